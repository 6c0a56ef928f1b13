"""``python -m course_pp lab``: make or update the working copy of the notebooks, and open it in JupyterLab."""

import argparse
import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import course_pp
from course_pp.notebook.working_copy import WorkingCopyError, copy_scripts, update

HELP = "open your own copy of the notebooks in JupyterLab"

_FIRST = "00_ranks_and_messages.ipynb"
_FOLDER = "my_course"
_SCRIPTS = "source_code"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = f"where the copy is (default: {_FOLDER}/ beside notebooks/ of a clone; without one, here)"
    parser.add_argument("--folder", type=Path, help=where)
    parser.add_argument("--copy-only", action="store_true", help="make or update the copy, and open nothing")
    parser.add_argument("jupyter", nargs="*", metavar="ARGUMENT", help="after --: for jupyter lab")


def run(arguments: argparse.Namespace) -> None:
    """Make the copy and become JupyterLab.

    In a clone the copy holds the notebooks alone; in a folder elsewhere also the scripts, or ``%torchrun`` would not
    find them. What was installed from a wheel has no clone around it: its copy has
    the clone's folders, ``notebooks/`` and ``source_code/``, so that links and ``%torchrun`` find the scripts.

    Raises:
        WorkingCopyError: the copy cannot be made, or JupyterLab or ipywidgets are not installed here.
    """
    clone = Path(course_pp.__file__).resolve().parents[1]
    if (clone / "notebooks").is_dir():
        home, folder = clone, (arguments.folder or clone / _FOLDER).resolve()
        copied = update(clone / "notebooks", folder)
        if not folder.is_relative_to(clone):
            copy_scripts(clone / _SCRIPTS, folder / _SCRIPTS)
    else:
        home, shipped = (arguments.folder or Path(_FOLDER)).resolve(), _shipped()
        folder = home / "notebooks"
        copied = update(shipped / "notebooks", folder)
        copy_scripts(shipped / _SCRIPTS, home / _SCRIPTS)
    if str(copied):
        print(copied, flush=True)
    if arguments.copy_only:
        return
    for package in ("jupyterlab", "ipywidgets"):
        if importlib.util.find_spec(package) is None:
            remedy = "make clean lab in a clone, else pip install 'course_pp[course]'"
            raise WorkingCopyError(f"{package} is not installed for {sys.executable}: {remedy}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments.jupyter:
        print("as root JupyterLab wants a word: make lab ARGS=--allow-root", flush=True)
    # A kernel of this interpreter is found before those of other installations.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    root = home if folder.is_relative_to(home) else folder
    first = (folder / _FIRST).relative_to(root).as_posix()
    options = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{first}"]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *options, *arguments.jupyter])


def _shipped() -> Path:
    """Return the folder in which a wheel puts notebooks and scripts: beside the libraries, wherever those are."""
    try:
        files = distribution("course_pp").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _FIRST:
            return Path(str(file.locate())).resolve().parents[1]
    raise WorkingCopyError(
        "there are no notebooks beside this package: start from a clone of the course, or install its wheel "
        "(pip install 'course_pp[course]')"
    )
