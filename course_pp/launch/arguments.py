"""What ``on_ranks`` refuses before it starts anything."""

from __future__ import annotations

import inspect
import os
import reprlib
from collections.abc import Callable
from typing import Any

from course_pp.arguments import shown
from course_pp.launch import rank as in_rank
from course_pp.launch.limits import refuse_bad_limit
from course_pp.launch.where import CHOICES

_MOST = 4096  # ranks of one machine, and threads of one rank: more would end in a sentence from elsewhere
_BACKENDS = ("gloo", "nccl", None)


def refuse_bad_arguments(
    n: int, fn: object, args: tuple[Any, ...], timeout_s: float, backend: object, threads: int, where: object
) -> None:
    """Raise RuntimeError inside a rank, and TypeError or ValueError for an argument that cannot work."""
    __tracebackhide__ = True
    if in_rank.inside():
        raise RuntimeError(
            f"on_ranks was called on rank {os.environ['RANK']}, inside a rank of on_ranks. "
            "Call it once, outside, with as many ranks as you need."
        )
    if callable(n) and isinstance(fn, int):
        raise TypeError(f"the number of ranks comes first: on_ranks({fn}, {_name(n)}), not on_ranks({_name(n)}, {fn}).")
    for name, value in (("n", n), ("threads", threads)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is {shown(value)}; it must be a whole number, for example {name}=2.")
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
        if value > _MOST:
            raise ValueError(f"{name} is {shown(value)}; it must be at most {_MOST:,}.")
    if not callable(fn):
        raise TypeError(
            f"fn is {shown(fn)}, which cannot be called. Pass the function itself: on_ranks({n}, fn), not fn(0)."
        )
    refuse_bad_limit(timeout_s)
    for name, choice, known in (("backend", backend, _BACKENDS), ("where", where, CHOICES)):
        if not isinstance(choice, str | None) or choice not in known:
            spelled = " or ".join(map(repr, known))
            raise ValueError(f"{name} is {shown(choice)}; it must be {spelled}.")
    _refuse_bad_call(fn, args)


def _refuse_bad_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    __tracebackhide__ = True
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(0, *args)
    except TypeError as e:
        given = ", ".join(["rank", *(_name(arg) for arg in args)])
        raise TypeError(
            f"on_ranks calls fn(rank, *args), here {_name(fn)}({given}), but {_name(fn)}{signature} has {e}. "
            f"Its first parameter is the rank; pass the others after it: on_ranks(n, {_name(fn)}, …)."
        ) from None


def _name(value: object) -> str:
    if name := getattr(value, "__name__", None):
        return str(name)
    # A repr of one's own may take for ever, or fail.
    return reprlib.repr(value) if type(value).__module__ == "builtins" else f"a {type(value).__name__}"
