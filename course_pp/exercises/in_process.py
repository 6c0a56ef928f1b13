"""What happens to an answer in a process of its own: the calls, and how each of them ended."""

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
from collections.abc import Callable, Iterator, Sequence
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
    """Call ``fn(*row, **kwargs)`` for each row; write to ``note`` which one is being called, for
    the caller to read.

    Raises:
        Stopped: at the first call that does not end well; the symptom begins where the call is to
            be named.
        Pending: likewise, of a stub.
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
    """Call ``harness(rank, fn, *args)`` on a rank. Raises as `call_each` does, or the Mistake of the harness."""
    _bound_memory()
    with _told(fn) as called:
        return _sendable(harness(rank, called, *args), is_the_answers=False)


def _bound_memory() -> None:
    """Let this process take 2 GiB more and no further, so that an answer gets a MemoryError and the system lives."""
    with contextlib.suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, hard))


class _Called:
    """The answer; knows whether it is being called."""

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
    """Tell whatever the answer raises in terms of its own lines."""
    called = _Called(fn)
    try:
        yield called
    except (Mistake, Pending):
        raise
    except SystemExit as e:
        where = _where(e, fn)
        raise Stopped(
            "exited", f"tried to leave Python{where}", "Give the value back with `return` instead."
        ) from e
    except BaseException as e:
        what, where = _in_a_line(e), _where(e, fn)
        # torch raises NotImplementedError, too, where a dtype lacks an operation, and leaves no
        # frame of its own.
        if isinstance(e, NotImplementedError) and (not e.args or ": `raise " in where):
            raise Pending(f"raised {what}{where}", what == type(e).__name__) from e
        cause = cause_of(what) if where or not called.inside else _why_not_cached(e, fn)
        if not (where or called.inside):
            cause = (
                f"It happened outside your function, probably because of what it returned. {cause}"
            ).rstrip()
        peer = e.peer if isinstance(e, NoSuchRank) else None
        raise Stopped(
            "raised", f"raised {what}{where}", cause, error=type(e).__name__, peer=peer
        ) from e


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
    text = " ".join((lines[-1] if len(lines) > 3 else " ".join(lines)).split())
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + " …"
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _where(error: BaseException, fn: Callable[..., Any]) -> str:
    """The innermost line in the answer's file, or in a cell: ``", in line 3: `return 1 / 0`"``."""
    file = getattr(getattr(innermost(fn), "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file or has_name_of_cell(frame.filename)]
    if not own:
        return ""
    return f", in line {own[-1].lineno}" + (f": `{own[-1].line}`" if own[-1].line else "")


def innermost(fn: Any) -> Any:
    """Return ``fn`` without partials, bindings, and decorators that say what they wrap."""
    # An object may claim to wrap itself.
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
    """The value, if the caller can receive and print it: whatever that does happens here first, under the limits."""
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
    """The kind of what cannot be sent: of the value, or of the entry in it that is to blame."""
    import cloudpickle

    for entry in (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    ):
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
    """The arguments of a call by the names of their parameters; by number, where these are not known."""
    try:
        return dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {i}": arg for i, arg in enumerate(args)} | kwargs


@contextlib.contextmanager
def unchanged(**arguments: Any) -> Iterator[None]:
    """Refuse an answer that changes what it was given, by name: lists, tensors, whatever can be
    copied.

    Raises:
        Stopped: with the first argument that is not what it was before the block.
    """
    before = copy.deepcopy(arguments)
    yield
    for name, value in arguments.items():
        if not _same(before[name], value):
            cause = "Whoever called still needs it: work on a copy, or build something new."
            raise Stopped(
                "changed", f"changed its argument {_change(name, before[name], value)}", cause
            )


def _change(name: str, before: Any, after: Any) -> str:
    """What has changed, told by its innermost place; tensors are not printed."""
    if type(before) is type(after):
        if isinstance(before, list | tuple) and len(before) == len(after):
            i = next(
                i for i, pair in enumerate(zip(before, after, strict=True)) if not _same(*pair)
            )
            if (
                isinstance(before[i], list | tuple | dict)
                or _tensor_comparison(before[i]) is not None
            ):
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
    """Whether two values look the same, however deep; what cannot be compared counts as the same."""
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
