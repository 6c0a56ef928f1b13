"""What notebooks launch goes through srun, on a login node: every launching cell, with the cells
that it needs.

Whole, the notebooks run in the kernel's own machine (``make test-notebooks``), and some of them
here.
"""

import ast
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebooks.rules import code_cells, parsed
from tests.notebooks.solved import add_solutions
from tests.notebooks.test_notebooks import NOTEBOOKS

pytestmark = pytest.mark.timeout(600)

REPOSITORY = Path(__file__).parents[2]
CELL_LIMIT_S = 240
# Whatever would start ranks in the kernel's own machine ends the notebook; graders say that they
# want theirs there.
NOTHING_LOCAL = """
from course_pp.launch import ranks

chosen = ranks.decide

def through_slurm(ask, where, kept):
    place = chosen(ask, where, kept=kept)
    if place.local and where != "local":
        raise RuntimeError("ranks were started outside Slurm")
    return place

ranks.decide = through_slurm
"""
_SAID = re.compile(
    r"Ranks run in (a Slurm job of their own|Slurm job \d+, kept since the last call)"
)
# Exercises, messages and hangs; emulated timelines, and what one step measures.
WHOLE = ("00", "03")


def launching_cells(cells: list[nbformat.NotebookNode]) -> list[int]:
    """Return the cells that start ranks: ``%torchrun``, or a call that leads to a starter."""
    launchers, found = {"on_ranks", "run_torchrun"}, []
    for i, cell in enumerate(cells):
        statements = parsed(cell).body
        defined = [node for node in statements if isinstance(node, ast.FunctionDef)]
        launchers |= {node.name for node in defined if launchers & called(node)}
        at_once = set().union(*(called(node) for node in statements if node not in defined))
        if "%torchrun" in cell.source or launchers & at_once:
            found.append(i)
    return found


def called(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def with_what_they_need(wanted: list[int], cells: list[nbformat.NotebookNode]) -> list[int]:
    """Return the wanted cells, the first one, and those that bind a name which one of them uses."""
    kept = {0, *wanted}
    needed = set()
    # From the last cell back, so that a cell's own needs are known when it is looked at.
    for i in reversed(range(len(cells))):
        if i in kept or names_bound(cells[i]) & needed:
            kept.add(i)
            needed |= names_used(cells[i])
    return sorted(kept)


def names_bound(cell: nbformat.NotebookNode) -> set[str]:
    found = set()
    for node in ast.walk(parsed(cell)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
    return found


def names_used(cell: nbformat.NotebookNode) -> set[str]:
    """Those in the braces of a ``%torchrun`` line, too."""
    nodes = ast.walk(parsed(cell))
    loaded = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return loaded | set(re.findall(r"\{(\w+)", cell.source))


def our_jobs() -> set[str]:
    """Return the numbers of jobs of `on_ranks` and ``%torchrun`` in the last hour."""
    shown = subprocess.run(
        ["scontrol", "show", "jobs", "-o"], check=True, capture_output=True, text=True
    ).stdout
    return set(re.findall(r"^JobId=(\d+) JobName=course_pp ", shown, re.M))


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(
        output.get("text", "") for output in cell.outputs if output.output_type == "stream"
    )


def run_on_a_login_node(
    cells: list[nbformat.NotebookNode], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[list[str]]:
    """Run the cells in one kernel; returns what each said about where its ranks run."""
    (folder / "notebooks").mkdir()
    (folder / "source_code").symlink_to(REPOSITORY / "source_code")
    (folder / "site.toml").write_text(f'partition = "gpu"\nfolder = "{folder / "shared"}"\n')
    monkeypatch.setenv("COURSE_PP_SITE", str(folder / "site.toml"))
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(folder / "progress.json"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTHING_LOCAL), *cells])
    where = {"metadata": {"path": str(folder / "notebooks")}}
    patience = {"timeout": CELL_LIMIT_S, "iopub_timeout": 60, "raise_on_iopub_timeout": True}
    before = our_jobs()
    NotebookClient(notebook, resources=where, **patience).execute()
    said = [_SAID.findall(printed(cell)) for cell in notebook.cells[1:]]
    announced = sum(line.startswith("a Slurm job") for lines in said for line in lines)
    ours = our_jobs() - before
    assert announced == len(ours) > 0, (
        f"each job that is announced is one, and there is no other: {said}, {ours}"
    )
    return said


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.name[:2] not in WHOLE], ids=lambda path: path.stem
)
def test_every_launching_cell_starts_its_ranks_through_srun(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = code_cells(nbformat.read(path, as_version=4))
    launching = launching_cells(cells)
    kept = with_what_they_need(launching, cells)
    said = run_on_a_login_node([cells[i] for i in kept], tmp_path, monkeypatch)
    assert set(launching) <= {i for i, lines in zip(kept, said, strict=True) if lines}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=() if path.name[:2] in WHOLE else pytest.mark.full)
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_whole_notebook_with_its_solutions(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = code_cells(add_solutions(nbformat.read(path, as_version=4), path.name[:2]))
    said = run_on_a_login_node(cells, tmp_path, monkeypatch)
    # Others call functions of the package that start ranks; had one started them here, the notebook
    # would have ended.
    assert set(launching_cells(cells)) <= {i for i, lines in enumerate(said) if lines}
