"""The one error that a user can mend. Everything else that is raised is a fault of ours."""


class UserError(Exception):
    """Something the user can put right: exit code 2, no traceback.

    Args:
        what: what was found and what was expected, with the values.
        where: the place, e.g. `groups/train.h5:/groups/0017`, `demo.toml: train.lr`, `my_model.py:31`.
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
