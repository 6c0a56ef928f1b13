"""The calls of an answer in a process of its own, and how each of them ended."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import pickle
import reprlib
import resource
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from course_pp.exercises.mistakes import Mistake, Pending, Stopped, cause_of
from course_pp.launch.channel import CACHED
from course_pp.launch.watch import NoSuchRank, has_name_of_cell

_MEMORY_BYTES = 2 << 30
_RESULT_BYTES = 64 << 20
_SHOWN_CHARACTERS = 300


def call_each(
    rank: int, fn: Callable[..., Any], rows: Sequence[tuple[Any, ...]], kwargs: dict, note: Path
) -> list:
    """Call ``fn(*row, **kwargs)`` for each row, and write the number of the row to ``note``.

    The process that judges reads the number there if this one ends.

    Raises:
        Stopped: the first call that does not end well. Its symptom lacks the call at its beginning.
        Pending: the first call that finds a stub. Its text lacks the call, too.
    """
    _bound_memory()
    results = []
    with _told(fn) as called, open(note, "w", encoding="ascii") as noted:
        for i, row in enumerate(rows):
            noted.seek(0)
            noted.write(f"{i:09}")
            noted.flush()
            args, named = copy.deepcopy((row, kwargs))
            with unchanged(**_by_name(fn, args, named)):
                value = called(*args, **named)
            results.append(_sendable(value))
    return results


def run_harness(
    rank: int, harness: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Call ``harness(rank, fn, *args)`` on a rank.

    Raises:
        Stopped, Pending: as `call_each` does.
        Mistake: the harness raises it.
    """
    _bound_memory()
    with _told(fn) as called:
        return _sendable(harness(rank, called, *args), is_the_answers=False)


def _bound_memory() -> None:
    """Let this process take 2 GiB more: an answer that takes more gets a MemoryError."""
    with contextlib.suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, hard))


class _Called:
    """The answer, with a note of whether it is being called."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.inside = True
        value = self._fn(*args, **kwargs)
        self.inside = False
        if inspect.isgenerator(value) or inspect.iscoroutine(value):
            value.close()  # or Python warns that a coroutine was never awaited
            raise _unsendable(type(value).__name__)
        return value


@contextlib.contextmanager
def _told(fn: Callable[..., Any]) -> Iterator[_Called]:
    """Raise every exception of the answer as a sentence with the line at which it was raised."""
    called = _Called(fn)
    try:
        yield called
    except (Mistake, Pending):
        raise
    except SystemExit as e:
        where = _where(e, fn)
        symptom = f"tried to leave Python{where}"
        raise Stopped("exited", symptom, "Give the value back with `return` instead.") from e
    except BaseException as e:
        what = _in_a_line(e)
        where = _where(e, fn)
        # torch, too, raises NotImplementedError, where a dtype lacks an operation. It leaves no
        # frame of its own, so only a `raise` in the learner's line means a stub.
        if isinstance(e, NotImplementedError) and (not e.args or ": `raise " in where):
            raise Pending(f"raised {what}{where}", what == type(e).__name__) from e
        if where:
            cause = cause_of(what)
        elif called.inside:
            cause = _why_not_cached(e, fn)
        else:
            outside = "It happened outside your function, probably because of what it returned."
            cause = f"{outside} {cause_of(what)}".rstrip()
        peer = e.peer if isinstance(e, NoSuchRank) else None
        symptom = f"raised {what}{where}"
        raise Stopped("raised", symptom, cause, error=type(e).__name__, peer=peer) from e


def _why_not_cached(error: BaseException, fn: Callable[..., Any]) -> str:
    if not isinstance(fn, CACHED) or not isinstance(error, TypeError):
        return ""
    return (
        "`functools.cache` looks a result up by the arguments, and a list or a dictionary cannot be"
        " looked up by: cache a helper that is given tuples or numbers, or nothing."
    )


def _in_a_line(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:
        lines = ["(its message cannot be shown)"]
    # torch writes the reason at the end of a long message, after a stack of its own.
    if len(lines) > 3:
        lines = lines[-1:]
    text = " ".join(" ".join(lines).split())
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + " …"
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _where(error: BaseException, fn: Callable[..., Any]) -> str:
    """Return the innermost line in the answer's file or in a cell; empty if there is none.

    For example ``", in line 3: `return 1 / 0`"``.
    """
    file = getattr(getattr(innermost(fn), "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file or has_name_of_cell(frame.filename)]
    if not own:
        return ""
    last = own[-1]
    text = f": `{last.line}`" if last.line else ""
    return f", in line {last.lineno}{text}"


def innermost(fn: Any) -> Any:
    """Return ``fn`` without partials, bindings, and decorators that name the function they wrap."""
    # An object may claim to wrap itself: hence a limit.
    for _ in range(100):
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif inspect.ismethod(fn):
            fn = fn.__func__
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif isinstance(call := inspect.getattr_static(type(fn), "__call__", None), FunctionType):
            fn = call
        else:
            break
    return fn


def _sendable(value: Any, is_the_answers: bool = True) -> Any:
    """Return the value, if the caller can receive and print it.

    Both are tried here first, because here a limit of time and memory holds.
    """
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
        reprlib.repr(pickle.loads(data))
    except Exception as e:
        culprit = _culprit(value)
        raise _unsendable(type(value).__name__ if is_the_answers else culprit, culprit) from e
    if len(data) > _RESULT_BYTES:
        raise _unsendable(f"{type(value).__name__} of {len(data):,} bytes")
    return value


def _culprit(value: Any) -> str:
    """Return the type of the value that cannot be sent, or of its entry at fault."""
    import cloudpickle

    entries: Iterable[Any] = ()
    if isinstance(value, dict):
        entries = value.values()
    elif isinstance(value, list | tuple):
        entries = value
    for entry in entries:
        try:
            cloudpickle.dumps(entry)
        except Exception:
            return _culprit(entry)
    return type(value).__name__


def _unsendable(returned: str, culprit: str = "") -> Stopped:
    held = f" with {_a(culprit)} in it" if culprit not in ("", returned) else ""
    cause = "Return numbers, strings, tensors, or lists of them."
    match culprit or returned:
        case "generator":
            cause = (
                "It contains `yield`, or a `for` in round brackets: collect the values in a list"
                " and return that."
            )
        case "coroutine":
            cause = "It begins with `async def`: an ordinary `def` is asked for."
    return Stopped("unsendable", f"returned {_a(returned)}{held}", cause)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


def _by_name(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of their parameters, or by number if unknown."""
    try:
        return dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {i}": arg for i, arg in enumerate(args)} | kwargs


