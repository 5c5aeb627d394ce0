"""Reads what `torch.save` wrote without running anything that the file says.

In: a file, ours or another's. Out: its values: tensors on the CPU, containers, numbers, text. NumPy's scalars are read
too, because training loops like to keep an error rate as one. What the values mean is left to the caller.
"""

import re
import threading
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xla_b2t.errors import UserError

# torch keeps the list of what may be read for the whole process, and ranks may be threads of one.
_READING = threading.Lock()


def read_tensor_file(path: str | Path, *, mapped: bool = False) -> Any:
    """The values of a file, with every tensor on the CPU.

    Args:
        path: the file.
        mapped: True leaves tensors in the file until they are read: of a checkpoint with its moments, a third. Files
            in torch's layout before 1.6, which is not a zip archive, are read whole.

    Raises:
        UserError: missing, damaged, or with Python objects in it.
    """
    path = Path(path)
    try:
        mapped = mapped and zipfile.is_zipfile(path)
        with _READING, _numpy_scalars():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}", str(path), "check the path") from None
    except Exception as error:  # the unpickler stumbles over a damaged file in any way it likes
        if refused := re.search(r"GLOBAL (\S+) was not an allowed", str(error)):
            raise UserError(
                f"{path.name} holds a Python object, {refused.group(1)}; reading it could run anything",
                str(path),
                "save it again with nothing but tensors, numbers and text in it",
            ) from None
        # torch's own text goes on to advise an unsafe load.
        reason = (
            str(error).partition("\n")[0] if "eights only load" not in str(error) else "torch.save did not write it"
        )
        raise UserError(
            f"{path.name} is not a whole checkpoint: {reason}",
            str(path),
            "give a run, a file of its checkpoints/, or a folder of the published baseline",
        ) from None


def _numpy_scalars() -> AbstractContextManager[None]:
    make = np.float64(0).__reduce__()[0]
    # NumPy 1 and 2 write the same function under two names.
    functions = [(make, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    kinds = [np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_]
    return torch.serialization.safe_globals([*functions, np.dtype, *(type(np.dtype(kind)) for kind in kinds)])
