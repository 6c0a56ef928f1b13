"""Each notebook runs with the solutions in place of the stubs, and every check then says correct."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from course_pp.exercises import Exercise
from course_pp.exercises.registry import exercises_of
from tests.notebooks.test_notebooks import NOTEBOOKS

CELL_LIMIT_S = 120


def fill_in(cell: nbformat.NotebookNode, exercise: Exercise) -> bool:
    """Replaces the stub by the solution's source, if it is in this cell."""
    if f"def {exercise.name}(" not in cell.source or f"check({exercise.name})" not in cell.source:
        return False
    [stub] = [
        node for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef) and node.name == exercise.name
    ]
    lines = cell.source.splitlines()
    lines[stub.lineno - 1 : stub.end_lineno] = exercise.source.splitlines()
    cell.source = "\n".join(lines)
    return True


def shown(cell: nbformat.NotebookNode) -> str:
    return "\n".join(output.data.get("text/plain", "") for output in cell.outputs if "data" in output)


@pytest.mark.solutions
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS[::-1], ids=lambda path: path.stem)
def test_every_check_says_correct_with_the_solutions(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "progress.json"))
    notebook = nbformat.read(path, as_version=4)
    cells = {}
    for exercise in exercises_of(path.name[:2]):
        [cells[exercise.name]] = [
            cell for cell in notebook.cells if cell.cell_type == "code" and fill_in(cell, exercise)
        ]
    client = NotebookClient(notebook, timeout=CELL_LIMIT_S, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    verdicts = {name: shown(cell) for name, cell in cells.items()}
    assert {name: text for name, text in verdicts.items() if not text.startswith("✓ correct")} == {}
