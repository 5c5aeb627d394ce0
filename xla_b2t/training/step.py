"""The training step: forward, loss, gradients, reduction, clipping, update, with shapes that never depend on data.

In: batches on the core. Out: nothing but a changed state; losses are summed on the core and read when they are asked
for. Where the reduction is a part of the graph and nothing is accumulated, an update is one graph for each bucket.
Otherwise a micro-step is one graph for each bucket, and applying is one more for all. No graph depends on how many
micro-steps there are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from xla_b2t.config import Config, ModelConfig
from xla_b2t.errors import UserError
from xla_b2t.models.augment import augment, smooth
from xla_b2t.models.loss import trial_losses
from xla_b2t.models.policy import DTYPES, STATE, kept_dtype
from xla_b2t.models.protocol import checked, scheduled_numbers
from xla_b2t.training import optimizer
from xla_b2t.training.fallback import explaining, way_out_of_update
from xla_b2t.training.sharding import Sharding
from xla_b2t.training.totals import NUM_TOTALS, Totals, add_up, is_finite
from xla_b2t.xla.attempt import OutOfHbm, attempt
from xla_b2t.xla.compile_guard import CompileGuard
from xla_b2t.xla.device import set_noise, sync, to_device, to_host
from xla_b2t.xla.feed import DeviceBatch
from xla_b2t.xla.world import World

Place = Callable[[list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint keeps of the step, as CPU tensors by their names in the model.

    Attributes:
        weights: float32 masters of the trained parameters.
        moment1, moment2: float32, the optimizer's running moments of them.
        fixed: frozen parameters and buffers, which no step changes.
    """

    weights: dict[str, torch.Tensor]
    moment1: dict[str, torch.Tensor]
    moment2: dict[str, torch.Tensor]
    fixed: dict[str, torch.Tensor]


