"""What an audit found to be not as it must be, and how it is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class Report:
    """What a preflight says of a run.

    Attributes:
        findings: all of them, the most upstream first.
        checked: how many parameters, buffers, optimizer tensors, inputs, operations and graphs were looked at.
        exceptions: what the configuration allows beyond the policy, in words.
        seconds: time it took.
        planned_bytes: HBM that training needs of a core in the longest bucket, by arithmetic (`memory/estimate.py`); 0
            where no step could be traced.
    """

    findings: tuple[Finding, ...]
    checked: dict[str, int] = field(default_factory=dict)
    exceptions: tuple[str, ...] = ()
    seconds: float = 0.0
    planned_bytes: int = 0


class Collected:
    """Findings of a step that is being traced: one for each kind and place, in the order of the step.

    What follows from a finding is counted with it and not listed.

    Attributes:
        now: number of the operation at hand, in the step.
    """

    def __init__(self) -> None:
        self.now = 0
        self._findings: dict[tuple[str, str], tuple[int, Finding]] = {}
        self._consequences: dict[str, int] = {}
        self._causes: dict[str, str] = {}

    def add(self, kind: str, name: str, where: str, found: str, expected: str, fix: str, at: int | None = None) -> None:
        """Keeps a finding, unless one of its kind and place is known.

        Args:
            kind, name, where, found, expected, fix: as of `Finding`.
            at: number of the operation it starts with, which orders the findings; None is the one at hand.
        """
        finding = Finding(kind, name, where, found, expected, fix)
        self._findings.setdefault((kind, where), (self.now if at is None else at, finding))

    def follows(self, cause: str, line: str) -> None:
        """Counts an operation at `line` that is as it is because of what was found at `cause`."""
        cause = self.cause(cause)
        self._consequences[cause] = self._consequences.get(cause, 0) + 1
        self._causes.setdefault(line, cause)

    def cause(self, line: str) -> str:
        """Where that lies which explains what happens at a line: there, or where it started; "" for nothing."""
        return line if any(where == line for _, where in self._findings) else self._causes.get(line, "")

    @property
    def count(self) -> int:
        """How many were found so far."""
        return len(self._findings)

    def kinds(self) -> set[str]:
        """Kinds of what was found so far."""
        return {kind for kind, _ in self._findings}

    def first(self, kind: str) -> str:
        """Where the first finding of a kind is; "" for none."""
        return next((where for known, where in self._findings if known == kind), "")

    def list(self) -> list[Finding]:
        """All findings in the order of the step, the first of a place with the number of its consequences."""
        told: set[str] = set()
        findings = []
        for _, finding in sorted(self._findings.values(), key=lambda entry: entry[0]):
            count = 0 if finding.where in told else self._consequences.get(finding.where, 0)
            told.add(finding.where)
            also = f"; {count} operations after it are wider for it" if count > 1 else ""
            also = "; one operation after it is wider for it" if count == 1 else also
            findings.append(replace(finding, found=finding.found + also))
        return findings


def finding_of(error: UserError, kind: str) -> Finding:
    """What a check found that raises at the first thing it finds, as one finding among others."""
    return Finding(kind, kind, error.where, error.what, "", error.fix)


def refuse(findings: Sequence[Finding]) -> None:
    """Raises all findings as one error, the most upstream first; does nothing when there are none."""
    if findings:
        raise Refused(findings)


class Refused(UserError):
    """Findings that keep a run from starting, one block of lines for each."""

    def __init__(self, findings: Sequence[Finding]):
        told = [in_words(finding) for finding in findings]
        if len(told) > 1:
            told = [f"({number}) {text}" for number, text in enumerate(told, 1)]
            told.insert(0, f"{len(findings)} things must change before this run can start:")
        places, fixes = ([getattr(finding, part) for finding in findings] for part in ("where", "fix"))
        super().__init__("\n".join(told), "\n".join(places), "\n".join(fixes))
        self.args = (findings,)

    def __str__(self) -> str:
        (findings,) = self.args
        if len(findings) == 1:
            return super().__str__()
        blocks = [
            f"({number}) {in_words(finding)}\n    where: {finding.where}\n    fix:   {finding.fix}"
            for number, finding in enumerate(findings, 1)
        ]
        return "\n".join([f"{len(findings)} things must change before this run can start:", *blocks])


def in_words(finding: Finding) -> str:
    """What was found and expected, in a line."""
    if not finding.expected:
        return finding.found
    return f"{finding.name}: found {finding.found}, expected {finding.expected}"
