"""What starting ranks can end in, when it does not end well."""

from __future__ import annotations

import linecache
import re
import signal
import traceback

from course_pp.launch.waits import Wait

_ECHO = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|closed by peer|pair closure|remote process exited", re.I
)


def is_echo(summary: str, began_elsewhere: bool) -> bool:
    """Return whether an exception only says that a peer is gone or has failed: the cause lies with that peer.

    Args:
        summary: ``Type: message``, in which torch and gloo name a lost connection.
        began_elsewhere: attribute of that name of the exception, by which ours say it.
    """
    return began_elsewhere or bool(_ECHO.search(summary))


def signal_name(number: int) -> str:
    """Return ``"SIGKILL"``, or ``"signal 40"``: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def why_ended(exit_code: int) -> str:
    """Say what probably ended a process, from its exit code as ``subprocess`` gives it."""
    if exit_code >= 0:
        return "Something in it called os._exit, or a library ended the process."
    return {
        "SIGKILL": "Something killed it; if nobody did, the system ran out of memory.",
        "SIGABRT": "A library gave up; with gloo, often a message larger than the buffer that receives it.",
        "SIGSEGV": "Native code touched memory it does not own.",
    }.get(signal_name(-exit_code), "Something sent it that signal.")


def is_cell(filename: str) -> bool:
    """Return whether the source text of this name is in no file."""
    entry = linecache.cache.get(filename, ())
    # The others have a modification time, or are not read yet.
    return len(entry) == 4 and entry[1] is None


class _Sentence(BaseException):
    """An exception that a notebook shows as the cell's line and the message, without our own frames."""

    def _render_traceback_(self) -> list[str]:
        # What IPython calls in place of printing a traceback.
        cells = [frame for frame in traceback.extract_tb(self.__traceback__) if is_cell(frame.filename)]
        shown = [f"----> {cells[-1].lineno} {cells[-1].line}"] if cells else []
        before = self.__cause__ or (None if self.__suppress_context__ else self.__context__)
        if isinstance(before, RankTraceback):
            shown.insert(0, str(before))
        elif before is not None:
            shown.insert(0, "".join(traceback.format_exception(before)))
        return [*shown, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class LaunchError(_Sentence, RuntimeError):
    """A run failed. The message names the rank, what happened to it, and its last lines where there are any."""


class RankDied(LaunchError):
    """A rank's process ended before its function returned.

    Attributes:
        rank: the rank that ended.
        exit_code: as ``subprocess`` gives it; ``-n`` means that signal ``n`` ended the process.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[RankDied], tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.exit_code)


class RanksHung(_Sentence, TimeoutError):
    """Ranks were still running at the time limit.

    Attributes:
        waits: what every rank was doing then, in rank order.
    """

    def __init__(self, message: str, waits: tuple[Wait, ...]) -> None:
        super().__init__(message)
        self.waits = waits

    def __reduce__(self) -> tuple[type[RanksHung], tuple[str, tuple[Wait, ...]]]:
        return type(self), (str(self), self.waits)


class RankTraceback(Exception):
    """A rank's own traceback, as text; the cause of the exception that the caller gets."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"on rank {rank}:\n{text.rstrip()}")
        self._given = rank, text

    def __reduce__(self) -> tuple[type[RankTraceback], tuple[int, str]]:
        return type(self), self._given
