import gc
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

from course_pp.base.imports import imports_that_stay


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()


def test_what_a_block_makes_is_passed_over_and_the_rest_is_collected_as_before() -> None:
    frozen = gc.get_freeze_count()
    with imports_that_stay():
        assert not gc.isenabled()
        made = [[i] for i in range(1000)]
    assert gc.get_freeze_count() >= frozen + len(made)
    assert gc.isenabled()


def test_a_block_that_raises_ends_all_the_same() -> None:
    with pytest.raises(ImportError), imports_that_stay():
        raise ImportError
    assert gc.isenabled()


def test_who_does_without_a_collector_gets_none() -> None:
    gc.disable()
    with imports_that_stay():
        pass
    assert not gc.isenabled()


def test_in_a_notebook_the_cell_that_loads_the_extension_is_such_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # no ranks are wanted
    monkeypatch.setattr("course_pp.launch.where.certainly_here", lambda: False)
    shell = InteractiveShell()
    seen = shell.user_ns["seen"] = []
    look = "import gc; seen.append((gc.isenabled(), gc.get_freeze_count()))"
    for cell in (
        look,
        f"%load_ext course_pp.launch\n{look}\nmade = [[i] for i in range(1000)]\n1 / 0",
        look,
    ):
        shell.run_cell(cell)
    (before, frozen), (meanwhile, _), (after, more) = seen
    assert (before, meanwhile, after) == (True, False, True)
    assert more >= frozen + 1000


def test_loaded_outside_a_cell_it_ends_before_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("course_pp.launch.where.certainly_here", lambda: False)
    shell = InteractiveShell()
    shell.extension_manager.load_extension("course_pp.launch")
    assert not gc.isenabled()
    for _ in range(2):
        shell.run_cell("import gc; on = gc.isenabled()")
        assert shell.user_ns["on"]
