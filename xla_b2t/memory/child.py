"""The process in which a plan is made (`plan.py`): torch_xla must be imported under an environment that suits tracing.

In: a folder with the task. Out: the plan in it, or what the user can mend, and meanwhile how far it is.
"""

import faulthandler
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec

from xla_b2t.errors import UserError
from xla_b2t.files import replacing
from xla_b2t.memory.plan import ERROR, PLAN, PROGRESS, TASK, Task
from xla_b2t.memory.planner import Planner
from xla_b2t.xla.tracing_process import end_with_parent


def main(folder: Path, parents_pipe: int) -> int:
    """Reads the task, plans, writes the plan; 2 where the user can mend what kept it from that."""
    faulthandler.enable()
    end_with_parent(parents_pipe)
    task = msgspec.json.decode((folder / TASK).read_bytes(), type=Task)
    stages: dict[str, tuple[int, int]] = {}

    def tell(stage: str, done: int, of: int) -> None:
        stages[stage] = done, of
        with replacing(folder / PROGRESS) as path:
            path.write_bytes(msgspec.json.encode([(name, *counts) for name, counts in stages.items()]))

    try:
        with ExitStack() as stack:
            plan = Planner(task, tell, stack).plan()
    except UserError as error:
        (folder / ERROR).write_bytes(msgspec.json.encode((error.what, error.where, error.fix)))
        return 2
    (folder / PLAN).write_bytes(msgspec.json.encode(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
