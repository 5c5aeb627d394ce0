"""Whether a run may go on under another configuration.

A resumed run is to equal the uninterrupted one, so what the weights and the order of trials depend on must not change.
The number of cores may, as long as the global batch stays: the schedule deals the same groups. So may how the state
is spread over them, whether our own models run the TPU's kernels, which compute the same, and what a run began with.
"""

from dataclasses import dataclass

import msgspec

from xla_b2t import config as configuration
from xla_b2t.audit.findings import Finding
from xla_b2t.config import Config
from xla_b2t.models.build import with_all_options

MAY_CHANGE = (
    "run.dir", "run.cores", "data.dir", "data.prefetch_batches", "optimizer.sharded",
    "train.steps", "train.batch_size", "train.global_batch", "train.accumulation", "train.log_every",
    "train.checkpoint_every", "train.init_from", "validation.every", "validation.split", "validation.batch_size",
)  # fmt: skip
KERNEL = "model.options.kernel"
"""May change too, but for a user's own model, whose options mean what it likes."""


@dataclass(frozen=True)
class Resumed:
    """The run that is gone on with: its `config.toml`, which groups it trained on, and the trials of an update."""

    config_path: str
    conversion: str
    global_batch: int


def changed_keys(before_path: str, config: Config) -> list[Finding]:
    """A finding for every key whose change would make another run of it.

    Args:
        before_path: `config.toml` of the run.
        config: what it is to go on with.

    Raises:
        UserError: the file cannot be read.
    """
    before = _flat(msgspec.to_builtins(with_all_options(configuration.load(before_path))))
    now = _flat(msgspec.to_builtins(with_all_options(config)))
    may_change = MAY_CHANGE if config.model.factory else (*MAY_CHANGE, KERNEL)
    return [
        Finding(
            "resume",
            key,
            before_path,
            repr(now.get(key)),
            f"{before.get(key)!r}, with which this run began",
            f"leave {key} as it was, or begin another run with --set run.dir=",
        )
        for key in sorted(before.keys() | now.keys())
        if key not in may_change and before.get(key) != now.get(key)
    ]


def changed_data(before: Resumed, conversion: str, global_batch: int, data_dir: str) -> list[Finding]:
    """Findings when the groups, or the trials an update, are not those that the run began with."""
    found = []
    if before.conversion != conversion:
        found.append(
            Finding(
                "resume",
                "data.dir",
                data_dir,
                f"groups of the conversion {conversion}",
                f"{before.conversion}, with which this run began",
                "give the groups that the run began with: --set data.dir=",
            )
        )
    if before.global_batch != global_batch:
        found.append(
            Finding(
                "resume",
                "trials an update",
                before.config_path,
                str(global_batch),
                f"{before.global_batch}, with which this run began",
                f"set train.global_batch={before.global_batch}, or a batch size, accumulation and cores that give it",
            )
        )
    return found


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat
