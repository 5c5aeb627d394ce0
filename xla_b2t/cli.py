"""The command line: finds the sub-command, runs it, and turns what it raises into an exit code.

In: the arguments. Out: 0; 1 for a fault of ours (with a traceback); 2 for what the user can mend (what, where, how to
fix, on stderr, or as JSON on stdout under `--json`); 130 after Ctrl-C. What a command does is left to `commands/`.
Nothing here imports numpy or torch: `xla_b2t --help` is instant.
"""

import argparse
import difflib
import importlib
import json
import re
import sys
import traceback
from importlib import metadata
from typing import NoReturn

from xla_b2t.errors import UserError

PROGRAM = "xla_b2t"
COMMANDS = ("synth", "prebatch", "audit-dtypes", "plan-memory", "train", "evaluate", "export")
"""In the order in which a newcomer needs them; each is a module in `commands/`, with `_` for `-`."""

EPILOG = """\
with nothing at hand, the demo on simulated data:
  python -m xla_b2t.launch --cores 8

with data of your own, in the layout of the public data:
  xla_b2t prebatch hdf5_data_final groups
  xla_b2t audit-dtypes --config configs/gru_baseline.toml --set data.dir=groups --cores 8
  xla_b2t plan-memory --config configs/gru_baseline.toml --set data.dir=groups --topology v5e-8
  xla_b2t train --config configs/gru_baseline.toml --set data.dir=groups --set run.dir=runs/first
  xla_b2t evaluate runs/first

exit codes: 0 done, 1 a fault of ours (traceback), 2 something you can mend (what, where, fix), 130 interrupted"""


class Help(argparse.RawDescriptionHelpFormatter):
    """Help whose list of commands has no heading but its title, and a name and its summary on one line."""

    def __init__(self, prog: str):
        super().__init__(prog)
        self._action_max_length = 4 + max(map(len, COMMANDS))  # it forgets how far the list is indented

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        return text.partition("\n")[2] if isinstance(action, argparse._SubParsersAction) else text


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are user errors like all others."""

    def __init__(self, *args, **options):
        # An abbreviation works until the next option with the same start exists: scripts would break on an update.
        super().__init__(*args, allow_abbrev=False, formatter_class=Help, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(message, "the command line", _nearest(message, list(COMMANDS)) or f"see {self.prog} --help")


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse(argv)
        return args._run(args) or 0
    except UserError as error:
        _tell(error, as_json="--json" in argv)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception:  # the outermost boundary: nothing is swallowed, the traceback is shown and the exit code is 1
        traceback.print_exc()
        print(f"\nThis is a fault of {PROGRAM}, not yours. Please report it with the lines above.", file=sys.stderr)
        return 1


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the arguments.

    Raises:
        UserError: no such command or option, a missing or malformed value; it names the nearest right one.
    """
    args, unknown = build_parser(argv).parse_known_args(argv)
    if unknown:
        options = list(args._parser._option_string_actions)
        raise UserError(
            f"unknown argument {' '.join(unknown)}",
            "the command line",
            _nearest(f"'{unknown[0]}'", options) or f"see {args._parser.prog} --help",
        )
    return args


def build_parser(argv: list[str]) -> Parser:
    """The parser for these arguments. Only the command that is asked for is imported; all of them for the overview."""
    parser = Parser(
        prog=PROGRAM,
        description="Trains brain-to-text decoders (neural features in, phonemes out) on TPU cores.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {_version()}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command", required=True)
    asked = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    for name in asked:
        module = importlib.import_module(module_of(name))
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, epilog=f"example:\n  {module.EXAMPLE}"
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print the result, or the error, as JSON on stdout")
        command.set_defaults(_run=module.run, _parser=command)  # names that no option of a command has
    return parser


def module_of(command: str) -> str:
    """The module that a command is."""
    return f"xla_b2t.commands.{command.replace('-', '_')}"


def _version() -> str:
    try:
        return metadata.version(PROGRAM)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _nearest(message: str, known: list[str]) -> str:
    """What was probably meant by the word that the message quotes first."""
    wrong = re.search(r"'([^'=]+)", message)
    near = difflib.get_close_matches(wrong.group(1), known, n=1) if wrong else []
    return f"did you mean {near[0]}?" if near else ""


def _tell(error: UserError, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"what": error.what, "where": error.where, "fix": error.fix}}))
    else:
        print(f"error: {error}", file=sys.stderr)
