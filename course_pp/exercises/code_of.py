"""The code behind an answer, whatever it is wrapped in: a decorator, a cache, a partial, an object that is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

_MOST_LAYERS = 100


def innermost(fn: Any) -> Any:
    """Return ``fn`` without partials, bindings, and decorators that say what they wrap."""
    # An object may claim to wrap itself.
    for _ in range(_MOST_LAYERS):
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


def codes_of(fn: Callable[..., Any]) -> Iterator[CodeType]:
    """Return its code, and that of the functions it uses from its closure, module or notebook."""
    seen: set[int] = set()
    waiting = [innermost(fn)]
    while waiting:
        if id(found := waiting.pop()) in seen or not isinstance(found, FunctionType):
            continue
        seen.add(id(found))
        yield found.__code__
        cells = [cell.cell_contents for cell in found.__closure__ or () if _is_filled(cell)]
        beside = [found.__globals__.get(name) for name in names_in(found.__code__)]
        helpers = map(innermost, filter(callable, [*cells, *beside]))
        waiting += [each for each in helpers if getattr(each, "__globals__", None) is found.__globals__]


def files_of(fn: Callable[..., Any]) -> set[str]:
    """The files, or cells, in which its code stands."""
    return {code.co_filename for code in codes_of(fn)}


def names_in(code: CodeType) -> set[str]:
    """Functions, attributes and global variables that a code mentions, inner functions included."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
