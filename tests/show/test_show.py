import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from course_pp import show
from course_pp.runtime import EmulatedCluster
from course_pp.schedule import Costs, Timeline, build, fit
from tests.grids import folded
from tests.show.reading import title


@folded("name", show.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(show, name).__module__.startswith("course_pp.show.")
    assert name in dir(show)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gantt'"):
        show.gantt  # noqa: B018


@pytest.mark.slow
def test_neither_torch_nor_matplotlib_is_imported_before_a_figure_is_asked_for() -> None:
    code = (
        "import sys; from course_pp import show; assert 'matplotlib' not in sys.modules; "
        "show.timeline; assert 'matplotlib' in sys.modules; assert 'torch' not in sys.modules; "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "shown",
    [
        lambda tl: show.timeline(tl).alt_text,
        lambda tl: title(show.compare(tl, tl)),
        lambda tl: show.speed_up("1f1b", (1, 2), 4, measured=[tl]).alt_text,
        lambda tl: str(fit(tl)),
    ],
    ids=["timeline", "compare", "speed_up", "fit"],
)
def test_what_ranks_ran_is_called_measured_and_what_was_simulated_is_not(
    shown: Callable[[Timeline], str],
) -> None:
    # in seconds, as what a recorder measures
    simulated = EmulatedCluster(Costs()).predict(build("1f1b", 2, 4))
    assert "measured" not in shown(simulated).lower()
    assert "measured" in shown(replace(simulated, measured=True)).lower()


@pytest.mark.parametrize(
    "script", ["course_pp/show/board.js", "course_pp/show/player.js", "docs/live.js"]
)
def test_no_script_in_the_browser_says_on_its_own_what_was_measured(script: str) -> None:
    assert (
        "measured" not in (Path(__file__).parents[2] / script).read_text(encoding="utf-8").lower()
    )
