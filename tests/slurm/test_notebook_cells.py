"""Every notebook with its solutions, on a login node: its checks say correct, and its ranks start through srun.

As shipped the notebooks run in the kernel's own machine (``make test``): each runs once with and once without Slurm.
"""

import ast
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.notebooks.solved import fill_in_solutions
from tests.notebooks.test_notebooks import NOTEBOOKS

REPOSITORY = Path(__file__).parents[2]
CELL_LIMIT_S = 240
# Whatever would start ranks in the kernel's own machine ends the notebook; graders say that they want theirs there.
NOTHING_LOCAL = """
from course_pp.launch import ranks

chosen = ranks._place

def through_slurm(ask, where):
    place = chosen(ask, where)
    if place.local and where != "local":
        raise RuntimeError("ranks were started outside Slurm")
    return place

ranks._place = through_slurm
"""
_SAID = re.compile(r"Ranks run in (a Slurm job of their own|Slurm job \d+, kept since the last call)")


def launching_cells(cells: list[nbformat.NotebookNode]) -> list[int]:
    """Those that call ``on_ranks``, ``run_torchrun`` or a function of the notebook that does, or ``%torchrun``."""
    launchers, found = {"on_ranks", "run_torchrun"}, []
    for i, cell in enumerate(cells):
        whole_lines = cell.source.replace("\\\n", "")
        statements = ast.parse(re.sub(r"^%(?:time )?(torchrun.*|load_ext.*)?", "", whole_lines, flags=re.M)).body
        defined = [node for node in statements if isinstance(node, ast.FunctionDef)]
        launchers |= {node.name for node in defined if launchers & called(node)}
        at_once = set().union(*(called(node) for node in statements if node not in defined))
        if "%torchrun" in cell.source or launchers & at_once:
            found.append(i)
    return found


def called(tree: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def our_jobs() -> set[str]:
    """Numbers of the jobs of `on_ranks` and ``%torchrun``; Slurm remembers those of the last hour."""
    shown = subprocess.run(["scontrol", "show", "jobs", "-o"], check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"^JobId=(\d+) JobName=course_pp-", shown, re.M))


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_solved_on_slurm(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "source_code").symlink_to(REPOSITORY / "source_code")
    (tmp_path / "site.toml").write_text(f'partition = "gpu"\nfolder = "{tmp_path / "shared"}"\n')
    monkeypatch.setenv("COURSE_PP_SITE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "progress.json"))
    notebook = nbformat.read(path, as_version=4)
    checks = fill_in_solutions(notebook, path.name[:2])
    notebook.cells.insert(0, nbformat.v4.new_code_cell(NOTHING_LOCAL))
    before = our_jobs()
    folder = {"metadata": {"path": str(tmp_path / "notebooks")}}
    patience = {"timeout": CELL_LIMIT_S, "iopub_timeout": 60, "raise_on_iopub_timeout": True}
    NotebookClient(notebook, resources=folder, **patience).execute()
    assert checks.not_correct() == {}

    cells = [cell for cell in notebook.cells[1:] if cell.cell_type == "code"]
    said = [_SAID.findall(printed(cell)) for cell in cells]
    through_slurm = {i for i, lines in enumerate(said) if lines}
    # Others call functions of the package that start ranks; had one started them here, the notebook would have ended.
    assert set(launching_cells(cells)) <= through_slurm
    announced = sum(line.startswith("a Slurm job") for lines in said for line in lines)
    ours = our_jobs() - before
    assert announced == len(ours) > 0, f"each job that is announced is one, and there is no other: {said}, {ours}"
