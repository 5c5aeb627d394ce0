"""The largest batch for a device of which nothing is known but its free memory: a card without a compiler to ask.

In: plain numbers. Out: an `Answer`, or the error that says what is required, what may be used, and the ways out. Where
the TPU's compiler can be asked it knows better: these are rules of thumb, on purpose coarse.

A "value" is one number of the model; B bytes each, 4 for float32, 2 for bfloat16 and float16, 1 for int8.

| what | rule |
| --- | --- |
| margin, left free | the larger of the user's and 50 % for float32, 20 % for int8 |
| weights | values x B |
| optimizer | values x B for each of its moments: none for SGD, one with momentum, two for Adam and AdamW |
| gradients | values x B |
| activations | as the weights; with checkpointing 0.65 of that, since what the second pass begins from is kept |
| once for each batch | 250 MB for float32, 75 MB for int8: workspaces, the allocator's pools, the input pipeline |
| a sample | steps x inputs x B x 1.2: the fifth is labels, lengths, masks and the rounding-up of allocations |

Sixteen bits lie on the line through the two ends that are given, which is linear in bytes a value: one third of the way
from int8 to float32. So the margin is 30 %, and a batch costs 133.3 MB once.

What is kept in 16 bits is the model, not what the update works on: this project's trainer holds a float32 master of
each weight, float32 moments, and gradients summed in float32 (`models/policy.py`). So before activations a value costs
2 + (4 + 8) + 4 bytes under Adam, and not 2 + 4 + 2; `narrow_state` is for trainers that keep everything in 16 bits.

What these rules leave out is that activations grow with the batch and with the steps: for long trials they promise too
much. docs/decisions/0008 has the argument, and the rules beside what the TPU's compiler says.

MB is 10^6 bytes, MiB is 2^20. Requirements are rounded up to whole bytes, what may be used is rounded down.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from xla_b2t.errors import UserError

VALUE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1})
"""Bytes of a value, by precision."""
MOMENTS: Mapping[str, int] = MappingProxyType({"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2})
"""Moments of each weight that an optimizer keeps."""

_STATE_BYTES = 4  # of a float32 master, moment or gradient
_MARGIN_INT8, _MARGIN_FLOAT32 = Fraction(20, 100), Fraction(50, 100)
_BATCH_BYTES_INT8, _BATCH_BYTES_FLOAT32 = 75_000_000, 250_000_000
_KEPT_WITH_CHECKPOINTING = Fraction(65, 100)
_SAMPLE_FACTOR = Fraction(6, 5)
_LARGEST_BYTES = 10**15  # above every device and model that could be meant
_UNITS = MappingProxyType(
    {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
)


@dataclass(frozen=True)
class Answer:
    """What these rules make of a model and a device.

    Attributes:
        usable_bytes: of the free memory, less the margin.
        margin: the share of the free memory that is left alone, 0 to 1.
        weights_bytes, optimizer_bytes, gradient_bytes, activation_bytes: what does not depend on the batch.
        per_batch_bytes: once, whatever the batch's size.
        per_sample_bytes: for each trial of a batch.
        batch_size: trials, at least 1.
        limited_by: what keeps the batch from being larger.
    """

    usable_bytes: int
    margin: float
    weights_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    per_batch_bytes: int
    per_sample_bytes: int
    batch_size: int
    limited_by: Literal["memory", "max_batch"]

    @property
    def fixed_bytes(self) -> int:
        """What does not depend on the batch at all."""
        return self.weights_bytes + self.optimizer_bytes + self.gradient_bytes + self.activation_bytes

    @property
    def required_bytes(self) -> int:
        """With a batch of `batch_size`; at most `usable_bytes`."""
        return self.fixed_bytes + self.per_batch_bytes + self.batch_size * self.per_sample_bytes


@dataclass(frozen=True)
class _Needs:
    """Parts of what is required, in the order of `Answer`."""

    weights_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    per_batch_bytes: int
    per_sample_bytes: int

    @property
    def base_bytes(self) -> int:
        """Before the first sample."""
        return sum(vars(self).values()) - self.per_sample_bytes


def largest_batch(
    *,
    free_bytes: int,
    base_bytes: int,
    num_steps: int,
    num_inputs: int,
    precision: str = "bfloat16",
    optimizer: str = "adamw",
    checkpointing: bool = False,
    narrow_state: bool = False,
    margin: float = 0.0,
    max_batch: int | None = None,
) -> Answer:
    """The largest batch that a device with so much free memory can train on.

    Args:
        free_bytes: free on the device before the model is there.
        base_bytes: the model at one byte a value, which is its number of parameters.
        num_steps: steps of the longest sample, such as the bins of the longest bucket.
        num_inputs: values in a step, such as the features of a bin.
        precision: a key of `VALUE_BYTES`.
        optimizer: a key of `MOMENTS`.
        checkpointing: activations are worked out again in the backward pass.
        narrow_state: in 16 bits, moments and gradients have 16 bits too, and there is no master.
        margin: the least share of the free memory to leave alone, 0 to 1; a precision's own may be larger.
        max_batch: the user's cap; None for none.

    Raises:
        UserError: a value that cannot be meant, or no batch of any size fits.
    """
    _check_word("--precision", precision, VALUE_BYTES)
    _check_word("--optimizer", optimizer, MOMENTS)
    _check_count("--free-memory", "the free memory", free_bytes, "bytes")
    _check_count("the model", "its size at one byte a value", base_bytes, "bytes")
    _check_count("the data", "the number of steps in a sample", num_steps, "steps")
    _check_count("the data", "the number of inputs in a step", num_inputs, "inputs")
    if max_batch is not None:
        _check_count("--max-batch", "the largest batch", max_batch, "trials")
    if type(margin) not in (int, float) or not 0 <= margin < 1:
        what = f"the margin is {margin!r}, expected a share of the free memory, from 0 to below 1"
        raise UserError(what, "--margin", "write 30 % as 0.3")

    def needs(precision: str, checkpointing: bool) -> _Needs:
        return _needs(base_bytes, num_steps * num_inputs, precision, MOMENTS[optimizer], checkpointing, narrow_state)

    chosen, usable_bytes = needs(precision, checkpointing), _usable_bytes(free_bytes, precision, margin)
    fitting = (usable_bytes - chosen.base_bytes) // chosen.per_sample_bytes
    if fitting >= 1:
        is_capped = max_batch is not None and max_batch <= fitting
        return Answer(
            usable_bytes=usable_bytes,
            margin=float(_margin(precision, margin)),
            **vars(chosen),
            batch_size=max_batch if is_capped else fitting,
            limited_by="max_batch" if is_capped else "memory",
        )
    raise _refusal(free_bytes, base_bytes, margin, needs, precision, checkpointing, optimizer)


def num_bytes(text: str, where: str = "--free-memory") -> int:
    """Bytes that a text such as `3669MB`, `15.75 GiB` names; MB is 10^6 bytes, MiB 2^20.

    Args:
        text: a number and a unit.
        where: what the error names.

    Raises:
        UserError: no number, or no unit that is known; a bare number is refused because tools print MB and MiB.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, flags=re.IGNORECASE)
    if not found or found.group(2).lower() not in _UNITS:
        raise UserError(
            f"{text!r} is no size, expected a number and one of B, kB, MB, GB, TB, KiB, MiB, GiB",
            where,
            "write it as 3669MB; nvidia-smi and the like print MiB",
        )
    return int(Fraction(found.group(1)) * _UNITS[found.group(2).lower()])


