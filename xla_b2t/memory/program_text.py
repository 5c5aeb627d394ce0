"""What the texts of traced and of compiled programs have in common.

In: lines of such a text. Out: their parts, for `traced_program.py` and `compiled_program.py`.
"""

import re

HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
"""The line that begins a computation: whether it is the entry, its name."""

NAME = re.compile(r"%([\w.\-]+)")
"""Of an instruction or a computation, where it is referred to."""


def closing(text: str, start: int = 0) -> int:
    """Index of the parenthesis that closes the one open before `start`; the text's end where none does."""
    depth, position = 1, start
    while depth:
        found = text.find(")", position)
        if found < 0:
            return len(text)
        depth += text.count("(", position, found) - 1
        position = found + 1
    return position - 1
