"""Notebooks for the site: each exercise gets an anchor, and folded hints below it."""

import copy
import re
from html import escape

from course_pp.exercises.exercise import Exercise, exercises_of

_CHECKED = re.compile(r"^check\((\w+)", re.M)
_HEADING = re.compile(r"^(### Exercise \d)", re.M)


def anchor(exercise: Exercise) -> str:
    """Return the name of an exercise's place in its chapter."""
    return f"exercise-{exercise.notebook}-{exercise.name.replace('_', '-')}"


def with_hints(notebook: dict, name: str) -> dict:
    """Return a copy of a notebook: an anchor stands before each exercise, folded hints below it."""
    notebook = copy.deepcopy(notebook)
    known = {exercise.name: exercise for exercise in exercises_of(name[:2])}
    cells = []
    heading = None
    for cell in notebook["cells"]:
        cells.append(cell)
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown" and _HEADING.search(source):
            heading = cell
        elif cell["cell_type"] == "code":
            for found in _CHECKED.findall(source):
                exercise = known.pop(found, None)
                if exercise is not None and heading is not None:
                    target = rf"({anchor(exercise)})=\n\1"
                    heading["source"] = _HEADING.sub(target, "".join(heading["source"]), count=1)
                    heading = None
                if exercise is not None:
                    cells.append(_hints(exercise))
    notebook["cells"] = cells
    return notebook


def _hints(exercise: Exercise) -> dict:
    folded = []
    for i, hint in enumerate(exercise.hints, start=1):
        title = f"Hint {i} of {len(exercise.hints)} for {escape(exercise.name)}"
        folded.append(f"<details><summary>{title}</summary>\n\n{hint}\n\n</details>")
    return {
        "cell_type": "markdown",
        "id": f"hints-{exercise.name}"[:60],
        "metadata": {},
        "source": "\n\n".join(folded),
    }
