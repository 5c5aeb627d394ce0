"""The slices of TPUs that can be rented, by the names that Google gives them.

In: a name such as `v5e-8` or `v4-512`. Out: a `Slice`: how many ranks run there, and what libtpu calls it. The number
in a name counts TensorCores up to v5p, and chips of v5e and v6e. Known are slices of up to 256 chips, in the shape that
is nearest to a square or a cube.

A rank has a device: a chip, but on v2 and v3 one of its two TensorCores. Those of v4 and v5p work as one ("megacore").

Source: https://cloud.google.com/tpu/docs/v2, /v3, /v4, /v5e, /v5p, /v6e (configurations); for the shapes of v4 and v5p
and the name of their megacore configuration MaxText/accelerator_to_spec_map.py of github.com/AI-Hypercomputer/maxtext.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from xla_b2t.errors import UserError

_FLAT = MappingProxyType(
    {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
)
_CUBIC = MappingProxyType(
    {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 192: "4x4x12", 256: "4x8x8"},
)


@dataclass(frozen=True)
class Slice:
    """Chips that are rented together.

    Attributes:
        name: as Google has it, such as `v5e-8`.
        chip: its kind of chip, such as `v5e`; a key of `memory/chips.py`.
        kind: the same as PJRT names the device, such as `TPU v5 lite`.
        topology: the slice as libtpu names it, such as `v5e:2x4`.
        cores: devices, which is the number of ranks.
        options: what libtpu must be told besides.
    """

    name: str
    chip: str
    kind: str
    topology: str
    cores: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def accelerator_type(self) -> str:
        """The name in Google's interfaces, which know v5e as `v5litepod`."""
        return self.name.replace("v5e", "v5litepod")


@dataclass(frozen=True)
class _Family:
    chip: str
    kind: str
    counted: int  # in a name, for each chip
    devices: int  # of a chip
    sizes: tuple[int, ...]  # in chips

    def name(self, chips: int) -> str:
        return f"{self.chip}-{chips * self.counted}"


_FAMILIES = (
    _Family("v2", "TPU v2", 2, 2, (4, 16, 64, 128, 256)),
    _Family("v3", "TPU v3", 2, 2, (4, 16, 32, 64, 128, 256)),
    _Family("v4", "TPU v4", 2, 1, tuple(_CUBIC)),
    _Family("v5e", "TPU v5 lite", 1, 1, tuple(_FLAT)),
    _Family("v5p", "TPU v5", 2, 1, tuple(_CUBIC)),
    _Family("v6e", "TPU v6 lite", 1, 1, tuple(_FLAT)),
)


NAMES = tuple(family.name(chips) for family in _FAMILIES for chips in family.sizes)
"""Of all slices, by chip and size."""


def slice_named(name: str) -> Slice:
    """The slice of that name; `v5litepod-8` is `v5e-8`.

    Raises:
        UserError: there is no such slice, or it has more than 256 chips.
    """
    plain = name.strip().lower().replace("v5litepod", "v5e")
    for family in _FAMILIES:
        for chips in family.sizes:
            if plain == family.name(chips):
                return _slice(family, chips)
    raise UserError(
        f"no slice of up to 256 chips has this name; the nearest is {' or '.join(_nearest(plain))}",
        repr(name),
        "take one of " + "; ".join(_listed(family) for family in _FAMILIES),
    )


def _slice(family: _Family, chips: int) -> Slice:
    is_cubic = family.chip in ("v4", "v5p")
    options = {"chip_config_name": "megacore"} if family.chip == "v4" else {}  # of v5p it is libtpu's default
    if chips == 1:
        options = {"chips_per_host_bounds": (1, 1, 1)}  # libtpu's default is four chips a host
    topology = f"{family.chip}:{(_CUBIC if is_cubic else _FLAT)[chips]}"
    return Slice(family.name(chips), family.chip, family.kind, topology, chips * family.devices, options)


def _nearest(plain: str) -> list[str]:
    """Of a known family the sizes around the number; of libtpu's name Google's; else what is spelled alike."""
    slices = [_slice(family, chips) for family in _FAMILIES for chips in family.sizes]
    if same := [each.name for each in slices if each.topology == plain]:
        return same
    family, _, number = plain.partition("-")
    sizes = {int(each.name.partition("-")[2]): each.name for each in slices if each.chip == family}
    if sizes and re.fullmatch(r"\d{1,9}", number):
        below = [size for size in sizes if size < int(number)]
        above = [size for size in sizes if size > int(number)]
        return [sizes[size] for size in (*below[-1:], *above[:1])]
    return difflib.get_close_matches(plain, [*sizes.values()] or [each.name for each in slices], 2, 0) or ["v5e-8"]


def _listed(family: _Family) -> str:
    return f"{family.chip}-" + "/".join(str(chips * family.counted) for chips in family.sizes)
