"""Every notebook runs from top to bottom in a real JupyterLab, without an error in any output."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course_pp.notebook.command import copy_scripts, update
from tests.browser.conftest import Lab
from tests.browser.notebook import SOON, errors, open_notebook, run_all

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FOLDER = "my_course"
MINUTES = 6

pytestmark = [pytest.mark.full, pytest.mark.timeout(60 * MINUTES + 120)]


@pytest.fixture(scope="module")
def course(lab: Lab) -> Path:
    """The working copy that ``make lab`` would make, where JupyterLab serves it."""
    folder = lab.folder / FOLDER
    update(ROOT / "notebooks", folder)
    copy_scripts(ROOT / "source_code", folder / "source_code")
    return folder


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_learner_runs_it_from_top_to_bottom(
    page: Any, lab: Lab, course: Path, path: Path
) -> None:
    page.thrown.clear()
    open_notebook(page, lab, f"{FOLDER}/{path.name}")
    run_all(page)
    try:
        wait_until_idle(lab)
        shown = scroll_through(page)
        page.keyboard.press("Control+s")
        notebook = saved(course / path.name)
    finally:
        end_kernels(lab)
    assert page.thrown == []
    assert [
        text for text in shown if "rror displaying widget" in text or "rror creating widget" in text
    ] == []
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.source for cell in cells if not cell.execution_count] == []
    outputs = [output for cell in cells for output in cell.outputs]
    assert [
        output
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ] == []
    committed = nbformat.read(path, as_version=4)
    assert kinds(notebook) == kinds(committed)
    assert errors(page) == []


def wait_until_idle(lab: Lab) -> None:
    """Wait for a kernel that stays idle: between two cells it is idle for a moment, too."""
    deadline, quiet = time.monotonic() + 60 * MINUTES, 0
    while quiet < 6:
        assert time.monotonic() < deadline, f"the notebook still runs after {MINUTES} minutes"
        time.sleep(0.5)
        [kernel] = asked(lab, "api/kernels")
        quiet = quiet + 1 if kernel["execution_state"] == "idle" else 0


def end_kernels(lab: Lab) -> None:
    for session in asked(lab, "api/sessions"):
        urllib.request.urlopen(
            urllib.request.Request(lab.address(f"api/sessions/{session['id']}"), method="DELETE"),
            timeout=30,
        )


def asked(lab: Lab, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        urllib.request.urlopen(lab.address(path), timeout=30).read()
    )
    return found


def scroll_through(page: Any) -> list[str]:
    """What the page shows, screen by screen: JupyterLab draws only what is near the window."""
    texts = []
    box = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer")
    box.evaluate("each => each.scrollTo(0, 0)")
    for _ in range(100):
        page.wait_for_timeout(150)
        texts.append(box.inner_text())
        if box.evaluate(
            "each => { const at = each.scrollTop; each.scrollBy(0, 700); return each.scrollTop ==="
            " at; }"
        ):
            break
    return texts


def saved(path: Path) -> nbformat.NotebookNode:
    """The notebook when its outputs are on the disk."""
    deadline = time.monotonic() + SOON / 1000
    while True:
        notebook = nbformat.read(path, as_version=4)
        if any(cell.get("outputs") for cell in notebook.cells) or time.monotonic() > deadline:
            return notebook
        time.sleep(0.2)


def kinds(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """What each code cell shows: figures, widgets, tables. Printed text may stand or not."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    return [{kind for output in cell.outputs for kind in output.get("data", {})} for cell in cells]
