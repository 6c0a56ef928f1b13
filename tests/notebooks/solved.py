"""Runs each exercise twice, as shipped and then solved: nbmake with ``-p tests.notebooks.solved``.

The cell with the solution runs behind the one with the stub, in the same kernel, and its check must
say correct. No other cell uses what is asked for
(`rules.uses_an_answer_only_where_it_is_asked_for`), so this shows what a second run of the whole
notebook would.
"""

import ast
import os
import tempfile
from types import SimpleNamespace

import nbformat
import pytest
from nbmake import nb_run

import tests.kernels  # noqa: F401, for the kernels that nbmake starts
from course_pp.exercises import Exercise
from course_pp.exercises.exercise import exercises_of
from tests.notebooks.rules import checked


def add_solutions(notebook: nbformat.NotebookNode, number: str) -> nbformat.NotebookNode:
    """Put a cell behind every exercise of a notebook that raises unless the solution is correct."""
    for exercise in exercises_of(number):
        [i] = [i for i, cell in enumerate(notebook.cells) if exercise.name in checked(cell)]
        notebook.cells.insert(
            i + 1, nbformat.v4.new_code_cell(_solved(notebook.cells[i], exercise))
        )
    return notebook


def _solved(cell: nbformat.NotebookNode, exercise: Exercise) -> str:
    """The source of the cell with the solution in place of the stub."""
    [stub] = [
        node
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.FunctionDef) and node.name == exercise.name
    ]
    ending = f"check({exercise.name})"
    lines = cell.source.removesuffix(ending).splitlines()
    lines[stub.lineno - 1 : stub.end_lineno] = exercise.source.splitlines()
    return "\n".join(
        [
            *lines,
            f"verdict = {ending}",
            'assert verdict.status == "correct", verdict.text',
            "verdict",
        ]
    )


def _read(path: str, as_version: int) -> nbformat.NotebookNode:
    return add_solutions(nbformat.read(path, as_version), os.path.basename(path)[:2])


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    os.environ["COURSE_PP_PROGRESS"] = os.path.join(folder.name, "progress.json")
    assert nb_run.nbformat.read is nbformat.read, (
        "nbmake reads notebooks in another way: solutions would not run"
    )
    nb_run.nbformat = SimpleNamespace(read=_read)  # type: ignore[attr-defined]
