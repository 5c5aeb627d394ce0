"""The third look: the programs that the core will be given.

In: the HLO of a run's graphs, as text. Out: findings: float64 beyond single numbers, float16, loops that carry a wider
state than the model's, graphs of a size that no compiler ends with, graphs that are not the same when they must be.
"""

import re
from collections import Counter

from xla_b2t.audit.findings import Finding
from xla_b2t.xla.frames import shown

LARGEST = 60_000
"""Instructions of one graph. An unrolled loop of 247 GRU steps has 100,000, and compiles for many minutes."""
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|[\w\[\],{}:()*]+) ([a-z][\w\-]*)\(", re.MULTILINE)
_METADATA = re.compile(r", metadata=\{[^}]*\}")
_SOURCE = re.compile(r'source_file="([^"]+)" source_line=(\d+)')


_FIX_FLOAT64 = "look there for a comparison with a Python float, and for dtype=torch.float64"


def opcodes(text: str) -> list[str]:
    """What a program does, one word for each instruction, those of loops' bodies once."""
    return [opcode for _, opcode in _INSTRUCTION.findall(text)]


def forbidden(text: str, graph: str) -> list[Finding]:
    """Arrays of float64 or float16 in a program; a single number costs nothing and is not told."""
    found = []
    for kind, name, fix in (("f64", "float64", _FIX_FLOAT64), ("f16", "float16", "look there for .half() and float16")):
        lines = [line for line in text.splitlines() if re.search(rf" = \(?{kind}\[\d", line)]
        if not lines:
            continue
        places = Counter(f"{shown(match[1])}:{match[2]}" for line in lines if (match := _SOURCE.search(line)))
        where = places.most_common(1)[0][0] if places else graph
        told = f"{name} in {len(lines)} operations of the {graph}"
        found.append(Finding(name, graph, where, told, f"no {name}", fix))
    return found


def too_large(text: str, graph: str) -> list[Finding]:
    """A graph that grew with the length of the trials, a loop over time that Python unrolled."""
    count = len(opcodes(text))
    if count <= LARGEST:
        return []
    fix = "let xla_b2t.xla.scan.scan run the loop over time: its graph is the same at every length"
    return [Finding("size", graph, graph, f"{count:,} instructions", f"at most {LARGEST:,}", fix)]


def are_equal(first: str, again: str) -> bool:
    """Whether two programs, as text, are one but for where their operations come from."""
    return _METADATA.sub("", first) == _METADATA.sub("", again)


def another(first: str, again: str, graph: str, what: str, where: str) -> Finding:
    """Two traces of one graph, as text, that must be equal and are not."""
    found = f"another graph {what}: {len(opcodes(first)):,} and {len(opcodes(again)):,} instructions"
    fix = "let nothing in forward depend on what an earlier step left, on the rank, or on chance of the host"
    return Finding("recompile", graph, where, found, "one graph for each bucket: any other is a compile", fix)
