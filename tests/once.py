"""``functools.cache`` for grids of tests: one that fails, fails once."""

from collections.abc import Callable, Hashable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")


def once(function: Callable[P, T]) -> Callable[P, T]:
    """Call ``function`` once for each set of arguments; what it returned, or raised, is the answer to later calls.

    ``functools.cache`` forgets exceptions: where two hundred tests look at one grid, a failure would run it as often.
    Nor does it know that an argument may be given, by name too, or left to its default.
    """
    taken = signature(function)
    returned: dict[Hashable, T] = {}
    raised: dict[Hashable, BaseException] = {}

    @wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> T:
        given = taken.bind(*args, **kwargs)
        given.apply_defaults()
        key = tuple(given.arguments.items())
        if key in raised:
            raise raised[key]
        if key not in returned:
            try:
                returned[key] = function(*args, **kwargs)
            except (Exception, pytest.fail.Exception) as error:  # the latter of a time limit
                raised[key] = error
                raise
        return returned[key]

    return remembered
