"""What this machine offers to train on, found without touching a device.

In: the process environment and the PCI bus. Out: a `Machine`. Starting the runtime is left to the ranks.
"""

import glob
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xla_b2t.errors import UserError

_GOOGLE_PCI_VENDOR = "0x1ae0"


@dataclass(frozen=True)
class Machine:
    """The device kind and how many ranks it takes.

    Attributes:
        kind: "tpu" or "cpu".
        cores: ranks a TPU host takes; on a CPU any number may be asked for and this is 1, the default.
    """

    kind: Literal["tpu", "cpu"]
    cores: int

    def ranks(self, asked: int) -> int:
        """The number of ranks for `--cores asked`; 0 asks for the default.

        Raises:
            UserError: more than the machine has, or a part of a TPU host that torch_xla cannot start.
        """
        if asked < 0:
            raise UserError(f"{asked} cores were asked for", "--cores", "give 1 or more, or 0 for all")
        if asked == 0 or self.kind == "cpu":
            return asked or self.cores
        if asked > self.cores:
            raise UserError(
                f"{asked} cores were asked for, this machine has {self.cores}", "--cores", f"use --cores {self.cores}"
            )
        if asked not in (1, self.cores):
            raise UserError(
                f"{asked} of {self.cores} cores were asked for; torch_xla starts one or all of a TPU host",
                "--cores",
                f"use --cores 1 or --cores {self.cores} (fewer cores never give a core more memory)",
            )
        return asked


def find_machine() -> Machine:
    """Looks for TPU chips, unless PJRT_DEVICE already says what to use.

    It sets PJRT_DEVICE when it is unset, so that torch_xla, in this process and in the ranks, decides alike.

    Raises:
        UserError: PJRT_DEVICE asks for a TPU and there is none, or for something else than TPU or CPU.
    """
    chosen = os.environ.get("PJRT_DEVICE") or ("TPU" if _has_tpu() else "CPU")
    if chosen not in ("TPU", "CPU"):
        raise UserError(f"PJRT_DEVICE is {chosen!r}, expected TPU or CPU", "environment", "unset PJRT_DEVICE")
    if chosen == "TPU" and not _has_tpu():
        raise UserError(
            "PJRT_DEVICE asks for a TPU, no TPU chip is attached to this machine",
            "environment",
            "unset PJRT_DEVICE to train on the CPU, or run this on a TPU VM",
        )
    os.environ["PJRT_DEVICE"] = chosen
    if chosen == "CPU":
        return Machine("cpu", 1)
    from torch_xla._internal import tpu

    try:
        return Machine("tpu", tpu.num_available_devices())
    except (OSError, KeyError) as error:  # torch_xla asks the machine's metadata which TPU this is
        raise UserError(
            f"the TPU does not say what it is: {error}",
            "the metadata server of this machine",
            "on a machine without one set TPU_SKIP_MDS_QUERY=1 and TPU_ACCELERATOR_TYPE, e.g. v5litepod-8",
        ) from None


def _has_tpu() -> bool:
    vendors = (Path(path).read_text().strip() for path in glob.glob("/sys/bus/pci/devices/*/vendor"))
    if _GOOGLE_PCI_VENDOR not in vendors:
        return False
    from torch_xla._internal import tpu  # knows which of Google's devices are TPUs; a network card is not

    return tpu.num_available_chips() > 0
