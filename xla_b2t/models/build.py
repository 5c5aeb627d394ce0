"""Makes the decoder that a configuration names, ours or the user's own.

In: `[model]` of the configuration and the sizes of the data. Out: an `nn.Module` with float32 weights on the default
device (`torch.device("meta")` as a context gives it no memory). Dtype and device are the trainer's affair.
"""

import difflib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import nn

from xla_b2t.config import Config, ModelConfig, decode
from xla_b2t.errors import UserError, line_of
from xla_b2t.models.gru_decoder import GruDecoder, GruDecoderOptions
from xla_b2t.models.noise_split import NoiseSplit, NoiseSplitOptions
from xla_b2t.models.protocol import Sizes

OURS = {"gru_decoder": (GruDecoderOptions, GruDecoder), "noise_split": (NoiseSplitOptions, NoiseSplit)}
"""name -> the record that its options must fit, and the model made from (sizes, options)."""

# Initial weights are drawn from torch's generator, of which a process has one, and ranks may be threads of a process.
# Reentrant, because a user's factory may build on one of our models.
_BUILDING = threading.RLock()


def build_model(config: ModelConfig, sizes: Sizes, *, seed: int | None = None) -> nn.Module:
    """The model, freshly initialised; one at a time, where ranks are threads.

    Args:
        config: `factory`, if given, is called as `function(sizes, options)`; else `name` is one of ours.
        sizes: features, days and classes of the data.
        seed: draws the weights from this seed, the same on every rank, and leaves torch's generator as it was. None
            draws them from that generator.

    Raises:
        UserError: no such model, an option it does not know, a factory that cannot be loaded, fails, or gives no
            decoder.
    """
    with _BUILDING, nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        return _build(config, sizes)


def build_without_weights(config: ModelConfig, sizes: Sizes) -> nn.Module:
    """The model for what needs no values of its weights: names, shapes, `output_steps`, a trace.

    It is on the meta device and takes no memory. A user's own model that cannot be built there, because its constructor
    reads a value back, is built on the CPU.

    Raises:
        UserError: as `build_model`.
    """
    try:
        with torch.device("meta"):
            return build_model(config, sizes)
    except UserError as error:
        if not config.factory or error.__cause__ is None:  # nothing that the user's own code did
            raise
    return build_model(config, sizes, seed=0)


def with_all_options(config: Config) -> Config:
    """The configuration with every option of one of our models written out, as it is or by default.

    Raises:
        UserError: there is no such model, or an option that it does not know or take.
    """
    if config.model.factory:
        return config
    record, _ = _our(config.model.name)
    options = msgspec.to_builtins(decode(record, config.model.options, "configuration", "model.options"))
    return replace(config, model=replace(config.model, options=options))


def _build(config: ModelConfig, sizes: Sizes) -> nn.Module:
    if config.factory:
        return _build_users(config, sizes)
    record, model = _our(config.name)
    return model(sizes, decode(record, config.options, "configuration", "model.options"))


def _our(name: str) -> tuple[type, Callable[[Sizes, Any], nn.Module]]:
    if name in OURS:
        return OURS[name]
    near = difflib.get_close_matches(name, OURS, n=1)
    raise UserError(
        f"there is no model {name!r}; known: {', '.join(OURS)}",
        "configuration: model.name",
        f"did you mean {near[0]}?" if near else "set model.name to one of them, or model.factory to one of your own",
    )


def _build_users(config: ModelConfig, sizes: Sizes) -> nn.Module:
    function, file = _load(config.factory)
    options = dict(config.options)
    try:
        inspect.signature(function).bind(sizes, options)
    except TypeError as error:
        raise UserError(
            f"the function cannot be called with (sizes, options): {error}",
            config.factory,
            "define it with two parameters",
        ) from None
    try:
        model = function(sizes, options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        fix = _way_out(error)
        if isinstance(error, TypeError) and options:
            fix += f"; the options come from [model.options] of the configuration: {', '.join(options)}"
        raise UserError(f"the factory failed: {type(error).__name__}: {error}", line_of(error, file), fix) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"the factory returned {type(model).__name__}, a torch.nn.Module is needed",
            config.factory,
            "return the model from the function",
        )
    for name in ("forward", "output_steps"):
        if not callable(getattr(model, name, None)):
            raise UserError(
                f"the model {type(model).__name__} has no method {name}",
                config.factory,
                f"add {name} as xla_b2t/models/protocol.py describes it",
            )
    return model


def _way_out(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name}, or put the folder that it lies in on PYTHONPATH"
    if isinstance(error, SystemExit):
        return "move what reads the command line or ends the program under if __name__ == '__main__'"
    return "correct the line"


def _load(factory: str) -> tuple[Callable[[Sizes, dict[str, Any]], Any], Path]:
    path, colon, name = factory.rpartition(":")
    if not colon or not path or not name:
        raise UserError(
            f"{factory!r} is not file.py:function", "model.factory", 'write factory = "path/to/my_model.py:build"'
        )
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file {path}", f"model.factory: {factory}", "give the path of an existing file")
    spec = importlib.util.spec_from_file_location(f"xla_b2t_user_model_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file", f"model.factory: {factory}", "name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        what = f"the file cannot be imported: {type(error).__name__}: {error}"
        raise UserError(what, line_of(error, file), _way_out(error)) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"there is no function {name} in it", str(file), f"define {name}(sizes, options)")
    return function, file
