"""Set-up of all tests: ranks start on this machine, and tests that start ranks are marked."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import cache, partial
from inspect import unwrap
from itertools import groupby
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

import tests.kernels  # noqa: F401, for every kernel that a test starts
from course_pp.base.imports import imports_that_stay
from course_pp.exercises import check, checking
from course_pp.launch import fork_server, on_ranks, run_torchrun
from tests import grids
from tests.chromium import page as page  # one for all folders: a process drives one browser

# Ranks start on this machine even if it belongs to a cluster; tests/slurm changes that.
os.environ["COURSE_PP_WHERE"] = "local"
# Workers of pytest-xdist get the width of a terminal that is not theirs.
os.environ.pop("COLUMNS", None)
# A shell that starts the tests in the background lets them ignore this signal. Tests interrupt
# themselves and processes that they start, so the signal must work.
signal.signal(signal.SIGINT, signal.default_int_handler)

STARTERS = (on_ranks, run_torchrun, check, checking.judge, subprocess.Popen)
STARTING_FIXTURES = {"kernel", "lab", "page", "cluster"}
STARTING_FILES: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    grids.IN_FULL = "not long" not in config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with imports_that_stay():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start ranks, and the cases that a sample leaves out."""
    for _, cases in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        mark_all_but_a_sample([item for item in cases if not item.get_closest_marker("full")])
    for item in items:
        if isinstance(item, pytest.Function) and starts_ranks(item):
            item.add_marker("ranks")
            if "cluster" not in item.fixturenames:  # else they start on its nodes
                STARTING_FILES.add(item.nodeid.partition("::")[0])
    # Tests that start ranks mostly wait. They go first, or one would hold up the end of the run.
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


def mark_all_but_a_sample(cases: list[pytest.Item]) -> None:
    """Mark cases under ``@pytest.mark.sample(n)`` as ``long``, but for every n-th one."""
    for number, item in enumerate(cases):
        sample = item.get_closest_marker("sample")
        if sample is not None and number % sample.args[0]:
            item.add_marker("long")


def starts_ranks(item: pytest.Item) -> bool:
    """Return whether the test, or a fixture or function that it reaches, mentions a starter."""
    if not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs
    if STARTING_FIXTURES & fixtures.keys():
        return True
    own = (definition.func for definitions in fixtures.values() for definition in definitions)
    return reaches_starter(item.function) or any(map(reaches_starter, own))


@cache
def reaches_starter(function: Callable[..., Any]) -> bool:
    todo = {function}
    seen: set[Any] = set()
    while todo:
        seen.add(function := todo.pop())
        mentioned = mentioned_by(function)
        if any(starter in mentioned for starter in STARTERS):
            return True
        todo |= {
            f
            for f in mentioned
            if str(getattr(f, "__module__", "")).startswith(("tests.", "course_pp."))
        } - seen
    return False


@cache
def mentioned_by(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions and classes, its module's own and others, that a function names."""
    function = unwrap(function)
    if not isinstance(function, FunctionType):
        return []
    names = set(names_in(function.__code__))
    found = [function.__globals__.get(name) for name in names]
    found += [getattr(m, name, None) for m in found if isinstance(m, ModuleType) for name in names]
    found = [value.func if isinstance(value, partial) else value for value in found]
    return [value for value in found if callable(value) and getattr(value, "__hash__", None)]


def names_in(code: CodeType) -> Iterator[str]:
    """Return the names that code uses, in inner functions too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@pytest.fixture(scope="module", autouse=True)
def _ranks_inherit_imports(request: pytest.FixtureRequest) -> None:
    """Import a file's modules, and its ``RANKS_IMPORT``, before its tests start ranks.

    The ranks inherit the imports. Otherwise each of thousands of ranks would import them anew.
    """
    if request.node.nodeid in STARTING_FILES and "not ranks" not in request.config.option.markexpr:
        fork_server.SERVERS.get().preload(
            (request.module.__name__, *getattr(request.module, "RANKS_IMPORT", ()))
        )


@pytest.fixture(autouse=True)
def _starts_no_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail an unmarked test that starts ranks, where marked ones are left out."""
    if "not ranks" in request.config.option.markexpr and not request.node.get_closest_marker(
        "ranks"
    ):
        monkeypatch.setattr(fork_server.ForkServer, "__init__", _refuse)


def _refuse(*_: object) -> None:
    pytest.fail("this test starts ranks unnoticed: mark it @pytest.mark.ranks", pytrace=False)
