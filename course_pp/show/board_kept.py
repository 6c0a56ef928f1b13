"""Boards outlive their kernel: the moves of each are kept in one small file beside the learner's progress."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from course_pp.files import locked, state_folder, write_atomically


def kept_in() -> Path:
    """Return the file of kept boards; delete it to begin again."""
    path = state_folder() / "boards.json"
    with contextlib.suppress(RuntimeError):  # nobody has that home directory
        path = path.expanduser()
    return path


def kept(name: str) -> list[str]:
    """Return the moves of the board called ``name``; none if nothing readable was kept."""
    found = _read().get(name, [])
    return found if isinstance(found, list) and all(isinstance(move, str) for move in found) else []


def keep(name: str, moves: list[str]) -> str:
    """Keep the moves of a board; an empty list forgets it. Return a sentence if that failed, else an empty one."""
    path = kept_in()
    try:
        with locked(path) as file:  # another kernel may keep a board at the same time
            boards = {each: made for each, made in {**_read(), name: moves}.items() if made}
            write_atomically(file, json.dumps(boards, indent=1) + "\n")
    except OSError as error:
        return f"This board will not outlive its kernel: {path} cannot be written ({error.strerror or error})."
    return ""


def _read() -> dict[str, object]:
    try:
        boards = json.loads(kept_in().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return boards if isinstance(boards, dict) else {}
