"""bfloat16 without a library that knows it: the upper 16 bits of a float32, as unsigned integers.

In: float32. Out: uint16 bit patterns, and back. Reading them as a tensor is left to whoever has torch.
"""

import numpy as np

LARGEST = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
"""The largest finite bfloat16; above about this a float32 would round to infinity."""

_PIECE = 1 << 15


def to_bits(values: np.ndarray) -> np.ndarray:
    """Rounds finite float32 values to the nearest bfloat16, ties to even.

    Args:
        values: float32 of any shape, C-contiguous or not, no NaN.

    Returns:
        uint16 of the same shape.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Adding just under half a unit, plus one when the kept part is odd, carries exactly when it must round up.
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def write_bits(values: np.ndarray, bits: np.ndarray) -> bool:
    """Rounds like `to_bits` into an array that is there, piece by piece within the processor's cache.

    Args:
        values: float32 of any shape, C-contiguous.
        bits: uint16 of the same shape, C-contiguous, written.

    Returns:
        Whether every value is finite and not beyond `LARGEST`; if not, `bits` mean nothing.
    """
    values_N, bits_N = values.reshape(-1), bits.reshape(-1)
    room_N = np.empty(_PIECE, np.uint32)
    for start in range(0, len(values_N), _PIECE):
        piece_N = values_N[start : start + _PIECE]
        # One look at each value: a sum of squares is finite unless a value is not, or is very large.
        if not np.isfinite(np.einsum("i,i->", piece_N, piece_N)) and not np.all(np.abs(piece_N) <= LARGEST):
            return False
        words_N, work_N = piece_N.view(np.uint32), room_N[: len(piece_N)]
        np.right_shift(words_N, 16, out=work_N)
        work_N &= 1
        work_N += 0x7FFF
        work_N += words_N
        np.right_shift(work_N, 16, out=bits_N[start : start + _PIECE], casting="unsafe")
    return True


def from_bits(bits: np.ndarray) -> np.ndarray:
    """The float32 values that bfloat16 bit patterns (uint16) stand for; exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