@contextlib.contextmanager
def unchanged(**arguments: Any) -> Iterator[None]:
    """Refuse an answer that changes its arguments: lists, tensors, any value that can be copied.

    Raises:
        Stopped: an argument is not as it was before the block. Names the first one.
    """
    before = copy.deepcopy(arguments)
    yield
    for name, value in arguments.items():
        if not _same(before[name], value):
            cause = "The caller still needs it: work on a copy, or build a new one."
            change = _change(name, before[name], value)
            raise Stopped("changed", f"changed its argument {change}", cause)


def _change(name: str, before: Any, after: Any) -> str:
    """Return the innermost place that has changed, with its values; tensors are not printed."""
    if type(before) is type(after):
        if isinstance(before, list | tuple) and len(before) == len(after):
            pairs = zip(before, after, strict=True)
            i = next(i for i, pair in enumerate(pairs) if not _same(*pair))
            is_tensor = _tensor_comparison(before[i]) is not None
            if is_tensor or isinstance(before[i], list | tuple | dict):
                return _change(f"{name}[{i}]", before[i], after[i])
        if isinstance(before, dict) and list(before) == list(after):
            key = next(key for key in before if not _same(before[key], after[key]))
            return _change(f"{name}[{key!r}]", before[key], after[key])
        elif _tensor_comparison(before) is not None:
            return f"`{name}`"
        elif isinstance(before, list) and any(map(_tensor_comparison, before)):
            return f"`{name}`, which had {len(before)} entries and now has {len(after)}"
    return f"`{name}` from {reprlib.repr(before)} to {reprlib.repr(after)}"


def _same(a: Any, b: Any) -> bool:
    """Whether two values look the same, however deep.

    Values that cannot be compared count as the same.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if (compare := _tensor_comparison(a)) is not None:
        return compare(b)
    if type(a).__eq__ is object.__eq__:
        return _same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
    try:
        return bool(a == b) or bool(a != a and b != b)
    except Exception:
        return True


def _tensor_comparison(a: Any) -> Callable[[Any], bool] | None:
    import torch

    if not isinstance(a, torch.Tensor):
        return None
    return lambda b: (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=a.is_floating_point())
    )