def _needs(
    base_bytes: int, values: int, precision: str, moments: int, checkpointing: bool, narrow_state: bool
) -> _Needs:
    each = VALUE_BYTES[precision]
    has_wide_state = each == 2 and not narrow_state
    state = _STATE_BYTES if has_wide_state else each
    return _Needs(
        weights_bytes=base_bytes * each,
        optimizer_bytes=base_bytes * state * (moments + has_wide_state),  # the master is one more
        gradient_bytes=base_bytes * state,
        activation_bytes=math.ceil(base_bytes * each * (_KEPT_WITH_CHECKPOINTING if checkpointing else 1)),
        per_batch_bytes=math.ceil(_between(precision, _BATCH_BYTES_INT8, _BATCH_BYTES_FLOAT32)),
        per_sample_bytes=math.ceil(values * each * _SAMPLE_FACTOR),
    )


def _between(precision: str, at_int8: Fraction | int, at_float32: Fraction | int) -> Fraction:
    """The line through what is given for 1 and 4 bytes a value."""
    return at_int8 + Fraction(VALUE_BYTES[precision] - 1, 3) * (at_float32 - at_int8)


def _margin(precision: str, asked: float) -> Fraction:
    """Exact: 0.3 is three tenths, which it is not in floating point."""
    return max(Fraction(str(asked)), _between(precision, _MARGIN_INT8, _MARGIN_FLOAT32))


