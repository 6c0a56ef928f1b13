"""Grids of cases, of which the default run holds a sample."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from itertools import product
from math import prod
from typing import Any

import pytest
from hypothesis import settings

IN_FULL = True

# A prime, so that a sample of a grid holds every value of its axes.
thinned = pytest.mark.parametrize(
    "every", [pytest.param(7, id="a seventh"), pytest.param(1, id="all", marks=pytest.mark.long)]
)
"""For a test of many cases in one process: it takes ``cases[::every]``."""


def examples(n: int) -> settings:
    """Return Hypothesis' settings: ``n`` examples, and in the default run a third of them.

    ``IN_FULL``, which tests/conftest.py sets, tells which run this is.
    """
    return settings(deadline=None, max_examples=n if IN_FULL else n // 3)


def folded(
    names: str, cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize like ``pytest.mark.parametrize``, but run all cases as one test.

    It is for sizes, whose ids would say nothing. The first case that fails ends the test, and the
    error names the case.

    Args:
        names: names of the parameters, with commas between them.
        cases: a tuple for each case, or a value if there is one parameter.
    """
    keys = names.replace(" ", "").split(",")
    rows = [dict(zip(keys, case if len(keys) > 1 else (case,), strict=True)) for case in cases]

    def fold(function: Callable[..., None]) -> Callable[..., None]:
        taken = signature(function)

        @wraps(function)
        def every(*args: Any, **given: Any) -> None:
            for row in rows:
                try:
                    function(*args, **given, **row)
                except BaseException as error:  # a skip, too
                    error.add_note(
                        f"in the case {', '.join(f'{key}={value!r}' for key, value in row.items())}"
                    )
                    raise

        rest = [parameter for name, parameter in taken.parameters.items() if name not in keys]
        every.__signature__ = taken.replace(parameters=rest)  # type: ignore[attr-defined]  # what pytest asks for
        return every

    return fold


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Return every combination of the axes' values, for ``pytest.mark.parametrize``.

    All but a sample are marked ``full``. The sample holds every value of every axis, and as many
    pairs of values of the axes beside the longest as fit.

    Args:
        axes: the values of one parameter each. An axis of tuples, or of ``pytest.param``, has the
            values of several.
    """
    entries = [[each if hasattr(each, "marks") else _param(each) for each in axis] for axis in axes]
    sizes = [len(axis) for axis in entries]
    longest = sizes.index(max(sizes))
    n_sampled = max(sizes[longest], prod(sizes) // sizes[longest])
    sample = {_place(i, sizes, longest) for i in range(n_sampled)}
    found = []
    for place in product(*map(range, sizes)):
        chosen = [axis[i] for axis, i in zip(entries, place, strict=True)]
        named = "-".join(each.id or "-".join(map(str, each.values)) for each in chosen)
        found.append(
            pytest.param(
                *(value for each in chosen for value in each.values),
                id=named if any(each.id for each in chosen) else None,
                marks=[] if place in sample else pytest.mark.full,
            )
        )
    return found


def _param(value: Any) -> Any:
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)


def _place(i: int, sizes: Sequence[int], longest: int) -> tuple[int, ...]:
    """Return the place of a sampled case on each axis.

    It goes step by step along the longest axis, and along the others as digits of a number that
    counts up.
    """
    place, stride = [], 1
    for axis, size in enumerate(sizes):
        if axis == longest:
            place.append(i % size)
        else:
            place.append(i // stride % size)
            stride *= size
    return tuple(place)
