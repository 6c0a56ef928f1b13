"""``python -m course_pp lab``: make or update the working copy of the notebooks, and open it in JupyterLab."""

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import course_pp
from course_pp.notebook.working_copy import WorkingCopyError, update

HELP = "open your own copy of the notebooks in JupyterLab"

_FIRST = "00_ranks_and_messages.ipynb"
_FOLDER = "my_course"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help=f"where the copy is (default: {_FOLDER}/ beside notebooks/)")
    parser.add_argument("--copy-only", action="store_true", help="make or update the copy, and open nothing")
    parser.add_argument("jupyter", nargs="*", metavar="ARGUMENT", help="after --: for jupyter lab")


def run(arguments: argparse.Namespace) -> None:
    """Make the copy and become JupyterLab.

    Raises:
        WorkingCopyError: the copy cannot be made, or JupyterLab or ipywidgets are not installed here.
    """
    home = Path(course_pp.__file__).resolve().parents[1]
    folder = (arguments.folder or home / _FOLDER).resolve()
    copied = update(home / "notebooks", folder)
    if str(copied):
        print(copied, flush=True)
    if arguments.copy_only:
        return
    for package in ("jupyterlab", "ipywidgets"):
        if importlib.util.find_spec(package) is None:
            raise WorkingCopyError(f"{package} is not installed for {sys.executable}: set up again with make clean lab")
    # A kernel of this interpreter is found before those of other installations.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    root = home if folder.is_relative_to(home) else folder
    first = (folder / _FIRST).relative_to(root).as_posix()
    options = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{first}"]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *options, *arguments.jupyter])