def _usable_bytes(free_bytes: int, precision: str, asked: float) -> int:
    return math.floor(free_bytes * (1 - _margin(precision, asked)))


def _refusal(
    free_bytes: int,
    base_bytes: int,
    margin: float,
    needs: Callable[[str, bool], _Needs],
    precision: str,
    checkpointing: bool,
    optimizer: str,
) -> UserError:
    """Both numbers, and the ways out that lead out."""
    chosen, share = needs(precision, checkpointing), _margin(precision, margin)
    usable_bytes = _usable_bytes(free_bytes, precision, margin)
    ways = []
    for words, name, other in _narrower(needs, precision, checkpointing):
        there_bytes = _usable_bytes(free_bytes, name, margin)
        if other.base_bytes + other.per_sample_bytes <= there_bytes:
            ways.append(f"{words} ({_mb(other.base_bytes)} of {_mb(there_bytes)} MB)")
    left_bytes = usable_bytes - chosen.per_batch_bytes - chosen.per_sample_bytes
    largest_model = base_bytes * left_bytes // (chosen.base_bytes - chosen.per_batch_bytes)
    if largest_model >= 100_000:
        ways.append(f"a model of at most {_mb(largest_model, math.floor)} million parameters")
    device_bytes = math.ceil((chosen.base_bytes + chosen.per_sample_bytes) / (1 - share))
    ways.append(f"a device with at least {_mb(device_bytes, math.ceil)} MB free")
    return UserError(
        f"{_mb(chosen.base_bytes)} MB are required before the first sample ({_told(chosen)}), and each sample takes "
        f"{_mb(chosen.per_sample_bytes, places=4)} MB; of {_mb(free_bytes)} MB free, {_mb(usable_bytes)} MB are usable "
        f"with a margin of {float(share * 100):.4g} %",
        f"--free-memory at {precision}, {optimizer}, {'with' if checkpointing else 'without'} checkpointing",
        f"any of: {'; '.join(ways)}",
    )


def _narrower(
    needs: Callable[[str, bool], _Needs], precision: str, checkpointing: bool
) -> Iterator[tuple[str, str, _Needs]]:
    """Ways to need less, as (words, precision, what is needed): one change at a time, then both."""
    narrower = [name for name in ("int8", "bfloat16") if VALUE_BYTES[name] < VALUE_BYTES[precision]]
    if not checkpointing:
        yield "checkpointing", precision, needs(precision, True)
    for name in narrower:
        yield name, name, needs(name, checkpointing)
    if not checkpointing:
        for name in narrower:
            yield f"{name} with checkpointing", name, needs(name, True)


def _told(needs: _Needs) -> str:
    parts = (
        (needs.weights_bytes, "weights"),
        (needs.optimizer_bytes, "optimizer"),
        (needs.gradient_bytes, "gradients"),
        (needs.activation_bytes, "activations"),
        (needs.per_batch_bytes, "each batch"),
    )
    return " + ".join(f"{_mb(size)} {name}" for size, name in parts)


def _mb(size: int, rounded: Callable[[float], int] = round, places: int = 1) -> str:
    """Megabytes as people write them: 2575, 1834.5."""
    return f"{rounded(size / 10 ** (6 - places)) / 10**places:.{places}f}".rstrip("0").rstrip(".")


def _check_word(where: str, word: str, known: Mapping[str, int]) -> None:
    if word not in known:
        near = difflib.get_close_matches(str(word).lower(), known, n=1, cutoff=0.5)
        raise UserError(
            f"{word!r} is none of {', '.join(known)}", where, f"did you mean {near[0]}?" if near else "give one of them"
        )


def _check_count(where: str, what: str, value: int, unit: str) -> None:
    if type(value) is not int or not 1 <= value <= _LARGEST_BYTES:
        expected = f"a whole number of {unit} from 1 to 10^15"
        raise UserError(f"{what} is {value!r}, expected {expected}", where, f"give {expected}")
