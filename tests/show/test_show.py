import subprocess
import sys

import pytest

from course_pp import show
from tests.grids import folded


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
