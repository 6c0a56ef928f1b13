"""The learner's function, as a grader calls it: in other processes and under a time limit."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import reprlib
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from course_pp.exercises.in_process import call_each, innermost, run_harness
from course_pp.exercises.mistakes import Pending, Stopped
from course_pp.launch import LaunchError, RankDied, RanksHung, Wait, on_ranks
from course_pp.launch.errors import RETURNED, diagnosis, state, why_ended

_KEPT_CHARACTERS = 2000
_KEPT_LINES = 50
_LABEL = "[rank 0] "


class Answer:
    """A function to be judged.

    To call it, :meth:`calls` and :meth:`on_ranks` raise `Stopped`, with a sentence, for an answer
    that does not end, raises, exits, ends its process, changes its arguments or waits for a message
    that never comes. They raise `Pending` for the stub.

    Args:
        fn: the function, or another object that can be called.
        limit_s: seconds that each run may take, not counting the start of the processes.
        name: the answer's name in messages; the name of ``fn`` if None.
    """

    def __init__(
        self, fn: Callable[..., Any], limit_s: float = 5.0, name: str | None = None
    ) -> None:
        self.name = name or str(getattr(fn, "__name__", type(fn).__name__))
        self._fn = fn
        self.limit_s = limit_s
        self._printed = _ShortenedOutput()
        self._has_returned = False

    @property
    def source(self) -> str:
        """The text of the function, a clue for a cause; empty where it is not known."""
        try:
            return inspect.getsource(innermost(self._fn))
        except (OSError, TypeError):
            return ""

    @property
    def printed(self) -> str:
        """The output of the answer so far, shortened if it is long."""
        return self._printed.text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``fn(*args, **kwargs)``, called in another process."""
        return self._call_each([args], kwargs)[0]

    def calls(self, rows: Sequence[tuple[Any, ...]], call: str | None = None) -> list[Any]:
        """Return ``[fn(*row) for row in rows]``, called in one other process under one time limit.

        Args:
            rows: arguments of each call.
            call: text of a call in messages, where the arguments would be too long to read.
        """
        return self._call_each([tuple(row) for row in rows], {}, call)

    def on_ranks(self, n: int, harness: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``harness(rank, fn, *args)`` on ``n`` ranks; return their results in rank order.

        The ranks have a process group. ``harness`` is a function of the grader's module, and may
        raise `Mistake` itself.
        """
        on = f"on {n} ranks" if n > 1 else "on one rank"
        try:
            return self._run(n, run_harness, harness, self._fn, args)
        except Exception as e:
            raise self._why_no_value(e, f"`{self.name}`, {on},", n) from None

    def _call_each(
        self, rows: list[tuple[Any, ...]], kwargs: dict[str, Any], written: str | None = None
    ) -> list[Any]:
        for row in rows:
            self._refuse_other_parameters(row, kwargs)
        with tempfile.TemporaryDirectory() as folder:
            # The other process writes here which row it is at, so that a hang can be told by it.
            note = Path(folder) / "row"
            try:
                [results] = self._run(1, call_each, self._fn, rows, kwargs, note, backend=None)
            except Exception as e:
                i = int(note.read_text() or 0) if note.exists() else 0
                self._has_returned |= i > 0
                call = f"`{written or written_call(self.name, *rows[i], **kwargs)}`"
                stopped = self._why_no_value(e, call)
                if isinstance(stopped, Stopped):
                    stopped.row = i
                raise stopped from None
        return list(results)

    def _run(self, n: int, run: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        with contextlib.redirect_stdout(self._printed), contextlib.redirect_stderr(self._printed):
            results = on_ranks(n, run, *args, timeout_s=self.limit_s, where="local", **settings)
        self._has_returned = True
        return results

    def _why_no_value(self, error: Exception, call: str, n_ranks: int = 1) -> Exception:
        match error:
            case Pending(args=(text, is_stub)):
                # A stub that has returned before is written in part.
                if is_stub and not self._has_returned:
                    return Pending("")
                return Pending(f"{call} {text}.")
            case Stopped():
                error.symptom = f"{call} {error.symptom}."
            case RanksHung():
                return _endless(error.waits, call, self.limit_s)
            case RankDied():
                whose = f"the process of rank {error.rank}"
                if n_ranks == 1:
                    whose = "its whole process"
                cause = _why_died(error, n_ranks, self.source)
                return Stopped("died", f"{call} ended {whose}.", cause)
            case LaunchError():
                symptom = f"{call} broke the process that it ran in."
                cause = "It changes Python itself, or ends processes."
                return Stopped("broken", symptom, cause, str(error))
            case TypeError() | AttributeError():
                return self._unsendable(error)
        return error

    def _refuse_other_parameters(self, row: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(self._fn)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*row, **kwargs)
        except TypeError as e:
            call = written_call(self.name, *row, **kwargs)
            symptom = f"`{self.name}{signature}` cannot be called as `{call}`: {e}."
            raise Stopped("parameters", symptom, "Keep the parameters of the stub.") from None

    def _unsendable(self, error: Exception) -> Stopped:
        # The `exit` and `quit` of a notebook belong to its shell, which cannot be sent.
        if leaving := re.search(r"(?<![.\w])(exit|quit)\(", self.source):
            symptom = f"`{self.name}` calls `{leaving[1]}`, which ends Python."
            return Stopped("exited", symptom, "Give the value back with `return` instead.")
        return Stopped(
            "unsendable",
            f"`{self.name}` is checked in another process, and cannot be sent there.",
            "It is, or uses, an object that exists only in this notebook, such as an open file, a"
            " lock, a generator or `exit`: make it inside the function, and give values back with"
            " `return`.",
            str(error.__cause__ or error),
        )


def written_call(name: str, *args: Any, **kwargs: Any) -> str:
    """Write a call as it would be typed, long values shortened: ``bubble(4, [1, 2, 3, …])``."""
    short = _Short()
    short.maxlist = short.maxtuple = short.maxset = 8
    short.maxother = short.maxstring = 60
    typed = [short.repr(arg) for arg in args]
    typed += [f"{key}={short.repr(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(typed)})"


class _Short(reprlib.Repr):
    def repr_Tensor(self, tensor: Any, level: int) -> str:  # noqa: N802
        """Return a tensor by its shape: ``<tensor of 6 × 4>``.

        `reprlib` looks for a method by the name of the class.
        """
        if not tensor.dim():
            return f"tensor({tensor.item():g})"
        return f"<tensor of {' × '.join(map(str, tensor.shape))}>"


class _ShortenedOutput(io.TextIOBase):
    """A stream that keeps the beginning of the text that is written to it."""

    def __init__(self) -> None:
        self._kept = ""
        self._left_out = 0

    def write(self, text: str) -> int:
        # One process needs no label.
        line = text.removeprefix(_LABEL)
        room = 0
        if self._kept.count("\n") < _KEPT_LINES:
            room = _KEPT_CHARACTERS - len(self._kept)
        self._kept += line[:room]
        self._left_out += len(line[room:])
        return len(text)

    @property
    def text(self) -> str:
        kept = self._kept.rstrip()
        if self._left_out:
            kept += f"\n… and {self._left_out:,} characters more"
        return kept


def _endless(waits: tuple[Wait, ...], call: str, limit_s: float) -> Stopped:
    running = [wait for wait in waits if wait.operation != RETURNED]
    late = f"was still running after {limit_s:g} s"
    if any(wait.peers for wait in waits):
        states = "\n".join(map(state, running))
        return Stopped("endless", f"{call} {late}.", diagnosis(waits), states, waits=waits)

    slowest = next(iter(running), waits[0])
    who = f" rank {slowest.rank}," if len(waits) > 1 else ""
    where = f", {slowest.where}" if slowest.where else ""
    cause = (
        "Look for a loop whose condition never changes, or for a call that waits. If there is none,"
        " this machine is busy: run the cell again."
    )
    if not slowest.where:
        cause = (
            "None of its own lines was running, so this machine may just be busy: run the cell"
            " again."
        )
    return Stopped("endless", f"{call}{who} {late}{where}.", cause, waits=waits)


def _why_died(died: RankDied, n_ranks: int, source: str) -> str:
    if died.exit_code == -signal.SIGABRT and (n_ranks == 1 or "os.abort" in source):
        return "Something in it called `os.abort`: give the value back with `return` instead."
    if died.exit_code >= 0:
        return "Something in it called `os._exit`: give the value back with `return` instead."
    if died.exit_code == -signal.SIGABRT:
        return (
            "gloo ends a process whose message is longer than the tensor that receives it: compare"
            " the shape and the dtype of what is sent with those of that tensor."
        )
    return why_ended(died.exit_code)
