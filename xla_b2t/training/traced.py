"""The graphs of a run as programs: what a core will be given, without data, weights or a TPU.

In: a model on the `meta` device, the configuration, the number of cores and a batch's shape. Out: HLO modules for
`xla/tpu_compiler.py` and for the audit. Nothing is run and no memory is taken, so a model of any size is traced in
seconds.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from xla_b2t.config import Config
from xla_b2t.evaluation.decode import decoding_step
from xla_b2t.models.protocol import scheduled_numbers
from xla_b2t.training import optimizer
from xla_b2t.training.step import TrainStep
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.feed import DeviceBatch
from xla_b2t.xla.target import V5E, tracing_for
from xla_b2t.xla.trace import TracedWorld, no_execution, placeholders, trace_numbered
from xla_b2t.xla.trace_environment import ENVIRONMENT

Role = Literal["weight", "master", "moment1", "moment2", "sum", "input"]


@dataclass(frozen=True)
class Parameter:
    """What a parameter of a program is in the run.

    Attributes:
        role: "weight" is what the model computes with, in its own dtype, buffers too; "master", "moment1" and "moment2"
            are the optimizer's; "sum" is added up over micro-steps or updates; "input" arrives with every step.
        name: of the weight in the model; of an input the field of `DeviceBatch`, or a few words.
    """

    role: Role
    name: str


class TracedRun:
    """One rank's state as placeholders, and the programs of its graphs.

    A process may open one while it was started with `ENVIRONMENT`; use `traced_run`.

    Args:
        model: a decoder on the `meta` device; it is left on placeholders.
        num_classes: K of its logits.
        config: the run's configuration.
        num_ranks: cores that train together.

    Attributes:
        step: the training step, whose state is placeholders.
        batch, controls_N, scheduled: inputs of the graph that was traced last.
        parameters: by the name of a program ("train", "micro", "apply", "evaluate") what the parameters of the one
            traced last are, by their numbers, which the TPU's compiler keeps. A number that is missing is a constant
            that torch_xla hands over as an argument.
    """

    def __init__(self, model: nn.Module, num_classes: int, config: Config, num_ranks: int):
        self._model, self._num_classes, self._config = model, num_classes, config
        self.step = TrainStep(model, num_classes, config, TracedWorld(num_ranks), CompileGuard(), place=placeholders)
        self.batch: DeviceBatch | None = None
        self.controls_N = torch.empty(optimizer.NUM_CONTROLS, device="meta")
        self.scheduled: list[torch.Tensor] = []
        self.parameters: dict[str, dict[int, Parameter]] = {}

    def update(
        self, batch: DeviceBatch, number: int = 0, watching: AbstractContextManager | None = None
    ) -> dict[str, bytes]:
        """An update: forward, loss, backward, reduction over the cores, clipping, update of weights and moments.

        Args:
            batch: from `blank_batch`.
            number: of the update, which a model's `scheduled` is asked for.
            watching: entered around what is traced.

        Returns:
            Serialised HloModuleProtos: "train"; with accumulation "micro" and "apply".
        """
        self._prepare(batch)
        numbers = [torch.from_numpy(optimizer.controls(number, False, self._config.optimizer))]
        self.controls_N, *self.scheduled = placeholders([*numbers, *scheduled_numbers(self._model, number)])
        inputs, controls_N = self.batch, self.controls_N
        if self._config.train.accumulation == 1:
            parts = {"train": lambda: self.step.trace(inputs, controls_N, self.scheduled)}
        else:
            parts = {
                "micro": lambda: self.step.trace_micro_step(inputs, self.scheduled),
                "apply": lambda: self.step.trace_apply(controls_N),
            }
        programs = {}
        with watching or nullcontext():
            for name, traced in parts.items():
                programs[name] = self._program(name, self.step.tensors(), traced, self._of_update())
                self._make_new()
        return programs

    def evaluation(self, batch: DeviceBatch, watching: AbstractContextManager | None = None) -> bytes:
        """The decoding step of validation and evaluation, with its loss."""
        self._prepare(batch)

        def decode() -> Sequence[torch.Tensor]:
            self._model.eval()
            with torch.no_grad():
                return decoding_step(self._model, self.batch, self._num_classes, self._config)

        with watching or nullcontext():
            return self._program("evaluate", [], decode, self._of_model())

    def _program(
        self,
        name: str,
        state: list[torch.Tensor],
        traced: Callable[[], Sequence[torch.Tensor] | None],
        known: list[tuple[Parameter, torch.Tensor]],
    ) -> bytes:
        parameters, tensors = zip(*known, strict=True)
        found = trace_numbered(state, traced, tensors)
        numbered = zip(found.numbers, parameters, strict=True)
        self.parameters[name] = {number: parameter for number, parameter in numbered if number >= 0}
        return found.program

    def _of_model(self) -> list[tuple[Parameter, torch.Tensor]]:
        weights = [*self._model.named_parameters(), *self._model.named_buffers()]
        known = [(Parameter("weight", name), tensor) for name, tensor in weights]
        return known + [(Parameter("input", name), tensor) for name, tensor in self.batch._asdict().items()]

    def _of_update(self) -> list[tuple[Parameter, torch.Tensor]]:
        slots, columns = self.step.slots, ("master", "moment1", "moment2")
        known = [(Parameter(role, slot.name), getattr(slot, role)) for slot in slots for role in columns]
        *accumulated, totals = self.step.sums
        names = [f"gradient of {slot.name}" for slot in slots] + ["losses and trials"]
        known += [(Parameter("sum", name), tensor) for name, tensor in zip(names, accumulated, strict=False)]
        known += [(Parameter("sum", "running totals"), totals), (Parameter("input", "learning rate"), self.controls_N)]
        return self._of_model() + known + [(Parameter("input", "scheduled"), tensor) for tensor in self.scheduled]

    def beside(self, name: str) -> list[torch.Tensor]:
        """The state that lies on the core while a program runs and is no argument of it, such as the optimizer's while
        a split is decoded. Of the program of that name that was traced last."""
        known, arguments = self._of_update(), set(self.parameters[name].values())
        # By identity: two names may share a tensor.
        held = {id(tensor) for parameter, tensor in known if parameter in arguments or parameter.role == "input"}
        return list({id(tensor): tensor for _, tensor in known if id(tensor) not in held}.values())

    def _prepare(self, batch: DeviceBatch) -> None:
        self.batch = DeviceBatch(*placeholders(list(batch)))
        self._make_new()

    def _make_new(self) -> None:
        """Puts placeholders in the place of what the last trace computed."""
        state = [*self.step.tensors(), *self._model.parameters(), *self._model.buffers()]
        for tensor in {id(tensor): tensor for tensor in state}.values():
            (tensor.data,) = placeholders([tensor])


@contextmanager
def traced_run(
    model: nn.Module, num_classes: int, config: Config, num_ranks: int, kind: str = V5E
) -> Iterator[TracedRun]:
    """A `TracedRun`, as on that kind of device; while it is open, nothing can be run on an XLA device."""
    missing = {name for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    assert not missing, f"set before the process starts: {missing}"
    with no_execution(), tracing_for(kind):
        yield TracedRun(model, num_classes, config, num_ranks)


def trace_train_step(
    model: nn.Module, num_classes: int, config: Config, num_ranks: int, batch: DeviceBatch, kind: str = V5E
) -> bytes:
    """The program of one update without accumulation; arguments as of `TracedRun` and `traced_run`."""
    assert config.train.accumulation == 1, "with accumulation an update is two programs"
    with traced_run(model, num_classes, config, num_ranks, kind) as run:
        return run.update(batch)["train"]


def blank_batch(trials: int, bins: int, features: int, labels: int) -> DeviceBatch:
    """A core's batch of these sizes on the `meta` device."""
    with torch.device("meta"):
        counts = [torch.empty(trials, dtype=torch.int32) for _ in range(4)]
        return DeviceBatch(
            features_BTC=torch.empty(trials, bins, features, dtype=torch.bfloat16),
            input_bins_B=counts[0],
            labels_BL=torch.empty(trials, labels, dtype=torch.int32),
            label_lengths_B=counts[1],
            required_steps_B=counts[2],
            days_B=counts[3],
            valid_B=torch.empty(trials, dtype=torch.bool),
        )
