"""What happens to an answer in a process of its own: the calls, and how each of them ended."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import linecache
import os
import pickle
import reprlib
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from course_pp.exercises.mistakes import Mistake
from course_pp.launch.watch import NoSuchRank, has_name_of_cell

_MEMORY_BYTES = 2 << 30
_RESULT_BYTES = 64 << 20
_SHOWN_CHARACTERS = 300


class Failure(Exception):
    """An answer stopped. ``on_ranks`` takes it to the caller.

    Attributes:
        kind: ``"raised"``, ``"exited"``, ``"pending"``, ``"changed"`` or ``"unsendable"``.
        what: the exception in a line, or what was changed or returned.
        where: ``"line 3: `return 1 / 0`"``, the innermost line of the answer; empty if it is not in there.
        error: the name of the exception's class; of what cannot be sent, the innermost's; empty for anything else.
        inside: whether the answer was being called, as opposed to what the check does with its result.
        peer: the rank beyond the group that a message was for or from.
    """

    def __init__(
        self,
        kind: str,
        what: str,
        where: str = "",
        error: str = "",
        inside: bool = True,
        peer: int | None = None,
    ) -> None:
        super().__init__(kind, what, where, error, inside, peer)
        self.kind = kind
        self.what = what
        self.where = where
        self.error = error
        self.inside = inside
        self.peer = peer

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def call_each(rank: int, fn: Callable[..., Any], rows: Sequence[tuple[Any, ...]], kwargs: dict, note: Path) -> list:
    """Call ``fn(*row, **kwargs)`` for each row; write to ``note`` which one is being called, for the caller to read.

    Raises:
        Failure: at the first call that does not end well.
    """
    _bound_memory()
    results = []
    with _failures_of(fn) as called, open(note, "w", encoding="ascii") as noted:
        for i, row in enumerate(rows):
            noted.seek(0)
            noted.write(f"{i:09}")
            noted.flush()
            args, named = copy.deepcopy((row, kwargs))
            with unchanged(**_by_name(fn, args, named)):
                value = called(*args, **named)
            results.append(_sendable(value))
    return results


def run_harness(rank: int, harness: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call ``harness(rank, fn, *args)`` on a rank. Raises Failure where ``fn`` stops, Mistake where harness does."""
    _bound_memory()
    with _failures_of(fn) as called:
        value = harness(rank, called, *args)
        try:
            return _sendable(value)
        except Failure as e:
            if not e.error:
                raise
            # What it is in is the harness's.
            raise Failure(e.kind, e.error, error=e.error) from e


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
            raise Failure("unsendable", type(value).__name__, error=type(value).__name__)
        return value


@contextlib.contextmanager
def _failures_of(fn: Callable[..., Any]) -> Iterator[_Called]:
    called = _Called(fn)
    try:
        yield called
    except (Failure, Mistake):
        raise
    except SystemExit as e:
        raise Failure("exited", "", _where(e, fn)) from e
    except BaseException as e:
        where = _where(e, fn)
        # torch raises NotImplementedError, too, where a dtype lacks an operation, and leaves no frame of its own.
        pending = isinstance(e, NotImplementedError) and (not e.args or ": `raise " in where)
        peer = e.peer if isinstance(e, NoSuchRank) else None
        kind = "pending" if pending else "raised"
        raise Failure(kind, _in_a_line(e), where, type(e).__name__, called.inside, peer) from e


def _frames(error: BaseException) -> Iterator[TracebackType]:
    tb = error.__traceback__
    while tb is not None:
        yield tb
        tb = tb.tb_next


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
    """The innermost line in the answer's file, or in a cell."""
    file = getattr(getattr(innermost(fn), "__code__", None), "co_filename", None)
    own = [tb for tb in _frames(error) if _is_cell_or(file, tb)]
    if not own:
        return ""
    text = linecache.getline(own[-1].tb_frame.f_code.co_filename, own[-1].tb_lineno).strip()
    return f"line {own[-1].tb_lineno}" + (f": `{text}`" if text else "")


def _is_cell_or(file: str | None, tb: TracebackType) -> bool:
    found = tb.tb_frame.f_code.co_filename
    return found == file or has_name_of_cell(found)


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


def _sendable(value: Any) -> Any:
    """The value, if the caller can receive and print it: whatever that does happens here first, under the limits."""
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
        reprlib.repr(pickle.loads(data))
    except Exception as e:
        raise Failure("unsendable", type(value).__name__, error=_culprit(value)) from e
    if len(data) > _RESULT_BYTES:
        raise Failure("unsendable", f"{type(value).__name__} of {len(data):,} bytes")
    return value


def _culprit(value: Any) -> str:
    """The kind of what cannot be sent: of the value, or of the entry in it that is to blame."""
    import cloudpickle

    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        try:
            cloudpickle.dumps(entry)
        except Exception:
            return _culprit(entry)
    return type(value).__name__


def _by_name(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of their parameters; by number, where these are not known."""
    try:
        return dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument {i}": arg for i, arg in enumerate(args)} | kwargs


@contextlib.contextmanager
def unchanged(**arguments: Any) -> Iterator[None]:
    """Refuse an answer that changes what it was given, by name: lists, tensors, whatever can be copied.

    Raises:
        Failure: with the first argument that is not what it was before the block.
    """
    before = copy.deepcopy(arguments)
    yield
    for name, value in arguments.items():
        if not _same(before[name], value):
            raise Failure("changed", _change(name, before[name], value))


def _change(name: str, before: Any, after: Any) -> str:
    """What has changed, told by its innermost place; tensors are not printed."""
    if type(before) is type(after):
        if isinstance(before, list | tuple) and len(before) == len(after):
            i = next(i for i, pair in enumerate(zip(before, after, strict=True)) if not _same(*pair))
            if isinstance(before[i], list | tuple | dict) or _tensor_comparison(before[i]) is not None:
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
