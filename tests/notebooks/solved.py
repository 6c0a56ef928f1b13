"""A notebook with the solutions in place of the stubs, and what its checks then say."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass

import nbformat

from course_pp.exercises import Exercise
from course_pp.exercises.registry import exercises_of

_CORRECT = "✓ correct"


@dataclass(frozen=True)
class Checks:
    """The cells in which a notebook's exercises are checked, by the exercise's name."""

    cells: Mapping[str, nbformat.NotebookNode]

    def not_correct(self) -> dict[str, str]:
        """What the checks of a run notebook show, where that is not *correct*."""
        verdicts = {name: _shown(cell) for name, cell in self.cells.items()}
        return {name: verdict for name, verdict in verdicts.items() if not verdict.startswith(_CORRECT)}


def fill_in_solutions(notebook: nbformat.NotebookNode, number: str) -> Checks:
    """Solve every exercise of the notebook with this number, each in the one cell that asks for it."""
    cells = {}
    for exercise in exercises_of(number):
        [cells[exercise.name]] = [
            cell for cell in notebook.cells if cell.cell_type == "code" and _fill_in(cell, exercise)
        ]
    return Checks(cells)


def _fill_in(cell: nbformat.NotebookNode, exercise: Exercise) -> bool:
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


def _shown(cell: nbformat.NotebookNode) -> str:
    return "\n".join(output.data.get("text/plain", "") for output in cell.outputs if "data" in output)
