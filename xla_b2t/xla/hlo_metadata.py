"""Where the operations of a traced program say that they come from, put right before it is compiled.

In: a program from `xla/trace.py`. Out: the same program, with the Python line to blame on every operation of which it
can be told, and with nothing in it that differs from one trace of a step to the next.

torch_xla gives an operation the line it was called from, and a number in a table of calling frames. The body of a loop
is traced by itself, so its numbers are of another table than the one that the program ends up with, and the TPU's
compiler believes the numbers: it would blame a loop's operations on whatever lines have them there. Without frames it
takes the lines. So the frames are looked up here, for the line that `frames.blamed` takes: an operation of a loop is
called by what calls the loop; the backward half of a `torch.autograd.Function`, which the engine calls and no line of
anybody, by what calls its forward half.

Source: HloModuleProto and OpMetadata in openxla/xla, xla/service/hlo.proto and xla/xla_data.proto. Of a module
computations = 3, entry_computation_id = 6, stack_frame_index = 17; of a computation instructions = 2, id = 5; of an
instruction opcode = 2, metadata = 7, called_computation_ids = 38; of metadata op_name = 2, source_file = 3,
source_line = 4, stack_frame_id = 15; of the index file_names = 1, function_names = 2, file_locations = 3
(file_name_id = 1, function_name_id = 2, line = 3), stack_frames = 4 (file_location_id = 1, parent_frame_id = 2), all
counted from 1.
"""

import re
from typing import NamedTuple

from xla_b2t.xla.frames import blamed
from xla_b2t.xla.wire import field, parts, whole_number, whole_numbers

_COUNT = re.compile(rb"\.\d+(?=/|$)")
_ASKED = "/xla_b2t/xla/trace.py"
"""Ends the file that traces: who asked for that is not to blame."""


_Place = tuple[str, int]  # file, line


class _Frame(NamedTuple):
    place: _Place
    function: str = ""


_Chain = tuple[_Frame, ...]  # the innermost first


def settled(program: bytes) -> bytes:
    """The program with lines in place of frames, and without the numbers that count on from trace to trace.

    Args:
        program: a serialised HloModuleProto.

    Raises:
        ValueError: it is none.
    """
    top = list(parts(program))
    entry = next((part.value for part in top if part.number == 6), None)
    frames = next((_frames(part.value) for part in top if part.number == 17), {})
    computations = {_number(part.value): list(parts(part.value)) for part in top if part.number == 3}
    callers: dict[int, _Chain] = {entry: ()}
    changed: dict[int, bytes] = {}
    pending = [*computations, entry]
    while pending:  # the entry first, then what is called, outermost first; last what nothing calls
        number = pending.pop()
        if number in changed or number not in computations:
            continue
        lines = _Lines(frames, number == entry, callers.get(number, ()))
        changed[number] = b"".join(
            field(2, lines.put(part.value)) if part.number == 2 else part.whole for part in computations[number]
        )
        for called, chain in lines.called:
            callers.setdefault(called, chain)
            pending.append(called)
    kept = [part for part in top if part.number != 17]
    return b"".join(field(3, changed[_number(part.value)]) if part.number == 3 else part.whole for part in kept)


def _number(computation: bytes) -> int:
    return next((part.value for part in parts(computation) if part.number == 5), 0)


class _Lines:
    """Puts lines on the operations of one computation.

    Attributes:
        called: the computations that were called from it, with what called them, the operation first.
    """

    def __init__(self, frames: dict[int, _Chain], is_entry: bool, caller: _Chain):
        self._frames, self._is_entry, self._caller = frames, is_entry, caller
        self._known: dict[_Chain, _Place | None] = {}
        self.called: list[tuple[int, _Chain]] = []

    def put(self, instruction: bytes) -> bytes:
        """The operation with its line."""
        found = list(parts(instruction))
        metadata = next((list(parts(part.value)) for part in found if part.number == 7), [])
        values = {part.number: part.value for part in metadata}
        chain = self._chain(values)
        self.called += [(called, chain) for part in found if part.number == 38 for called in whole_numbers(part)]
        said = b"".join(part.whole for part in metadata if part.number not in (2, 3, 4, 15))
        place = self._blamed(chain)
        # On its way to the compiler an operation without a name loses its line.
        opcode = next((part.value for part in found if part.number == 2), b"operation")
        if name := values.get(2, b"") or (opcode if place else b""):
            said += field(2, _COUNT.sub(b"", name))
        if place:
            said += field(3, place[0].encode()) + whole_number(4, place[1])
        if not metadata:
            return instruction + (field(7, said) if said else b"")
        return b"".join(field(7, said) if part.number == 7 else part.whole for part in found)

    def _chain(self, metadata: dict[int, int | bytes]) -> _Chain:
        frame, file = metadata.get(15, 0), metadata.get(3)
        own = (_Frame((file.decode(), metadata.get(4, 0))),) if file else ()
        return (self._frames.get(frame, own) if self._is_entry else own) + self._caller

    def _blamed(self, chain: _Chain) -> _Place | None:
        if chain not in self._known:
            places = [frame.place for frame in chain]
            forward = self._of_forward(chain)
            # Of two lines `blamed` takes the first, unless the second has an owner more to blame.
            self._known[chain] = blamed([*places, forward] if forward else places) or next(iter(places), None)
        return self._known[chain]

    def _of_forward(self, chain: _Chain) -> _Place | None:
        """The line that called the forward half of what the chain is the backward half of, if there is but one."""
        halves = {frame.place[0] for frame in chain if frame.function == "backward"}
        lines = {
            blamed(frame.place for frame in other)
            for other in self._frames.values()
            if any(frame.function == "forward" and frame.place[0] in halves for frame in other)
        } - {None}
        return lines.pop() if len(lines) == 1 else None


def _frames(index: bytes) -> dict[int, _Chain]:
    """For each frame itself and those it was called from, up to what asked for the trace."""
    files, functions = ([part.value.decode() for part in parts(index) if part.number == n] for n in (1, 2))
    locations, frames = (
        [{inner.number: inner.value for inner in parts(part.value)} for part in parts(index) if part.number == number]
        for number in (3, 4)
    )
    found: dict[int, _Chain] = {}
    for number, frame in enumerate(frames, 1):
        location = locations[frame[1] - 1]
        name = location.get(2, 0)
        here = _Frame((files[location[1] - 1], location.get(3, 0)), functions[name - 1] if name else "")
        outside = found.get(frame.get(2, 0), ())  # a caller stands before what it calls
        found[number] = () if here.place[0].endswith(_ASKED) else (here, *outside)
    return found
