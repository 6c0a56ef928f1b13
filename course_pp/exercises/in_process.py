"""What happens to an answer in a process of its own: the calls, and how they ended in words."""

from __future__ import annotations

import contextlib
import copy
import inspect
import linecache
import os
import pickle
import reprlib
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from course_pp.exercises.exercise import Mistake
from course_pp.launch.watch import is_cell

_MEMORY_BYTES = 2 << 30
_RESULT_BYTES = 64 << 20
_SHOWN_CHARACTERS = 300


class Failure(Exception):
    """An answer stopped. ``on_ranks`` takes it to the caller.

    Attributes:
        kind: ``"raised"``, ``"exited"``, ``"pending"``, ``"changed"`` or ``"unsendable"``.
        what: the exception in a line, or what was changed or returned.
        where: ``"line 3: `return 1 / 0`"``, the innermost line of the answer; empty if it is not in there.
    """

    def __init__(self, kind: str, what: str, where: str = "") -> None:
        super().__init__(kind, what, where)
        self.kind = kind
        self.what = what
        self.where = where

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def call_each(rank: int, fn: Callable[..., Any], rows: Sequence[tuple[Any, ...]], kwargs: dict, note: Path) -> list:
    """Calls ``fn(*row, **kwargs)`` for each row; writes to ``note`` which one is being called, for the caller to read.

    Raises:
        Failure: at the first call that does not end well.
    """
    _bound_memory()
    results = []
    with _failures_of(fn), open(note, "w", encoding="ascii") as noted:
        for i, row in enumerate(rows):
            noted.seek(0)
            noted.write(f"{i:09}")
            noted.flush()
            args, named = copy.deepcopy((row, kwargs))
            value = fn(*args, **named)
            _refuse_changes(fn, (row, kwargs), (args, named))
            results.append(_sendable(value))
    return results


def run_harness(rank: int, harness: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Calls ``harness(rank, fn, *args)`` on a rank. Raises Failure where ``fn`` stops, Mistake where harness does."""
    _bound_memory()
    with _failures_of(fn):
        return _sendable(harness(rank, fn, *args))


def _bound_memory() -> None:
    """Lets this process take 2 GiB more and no further, so that an answer gets a MemoryError and the system lives."""
    with contextlib.suppress(OSError, ValueError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, hard))


@contextlib.contextmanager
def _failures_of(fn: Callable[..., Any]) -> Iterator[None]:
    try:
        yield
    except (Failure, Mistake):
        raise
    except SystemExit as e:
        raise Failure("exited", "", _where(e, fn)) from e
    except BaseException as e:
        where = _where(e, fn)
        # torch raises NotImplementedError, too: for an operation that a dtype has not.
        pending = isinstance(e, NotImplementedError) and (not e.args or "NotImplementedError" in where)
        raise Failure("pending" if pending else "raised", _in_a_line(e), where) from e


def _in_a_line(error: BaseException) -> str:
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:
        lines = ["(its message cannot be shown)"]
    text = lines[-1] if len(lines) > 3 else " ".join(lines)
    if len(text) > _SHOWN_CHARACTERS:
        text = text[:_SHOWN_CHARACTERS] + " …"
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _where(error: BaseException, fn: Callable[..., Any]) -> str:
    own = getattr(getattr(inspect.unwrap(fn), "__code__", None), "co_filename", None)
    tb, found = error.__traceback__, None
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if file == own or is_cell(file):
            found = file, tb.tb_lineno
        tb = tb.tb_next
    if found is None:
        return ""
    text = linecache.getline(*found).strip()
    return f"line {found[1]}" + (f": `{text}`" if text else "")


def _sendable(value: Any) -> Any:
    """The value, if the caller can receive and print it: whatever that does happens here first, under the limits."""
    import cloudpickle

    if inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited
    try:
        data = cloudpickle.dumps(value)
        reprlib.repr(pickle.loads(data))
    except Exception as e:
        raise Failure("unsendable", type(value).__name__) from e
    if len(data) > _RESULT_BYTES:
        raise Failure("unsendable", f"{type(value).__name__} of {len(data):,} bytes")
    return value


def _refuse_changes(fn: Callable[..., Any], before: tuple[tuple, dict], after: tuple[tuple, dict]) -> None:
    if _same(before, after):
        return
    parameters = inspect.signature(fn)
    names = dict(parameters.bind(*before[0], **before[1]).arguments)
    now = parameters.bind(*after[0], **after[1]).arguments
    for name, value in names.items():
        if not _same(value, now[name]):
            raise Failure("changed", f"`{name}` from {reprlib.repr(value)} to {reprlib.repr(now[name])}")


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
