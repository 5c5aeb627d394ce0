"""`python -m xla_b2t.launch --cores 8` is the main job: the same as `xla_b2t train --cores 8`."""

import sys

from xla_b2t.cli import main

# The ranks of a run are processes that import the main module again: they must not run the command again.
if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
