"""The sub-commands of `xla_b2t`, one thin module each.

A command module holds `SUMMARY` (one line), `EXAMPLE` (what to type), `add_arguments(parser)` and `run(args) -> int`.
Its top imports the standard library and `xla_b2t.errors` only, so that `--help` answers at once; whatever is heavy is
imported inside `run`. `args.json` is there for every command: the command line adds it.
"""
