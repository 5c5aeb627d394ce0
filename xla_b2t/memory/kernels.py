"""What of a traced program reaches memory: its operations gathered into kernels, as the compiler's fusion would.

In: the operations of one computation, calls written out. Out: kernels, each with the values that it reads and writes.
What stands within a kernel takes no memory: element-wise work, broadcasts, slices and the like are done on the way into
a matmul or a reduction, or behind a matmul, or once for each of several readers where that reads no more.

The rules, from what the TPU compiler does with our programs:
- a matmul, a convolution, a reduction, a gather, random bits, a loop, a collective, a custom call writes its result;
  a matmul that only element-wise work of its own size reads is one kernel with that work;
- a loop, a collective, a custom call and a batch of matmuls read only what is in memory as they want it;
- element-wise work that several kernels read is written once, unless it is cheap and reads nothing larger than itself,
  or all that it reads is kept for others anyway.
"""

import math
import re
from dataclasses import dataclass, field

from xla_b2t.memory.layout import ordered_bytes, padded_bytes, plain_bytes
from xla_b2t.memory.traced_program import Array, Operation

_RENAMES = re.compile("bitcast|reshape|get-tuple-element|tuple|copy|opt-barrier|optimization-barrier|domain")
_MAYBE_RENAMES = re.compile("broadcast|convert|transpose|slice")  # where nothing changes but axes of size 1
_FREE = re.compile("constant|iota|after-all|partition-id|replica-id|rng-get-and-update-state|create-token")
_MATMUL = re.compile("dot|convolution")
# They read what is made on the way, and write their result.
_READS = re.compile("reduce|gather|reduce-window|scatter|dynamic-update-slice|rng|rng-bit-generator|sort|map")
_OPAQUE = re.compile(
    "while|conditional|custom-call|(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|async)(-start)?|"
    "fft|cholesky|triangular-solve|select-and-scatter|infeed|outfeed|send|recv|topk"
)
_IN_PLACE = re.compile("scatter|dynamic-update-slice|sort|all-reduce")
_COSTLY = re.compile(
    "exponential(-minus-one)?|log(-plus-one)?|logistic|tanh|power|r?sqrt|cbrt|divide|sine|cosine|tan|erf|atan2|remainder"
)
_PARTS = re.compile("slice|dynamic-slice|transpose|reverse")
_CHANGES_SIZE = re.compile("reduce|scatter|custom-call|while")
_LARGE = 4
"""An array with fewer than so many times less elements than a value counts as something that the value is made of."""
_BATCHED = re.compile(r"lhs_batch_dims=\{\d")
_INDEX = re.compile(r"index=(\d+)")

Value = tuple[int, int]
"""An operation's place among its computation's, and which of its results."""


@dataclass
class Kernel:
    """A group of operations of which only the last one's results are written.

    Attributes:
        operation: the last.
        place: of the last.
        writes: bytes of its results, padded.
        reads: values of other kernels, or parameters.
        ordered: which results have their axes as they are written, and are padded more than need be.
        copied_bytes: of parameters that it must first copy into the order of axes that it works in.
        in_place: whether a result may take the memory of something that it is the last to read.
        has_matmul: it is or contains one.
    """

    operation: Operation
    place: int
    writes: list[int]
    reads: set[Value] = field(default_factory=set)
    ordered: set[int] = field(default_factory=set)
    copied_bytes: int = 0
    in_place: bool = False
    has_matmul: bool = False

    @property
    def ends_gradient(self) -> bool:
        """Whether what it reads has other sizes than what it writes, so that a gradient is made here."""
        return self.has_matmul or _is(_CHANGES_SIZE, self.operation)


@dataclass(frozen=True)
class Graph:
    """Who reads what in a computation, renamings left out.

    Attributes:
        operations: in order.
        values: what each gives; a renaming gives what it renames.
        reads: what each reads.
        consumers: by the place of an operation the places of those that read it.
    """

    operations: list[Operation]
    values: list[list[Value]]
    reads: list[list[Value]]
    consumers: list[list[int]]

    def is_renaming(self, place: int) -> bool:
        """Whether it gives nothing of its own."""
        return not self.values[place] or self.values[place][0] != (place, 0)


@dataclass
class Kernels:
    """The kernels of a computation.

    Attributes:
        kernels: by the place of their last operation.
        parameters: places of the computation's parameters.
        results: what the computation returns.
        graph: all operations.
    """

    kernels: dict[int, Kernel]
    parameters: set[int]
    results: list[Value]
    graph: Graph


def _is(kind: re.Pattern, operation: Operation) -> bool:
    return kind.fullmatch(operation.opcode) is not None


