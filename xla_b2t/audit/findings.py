"""What an audit found to be not as it must be."""

from collections.abc import Sequence
from dataclasses import dataclass

from xla_b2t.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One thing that must change before the run can start.

    Attributes:
        kind: the rule, a word or two: "days", "labels", "dtype".
        name: what breaks it: a parameter, a key, a trial.
        where: file and place.
        found: the value there.
        expected: the value that would be right; "" where `found` is a sentence that says it.
        fix: a command to type or a key to change.
    """

    kind: str
    name: str
    where: str
    found: str
    expected: str
    fix: str


def finding_of(error: UserError, kind: str) -> Finding:
    """What a check found that raises at the first thing it finds, as one finding among others."""
    return Finding(kind, kind, error.where, error.what, "", error.fix)


def refuse(findings: Sequence[Finding]) -> None:
    """Raises all findings as one error, the most upstream first; does nothing when there are none."""
    if not findings:
        return
    lines = [
        f"{finding.name}: found {finding.found}, expected {finding.expected}" if finding.expected else finding.found
        for finding in findings
    ]
    places = [finding.where for finding in findings]
    fixes = [finding.fix for finding in findings]
    if len(findings) > 1:
        lines, places, fixes = (
            [f"({n}) {text}" for n, text in enumerate(texts, 1)] for texts in (lines, places, fixes)
        )
        lines.insert(0, f"{len(findings)} things must change before this run can start:")
    raise UserError("\n  ".join(lines), "  ".join(places), "\n         ".join(fixes))
