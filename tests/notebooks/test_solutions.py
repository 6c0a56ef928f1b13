"""Each notebook runs with the solutions in place of the stubs, and every check then says correct."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebooks.solved import fill_in_solutions
from tests.notebooks.test_notebooks import NOTEBOOKS

CELL_LIMIT_S = 120


@pytest.mark.solutions
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS[::-1], ids=lambda path: path.stem)
def test_every_check_says_correct_with_the_solutions(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "progress.json"))
    notebook = nbformat.read(path, as_version=4)
    checks = fill_in_solutions(notebook, path.name[:2])
    client = NotebookClient(notebook, timeout=CELL_LIMIT_S, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    assert checks.not_correct() == {}