def gather(operations: list[Operation]) -> Kernels:
    """Gathers the operations of a computation into kernels."""
    graph = graph_of(operations)
    results = graph.values[-1]
    wanted = {place for place, _ in results}
    for place, operation in enumerate(operations):
        if _is(_OPAQUE, operation) or _is_batch(operation):
            wanted.update(source for source, _ in graph.reads[place])
    kernels: dict[int, Kernel] = {}
    homes: list[set[int]] = [set() for _ in operations]  # the kernels that read an operation's results
    for place in range(len(operations) - 1, -1, -1):
        operation = operations[place]
        is_needed = homes[place] or place in wanted or _is(_OPAQUE, operation)
        if operation.opcode == "parameter" or graph.is_renaming(place) or not is_needed:
            continue
        if place in wanted or _is_written(place, homes[place], kernels, graph):
            kernel = Kernel(operation, place, [padded_bytes(*array) for array in operation.arrays])
            kernel.in_place = _is(_IN_PLACE, operation) or not _is_heavy(operation)
            kernels[place] = kernel
            within = {place}
        else:
            within = homes[place]
        for home in within:
            kernels[home].reads.update(graph.reads[place])
            kernels[home].has_matmul |= _is(_MATMUL, operation)
        for source, _ in graph.reads[place]:
            homes[source] |= within
    parameters = {place for place, operation in enumerate(operations) if operation.opcode == "parameter"}
    for kernel in kernels.values():
        kernel.reads = {value for value in kernel.reads if value[0] in kernels or value[0] in parameters}
        kernel.reads -= {(kernel.place, index) for index in range(len(kernel.writes))}
    _keep_order(kernels, graph, parameters)
    return Kernels(kernels, parameters, results, graph)


def _keep_order(kernels: dict[int, Kernel], graph: Graph, parameters: set[int]) -> None:
    """Corrects the bytes of what has its axes in the order in which they are written.

    That is what a collective may insist on, and element-wise work on its results follows: the update of a convolution's
    weights, whose last axis is its width, is padded from a few columns to 128.
    """
    operations = graph.operations
    ordered: set[Value] = set()
    for place, operation in enumerate(operations):
        if "constrain_layout=true" in operation.attributes:
            ordered |= {(place, index) for index in range(len(operation.arrays))} | set(graph.reads[place])
    for place in sorted(kernels):
        kernel, (_, sizes) = kernels[place], operations[place].arrays[0]
        if not (_is_heavy(operations[place]) or kernel.has_matmul):
            follows = [value for value in kernel.reads & ordered if operations[value[0]].arrays[value[1]][1] == sizes]
            if follows:
                ordered.add((place, 0))
                same = [operations[source].arrays[0] for source, _ in kernel.reads if source in parameters]
                copied = [ordered_bytes(*each) for each in same if each[1] == sizes and _spreads(*each)]
                # An update that reads the new moments is one kernel with what makes them, copies and all.
                kernel.copied_bytes = sum(copied) + sum(
                    kernels[source].copied_bytes for source, _ in follows if source in kernels
                )
        for index, array in enumerate(operations[place].arrays):
            if (place, index) in ordered and _spreads(*array):
                kernel.writes[index] = ordered_bytes(*array)
                kernel.ordered.add(index)


def _spreads(kind: str, sizes: tuple[int, ...]) -> bool:
    """Whether an array is larger in the order in which its axes are written than in the best."""
    return ordered_bytes(kind, sizes) > padded_bytes(kind, sizes)


def graph_of(operations: list[Operation]) -> Graph:
    """Reads off who reads what."""
    places = {operation.name: place for place, operation in enumerate(operations)}
    values: list[list[Value]] = []
    reads: list[list[Value]] = []
    consumers: list[list[int]] = [[] for _ in operations]
    for place, operation in enumerate(operations):
        sources = [values[places[name]] for name in operation.operands]
        given = _renamed(operation, operations, places, sources)
        values.append([(place, index) for index in range(len(operation.arrays))] if given is None else given)
        reads.append([] if given is not None else [value for source in sources for value in source])
        for source in {source for source, _ in reads[place]}:
            consumers[source].append(place)
    return Graph(operations, values, reads, consumers)


def _renamed(
    operation: Operation, operations: list[Operation], places: dict[str, int], sources: list[list[Value]]
) -> list[Value] | None:
    """What a renaming gives; None for any other operation."""
    if operation.opcode == "tuple":
        return [value for source in sources for value in source]
    if operation.opcode == "get-tuple-element":
        return [sources[0][int(_INDEX.search(operation.attributes).group(1))]]
    if _is(_RENAMES, operation):
        return sources[0]
    if _is(_MAYBE_RENAMES, operation):
        (before,), (after,) = operations[places[operation.operands[0]]].arrays, operation.arrays
        if before[0] == after[0] and _long(before) == _long(after):
            is_same = operation.opcode != "transpose" or _keeps_order(operation, before)
            return sources[0] if is_same else None
    return None


