"""The learner's function, as a grader sees it: called in other processes, under a time limit, whatever it does."""

from __future__ import annotations

import contextlib
import inspect
import io
import reprlib
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from course_pp.exercises.in_process import Failure, call_each, innermost, run_harness
from course_pp.exercises.mistakes import Pending, Stopped, cause_of
from course_pp.launch import LaunchError, RankDied, RanksHung, Wait, on_ranks
from course_pp.launch.errors import RETURNED, diagnosis, signal_name, state, why_ended
from course_pp.launch.messages import CACHED

_KEPT_CHARACTERS = 2000
_KEPT_LINES = 50
_LABEL = "[rank 0] "


class Answer:
    """A function to be judged.

    Calling it, :meth:`calls` and :meth:`on_ranks` raise `Stopped`, in a sentence, for an answer that does not end,
    raises, exits, ends its process, changes its arguments or waits for a message that never comes, and `Pending` for
    the stub.

    Args:
        fn: the function, or whatever else can be called.
        limit_s: seconds that each run may take, not counting the start of the processes.
        name: what messages call it; its own name if None.
    """

    def __init__(self, fn: Callable[..., Any], limit_s: float = 5.0, name: str | None = None) -> None:
        self.name = name or str(getattr(fn, "__name__", type(fn).__name__))
        self._fn = fn
        self.limit_s = limit_s
        self._printed = _Kept()
        self._has_returned = False

    @property
    def source(self) -> str:
        """Its text, a clue for a cause; empty where it is not known."""
        try:
            return inspect.getsource(innermost(self._fn))
        except (OSError, TypeError):
            return ""

    @property
    def printed(self) -> str:
        """What the answer has printed so far, shortened if it is long."""
        return self._printed.text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return ``fn(*args, **kwargs)``, called in another process."""
        return self._call_each([args], kwargs)[0]

    def calls(self, rows: Sequence[tuple[Any, ...]], call: str | None = None) -> list[Any]:
        """Return ``[fn(*row) for row in rows]``, called in one other process and within one time limit.

        ``call`` is how messages write a call whose arguments would be too long to read.
        """
        return self._call_each([tuple(row) for row in rows], {}, call)

    def on_ranks(self, n: int, harness: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``harness(rank, fn, *args)`` on ``n`` ranks with a process group; return their results in rank order.

        ``harness`` is a function of the grader's module. It may raise `Mistake` itself.
        """
        on = f"on {n} ranks" if n > 1 else "on one rank"
        try:
            with self._output_kept():
                results = on_ranks(n, run_harness, harness, self._fn, args, timeout_s=self.limit_s, where="local")
        except Failure as e:
            raise self._stopped(e, f"`{self.name}`, {on},") from None
        except RanksHung as e:
            raise _hung(e.waits, f"`{self.name}` {on}", self.limit_s) from None
        except RankDied as e:
            symptom = f"`{self.name}`, {on}: rank {e.rank} {_how_died(e)} before its function returned."
            raise Stopped("died", symptom, _why_died(e)) from None
        except LaunchError as e:
            raise _broken(e, f"`{self.name}`, {on},") from None
        except (TypeError, AttributeError) as e:
            raise self._unsendable(e) from None
        self._has_returned = True
        return results

    def _call_each(self, rows: list[tuple[Any, ...]], kwargs: dict[str, Any], written: str | None = None) -> list[Any]:
        for row in rows:
            self._refuse_other_parameters(row, kwargs)
        with tempfile.TemporaryDirectory() as folder:
            note = Path(folder) / "row"
            try:
                with self._output_kept():
                    [results] = on_ranks(
                        1, call_each, self._fn, rows, kwargs, note, timeout_s=self.limit_s, backend=None, where="local"
                    )
            except Exception as e:
                i = int(note.read_text() or 0) if note.exists() else 0
                self._has_returned |= i > 0
                call = f"`{written or written_call(self.name, *rows[i], **kwargs)}`"
                raise self._why_no_value(e, call, i) from None
        self._has_returned = True
        return list(results)

    def _why_no_value(self, error: Exception, call: str, row: int) -> Exception:
        match error:
            case Failure():
                return self._stopped(error, call, row)
            case RanksHung(waits=[wait]):
                return _endless(wait, call, self.limit_s, row)
            case RankDied():
                return Stopped("died", f"{call} ended its whole process.", _why_died(error), row=row)
            case LaunchError():
                return _broken(error, call)
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
            raise Stopped(
                "parameters",
                f"`{self.name}{signature}` cannot be called as `{written_call(self.name, *row, **kwargs)}`: {e}.",
                "Keep the parameters of the stub.",
            ) from None

    @contextlib.contextmanager
    def _output_kept(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._printed), contextlib.redirect_stderr(self._printed):
            yield

    def _stopped(self, failure: Failure, call: str, row: int = 0) -> Exception:
        where = f", in {failure.where}" if failure.where else ""
        match failure.kind:
            case "pending":
                told = failure.what != failure.error or self._has_returned
                return Pending(f"{call} raised {failure.what}{where}." if told else "")
            case "exited":
                symptom, cause = f"tried to leave Python{where}", "Give the value back with `return` instead."
            case "changed":
                symptom = f"changed its argument {failure.what}"
                cause = "Whoever called still needs it: work on a copy, or build something new."
            case "unsendable":
                held = f" with {_a(failure.error)} in it" if failure.error not in ("", failure.what) else ""
                symptom, cause = f"returned {_a(failure.what)}{held}", _instead_of(failure.error)
            case _:
                symptom, cause = f"raised {failure.what}{where}", self._why_raised(failure)
        return Stopped(failure.kind, f"{call} {symptom}.", cause, row=row, error=failure.error, peer=failure.peer)

    def _why_raised(self, failure: Failure) -> str:
        if failure.where:
            return cause_of(failure.what)
        if not failure.inside:
            outside = "It happened outside your function, probably because of what it returned."
            return f"{outside} {cause_of(failure.what)}".rstrip()
        if isinstance(self._fn, CACHED) and failure.error == TypeError.__name__:
            return (
                "`functools.cache` looks a result up by the arguments, and a list or a dictionary cannot be looked up "
                "by: cache a helper that is given tuples or numbers, or nothing."
            )
        return ""

    def _unsendable(self, error: Exception) -> Stopped:
        return Stopped(
            "unsendable",
            f"`{self.name}` cannot be sent to another process, which is where it is checked.",
            "It is, or uses, something of the notebook that exists only here, such as an open file, a lock, a "
            "generator or `exit`: make it inside the function, and give values back with `return`.",
            str(error.__cause__ or error),
        )


