"""Asks the TPU's compiler about graphs, each once, and reads its answers as what a core needs.

In: `Graph`s. Out: what they need in bytes and milliseconds, as `ProgramPlan`s. Without the compiler the arithmetic
stands in its place, and no time can be told.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from xla_b2t.memory.allocations import Usage, usage
from xla_b2t.memory.chips import Chip
from xla_b2t.memory.graphs import Graph
from xla_b2t.memory.plan import ProgramPlan, Tell
from xla_b2t.memory.refusal import Refusal, explained
from xla_b2t.memory.step_time import StepTime, predict
from xla_b2t.xla.slices import Slice
from xla_b2t.xla.tpu_compiler import TpuCompiler
from xla_b2t.xla.verdict import Verdict

_PARTS = ("weights", "optimizer", "inputs", "outputs", "temporaries", "gaps", "program")


class Judge:
    """Remembers every verdict.

    Attributes:
        num_compiled: programs that were compiled, and not found in the cache.

    Args:
        goal: slice that the programs are for.
        chip: a core of it.
        num_ranks: cores that train together.
        cache: folder in which verdicts are kept from plan to plan; None for none.
        tell: told how far the compiler is.
        stack: ends the compiler.
    """

    def __init__(self, goal: Slice, chip: Chip, num_ranks: int, cache: Path | None, tell: Tell, stack: ExitStack):
        self._goal, self._chip, self._num_ranks, self._cache, self._tell = goal, chip, num_ranks, cache, tell
        self._stack = stack
        self._compiler: TpuCompiler | None = None
        self._verdicts: dict[bytes, Verdict] = {}
        self._usages: dict[bytes, Usage] = {}
        self._refusals: dict[bytes, Refusal] = {}
        self._times: dict[bytes, StepTime | str] = {}
        self.num_compiled = 0

    def ask(self, graphs: Iterable[Graph], num_graphs: int, stage: str) -> None:
        """Has the compiler look at those that it has not seen.

        It is at the first of them while the next are traced, and at the next while its answer on one is read.

        Args:
            graphs: traced when they are asked for.
            num_graphs: how many come.
            stage: what is told of it meanwhile.
        """
        new: list[Graph] = []
        num_done = 0

        def programs() -> Iterator[bytes]:
            nonlocal num_done
            for graph in graphs:
                if graph.program in self._verdicts:
                    num_done += 1
                    continue
                new.append(graph)
                self._tell(stage, num_done, num_graphs)
                yield graph.program

        def answered(index: int, verdict: Verdict) -> None:
            nonlocal num_done
            graph = new[index]
            self.num_compiled += graph.program not in self._verdicts and not verdict.is_remembered
            self._verdicts[graph.program] = verdict
            self.plan(graph)  # which keeps what it has read
            num_done += 1
            self._tell(stage, num_done, num_graphs)

        if self._compiler is None:
            self._compiler = self._stack.enter_context(TpuCompiler(self._goal, self._num_ranks, cache=self._cache))
        self._compiler.compile(programs(), answered)

    def compiled_bytes(self, graph: Graph) -> int | None:
        """HBM that must be there for a graph to run, by the compiler: code and gaps too, and what lies beside.

        None where it was not asked, or gave no figure. What was refused for HBM needs more than there is, whatever the
        figure: the compiler may list less.
        """
        verdict = self._verdicts.get(graph.program)
        if verdict is None or verdict.crash:
            return None
        if not verdict.accepted:
            why = self._refusal(graph)
            if why.memory != "hbm" or why.needed_bytes is None:
                return None
            return max(why.needed_bytes, self._chip.hbm_bytes + 1) + graph.beside_bytes
        return self._usage(graph).needed_bytes + graph.beside_bytes

    def _usage(self, graph: Graph) -> Usage:
        if graph.program not in self._usages:
            self._usages[graph.program] = usage(self._verdicts[graph.program], graph.parameters)
        return self._usages[graph.program]

    def _refusal(self, graph: Graph) -> Refusal:
        if graph.program not in self._refusals:
            self._refusals[graph.program] = explained(self._verdicts[graph.program], graph.parameters)
        return self._refusals[graph.program]

    def _time(self, graph: Graph) -> StepTime | str:
        """Or why it is not known."""
        if graph.program not in self._times:
            try:
                time = predict(self._verdicts[graph.program].text, self._chip, self._num_ranks)
            except (KeyError, ValueError, IndexError) as error:  # an operation of some user's model that is not known
                time = f"not known ({type(error).__name__}: {error})"
            self._times[graph.program] = time
        return self._times[graph.program]

    def plan(self, graph: Graph) -> ProgramPlan:
        """All that is known of a graph."""
        verdict, compiled_bytes = self._verdicts.get(graph.program), self.compiled_bytes(graph)
        plan = ProgramPlan(
            program=graph.name,
            estimate_bytes=graph.needed_bytes,
            compiled_bytes=compiled_bytes,
            beside_bytes=graph.beside_bytes,
            fits=compiled_bytes is not None and compiled_bytes <= self._chip.hbm_bytes,
        )
        if verdict is None:
            fits = graph.sure_bytes <= self._chip.hbm_bytes
            return replace(plan, fits=fits, parts=graph.estimate.parts, largest=graph.largest)
        if verdict.crash:
            return replace(plan, refusal=verdict.crash.what)
        if not verdict.accepted:
            why = self._refusal(graph)
            return replace(plan, fits=False, refusal=why.words, largest=why.largest)
        held = self._usage(graph)
        plan = replace(plan, parts={name: getattr(held, name) for name in _PARTS}, largest=held.largest)
        time = self._time(graph)
        if isinstance(time, str):
            return replace(plan, limited_by=time)
        return replace(
            plan,
            milliseconds=time.ms,
            parts_ms=time.ms_by_limit,
            limited_by=time.limit,
            tflop=time.flops / 1e12,
        )
