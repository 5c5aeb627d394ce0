"""What a device of each kind of TPU has: the numbers that a plan of memory and time is made with.

All are of one device, which is what a rank has: a chip of v4, v5e, v5p and v6e, a TensorCore of v2 and v3
(`xla/slices.py`).

HBM is what the compiler lets a program have: all of it but what it says is reserved, when it refuses a program ("Used
21.54G of 15.75G hbm ... reserved 258.00M"). The clock is the one at which the matrix units reach the peak, 2 x their
products a cycle x clock; the compiler's estimates for a large matmul are 2 to 14 % above the cycles that follow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GOOGLE = "https://cloud.google.com/tpu/docs/"
_PAPER = "Jouppi et al. 2020, A domain-specific supercomputer for training deep neural networks, doi 10.1145/3360307"


@dataclass(frozen=True)
class Chip:
    """One device of a kind.

    Attributes:
        name: as in the name of a slice, such as `v5e`.
        clock_ghz: of the TensorCore; the compiler's `estimated_cycles` are of this clock.
        hbm_bytes: that one program may use.
        reserved_bytes: of HBM besides, which the compiler keeps for the system.
        hbm_gb_s: between HBM and the device, in 10^9 bytes.
        bf16_tflops: peak of bf16 products summed in float32.
        ici_gb_s: what the device can send over all its links to other chips together, in one direction; it can receive
            as much. On a slice that is narrow or has no wrap-around some links lead nowhere.
        vmem_bytes: on-chip vector memory of a TensorCore, which a kernel cannot exceed; a device of v4 or v5p has two.
        source: where the numbers are from, other than clock and HBM.
    """

    name: str
    clock_ghz: float
    hbm_bytes: int
    reserved_bytes: int
    hbm_gb_s: float
    bf16_tflops: float
    ici_gb_s: float
    vmem_bytes: int
    source: str


def _hbm(all_mib: float, reserved_mib: float) -> tuple[int, int]:
    """What a program may use, and what it may not."""
    return int((all_mib - reserved_mib) * 2**20), int(reserved_mib * 2**20)


# VMEM is from jax/_src/pallas/mosaic/tpu_info.py of github.com/jax-ml/jax. Bytes between chips: of v2 and v3 four links
# of 496 and 656 Gbit/s for two devices; of the others Google's bandwidth of an all-reduce by the chips of a pod, which
# is half of what is called bidirectional there. Of v4 1.25G are said to be reserved, which is 1 GiB more than of v5e.
# Google's page gives a v6e two units of 256 x 256; its peak and the compiler's estimates are those of four at 1.75 GHz.
_MIB = 2**20
_CHIPS = (
    Chip("v2", 0.7, *_hbm(8192, 530.01), 350.0, 23.0, 124.0, 16 * _MIB, _PAPER),
    Chip("v3", 0.94, *_hbm(16384, 530.01), 450.0, 61.5, 164.0, 16 * _MIB, f"{_GOOGLE}v3; {_PAPER}"),
    Chip("v4", 1.05, *_hbm(32768, 1024 + 258), 1200.0, 275.0, 268.0, 16 * _MIB, f"{_GOOGLE}v4"),
    Chip("v5e", 1.5, *_hbm(16384, 258), 819.0, 197.0, 200.0, 128 * _MIB, f"{_GOOGLE}v5e"),
    Chip("v5p", 1.75, *_hbm(98304, 263), 2765.0, 459.0, 600.0, 64 * _MIB, f"{_GOOGLE}v5p"),
    Chip("v6e", 1.75, *_hbm(32256, 260), 1638.0, 918.0, 400.0, 128 * _MIB, f"{_GOOGLE}v6e"),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _CHIPS})
"""By name."""
