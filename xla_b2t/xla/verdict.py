"""What the TPU's compiler said to a program, and how it is kept in a file.

A file holds JSON, packed, since the text of a program takes a megabyte and more.
"""

import json
import zlib
from dataclasses import asdict, dataclass, replace

from xla_b2t.errors import UserError

FORMAT = 2
"""Of the files. What another format has is not read."""


@dataclass(frozen=True)
class Verdict:
    """What the compiler said.

    Attributes:
        accepted: the program fits the device's memory, its arguments and outputs aside (`peak_bytes`).
        refusal: the compiler's words where it does not; "" otherwise.
        crash: what became of the compiler where it gave no answer; None otherwise.
        peak_bytes: most HBM in use at any moment, arguments included. The compiler accepts a program whose arguments
            and outputs alone are too large: one fits if it is accepted and its peak is not above the device's HBM.
        argument_bytes, output_bytes, aliased_bytes, temporary_bytes, code_bytes: its parts; aliased counts in both
            arguments and outputs. Temporaries can exceed the peak: the compiler counts them without their lifetimes.
        text: the compiled program, with the compiler's estimates; of a refused one what would have run, if the compiler
            came as far.
        buffers: where its values lie and how long they are needed, for `memory/buffers.py`; "" where `text` is.
        seconds: time it took to compile.
        is_remembered: it was not compiled now.
    """

    accepted: bool
    refusal: str = ""
    crash: UserError | None = None
    peak_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    aliased_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    text: str = ""
    buffers: str = ""
    seconds: float = 0.0
    is_remembered: bool = False

    @property
    def can_be_kept(self) -> bool:
        """It is new and whole. A crash may pass; of an accepted program text and buffers say what it needs."""
        is_whole = bool(self.text and self.buffers) if self.accepted else bool(self.refusal)
        return is_whole and self.crash is None and not self.is_remembered


def packed(verdict: Verdict) -> bytes:
    """A verdict as a file has it. A crash is none that could be kept."""
    assert verdict.crash is None
    return zlib.compress(json.dumps({"format": FORMAT, "verdict": asdict(verdict)}).encode())


def unpacked(content: bytes) -> Verdict:
    """The verdict in a file.

    Raises:
        ValueError: the file is damaged, or of another format.
    """
    try:
        held = json.loads(zlib.decompress(content))
        if held["format"] != FORMAT:
            raise ValueError(f"format {held['format']!r}, not {FORMAT}")
        return Verdict(**held["verdict"])
    except (zlib.error, KeyError, TypeError) as error:
        raise ValueError(f"it does not hold a verdict: {error}") from error


def remembered(verdict: Verdict) -> Verdict:
    """The same, marked as not compiled now."""
    return replace(verdict, is_remembered=True)