def _long(array: Array) -> tuple[int, ...]:
    """Its sizes but those of 1."""
    return tuple(size for size in array[1] if size != 1)


def _keeps_order(transpose: Operation, before: Array) -> bool:
    listed = re.search(r"dimensions=\{([\d,]*)\}", transpose.attributes)
    axes = [int(axis) for axis in listed.group(1).split(",") if axis and before[1][int(axis)] != 1]
    return axes == sorted(axes)


def _is_heavy(operation: Operation) -> bool:
    return any(_is(kind, operation) for kind in (_MATMUL, _READS, _OPAQUE)) or len(operation.arrays) > 1


def _is_batch(operation: Operation) -> bool:
    """Whether it is a batch of matmuls."""
    return operation.opcode == "dot" and _BATCHED.search(operation.attributes) is not None


def _is_written(place: int, homes: set[int], kernels: dict[int, Kernel], graph: Graph) -> bool:
    """Whether a result that kernels read, none of which insists, is written all the same."""
    operation = graph.operations[place]
    if _is(_FREE, operation):
        return False
    if _is(_MATMUL, operation):
        return len(homes) > 1 or not _takes_matmul(kernels[min(homes)], operation)
    if _is_heavy(operation):
        return True
    if operation.opcode == "concatenate" and any(kernels[home].has_matmul for home in homes):
        return True
    if len(homes) == 1 or _is_cheap(place, graph):
        return False
    return _is_costly(place, graph) or not _is_made_of_what_stays(place, min(homes), graph)


def _takes_matmul(home: Kernel, matmul: Operation) -> bool:
    same_size = math.prod(home.operation.arrays[0][1]) == math.prod(matmul.arrays[0][1])
    return same_size and not home.has_matmul and not _is_heavy(home.operation)


def _is_cheap(place: int, graph: Graph) -> bool:
    """Whether it is done once for each reader: it is simple, and made of one array that is no larger than itself.

    That array may be some simple operations away, as the random bits are that a mask in bfloat16 is made of.
    """
    operation = graph.operations[place]
    if _is(_PARTS, operation):
        return True
    (size,) = (plain_bytes(*array) for array in operation.arrays)
    at = place
    while not (
        _is_heavy(graph.operations[at]) or _is_costly(at, graph) or graph.operations[at].opcode == "concatenate"
    ):
        made_of = _large_reads(at, graph)
        if len(made_of) != 1:
            return not made_of
        ((source, index),) = made_of
        num_bytes = plain_bytes(*graph.operations[source].arrays[index])
        if num_bytes < size or (num_bytes == size and at == place):
            return True
        at = source
    return False


def _large_reads(place: int, graph: Graph) -> list[Value]:
    """Of what it reads, that of about its own size; broadcasts are seen through."""
    count = math.prod(graph.operations[place].arrays[0][1])
    return [
        (source, index)
        for source, index in graph.reads[place]
        if math.prod(graph.operations[source].arrays[index][1]) * _LARGE > count
        and not (graph.operations[source].opcode == "broadcast" and not _large_reads(source, graph))
    ]


def _is_costly(place: int, graph: Graph) -> bool:
    operation = graph.operations[place]
    # By one number for all it divides by multiplying.
    return _is(_COSTLY, operation) and not (operation.opcode == "divide" and _is_number(graph.reads[place][1], graph))


def _is_number(value: Value, graph: Graph) -> bool:
    """Whether it is one number, repeated or not."""
    place, index = value
    operation = graph.operations[place]
    if operation.opcode in ("broadcast", "convert"):
        return _is_number(graph.reads[place][0], graph)
    return math.prod(operation.arrays[index][1]) == 1


def _is_made_of_what_stays(place: int, first: int, graph: Graph) -> bool:
    """Whether all that a value is made of is read after its first reader by others than itself."""
    count = math.prod(graph.operations[place].arrays[0][1])
    seen, pending = {place}, list(graph.reads[place])
    while pending:
        source, index = pending.pop()
        operation = graph.operations[source]
        is_small = math.prod(operation.arrays[index][1]) * _LARGE < count
        if source in seen or is_small or operation.opcode == "parameter" or _is(_FREE, operation):
            continue
        others = [reader for reader in graph.consumers[source] if reader not in seen]
        seen.add(source)
        if any(reader > first for reader in others):
            continue
        if others or _is_heavy(operation) or _is_costly(source, graph):
            return False
        pending += graph.reads[source]
    return True
