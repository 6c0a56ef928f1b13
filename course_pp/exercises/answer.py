"""The learner's function, as a grader sees it: called in other processes, under a time limit, whatever it does."""

from __future__ import annotations

import contextlib
import inspect
import io
import reprlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from course_pp.exercises.exercise import Mistake
from course_pp.exercises.in_process import Failure, call_each, run_harness
from course_pp.launch import LaunchError, RankDied, RanksHung, Wait, on_ranks

_KEPT_CHARACTERS = 2000
_KEPT_LINES = 50
_LABEL = "[rank 0] "


class Pending(Exception):
    """The answer raises NotImplementedError: it is still the stub, or part of it.

    Its text says in which call; it is empty for the stub itself.
    """


class Answer:
    """A function to be judged.

    Calling it, :meth:`calls` and :meth:`on_ranks` raise `Mistake`, in a sentence, for an answer that does not end,
    raises, exits, ends its process, changes its arguments or waits for a message that never comes, and `Pending` for
    the stub.

    Args:
        fn: the function.
        limit_s: seconds that each run may take, not counting the start of the processes.
    """

    def __init__(self, fn: Callable[..., Any], limit_s: float = 5.0) -> None:
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._fn = fn
        self.limit_s = limit_s
        self._printed = _Kept()
        self._has_returned = False

    @property
    def names(self) -> set[str]:
        """Functions, attributes and global variables that its code mentions: a clue for the cause of a mistake."""
        return _names_in(getattr(self._fn, "__code__", None))

    @property
    def printed(self) -> str:
        """What the answer has printed so far, shortened if it is long."""
        return self._printed.text

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``fn(*args, **kwargs)``, in another process."""
        return self._call_each([args], kwargs)[0]

    def calls(self, rows: Sequence[tuple[Any, ...]]) -> list[Any]:
        """``[fn(*row) for row in rows]``, all in one other process and within one time limit."""
        return self._call_each([tuple(row) for row in rows], {})

    def on_ranks(self, n: int, harness: Callable[..., Any], *args: Any) -> list[Any]:
        """``harness(rank, fn, *args)`` on ``n`` ranks with a process group; the results in the order of the ranks.

        ``harness`` is a function of the grader's module. It may raise `Mistake` itself.
        """
        on = f"on {n} ranks" if n > 1 else "on one rank"
        try:
            with self._output_kept():
                results = on_ranks(n, run_harness, harness, self._fn, args, timeout_s=self.limit_s, where="local")
        except Failure as e:
            raise self._stopped(e, f"`{self.name}`, {on},") from None
        except RanksHung as e:
            raise _hung(e, f"`{self.name}` {on}", self.limit_s) from None
        except RankDied as e:
            what, _, cause = str(e).partition(". ")
            raise Mistake(f"`{self.name}`, {on}: {what}.", cause) from None
        except LaunchError as e:
            raise _broken(e, f"`{self.name}`, {on},") from None
        except (TypeError, AttributeError) as e:
            raise self._unsendable(e) from None
        self._has_returned = True
        return results

    def _call_each(self, rows: list[tuple[Any, ...]], kwargs: dict[str, Any]) -> list[Any]:
        for row in rows:
            self._refuse_other_parameters(row, kwargs)
        with tempfile.TemporaryDirectory() as folder:
            note = Path(folder) / "row"

            def index() -> int:
                return int(note.read_text() or 0) if note.exists() else 0

            def call() -> str:
                row = rows[index()]
                return f"`{written_call(self.name, *row, **kwargs)}`"

            try:
                with self._output_kept():
                    [results] = on_ranks(
                        1, call_each, self._fn, rows, kwargs, note, timeout_s=self.limit_s, backend=None, where="local"
                    )
            except Failure as e:
                self._has_returned |= index() > 0
                raise self._stopped(e, call()) from None
            except RanksHung as e:
                raise _endless(e.waits[0], call(), self.limit_s) from None
            except RankDied as e:
                raise Mistake(f"{call()} ended its whole process.", _why_died(e)) from None
            except LaunchError as e:
                raise _broken(e, call()) from None
            except (TypeError, AttributeError) as e:
                raise self._unsendable(e) from None
        self._has_returned = True
        return list(results)

    def _refuse_other_parameters(self, row: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(self._fn)
        except (TypeError, ValueError):
            return
        try:
            signature.bind(*row, **kwargs)
        except TypeError as e:
            raise Mistake(
                f"`{self.name}{signature}` cannot be called as `{written_call(self.name, *row, **kwargs)}`: {e}.",
                "Keep the parameters of the stub.",
            ) from None

    @contextlib.contextmanager
    def _output_kept(self) -> Iterator[None]:
        with contextlib.redirect_stdout(self._printed), contextlib.redirect_stderr(self._printed):
            yield

    def _stopped(self, failure: Failure, call: str) -> Exception:
        where = f", in {failure.where}" if failure.where else ""
        match failure.kind:
            case "pending":
                has_message = failure.what != NotImplementedError.__name__
                told = has_message or self._has_returned
                return Pending(f"{call} raised {failure.what}{where}." if told else "")
            case "exited":
                return Mistake(f"{call} tried to leave Python{where}.", "Give the value back with `return` instead.")
            case "changed":
                cause = "Whoever called still needs it: work on a copy, or build something new."
                return Mistake(f"{call} changed its argument {failure.what}.", cause)
            case "unsendable":
                return Mistake(f"{call} returned {_a(failure.what)}.", _instead_of(failure.what))
            case _:
                cause = "" if where else "It happened outside your function, probably because of what it returned."
                return Mistake(f"{call} raised {failure.what}{where}.", cause)

    def _unsendable(self, error: Exception) -> Mistake:
        if leaving := self.names & {"exit", "quit"}:
            return Mistake(
                f"`{self.name}` calls `{min(leaving)}`, which would end the whole process.",
                "Give the value back with `return` instead.",
            )
        return Mistake(
            f"`{self.name}` cannot be sent to another process, which is where it is checked.",
            "It is, or uses, something of the notebook that exists only here, such as an open file, a lock or a "
            "`functools.cache`: make it inside the function.",
            str(error.__cause__ or error),
        )


def written_call(name: str, *args: Any, **kwargs: Any) -> str:
    """A call as it would be typed, long values shortened: ``bubble(4, [1, 2, 3, …])``."""
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxset = 8
    short.maxother = short.maxstring = 60
    typed = [short.repr(arg) for arg in args] + [f"{key}={short.repr(value)}" for key, value in kwargs.items()]
    return f"{name}({', '.join(typed)})"


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


def _endless(wait: Wait, call: str, limit_s: float) -> Mistake:
    where = f", {wait.where}" if wait.where else ""
    return Mistake(
        f"{call} was still running after {limit_s:g} s{where}.",
        "Look for a loop whose condition never changes, or for something that waits.",
    )


def _hung(hung: RanksHung, run: str, limit_s: float) -> Mistake:
    if any(wait.peers for wait in hung.waits):
        _, *states, diagnosis = str(hung).splitlines()
        return Mistake(f"{run} was still running after {limit_s:g} s.", diagnosis, "\n".join(map(str.strip, states)))
    slowest = next((wait for wait in hung.waits if wait.operation != "returned"), hung.waits[0])
    return _endless(slowest, f"{run}, rank {slowest.rank},", limit_s)


def _why_died(died: RankDied) -> str:
    if died.exit_code >= 0:
        return "Something in it called `os._exit`: give the value back with `return` instead."
    return str(died).partition("returned. ")[2]


def _broken(error: LaunchError, run: str) -> Mistake:
    return Mistake(
        f"{run} broke the process that it ran in.", "It changes Python itself, or ends processes.", str(error)
    )


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def _instead_of(kind: str) -> str:
    if kind == "generator":
        return "It contains `yield`: collect the values in a list and return that."
    if kind == "coroutine":
        return "It begins with `async def`: an ordinary `def` is asked for."
    return "Return numbers, strings, tensors, or lists of them."


def _names_in(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))
