"""The learner's own copy of the notebooks: made once, never overwritten, so that an update meets no edit.

The notebooks of the course are committed with their outputs, which would give every guess away; the copy has none.
A notebook that is new in a later version of the course is added. One that has changed is put beside the copy that the
learner may have edited, as ``03_1f1b.new.ipynb``.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Copied", "WorkingCopyError", "copy_scripts", "update"]

# For each notebook the digest of every version that was ever put here, the newest last.
_RECORD = ".course_pp.json"


class WorkingCopyError(ValueError):
    """The working copy cannot be made or brought up to date."""


@dataclass(frozen=True)
class Copied:
    """What :func:`update` wrote into ``folder``.

    Attributes:
        added: notebooks that were not there.
        beside: newer versions, put beside a notebook that was there: the name of the old one and that of the new one.
    """

    folder: Path
    added: tuple[str, ...]
    beside: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{len(self.added)} notebooks copied to {self.folder.name}/, without outputs"] if self.added else []
        lines += [f"{old} has a newer version, which is now beside yours: {new}" for old, new in self.beside]
        return "\n".join(lines)


def update(source: Path, folder: Path) -> Copied:
    """Copy what ``folder`` lacks of the notebooks in ``source``, without outputs; change no file that is there.

    Raises:
        WorkingCopyError: there are no notebooks in ``source``, one cannot be read, or ``folder`` cannot be written.
    """
    notebooks = sorted(source.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        raise WorkingCopyError(f"there are no notebooks in {str(source)!r}: start from a clone of the course")
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return _update(notebooks, folder)


def copy_scripts(source: Path, folder: Path) -> None:
    """Copy the scripts that notebooks launch from ``source``; change no file that is there.

    Raises:
        WorkingCopyError: ``folder`` cannot be written.
    """
    with _refusing(folder):
        for path in sorted(path for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"):
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
        raise WorkingCopyError(
            f"cannot write the working copy ({str(where)!r}: {error.strerror}): make the folder writable, or name "
            "another one with --folder"
        ) from error


def _update(notebooks: list[Path], folder: Path) -> Copied:
    record, changed = _read_record(folder / _RECORD), False
    added, beside = [], []
    for path in notebooks:
        text = _without_outputs(path)
        digest, versions = hashlib.sha256(text.encode()).hexdigest(), record.setdefault(path.name, [])
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
        raise WorkingCopyError(f"{path.name} is no notebook ({error}): get it again from the course") from error
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