class TrainStep:
    """One rank's training state on its core, and the step that changes it.

    All of the state is on the core when the constructor returns: nothing is left for the first step to make, so that
    the second finds the same graph.

    Attributes:
        model: the decoder, on the core.
        slots: its trained parameters with their state.

    Args:
        model: a decoder with float32 weights on the CPU, the same on every rank; it is moved to the core.
        num_classes: K of its logits.
        config: the run's configuration.
        world: this rank among the others.
        guard: watches what compiles.
        state: the state to go on from; None begins with the model's weights.
        place: puts CPU tensors onto the core. A step that is only traced puts placeholders there.
        accumulation: micro-steps an update; None takes the configuration's.
        way_out: what to tell where HBM runs out and nothing can be undone.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        config: Config,
        world: World,
        guard: CompileGuard,
        state: TrainState | None = None,
        place: Place = to_device,
        accumulation: int | None = None,
        way_out: Callable[[], str] = str,
    ):
        self.model = model
        self._num_classes = num_classes
        self._config = config
        self._world = world
        self._guard = guard
        state = state or initial_state(model)
        self._fixed = state.fixed
        place_weights(model, config.model, state, place)
        shapes = [tuple(weight.shape) for weight in state.weights.values()]
        self._sharding = Sharding(shapes, config.optimizer.sharded, world)
        self.slots = _place_optimizer(model, config, state, self._sharding, place)
        self._place, self._shapes = place, shapes
        self._host = next((weight.device for weight in state.weights.values()), None)  # `meta` for a traced step
        self._way_out = way_out
        self.accumulate(config.train.accumulation if accumulation is None else accumulation)
        (self._totals,) = place([torch.zeros(NUM_TOTALS)])
        self._keep_totals = False
        self._num_scheduled: int | None = None
        self._has_run = False

    def accumulate(self, accumulation: int) -> None:
        """Makes so many micro-steps of every update from now on; what was added up of one is dropped."""
        self._accumulation = accumulation
        self._accumulated: list[torch.Tensor] = []  # let go before new ones are made
        shapes = [*self._shapes, (3,)] if accumulation > 1 else []
        self._accumulated = self._place([torch.zeros(shape, dtype=STATE, device=self._host) for shape in shapes])

    def run(self, step: int, bucket: int, batches: Iterator[DeviceBatch]) -> None:
        """One update.

        Args:
            step: the update's number, from 0.
            bucket: index of the bucket that the update's batches have, for the guard.
            batches: the feed; one batch is taken for every micro-step.

        Raises:
            UserError: the step compiled again, left the core, does not reach a parameter, or changes a buffer; the
                model breaks its protocol; a core has no HBM for the update itself, which no smaller batch cures.
            OutOfHbm: on all ranks alike, when the bucket is new or ranks are processes; the state is as it was, and
                `accumulate` must be called before the step is run again.
        """
        values = optimizer.controls(step, self._keep_totals, self._config.optimizer)
        numbers = scheduled_numbers(self.model, step, self._num_scheduled)
        self._num_scheduled = sum(map(len, numbers))
        controls_N, *scheduled = to_device([torch.from_numpy(values), *numbers])
        is_split = self._accumulation > 1 or not self._world.reduces_in_graph
        pending: list[torch.Tensor] = []
        self.model.train()

        def micro_steps() -> torch.Tensor:
            nonlocal pending
            for micro_step in range(self._accumulation):
                batch = next(batches)
                set_noise(self._config.run.seed, self._world.rank, step, micro_step)
                with self._guard.watch("train", bucket, f"features {tuple(batch.features_BTC.shape)}"):
                    pending = self._backward(batch, scheduled)
                    if not is_split:
                        self._apply(pending, controls_N)
                    sync()
            return pending[-1] if is_split else self._totals

        # Once a graph has run, it is started and left alone, so that the host stays ahead of the core. Processes meet
        # before every reduction anyway.
        if self._guard.knows("train", bucket) and self._world.reduces_in_graph:
            micro_steps()
        else:
            self._attempt(micro_steps, is_split)
        if is_split:
            self._run_apply(step, pending, controls_N)
        self._keep_totals = True
        if not self._has_run:
            self._has_run = True
            self._refuse_changed_buffers()

    def _attempt(self, micro_steps: Callable[[], torch.Tensor], is_split: bool) -> None:
        changed = [] if is_split else self.tensors()  # micro-steps change nothing but what `accumulate` makes anew
        reduces = self._world.size > 1 and not is_split
        try:
            attempt(self._world, changed, micro_steps, reduces, self._way_out())
        except OutOfHbm:
            for slot in self.slots:
                slot.parameter.grad = None
            raise

    def _run_apply(self, step: int, pending: list[torch.Tensor], controls_N: torch.Tensor) -> None:
        """The end of an update in micro-steps. It is the same for every batch, so that no smaller one is tried."""
        is_new = not self._guard.knows("apply", -1)
        can_share = self._world.size > 1 and not self._config.optimizer.sharded
        with explaining(
            lambda: way_out_of_update(can_share),
            lambda: f"step {step + 1}, its update",
            "in the update of the parameters, which takes as much with a smaller batch",
        ):
            with self._guard.watch("apply", -1, "every parameter"):
                self._apply(pending, controls_N)
                sync()
            if is_new:
                to_host([self._totals])  # what is refused as it runs is told here, and not of the next micro-step

    def trace(self, batch: DeviceBatch, controls_N: torch.Tensor, scheduled: list[torch.Tensor]) -> None:
        """An update without accumulation, traced and not run: what `xla/trace.py` turns into a program."""
        self.model.train()
        self._apply(self._backward(batch, scheduled), controls_N)

    def trace_micro_step(self, batch: DeviceBatch, scheduled: list[torch.Tensor]) -> None:
        """A micro-step of an update with accumulation, traced and not run."""
        self.model.train()
        self._backward(batch, scheduled)

    def trace_apply(self, controls_N: torch.Tensor) -> None:
        """The end of an update with accumulation, traced and not run."""
        self._apply(self._accumulated, controls_N)

    def tensors(self) -> list[torch.Tensor]:
        """Everything on the core that an update changes."""
        columns = ("parameter", "master", "moment1", "moment2")
        slots = [getattr(slot, column) for slot in self.slots for column in columns]
        return [*slots, *self.sums]

    @property
    def sums(self) -> list[torch.Tensor]:
        """What is added up on the core: gradients over micro-steps, and the running totals."""
        return [*self._accumulated, self._totals]

    def totals(self) -> Totals:
        """Reads the running totals, which waits for the core, and starts them anew with the next update."""
        self._keep_totals = False
        return Totals(*to_host([self._totals])[0].tolist())

    def parameters(self) -> dict[str, torch.Tensor]:
        """Copies what this rank's model computes with to its host, by name, which waits for the core."""
        names, parameters = [slot.name for slot in self.slots], [slot.parameter.data for slot in self.slots]
        return dict(zip(names, to_host(parameters), strict=True))

    def state(self) -> TrainState | None:
        """Copies the state to the host of rank 0, which waits for the core; None on the others.

        All ranks must call this together: each may hold a part.
        """
        weights, moment1, moment2 = map(self._collected, ("master", "moment1", "moment2"))
        if weights is None or moment1 is None or moment2 is None:
            return None
        return TrainState(weights, moment1, moment2, self._fixed)

    def _collected(self, column: str) -> dict[str, torch.Tensor] | None:
        wholes = self._sharding.collect([getattr(slot, column) for slot in self.slots])
        if self._world.rank != 0:
            return None
        return {slot.name: whole for slot, whole in zip(self.slots, wholes, strict=True)}

    def _refuse_changed_buffers(self) -> None:
        """Statistics kept in a buffer would be each rank's own, and rounded to bf16 at every step."""
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in self._fixed}
        for name, now in zip(buffers, to_host(list(buffers.values())), strict=True):
            if not torch.equal(now, self._fixed[name].to(now.dtype)):
                raise UserError(
                    f"a training step changes the buffer {name}, which every rank would then hold in its own version",
                    f"model: {name}",
                    "use LayerNorm or GroupNorm in place of BatchNorm, or set track_running_stats=False",
                )

    def _backward(self, batch: DeviceBatch, scheduled: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of the summed objective in float32, in the order of the slots, and last a vector of sums.

        Those are the objective, the main loss and the number of trials.
        """
        objective, loss = self._losses(batch, scheduled)
        objective.backward()
        lost = [slot.name for slot in self.slots if slot.parameter.grad is None]
        if lost:
            raise UserError(
                f"the loss does not depend on the parameter{'s' if len(lost) > 1 else ''} {', '.join(lost)}",
                f"model: {lost[0]}",
                "use it in forward, or set requires_grad=False on it",
            )
        gradients = [slot.parameter.grad.float() for slot in self.slots]
        for slot in self.slots:
            slot.parameter.grad = None
        sums = torch.stack([objective.detach(), loss.detach(), batch.valid_B.sum(dtype=torch.float32)])
        if not self._accumulated:
            return [*gradients, sums]
        for total, part in zip(self._accumulated, [*gradients, sums], strict=True):
            total.add_(part)
        return self._accumulated

    def _losses(self, batch: DeviceBatch, scheduled: list[torch.Tensor]) -> list[torch.Tensor]:
        settings = self._config.augment
        features_BTC, input_bins_B = augment(
            batch.features_BTC.to(DTYPES[self._config.model.dtype]),
            batch.input_bins_B,
            batch.required_steps_B,
            settings,
            self.model.output_steps,
        )
        features_BTC = smooth(features_BTC, settings.smooth_sigma_bins)
        output = self.model(features_BTC, input_bins_B, batch.days_B, *scheduled)
        output = checked(output, features_BTC, self._num_classes, self.model)
        losses = trial_losses(output, batch.labels_BL, batch.label_lengths_B)
        return [torch.where(batch.valid_B, loss_B, torch.zeros_like(loss_B)).sum() for loss_B in losses]

    @torch.no_grad()
    def _apply(self, pending: list[torch.Tensor], controls_N: torch.Tensor) -> None:
        *gradients, sums = pending
        gradients, squares, sums = self._sharding.reduce(gradients, sums)
        scale = 1.0 / torch.clamp(sums[-1], min=1.0)
        norm = squares.sqrt() * scale
        scale = scale * optimizer.clip_factor(norm, self._config.optimizer.clip_norm)
        # Of what was reduced, so that all ranks say the same; nothing is read from the core.
        is_taken = is_finite(norm) & is_finite(sums[0])
        gradients = [gradient * scale for gradient in gradients]
        optimizer.update(self.slots, gradients, controls_N, is_taken, self._config.optimizer)
        add_up(self._totals, torch.cat([sums, norm.reshape(1)]), is_taken, controls_N[optimizer.KEEP_TOTALS])
        for total in self._accumulated:
            total.zero_()
        rounded = [slot.master.to(slot.parameter.dtype) for slot in self.slots]
        for slot, whole in zip(self.slots, self._sharding.spread(rounded), strict=True):
            slot.parameter.copy_(whole)


def initial_state(model: nn.Module) -> TrainState:
    """The state before the first update of a model with float32 weights on the CPU."""
    weights, fixed = {}, {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        kept = weights if parameter.requires_grad else fixed
        kept[name] = parameter.detach().float().clone()
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    return TrainState(weights, zeros, zeros, fixed)


def place_weights(model: nn.Module, config: ModelConfig, state: TrainState, place: Place = to_device) -> None:
    """Moves a CPU model onto the core, each tensor in the dtype of the policy, with the values of a state.

    What two names share in the model they share on the core; `Module.to` would part them there.
    """
    values = {**state.weights, **state.fixed}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(values[name])
    named = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    host = [tensor.detach().to(kept_dtype(name, tensor, config)) for name, tensor in named.values()]
    placed = dict(zip(named, place(host), strict=True))
    parameters = {
        key: nn.Parameter(placed[key], tensor.requires_grad)
        for key, (_, tensor) in named.items()
        if isinstance(tensor, nn.Parameter)
    }
    for module in model.modules():
        for name, tensor in list(module._parameters.items()):
            if tensor is not None:
                setattr(module, name, parameters[id(tensor)])  # torch.nn.GRU keeps a list of its own in step
        for name, tensor in module._buffers.items():
            module._buffers[name] = None if tensor is None else placed[id(tensor)]


def _place_optimizer(
    model: nn.Module, config: Config, state: TrainState, sharding: Sharding, place: Place
) -> list[optimizer.Slot]:
    """Masters are the weights themselves, not their rounding to the model's dtype."""
    placed = dict(model.named_parameters())
    names = list(state.weights)
    wholes = ([column[name] for name in names] for column in (state.weights, state.moment1, state.moment2))
    columns = [place(sharding.held(tensors)) for tensors in wholes]
    return [
        optimizer.Slot(name, optimizer.kind_of(name, config.optimizer), placed[name], *tensors)
        for name, *tensors in zip(names, *columns, strict=True)
    ]
