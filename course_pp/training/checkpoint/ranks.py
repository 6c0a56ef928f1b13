"""All ranks succeed together or refuse together, with one sentence."""

import pickle
from collections.abc import Callable
from typing import TypeVar

from course_pp import collective
from course_pp.arguments import WrongArgument

__all__ = ["CheckpointError", "Ranks"]

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or must not be loaded; one sentence, the same on every rank."""


class Ranks(collective.Ranks):
    """The ranks that save or load together. Whatever fails on one of them, all raise a :class:`CheckpointError`."""

    refusal = CheckpointError

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank; return its results by rank.

        Raises:
            CheckpointError: on every rank, if it failed on any: what the lowest of those says.
        """
        return self.gather(self.collectively(work))

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and tell everyone the result; raises as :meth:`each` does."""
        return self.each(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    @staticmethod
    def sentence(error: Exception) -> str:
        """Return what went wrong, for a person."""
        return sentence(error)


def sentence(error: BaseException) -> str:
    """Return what went wrong, for a person."""
    if isinstance(error, CheckpointError | WrongArgument):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return "a record in it holds something other than a tensor"  # torch would suggest to load it nevertheless
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
