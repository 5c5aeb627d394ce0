"""Reads the text of a program as it was traced, which no compiler has seen: operations, sizes, who reads what.

In: text from `xla/trace.py: hlo_text`. Out: the computations, each its operations in order, with calls to other
computations written out in place, and which output takes the place of which parameter. The text is unfused and has no
layouts of its own; `compiled_program.py` reads what the compiler makes of it.
"""

import re
from dataclasses import dataclass, field, replace

from xla_b2t.memory.program_text import HEAD, NAME, closing

_OPERATION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|[^\s(]+) ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_CALLED = re.compile(r"(to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{")
_DEEPEST = 50

Array = tuple[str, tuple[int, ...]]
"""Element type as XLA names it, and sizes; of a size that only has a bound, the bound."""


@dataclass(frozen=True)
class Operation:
    """One operation of a traced program.

    Attributes:
        name: unique in its computation, calls written out.
        opcode: XLA's name of it.
        arrays: of the result; several for a tuple.
        operands: names.
        attributes: what is printed behind the operands, without metadata; of a parameter or a constant, its argument.
        source: `file:line` of the Python statement it comes from; "" when unknown.
        called: computations by the role they have, such as `body`; branches as `branch 0`, `branch 1`.
        argument: what stands between the parentheses, as printed.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    source: str
    called: dict[str, str] = field(default_factory=dict)
    argument: str = ""


@dataclass
class Traced:
    """A program: computations by name, the last operation of each its result; the entry's name; donated parameters.

    Attributes:
        aliases: output number -> number of the parameter whose buffer it takes.
    """

    computations: dict[str, list[Operation]] = field(default_factory=dict)
    entry: str = ""
    aliases: dict[int, int] = field(default_factory=dict)


def parse(text: str) -> Traced:
    """Reads a whole module.

    Raises:
        ValueError: a computation whose result is not marked, so that this is no program.
    """
    program, current, root = Traced(), [], None
    lines = text.splitlines()
    header = lines[0] if lines else ""
    if "input_output_alias={" in header:
        listed = header[header.index("input_output_alias={") :]
        program.aliases = {int(output or 0): int(number) for output, number in _ALIAS.findall(listed)}
    for line in lines:
        if line.startswith(" "):
            found = _OPERATION.match(line)
            if found:
                operation = _operation(line, found)
                current.append(operation)
                root = operation.name if found.group(1) else root
        elif head := HEAD.match(line):
            current, root = program.computations.setdefault(head.group(2), []), None
            program.entry = head.group(2) if head.group(1) else program.entry
        elif line.startswith("}") and current and root != current[-1].name:
            current.append(_result(current, root))
    if not program.entry:
        raise ValueError("no computation is marked as the entry: this is not the text of an HLO program")
    return program


def written_out(program: Traced, name: str) -> list[Operation]:
    """The operations of a computation, with those of every computation that it calls in the place of the call.

    A batch norm, which torch_xla makes of a layer norm too, is written out as the compiler does it: sums, and then
    element-wise work on what was summed.
    """
    return [part for operation in _written_out(program, name, 0) for part in _parts_of_norm(operation)]


def _parts_of_norm(norm: Operation) -> tuple[Operation, ...]:
    if norm.opcode not in ("batch-norm-training", "batch-norm-grad"):
        return (norm,)
    sums = replace(norm, name=f"{norm.name}/sums", opcode="reduce", arrays=norm.arrays[1:])
    normed = replace(
        norm,
        name=f"{norm.name}/normed",
        opcode="multiply",
        arrays=norm.arrays[:1],
        operands=(*norm.operands, sums.name),
    )
    return sums, normed, replace(norm, opcode="tuple", operands=(normed.name, sums.name))


def _written_out(program: Traced, name: str, depth: int) -> list[Operation]:
    assert depth < _DEEPEST, "a computation calls itself"
    operations = []
    for operation in program.computations[name]:
        if operation.opcode != "call":
            operations.append(operation)
            continue
        prefix = f"{operation.name}/"
        inside = _written_out(program, operation.called["to_apply"], depth + 1)
        for one in inside:
            if one.opcode == "parameter":
                given = (operation.operands[int(one.argument)],)
                operations.append(replace(one, name=prefix + one.name, opcode="bitcast", operands=given))
            else:
                operands = tuple(prefix + operand for operand in one.operands)
                source = one.source or operation.source  # a loop's stacks have no line of their own
                operations.append(replace(one, name=prefix + one.name, operands=operands, source=source))
        operations.append(replace(operation, opcode="bitcast", operands=(prefix + inside[-1].name,)))
    return operations


def _result(operations: list[Operation], root: str | None) -> Operation:
    """A copy of the result behind everything else, where the text has it in the midst."""
    for one in operations:
        if one.name == root:
            return Operation(f"{root}/result", "bitcast", one.arrays, (one.name,), "", one.source)
    raise ValueError("a computation has no result: this is not the text of an HLO program")


def _operation(line: str, found: re.Match) -> Operation:
    opcode = found.group(4)
    end = line.find(", metadata={", found.end())
    rest = line[found.end() : end if end >= 0 else len(line)]
    closes = closing(rest)
    argument, attributes = rest[:closes], rest[closes + 1 :]
    source = _SOURCE.search(line, end) if end >= 0 else None
    called = dict(_CALLED.findall(attributes)) if "=%" in attributes else {}
    if listed := _BRANCHES.search(attributes) if opcode == "conditional" else None:
        names = [name.strip().lstrip("%") for name in listed.group(1).split(",")]
        called = {f"branch {index}": name for index, name in enumerate(names)}
    return Operation(
        found.group(2),
        opcode,
        arrays(found.group(3)),
        tuple(NAME.findall(argument)) if "%" in argument else (),
        attributes,
        f"{source.group(1)}:{source.group(2)}" if source else "",
        called,
        argument if opcode in ("parameter", "constant") else "",
    )


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a printed shape, which may be a tuple."""
    return tuple(
        (kind, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
        for kind, sizes in _ARRAY.findall(shape)
    )
