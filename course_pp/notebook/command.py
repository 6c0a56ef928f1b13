"""``python -m course_pp lab``: make or update the working copy of the notebooks, and open it in
JupyterLab.

The notebooks of the course are committed with their outputs, which would give every guess away; the
copy has none. It is never overwritten: what is new in a later version of the course is added, and
what has changed is put beside the copy that the learner may have edited, as ``03_1f1b.new.ipynb``.
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
# For each notebook the digest of every version that was ever put here, the newest last.
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

    In a clone the copy holds the notebooks alone; in a folder elsewhere also the scripts, or
    ``%torchrun`` would not find them. Without a clone, from a wheel, it has the clone's folders:
    ``notebooks/`` and ``source_code/``.
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
            raise ValueError(f"{package} is not installed for {sys.executable}: {remedy}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments.jupyter:
        print("as root JupyterLab wants a word: make lab ARGS=--allow-root", flush=True)
    # A kernel of this interpreter is found before those of other installations.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
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
    raise ValueError(
        "there are no notebooks beside this package: start from a clone of the course, or install"
        " its wheel (pip install 'course_pp[course]')"
    )


@dataclass(frozen=True)
class Copied:
    """What :func:`update` wrote into ``folder``."""

    folder: Path
    added: tuple[str, ...]  # notebooks that were not there
    # of newer versions beside a notebook: the name of the old one and the new one
    beside: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = (
            [f"{len(self.added)} notebooks copied to {self.folder.name}/, without outputs"]
            if self.added
            else []
        )
        lines += [
            f"{old} has a newer version, which is now beside yours: {new}"
            for old, new in self.beside
        ]
        return "\n".join(lines)


def update(source: Path, folder: Path) -> Copied:
    """Copy what ``folder`` lacks of the notebooks in ``source``, without outputs; change no file that is there."""
    notebooks = sorted(source.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        raise ValueError(
            f"there are no notebooks in {str(source)!r}: start from a clone of the course"
        )
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        record, changed = _read_record(folder / _RECORD), False
        added, beside = [], []
        for path in notebooks:
            text = _without_outputs(path)
            digest, versions = (
                hashlib.sha256(text.encode()).hexdigest(),
                record.setdefault(path.name, []),
            )
            target = folder / path.name
            if not target.exists():
                _write(target, text)
                added.append(path.name)
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
        for path in sorted(
            path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"
        ):
            target = folder / path.relative_to(source)
            if not target.exists():
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
    """All of it or nothing: half a notebook would be taken for the learner's."""
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def _read_record(path: Path) -> dict[str, list[str]]:
    """Return the record; empty if it is missing or unreadable: newer notebooks then go beside what is there."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): [str(digest) for digest in digests] for name, digests in found.items()}
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}


def _without_outputs(path: Path) -> str:
    try:
        notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = [], None
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
    names = [f"{path.stem}.new.ipynb", *(f"{path.stem}.new{i}.ipynb" for i in range(2, 1000))]
    return next(folder / name for name in names if not (folder / name).exists())
