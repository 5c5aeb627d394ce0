"""bfloat16 without a library that knows it: the upper 16 bits of a float32, as unsigned integers.

In: float32. Out: uint16 bit patterns, and back. Reading them as a tensor is left to whoever has torch.
"""

import numpy as np

LARGEST = float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
"""The largest finite bfloat16; above about this a float32 would round to infinity."""


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


def from_bits(bits: np.ndarray) -> np.ndarray:
    """The float32 values that bfloat16 bit patterns (uint16) stand for; exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
