"""An exercise of notebook 09: a save by several ranks, with its two barriers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake

__all__ = ["grade_save_together", "save_together"]


def save_together(rank: int, write: Callable[[], None], publish: Callable[[], None]) -> None:
    """Write this rank's piece; publish once, when all pieces are there; return when it is published."""
    write()
    dist.barrier()
    if rank == 0:
        publish()
    dist.barrier()


_N_RANKS, _PATIENCE_S, _POLL_S = 3, 0.5, 0.002


class Fault(Enum):
    """What can be wrong with a save, and why; in the order in which it is told."""

    UNWRITTEN = "Every rank writes its own piece."
    UNPUBLISHED = "One rank has to publish."
    REPEATED = "One rank publishes, once; the others wait for it."
    EARLY = "Who publishes must know that all the others have written: a barrier after `write()`."
    LATE = "Who publishes must know that all the others have written before: a barrier after `write()`."
    UNAWAITED = (
        "Who returns takes the checkpoint for granted, and may load it or delete the one before: a barrier after "
        "`publish()`, on all ranks."
    )


class _Desk:
    """The draft and the published checkpoint of one save, as marks in a directory that all ranks see."""

    def __init__(self, folder: Path, rank: int, slow: int | None) -> None:
        self._folder, self._rank, self._slow = folder, rank, slow
        self.complaints: list[tuple[Fault, str]] = []
        self._barrier = dist.barrier

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``dist.barrier``, in whose place it stands, and leave a mark."""
        (self._folder / f"barrier.{self._rank}.{time.monotonic_ns()}").touch()
        return self._barrier(*args, **kwargs)

    def write(self) -> None:
        """Write this rank's piece; the slow rank's comes after the publishing, unless that waits for it."""
        if self._rank == self._slow:
            self._wait_for("published.*")
        if list(self._folder.glob("published.*")):
            told = f"Rank {self._rank} wrote its piece after the checkpoint was published without it."
            self.complaints.append((Fault.LATE, told))
        (self._folder / f"piece.{self._rank}").touch()

    def publish(self) -> None:
        """Give the draft its name; takes as long as another rank needs to return, unless that waits for it."""
        pieces = len(list(self._folder.glob("piece.*")))
        (self._folder / f"published.{self._rank}.{time.monotonic_ns()}").touch()
        if pieces < _N_RANKS:
            told = f"Rank {self._rank} published when {pieces} of {_N_RANKS} pieces were there."
            self.complaints.append((Fault.EARLY, told))
        if self._slow is None:
            self._wait_for("returned.*")
        (self._folder / "named").touch()

    def returned(self) -> None:
        """Note that the answer came back on this rank."""
        if not (self._folder / "named").exists():
            told = f"Rank {self._rank} returned before the checkpoint was published."
            self.complaints.append((Fault.UNAWAITED, told))
        (self._folder / f"returned.{self._rank}").touch()

    def meet(self) -> None:
        """Wait until the answer has come back on every rank.

        By marks: a barrier here would be taken for the other half of one that the answer calls on some ranks alone.

        Raises:
            Mistake: if another rank waits in a barrier that this one has never called.
        """
        while len(list(self._folder.glob("returned.*"))) < _N_RANKS:
            calls = [len(list(self._folder.glob(f"barrier.{rank}.*"))) for rank in range(_N_RANKS)]
            most = max(calls)
            # A barrier returns when all have called it, so nobody is behind a rank that is back.
            if most > (own := calls[self._rank]):
                raise Mistake(
                    f"Rank {calls.index(most)} called `barrier` {_times(most)}, rank {self._rank} {_times(own)}.",
                    "A barrier returns when all ranks have called it: every rank has to call each.",
                )
            time.sleep(_POLL_S)

    def judge(self) -> None:
        """Add the complaints that can be seen once everyone is back."""
        published = [path.name.split(".")[1] for path in self._folder.glob("published.*")]
        if not published:
            self.complaints.append((Fault.UNPUBLISHED, "Nobody called `publish()`."))
        elif len(published) > 1:
            by = f"by rank{'s' * (len(set(published)) > 1)} {', '.join(sorted(set(published)))}"
            self.complaints.append((Fault.REPEATED, f"`publish()` was called {_times(len(published))}, {by}."))
        if not (self._folder / f"piece.{self._rank}").exists():
            self.complaints.append((Fault.UNWRITTEN, f"Rank {self._rank} never wrote its piece."))

    def _wait_for(self, pattern: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not list(self._folder.glob(pattern)) and time.monotonic() < end:
            time.sleep(_POLL_S)


def _times(n: int) -> str:
    return ("never", "once", "twice")[n] if n < 3 else f"{n} times"


def _saved_on_rank(rank: int, fn: Callable[..., Any], folder: str) -> list[list[tuple[Fault, str]]]:
    """Complaints of this rank: with each rank slow to write in turn, then with a slow publishing."""
    found = []
    dist.barrier()  # so that nobody's patience ends while another is still starting
    for slow in (*range(_N_RANKS), None):
        place = Path(folder) / str(slow)
        place.mkdir(exist_ok=True)
        desk = _Desk(place, rank, slow)
        with mock.patch.object(dist, "barrier", desk.barrier):
            fn(rank, desk.write, desk.publish)
        desk.returned()
        desk.meet()
        desk.judge()
        found.append(desk.complaints)
    return found


def grade_save_together(answer: Answer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = answer.on_ranks(_N_RANKS, _saved_on_rank, folder)
    said = [complaint for scenario in zip(*ranks, strict=True) for rank in scenario for complaint in rank]
    for fault in Fault:
        for found, symptom in said:
            if found is fault:
                raise Mistake(symptom, fault.value)
