"""A step that fails on one rank: the others, whose messages from there never come, are told why."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from course_pp.collective import Ranks

__all__ = ["StepFailed", "Witness"]


class StepFailed(RuntimeError):
    """A pipeline's step ended here because it failed on another rank. Build another pipeline, and zero the gradients.

    Attributes:
        rank: where it failed, numbered within all ranks that share the step.
        what: how, ``"Type: message"``.
        began_elsewhere: True. Whoever collects the failures of all ranks names that of ``rank`` first.
    """

    began_elsewhere = True

    def __init__(self, rank: int, what: str) -> None:
        self.rank, self.what = rank, what
        super().__init__(f"the step failed on rank {rank}, for which this rank waited: {what}")

    def __reduce__(self) -> tuple[type["StepFailed"], tuple[int, str]]:
        return type(self), (self.rank, self.what)


class Witness:
    """Keeps in the group's store which rank of a pipeline was the first to fail.

    Args:
        group: all ranks that share the step; making it is a collective of them. None is this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        ranks = Ranks(group, alone=group is None)
        self._rank = ranks.rank
        # Pipelines of one group are told apart: one may have failed before.
        self._key = f"course_pp: step of {ranks.gather(secrets.token_hex(8))[0]}"
        self._group = group if ranks.size > 1 else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run this rank's part of a step in the body; if it fails, the other ranks can learn why.

        Raises:
            StepFailed: in place of the error of a message, if another rank has failed before.
        """
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # torch wraps what a stage raises
                cause = cause.__cause__
            told = self._first(f"{self._rank}\n{type(cause).__name__}: {cause}")
            rank, what = told.split("\n", 1)
            if int(rank) != self._rank and isinstance(error, RuntimeError):
                raise StepFailed(int(rank), what) from error
            raise

    def _first(self, mine: str) -> str:
        """Return what the first rank to fail said: ``mine`` if this rank is the first, or nobody can be asked."""
        if self._group is None:
            return mine
        try:
            return str(self._group.get_group_store().compare_set(self._key, "", mine).decode())
        except (AttributeError, RuntimeError):  # not in this release of torch; or the store was the other rank's
            return mine
