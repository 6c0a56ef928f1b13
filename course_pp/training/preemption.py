"""Leave in good order when a scheduler wants the machine back: finish the step, save, and exit so
as to be requeued.

    with Preemption() as preemption:  # from here on SIGTERM and SIGUSR1 leave a note and nothing
    else
        ...                           # after each step, on every rank:
        if (asked := preemption.agreed()) is not None:
            save(...)                 # together: some ranks may not have heard the signal
            raise Preempted(asked, step, root)

The script turns :class:`Preempted` into :data:`EXIT_CODE`, on which a batch script requeues the
job. Who hears what, and which exit code comes out, depends on what stands between the scheduler and
the ranks:

    ranks started directly, by srun   the signal reaches the ranks; each ends with 75
    torchrun, SIGTERM                 torchrun passes it on, waits 30 s (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, and in newer
                                      releases --shutdown-timeout, where that is too short to save),
                                      then kills; it ends with 1
    torchrun, SIGUSR1                 torchrun dies of it and leaves the ranks without a parent and unsaved, unless
                                      started with
                                      --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1;
                                      then as SIGTERM
    torchrun, a signal to one rank    all ranks save and end with 75; torchrun reports them as failed and ends with 1.
                                      With --max-restarts it would start them again: leave that at 0

So torchrun never hands 75 on: a batch script around it requeues because it has caught the signal
itself (``trap``). Before the ``with``, while Python imports torch, SIGTERM ends the process with
143; requeue on that as well.
"""

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from course_pp.base.ranks import Ranks

EXIT_CODE = 75
"""``EX_TEMPFAIL`` of sysexits.h: not done, and worth another try."""


class Preempted(Exception):
    """The run was asked to end by a signal and has saved what it had; raised on every rank."""

    def __init__(self, asked: signal.Signals, step: int, root: Path) -> None:
        super().__init__(
            f"{asked.name}: saved in {root} after step {step}; go on with --checkpoint-dir {root}"
        )
        self.asked, self.step, self.root = asked, step, root


class Preemption:
    """Listens for SIGTERM and SIGUSR1; a context manager, for the main thread.

    Inside, the signals interrupt nothing, however often they come: a save is never cut short. After
    a :class:`Preempted` they are ignored: a launcher that ends all ranks because one has ended
    cannot change the exit code then. Otherwise the handlers from before are back.
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
            signal.siginterrupt(number, False)  # what libraries wait for in the kernel goes on
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if isinstance(error, Preempted) else before)
