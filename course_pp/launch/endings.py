"""How a rank ended, as what the caller raises."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from course_pp.launch.errors import LaunchError, RankDied, RankTraceback, signal_name, why_ended
from course_pp.launch.rank import Left, Raised


def of_death(rank: int, exit_code: int, over: bool) -> RankDied:
    """Return the exception for a rank whose process has ended.

    Args:
        exit_code: as ``subprocess`` gives it.
        over: whether its function had returned or raised.
    """
    when = "while it sent what its function returned or raised" if over else "before its function returned"
    how = f"ended with exit code {exit_code}" if exit_code >= 0 else f"was ended by {signal_name(-exit_code)}"
    return RankDied(f"rank {rank} {how} {when}. {why_ended(exit_code)}", rank, exit_code)


def of_leaving(rank: int, left: Left) -> RankDied:
    """Return the exception for a rank whose function called ``sys.exit``."""
    return RankDied(
        f"rank {rank} left through sys.exit({left.exit_code}) before its function returned. Return a value instead.",
        rank,
        left.exit_code,
    )


def of_exception(rank: int, n: int, raised: Raised) -> BaseException:
    """Return what the function raised, with the rank's traceback as its cause.

    A `LaunchError` with its summary where that cannot be built again or not be marked, or is no `Exception`: here a
    KeyboardInterrupt would pass for one of the caller's own.
    """
    substitute = LaunchError(f"rank {rank} raised {raised.summary}")
    with contextlib.suppress(Exception, SystemExit):
        error = pickle.loads(raised.exception) if raised.exception is not None else substitute
        if isinstance(error, Exception):
            return _marked(error, rank, n, raised.text)
    return _marked(substitute, rank, n, raised.text)


def _marked(error: Exception, rank: int, n: int, text: str) -> Exception:
    error.__cause__ = RankTraceback(rank, text)
    error.add_note(f"Raised first on rank {rank} of {n}.")
    return error


def result(rank: int, pickled: bytes) -> Any:
    """Return what the function returned. Raises TypeError if only the rank can rebuild it."""
    __tracebackhide__ = True
    try:
        return pickle.loads(pickled)
    except (Exception, SystemExit) as error:
        raise TypeError(
            f"what rank {rank} returned cannot be rebuilt where on_ranks was called ({type(error).__name__}: {error}). "
            "Return tensors, numbers, strings or containers of them."
        ) from error
