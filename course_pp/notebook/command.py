"""``python -m course_pp lab``: copy the notebooks, or update the copy, and open it in JupyterLab.

The notebooks of the course are committed with their outputs, which would give every guess away. The
copy has no outputs. It is never overwritten: a notebook that a later version of the course adds is
added here, and one that has changed is put beside the learner's, as ``03_1f1b.new.ipynb``.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import course_pp

HELP = "open your own copy of the notebooks in JupyterLab"

_FIRST = "00_ranks_and_messages.ipynb"
_FOLDER = "my_course"
_SCRIPTS = "source_code"
# This file holds, for each notebook, the digests of all versions that were put here, newest last.
_RECORD = ".course_pp.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = (
        f"where the copy is (default: {_FOLDER}/ beside notebooks/ of a clone; without one, here)"
    )
    parser.add_argument("--folder", type=Path, help=where)
    parser.add_argument(
        "--copy-only", action="store_true", help="make or update the copy, and open nothing"
    )
    parser.add_argument("jupyter", nargs="*", metavar="ARGUMENT", help="after --: for jupyter lab")


def run(arguments: argparse.Namespace) -> None:
    """Make the copy and become JupyterLab.

    A copy inside the clone holds the notebooks alone. A copy elsewhere also holds the scripts, or
    ``%torchrun`` would not find them. A copy from a wheel has the folders of a clone:
    ``notebooks/`` and ``source_code/``.
    """
    clone = Path(course_pp.__file__).resolve().parents[1]
    if (clone / "notebooks").is_dir():
        home = clone
        folder = (arguments.folder or clone / _FOLDER).resolve()
        copied = update(clone / "notebooks", folder)
        if not folder.is_relative_to(clone):
            copy_scripts(clone / _SCRIPTS, folder / _SCRIPTS)
    else:
        shipped = _shipped()
        home = (arguments.folder or Path(_FOLDER)).resolve()
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
            raise ValueError(f"{package} is not installed for {sys.executable}: {remedy}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments.jupyter:
        print("as root JupyterLab wants a word: make lab ARGS=--allow-root", flush=True)
    # JupyterLab looks for kernels along PATH. It must find this interpreter's before others.
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    os.environ["PATH"] = os.pathsep.join(path)
    root = home if folder.is_relative_to(home) else folder
    first = (folder / _FIRST).relative_to(root).as_posix()
    options = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{first}"]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *options, *arguments.jupyter])


def _shipped() -> Path:
    """Return the folder in which the wheel has put notebooks and scripts."""
    try:
        files = distribution("course_pp").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _FIRST:
            return Path(str(file.locate())).resolve().parents[1]
    raise ValueError(
        "there are no notebooks beside this package: start from a clone of the course, or install"
        " its wheel (pip install 'course_pp[course]')"
    )


@dataclass(frozen=True)
class Copied:
    """The files that :func:`update` has written.

    Attributes:
        folder: folder of the copy.
        added: notebooks that were not there.
        beside: an (old name, new name) for each notebook that now has a newer version beside it.
    """

    folder: Path
    added: tuple[str, ...]
    beside: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = []
        if self.added:
            n = len(self.added)
            lines.append(f"{n} notebooks copied to {self.folder.name}/, without outputs")
        for old, new in self.beside:
            lines.append(f"{old} has a newer version, which is now beside yours: {new}")
        return "\n".join(lines)


def update(source: Path, folder: Path) -> Copied:
    """Copy the notebooks of ``source`` that ``folder`` lacks, without outputs; change none."""
    notebooks = sorted(source.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        raise ValueError(
            f"there are no notebooks in {str(source)!r}: start from a clone of the course"
        )
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        record = _read_record(folder / _RECORD)
        changed = False
        added = []
        beside = []
        for path in notebooks:
            text = _without_outputs(path)
            digest = hashlib.sha256(text.encode()).hexdigest()
            versions = record.setdefault(path.name, [])
            target = folder / path.name
            if not target.exists():
                _write(target, text)
                added.append(path.name)
            # The record may be lost, so the cells decide: the same ones need no second copy.
            elif digest not in versions and _read_cells(target) != _cells(json.loads(text)):
                target = _free_name(folder, path)
                _write(target, text)
                beside.append((path.name, target.name))
            if digest not in versions:
                versions.append(digest)
                changed = True
        if changed:
            _write(folder / _RECORD, json.dumps(record, indent=1) + "\n")
        return Copied(folder, tuple(added), tuple(beside))


def copy_scripts(source: Path, folder: Path) -> None:
    """Copy the scripts that notebooks launch from ``source``; change no file that is there."""
    with _refusing(folder):
        for path in sorted(source.rglob("*")):
            target = folder / path.relative_to(source)
            if path.is_file() and path.suffix != ".pyc" and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                _write(target, path.read_text(encoding="utf-8"))


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or folder
        raise ValueError(
            f"cannot write the working copy ({str(where)!r}: {error.strerror}): make the folder"
            " writable, or name another one with --folder"
        ) from error


def _write(path: Path, text: str) -> None:
    """Write all of the text or nothing: half a notebook would pass for the learner's."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _read_record(path: Path) -> dict[str, list[str]]:
    """Return the record. It is empty if the file is missing or unreadable.

    With an empty record, newer notebooks go beside the present ones, so nothing is lost.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): list(map(str, digests)) for name, digests in found.items()}
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}


def _without_outputs(path: Path) -> str:
    try:
        notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = []
                cell["execution_count"] = None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path.name} is no notebook ({error}): get it again from the course"
        ) from error
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _read_cells(path: Path) -> list[tuple[str, str]] | None:
    try:
        return _cells(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError):
        return None


def _cells(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def _free_name(folder: Path, path: Path) -> Path:
    """Return ``folder/03_1f1b.new.ipynb``, or ``.new2`` and so on if there is such a file."""
    free = folder / f"{path.stem}.new.ipynb"
    number = 2
    while free.exists():
        free = folder / f"{path.stem}.new{number}.ipynb"
        number += 1
    return free
