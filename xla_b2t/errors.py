"""The one error that a user can mend. Everything else that is raised is a fault of ours."""

import traceback
from pathlib import Path


class UserError(Exception):
    """Something the user can put right: exit code 2, no traceback.

    Args:
        what: what was found and what was expected, with the values.
        where: the place, e.g. `groups/train-0000.h5:/groups/0017`, `demo.toml: train.lr`, `my_model.py:31`.
        fix: what to do: a command to type or a key to change.

    The arguments are positional and kept in `args`, so that the error survives pickling between processes.
    """

    def __init__(self, what: str, where: str, fix: str):
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  where: {self.where}\n  fix:   {self.fix}"


class DtypeError(TypeError):
    """Tensors of several dtypes where a model needs one. The audit says where; untraced it is a fault of the model."""


def line_of(error: BaseException, file: Path) -> str:
    """The innermost line of the user's file on the way to its error; the file alone where none is known."""
    if isinstance(error, SyntaxError) and error.lineno and error.filename and Path(error.filename) == file.absolute():
        return f"{file}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if Path(frame.filename) == file.absolute()]
    return f"{file}:{numbers[-1]}" if numbers else str(file)