def written_call(name: str, *args: Any, **kwargs: Any) -> str:
    """Write a call as it would be typed, long values shortened: ``bubble(4, [1, 2, 3, …])``."""
    short = _Short()
    short.maxlist = short.maxtuple = short.maxset = 8
    short.maxother = short.maxstring = 60
    typed = [short.repr(arg) for arg in args] + [f"{key}={short.repr(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(typed)})"


class _Short(reprlib.Repr):
    def repr_Tensor(self, tensor: Any, level: int) -> str:  # noqa: N802
        """By its shape: ``<tensor of 6 × 4>``. `reprlib` looks for a method by the name of the class."""
        return f"<tensor of {' × '.join(map(str, tensor.shape))}>" if tensor.dim() else f"tensor({tensor.item():g})"


class _Kept(io.TextIOBase):
    """A stream that keeps the beginning of what is written to it."""

    def __init__(self) -> None:
        self._kept = ""
        self._left_out = 0

    def write(self, text: str) -> int:
        # One process needs no label.
        line = text.removeprefix(_LABEL)
        room = _KEPT_CHARACTERS - len(self._kept) if self._kept.count("\n") < _KEPT_LINES else 0
        self._kept += line[:room]
        self._left_out += len(line[room:])
        return len(text)

    @property
    def text(self) -> str:
        rest = f"\n… and {self._left_out:,} characters more" if self._left_out else ""
        return self._kept.rstrip() + rest


def _endless(wait: Wait, call: str, limit_s: float, row: int = 0) -> Stopped:
    where = f", {wait.where}" if wait.where else ""
    return Stopped(
        "endless",
        f"{call} was still running after {limit_s:g} s{where}.",
        "Look for a loop whose condition never changes, or for something that waits.",
        row=row,
        waits=(wait,),
    )


def _hung(waits: tuple[Wait, ...], run: str, limit_s: float) -> Stopped:
    running = [wait for wait in waits if wait.operation != RETURNED]
    if any(wait.peers for wait in waits):
        symptom = f"{run} was still running after {limit_s:g} s."
        return Stopped("endless", symptom, diagnosis(waits), "\n".join(map(state, running)), waits=waits)
    slowest = next(iter(running), waits[0])
    stopped = _endless(slowest, f"{run}, rank {slowest.rank},", limit_s)
    stopped.waits = waits
    return stopped


def _how_died(died: RankDied) -> str:
    code = died.exit_code
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"


def _why_died(died: RankDied) -> str:
    if died.exit_code >= 0:
        return "Something in it called `os._exit`: give the value back with `return` instead."
    if died.exit_code == -signal.SIGABRT:
        return (
            "gloo ends a process whose message is longer than the tensor that receives it: compare the shape and the "
            "dtype of what is sent with those of that tensor."
        )
    return why_ended(died.exit_code)


def _broken(error: LaunchError, run: str) -> Stopped:
    symptom, cause = f"{run} broke the process that it ran in.", "It changes Python itself, or ends processes."
    return Stopped("broken", symptom, cause, str(error))


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def _instead_of(kind: str) -> str:
    if kind == "generator":
        return "It contains `yield`, or a `for` in round brackets: collect the values in a list and return that."
    if kind == "coroutine":
        return "It begins with `async def`: an ordinary `def` is asked for."
    return "Return numbers, strings, tensors, or lists of them."
