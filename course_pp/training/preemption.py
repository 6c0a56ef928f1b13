"""Leave in good order when a scheduler wants the machine back.

Finish the step, save, and exit with a code that asks to be requeued:

    with Preemption() as preemption:  # from here on SIGTERM and SIGUSR1 only leave a note
        ...                           # after each step, on every rank:
        if (asked := preemption.agreed()) is not None:
            save(...)                 # together: some ranks may not have heard the signal
            raise Preempted(asked, step, root)

The script turns :class:`Preempted` into :data:`EXIT_CODE`, on which a batch script requeues the
job. Which ranks hear the signal, and which exit code comes out, depends on the launcher between the
scheduler and the ranks:

    ranks started directly, by srun   The signal reaches the ranks; each ends with 75.
    torchrun, SIGTERM                 torchrun passes it on, waits 30 s, then kills. It ends with 1.
                                      If 30 s are too short to save, set
                                      TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or in newer releases
                                      --shutdown-timeout.
    torchrun, SIGUSR1                 torchrun dies of it and leaves the ranks without a parent and
                                      unsaved. Started with
                                      --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
                                      it treats SIGUSR1 as SIGTERM.
    torchrun, a signal to one rank    All ranks save and end with 75. torchrun reports them as
                                      failed and ends with 1. With --max-restarts it would start
                                      them again: leave that at 0.

So torchrun never hands 75 on. A batch script around torchrun catches the signal itself (``trap``)
and requeues. Before the ``with``, while Python imports torch, SIGTERM ends the process with 143;
requeue on that as well.
"""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from course_pp.base.ranks import Ranks

EXIT_CODE = 75
"""``EX_TEMPFAIL`` of sysexits.h: not done, and worth another try."""


class Preempted(Exception):
    """A signal asked the run to end, and the run is saved. All ranks raise it."""

    def __init__(self, asked: signal.Signals, step: int, root: Path) -> None:
        super().__init__(
            f"{asked.name}: saved in {root} after step {step}; go on with --checkpoint-dir {root}"
        )
        self.asked = asked
        self.step = step
        self.root = root


class Preemption:
    """Listens for SIGTERM and SIGUSR1; a context manager, for the main thread.

    Inside the block the signals interrupt nothing, however often they come, so a save is never cut
    short. After a :class:`Preempted` they are ignored: when one rank has ended, a launcher signals
    the others, and that must not change their exit code. Otherwise the handlers from before are
    back.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._heard = 0

    def agreed(self) -> signal.Signals | None:
        """Return the signal that any rank has heard, the largest of several; a collective."""
        heard = Ranks().largest(self._heard)
        return signal.Signals(heard) if heard else None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = number

    def __enter__(self) -> "Preemption":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._hear)
            # A library's system call goes on after the signal, in place of failing with EINTR.
            signal.siginterrupt(number, False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ignored = isinstance(error, Preempted)
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if ignored else before)
