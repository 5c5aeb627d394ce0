"""How much of a TPU core's memory an array takes: its last two axes are padded to tiles.

In: element type and sizes. Out: bytes. The compiler may lay out an array with its axes in another order, arguments too,
and chooses one that pads little.

Source: https://openxla.org/xla/tiled_layout, and the layouts in programs that the compiler has compiled, such as
`f32[..]{1,0:T(8,128)}`, `bf16[..]{1,0:T(8,128)(2,1)}` and `s32[..]{0:T(1024)}`.
"""

import math
import re
from functools import lru_cache

_LANES = 128
_SUBLANES = 8
_BITS = {"pred": 8, "token": 0, "opaque": 0}


def element_bits(kind: str) -> int:
    """Of one element: what the name counts first, as in s4, bf16, f8e4m3fn, c64.

    Raises:
        ValueError: the name does not say.
    """
    count = re.match(r"[a-z]+(\d+)", kind)
    if kind not in _BITS and not count:
        raise ValueError(f"the elements {kind} are of a size that is not known")
    return _BITS[kind] if kind in _BITS else int(count.group(1))


def plain_bytes(kind: str, sizes: tuple[int, ...]) -> int:
    """Bytes without padding."""
    return -(-math.prod(sizes) * element_bits(kind) // 8)


@lru_cache(maxsize=4096)
def padded_bytes(kind: str, sizes: tuple[int, ...]) -> int:
    """Bytes of an array in the order of its axes that pads it least."""
    bits = element_bits(kind)
    if not bits or 0 in sizes:
        return 0
    if bits > 32:  # kept as two or more arrays of 32 bits
        return bits // 32 * padded_bytes("u32", sizes)
    kept = tuple(size for size in sizes if size != 1)
    if len(kept) < 2:
        return _vector_bytes(kept[0] if kept else 1, bits)
    rows_and_columns = [(row, column) for row in range(len(kept)) for column in range(len(kept)) if row != column]
    return min(_tiled_bytes(kept, row, column, bits) for row, column in rows_and_columns)


@lru_cache(maxsize=4096)
def ordered_bytes(kind: str, sizes: tuple[int, ...]) -> int:
    """Bytes of an array whose axes stand as they are written, with the last in a row of 128."""
    bits = element_bits(kind)
    if bits > 32 or len(sizes) < 2 or not bits or 0 in sizes:
        return padded_bytes(kind, sizes)
    return _tiled_bytes(sizes, len(sizes) - 2, len(sizes) - 1, bits)


def _vector_bytes(size: int, bits: int) -> int:
    """A vector fills tiles of the smallest power of two that holds it, up to eight rows."""
    packed = 32 // bits  # elements that share a place
    tile = min(_power_of_two(max(-(-size // _LANES), packed)), _SUBLANES) * _LANES
    return _round_up(size, tile) * bits // 8


def _tiled_bytes(sizes: tuple[int, ...], row: int, column: int, bits: int) -> int:
    others = math.prod(size for axis, size in enumerate(sizes) if axis not in (row, column))
    rows = _round_up(sizes[row], min(_power_of_two(max(sizes[row], 32 // bits)), _SUBLANES))
    return others * rows * _round_up(sizes[column], _LANES) * bits // 8


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _power_of_two(size: int) -> int:
    """The smallest that is not below the size."""
    return 1 << (size - 1).bit_length()
