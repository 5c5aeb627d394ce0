"""A run that is asked to end, by SIGTERM as before a preemption or by Ctrl-C: all ranks end before the same update.

In: a folder that the processes of a run share. Out: whether it was asked, and before which update all ranks end.

No rank may end alone: the others would wait for it in a reduction. Rank 0 decides, for an update that no other rank
comes to before it has met rank 0 once more (`World.next_meeting`). So each of them finds the decision in time.
"""

import os
import signal
import threading
from pathlib import Path
from typing import final


@final
class StopOrder:
    """What was asked and decided; the same for every process that has the folder.

    Args:
        folder: private to the run; "" where nobody can ask.
    """

    def __init__(self, folder: str | Path):
        self._asked, self._decided = Path(folder, "asked-to-end"), Path(folder, "ends-before")
        self._can_be_asked = bool(folder)

    def ask(self, number: int) -> None:
        """Asks all ranks to end.

        Args:
            number: of the signal that was the reason.
        """
        _write_once(self._asked, number)

    def asked(self) -> int | None:
        """The signal that was the reason; None where nobody asked."""
        return _read(self._asked) if self._can_be_asked else None

    def ends_before(self, step: int, rank: int, next_meeting: int) -> bool:
        """Whether all ranks end before an update; every rank asks before every update.

        Args:
            step: the update.
            rank: that asks.
            next_meeting: the first update, this one or later, that no rank comes to without having met rank 0.
        """
        if rank == 0 and self.asked() is not None:
            _write_once(self._decided, next_meeting)
        decided = _read(self._decided) if self._can_be_asked else None
        return decided is not None and step >= decided


def ask_on_sigterm(order: StopOrder, is_in_pool: bool = False) -> None:
    """In a rank, before it has threads: SIGTERM asks all ranks to end, at once, also while the main thread compiles.

    Args:
        order: of the run.
        is_in_pool: the process that started this one is a pool that ends by SIGTERM what is left of it when another
            process of it has died. From there SIGTERM is the end, as it would be without this.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def wait() -> None:
        while True:
            found = signal.sigwaitinfo([signal.SIGTERM])
            if is_in_pool and found.si_pid == os.getppid():
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
                os.kill(os.getpid(), signal.SIGTERM)
            order.ask(signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="wait-for-sigterm").start()


def _write_once(path: Path, number: int) -> None:
    """The first that comes counts, and nobody reads half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    partial.write_text(str(number))
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None
