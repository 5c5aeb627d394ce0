"""How long a step takes, predicted from the compiled program.

In: `Verdict.text`, a `Chip` and the number of cores. Out: a `StepTime`. How the time of an operation is found is in
`timeline.py`.

Left out: starting the program, the host and its input, latency of collectives and waiting for other cores, refresh of
HBM, and whatever slows a chip's clock.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from xla_b2t.memory.chips import Chip
from xla_b2t.memory.compiled_program import parse
from xla_b2t.memory.timeline import OTHER, Part, Timeline


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step and what it is made of.

    Attributes:
        parts: in the order of the program.
        unknown_loops: names of loops whose trips the program does not say; each is counted once, so that the step
            takes longer than is predicted.
    """

    parts: tuple[Part, ...]
    unknown_loops: tuple[str, ...]

    @property
    def ms(self) -> float:
        """Of the whole step."""
        return sum(part.ms for part in self.parts)

    @property
    def compiler_ms(self) -> float:
        """What the compiler's own estimates add up to, without what it has none for."""
        return sum(part.compiler_ms for part in self.parts)

    @property
    def kernel_ms(self) -> float:
        """In Pallas kernels, by what they say of themselves."""
        return sum(part.ms for part in self.parts if part.is_kernel)

    @property
    def loop_ms(self) -> float:
        """In loops."""
        return sum(part.ms for part in self.parts if part.in_loop)

    @property
    def flops(self) -> float:
        """Of all matmuls and kernels."""
        return sum(part.flops for part in self.parts)

    @property
    def hbm_bytes(self) -> float:
        """Read from HBM and written there."""
        return sum(part.hbm_bytes for part in self.parts)

    @property
    def sent_bytes(self) -> float:
        """Sent by each core to others."""
        return sum(part.sent_bytes for part in self.parts)

    @property
    def ms_by_limit(self) -> dict[str, float]:
        """The time of the step, by what limits the operations that it passes in; the largest first."""
        return _added((part.limit, part.ms) for part in self.parts)

    @property
    def limit(self) -> str:
        """What limits most of the step's time."""
        return next(iter(self.ms_by_limit), OTHER)

    @property
    def ms_by_source(self) -> dict[str, float]:
        """The time of the step by the Python lines that it passes in; the costliest first."""
        return _added((part.source, part.ms) for part in self.parts)


def predict(text: str, chip: Chip, num_cores: int) -> StepTime:
    """Predicts the time of a step.

    Args:
        text: the compiled program, of a verdict that accepts it.
        chip: what a core has.
        num_cores: that run it together.
    """
    timeline = Timeline(parse(text), chip, num_cores)
    return StepTime(tuple(timeline.parts()), tuple(timeline.unknown_loops))


def _added(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for key, ms in pairs:
        totals[key] += ms
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
