"""All ranks succeed together or refuse together, with one sentence."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["CheckpointError", "Ranks"]

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or must not be loaded; one sentence, the same on every rank."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together; a process without a process group is alone.

    Args:
        group: None for the default group.
        alone: do not speak to the others, although there is a process group.
    """

    group: dist.ProcessGroup | None = None
    alone: bool = False

    @property
    def rank(self) -> int:
        """This process among them."""
        return 0 if self._is_alone else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """How many they are."""
        return 1 if self._is_alone else dist.get_world_size(self.group)

    @property
    def _is_alone(self) -> bool:
        return self.alone or not dist.is_initialized()

    def gather(self, value: T) -> list[T]:
        """Everyone's ``value``, by rank, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do ``work`` on every rank; its results by rank.

        Raises:
            CheckpointError: on every rank, if it failed on any: what the lowest of those says.
        """
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        everyone = self.gather((result, None if failure is None else sentence(failure)))
        for _, problem in everyone:
            if problem is not None:
                raise CheckpointError(problem) from failure
        return [value for value, _ in everyone]

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and tell everyone the result; raises as :meth:`each` does."""
        return self.each(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def sentence(error: BaseException) -> str:
    """What went wrong, for a person."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        return "a record in it holds something other than a tensor"  # torch would suggest to load it nevertheless
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
