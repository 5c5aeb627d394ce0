"""The published baseline's checkpoint folder: reading one, and writing one that its evaluation takes for its own.

In and out: `Checkpoint`. The folder holds `checkpoint/best_checkpoint` (a dictionary by `torch.save`) and
`checkpoint/args.yaml` (its settings: what the model is, which sessions its days are). Written are the weights and all
settings that its evaluation reads; not the optimizer, so its training cannot go on from there. Names of weights are
left to `models/nejm_layout.py`.

Source: Neuroprosthetics-Lab/nejm-brain-to-text, what its `rnn_trainer.py` saves and its `evaluate_model.py` loads.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import yaml

from xla_b2t import config as configuration
from xla_b2t.config import AugmentConfig, Config, ModelConfig, decode
from xla_b2t.errors import UserError
from xla_b2t.files import flush, replacing
from xla_b2t.models.gru_decoder import GruDecoderOptions
from xla_b2t.models.nejm_layout import from_nejm, to_nejm
from xla_b2t.training.checkpoint import Checkpoint, disk_error
from xla_b2t.training.step import TrainState

CHECKPOINT = "checkpoint/best_checkpoint"
ARGS = "args.yaml"
STATE = "model_state_dict"
NEXT_STEP = "in its model_training: python evaluate_model.py --model_path {out} --data_dir TRIALS --eval_type val"

_KERNEL_BINS = 100
_NO_SMOOTHING_BINS = 0.1
"""Its evaluation always smooths; a Gaussian this narrow is a kernel of one tap."""


class _InputNetwork(msgspec.Struct):
    input_layer_dropout: float


class _Model(msgspec.Struct):
    n_input_features: int
    n_units: int
    n_layers: int
    patch_size: int
    patch_stride: int
    rnn_dropout: float
    input_network: _InputNetwork


class _Transforms(msgspec.Struct):
    smooth_data: bool
    smooth_kernel_std: float
    smooth_kernel_size: int = _KERNEL_BINS


class _Dataset(msgspec.Struct):
    sessions: Annotated[list[str], msgspec.Meta(min_length=1)]
    n_classes: int
    data_transforms: _Transforms
    batch_size: int = 0


class _Args(msgspec.Struct):
    """The settings that matter here, under their names there."""

    model: _Model
    dataset: _Dataset
    use_amp: bool = True


def export(checkpoint: Checkpoint, out: Path, where: str, overwrite: bool) -> list[Path]:
    """Writes the folder that `evaluate_model.py --model_path` takes.

    Args:
        checkpoint: of a `gru_decoder`.
        out: folder to write; made where it is missing.
        where: the file that the checkpoint is from, for errors.
        overwrite: replace a checkpoint, or settings, that are there.

    Returns:
        the files.

    Raises:
        UserError: a model that this layout cannot hold, a checkpoint or settings that are there, a disk that
            does not take it.
    """
    config = configuration.loads(checkpoint.config, where)
    model = config.model.factory or config.model.name
    if model != "gru_decoder":
        raise UserError(
            f"the run's model is {model}, the layout nejm holds nothing but gru_decoder",
            where,
            "export a run whose model.name is gru_decoder",
        )
    path = out / CHECKPOINT
    args_path = path.with_name(ARGS)
    for there, what in ((path, "is a checkpoint"), (args_path, "are settings of a model")):
        if there.exists() and not overwrite:
            fix = "give another --out, or --overwrite to replace what is there"
            raise UserError(f"there {what} already", str(there), fix)
    settings = msgspec.to_builtins(_args_of(checkpoint, config))
    values = {
        STATE: to_nejm(checkpoint.state.weights | checkpoint.state.fixed),
        "val_PER": checkpoint.val_per,
        "scheduler_state_dict": {"last_epoch": checkpoint.step},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The settings take their place before the weights do, and weights must never lie beside another order of days:
        # once the new pair is on disk the old weights go, so an export that ends half-way has none.
        with replacing(path) as new, replacing(args_path) as new_args:
            new_args.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), encoding="utf-8")
            with open(new, "wb") as file:
                torch.save(values, file)
            flush(new_args)
            flush(new)
            path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        raise disk_error(error, str(out), "give another --out") from error
    return [path, args_path]


def checkpoint_of(values: Mapping[str, Any], path: Path) -> Checkpoint:
    """A checkpoint of the published baseline as one of ours: weights only, in its order of sessions.

    Args:
        values: what its file holds.
        path: the file; `args.yaml` must lie beside it.

    Raises:
        UserError: no settings beside it, settings that say too little or name a session twice, weights that are not
            tensors by name, day layers that are not one a session.
    """
    args = _read_args(path.with_name(ARGS))
    weights = from_nejm(values[STATE], len(args.dataset.sessions), str(path))
    try:
        step = int((values.get("scheduler_state_dict") or {}).get("last_epoch", 0))
        val_per = None if values.get("val_PER") is None else float(values["val_PER"])
    except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise UserError(
            f"its scheduler_state_dict or val_PER is not as its training saves it: {error}",
            str(path),
            "give a checkpoint of the published baseline, or leave both away",
        ) from None
    return Checkpoint(
        step=step,
        state=TrainState(weights, {}, {}, {}),
        config=configuration.dumps(_config_of(args, str(path.with_name(ARGS)))),
        conversion="",
        global_batch=args.dataset.batch_size,
        sessions=tuple(args.dataset.sessions),
        num_features=args.model.n_input_features,
        num_classes=args.dataset.n_classes,
        val_per=val_per,
    )


def _args_of(checkpoint: Checkpoint, config: Config) -> _Args:
    options = decode(GruDecoderOptions, config.model.options, "configuration", "model.options")
    sigma = config.augment.smooth_sigma_bins
    return _Args(
        _Model(
            n_input_features=checkpoint.num_features,
            n_units=options.hidden,
            n_layers=options.layers,
            patch_size=options.patch_bins,
            patch_stride=options.patch_stride,
            rnn_dropout=options.dropout,
            input_network=_InputNetwork(options.input_dropout),
        ),
        _Dataset(
            sessions=list(checkpoint.sessions),
            n_classes=checkpoint.num_classes,
            data_transforms=_Transforms(smooth_data=sigma > 0, smooth_kernel_std=sigma or _NO_SMOOTHING_BINS),
            batch_size=checkpoint.global_batch,
        ),
        use_amp=True,  # whatever this run computed in: its evaluation makes features bfloat16, and fails without
    )


def _config_of(args: _Args, where: str) -> Config:
    model, transforms = args.model, args.dataset.data_transforms
    options = GruDecoderOptions(
        patch_bins=max(model.patch_size, 1),  # 0 leaves patches out there: a patch of one bin
        patch_stride=model.patch_stride if model.patch_size else 1,
        hidden=model.n_units,
        layers=model.n_layers,
        dropout=model.rnn_dropout,
        input_dropout=model.input_network.input_layer_dropout,
    )
    smoothing = AugmentConfig(smooth_sigma_bins=transforms.smooth_kernel_std if transforms.smooth_data else 0.0)
    config = Config(model=ModelConfig(options=msgspec.to_builtins(options)), augment=smoothing)
    return decode(Config, msgspec.to_builtins(config), where)


def _read_args(path: Path) -> _Args:
    fix = "put the args.yaml of its training beside the checkpoint: it names the sessions and the patch"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"its settings cannot be read: {error.strerror}", str(path), fix) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"its settings are not YAML: {error}", str(path), fix) from None
    try:
        args = msgspec.convert(settings, _Args, strict=False)  # YAML reads 1e-4 as text
    except msgspec.ValidationError as error:
        raise UserError(f"its settings do not describe the model: {error}", str(path), fix) from None
    if twice := [session for session, count in Counter(args.dataset.sessions).items() if count > 1]:
        raise UserError(
            f"its settings name a session more than once: {', '.join(twice)}; which day layer is its own is not known",
            str(path),
            "give each day layer a name of its own in dataset.sessions",
        )
    return args
