"""The options that name a run, the same for every command that looks at one before it exists."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xla_b2t.config import Config

_DEMO = Path(__file__).parent.parent / "demo.toml"


@dataclass(frozen=True)
class NamedRun:
    """The run that a command line names.

    Attributes:
        config: resolved.
        given: tells where a key was given.
        is_demo: no configuration was named: the demo, on its own data and in its own directory unless overridden.
    """

    config: "Config"
    given: Callable[[str], str]
    is_demo: bool

    @property
    def has_demo_dir(self) -> bool:
        """The run directory is the demo's own, which is free to take."""
        return self.is_demo and self.config.run.dir == _demo().run.dir

    def make_demo_data(self) -> None:
        """Simulates the demo's data where the run is the demo, on its own data, and they do not exist yet."""
        if self.is_demo and self.config.data.dir == _demo().data.dir:
            from xla_b2t.commands.demo_data import make_demo_data

            make_demo_data(Path(self.config.data.dir))


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--config`, `--set` and `--cores`."""
    parser.add_argument("--config", metavar="FILE", help="TOML file; without it the demo runs on simulated data")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="override one key; may be given again"
    )
    parser.add_argument(
        "--cores", type=int, metavar="N", help="ranks; on a TPU 1 or all, on a CPU any number (default: run.cores)"
    )


def named_run(args: argparse.Namespace) -> NamedRun:
    """The run of these options; errors as of `config.load`."""
    from xla_b2t import config as configuration

    overrides = [*args.set, *([f"run.cores={args.cores}"] if args.cores is not None else [])]
    path = args.config or str(_DEMO)
    return NamedRun(configuration.load(path, overrides), given_in(path, overrides), args.config is None)


def given_in(path: str, overrides: Sequence[str]) -> Callable[[str], str]:
    """Tells of a key where it was given: in the last override that sets it or a table that it is in, else in the file.

    Args:
        path: the configuration file.
        overrides: each `table.key=value`, as given to `config.load`.
    """

    def place(key: str) -> str:
        for override in reversed(overrides):
            name = override.partition("=")[0].strip()
            if key == name or key.startswith(f"{name}."):
                return f"--set {override}"
        return f"{path}: {key}"

    return place


def _demo() -> "Config":
    from xla_b2t import config as configuration

    return configuration.load(_DEMO)
