"""Ways through the course for 45 minutes to a semester, in minutes of the notebooks' own: python docs/routes.py"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from course_pp.exercises.exercise import Exercise, exercises_of, find
from course_pp.exercises.inventory import questions_about

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_RANKS = re.compile(r"\*\*(?:\d+ to )?(\d+) ranks?\*\*")


@dataclass(frozen=True)
class Part:
    """Sections of a notebook, by the beginning of their headings, and exercises to do in the room.

    Attributes:
        notebook: ``"02"``.
        sections: ``("1", "3")``; empty for all of them.
        exercises: names of functions.
    """

    notebook: str
    sections: tuple[str, ...] = ()
    exercises: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """A way through the course.

    Attributes:
        name: of the file of slides.
        title: how long it takes.
        minutes: in the room.
        goal: what people can say afterwards.
        parts: in order.
        skipped: what to leave out, and say so.
    """

    name: str
    title: str
    minutes: int
    goal: str
    parts: tuple[Part, ...]
    skipped: str


ROUTES = (
    Route(
        "45_minutes",
        "45 minutes",
        45,
        "why ranks wait, and why 1F1B needs less memory for the same wait",
        (Part("02", ("1", "2"), ("bubble",)), Part("03", ("1", "2"), ("order_1f1b",))),
        "all steps by hand, messages, clusters; show the figures of 04 and 05 as an outlook",
    ),
    Route(
        "90_minutes",
        "90 minutes",
        90,
        "the same, and write both orders and one step that does not deadlock",
        (
            Part("00", ("2", "3"), ("shift",)),
            Part("02", ("1", "2"), ("bubble", "afab_order")),
            Part("03", ("1", "2", "3"), ("order_1f1b", "step_without_deadlock")),
        ),
        "memory budgets, latency, clinics",
    ),
    Route(
        "180_minutes",
        "180 minutes",
        180,
        "the same, and choose a schedule for slow links or little memory",
        (
            Part("00", ("1", "2", "3"), ("shift",)),
            Part("01", ("1", "4"), ("assign_layers",)),
            Part("02", ("1", "2", "3", "4"), ("bubble", "afab_order", "accumulate")),
            Part("03", ("1", "2", "3", "4"), ("order_1f1b", "step_without_deadlock")),
            Part("05", ("1", "2", "5"), ("order_zb_h1",)),
        ),
        "all-reduce, interleaved stages, bug clinics; give one clinic as homework",
    ),
    Route(
        "a_day",
        "A day (six hours in the room)",
        360,
        "the same, cut a model in two dimensions, and start it on a cluster",
        (
            Part("00", (), ("shift",)),
            Part("01", ("1", "2", "3", "4", "On the cluster"), ("assign_layers",)),
            Part("02", (), ("bubble", "afab_order", "accumulate")),
            Part("03", (), ("order_1f1b", "step_without_deadlock")),
            Part("04", ("1", "2", "6"), ("warm_up_forwards",)),
            Part("05", ("1", "2", "3", "5", "7"), ("order_zb_h1",)),
            Part("07", ("1", "2", "3", "4", "On the cluster"), ("neighbours",)),
        ),
        "PipeDream, FSDP's policies, checkpoints",
    ),
    Route(
        "a_semester",
        "A semester, a notebook a week",
        0,
        "all of it",
        tuple(Part(f"{number:02}") for number in range(14)),
        "nothing; the exercises are homework, `progress().to_json(path)` is handed in",
    ),
)


def route(name: str) -> Route:
    """The route with this name. Raises ValueError, which lists the names, for any other."""
    for each in ROUTES:
        if each.name == name:
            return each
    raise ValueError(f"there is no route {name!r}; choose one of {', '.join(each.name for each in ROUTES)}")


@dataclass(frozen=True)
class Section:
    """A section of a notebook as the routes see it: its heading, its cells, and its share of the notebook's minutes."""

    title: str
    cells: list[dict]
    minutes: float


@cache
def path_of(notebook: str) -> Path | None:
    """The notebook with this number, None if it is not written."""
    return next(iter(NOTEBOOKS.glob(f"{notebook}_*.ipynb")), None)


@cache
def sections_of(notebook: str) -> tuple[Section, ...]:
    """The sections of a notebook; its minutes are shared out by words of prose and lines of code."""
    path = path_of(notebook)
    if path is None:
        return ()
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    minutes = int(re.search(r"\*\*(\d+) minutes\*\*", "".join(cells[0]["source"]))[1])
    found: list[tuple[str, list[dict]]] = []
    for cell in cells:
        source = "".join(cell["source"])
        pieces = re.split(r"(?m)^(?=## )", source) if cell["cell_type"] == "markdown" else [source]
        for piece in filter(str.strip, pieces):
            if cell["cell_type"] == "markdown" and (heading := re.match(r"## (.*)", piece)):
                found.append((heading[1], []))
            if found:
                found[-1][1].append({**cell, "source": piece})
    lengths = [sum(_length(cell) for cell in cells) for _, cells in found]
    return tuple(
        Section(title, cells, minutes * length / sum(lengths))
        for (title, cells), length in zip(found, lengths, strict=True)
    )


def _length(cell: dict) -> int:
    prose = cell["source"].partition("**References**")[0]
    return len(prose.split()) if cell["cell_type"] == "markdown" else 8 * prose.count("\n") + 8


def chosen(part: Part) -> list[Section]:
    """The sections of a part of a route. Raises ValueError for one that the notebook does not have."""
    sections = sections_of(part.notebook)
    if not part.sections or not sections:
        return list(sections)
    for beginning in part.sections:
        if not any(_begins(section, beginning) for section in sections):
            raise ValueError(f"notebook {part.notebook} has no section {beginning!r}: mend docs/routes.py")
    return [section for section in sections if any(_begins(section, each) for each in part.sections)]


def _begins(section: Section, beginning: str) -> bool:
    return section.title.startswith(f"{beginning}." if beginning.isdigit() else beginning)


def exercises_in(part: Part) -> list[Exercise]:
    """The exercises of a part of a route; a whole notebook that names none has all of its own."""
    return [*map(find, part.exercises)] if part.sections or part.exercises else exercises_of(part.notebook)


def minutes_of(part: Part) -> tuple[float, int]:
    """Minutes of reading and running, and of the exercises."""
    exercises = exercises_in(part)
    return sum(section.minutes for section in chosen(part)), sum(exercise.minutes for exercise in exercises)


def ranks_of(route: Route) -> int:
    """The most ranks that its notebooks start at once."""
    texts = [path.read_text(encoding="utf-8") for part in route.parts if (path := path_of(part.notebook))]
    return max(int(found[1]) for text in texts if (found := _RANKS.search(text)))


def page() -> str:
    """The routes in Markdown."""
    lines = [
        "# Routes",
        "",
        "Minutes of a section are its share, by length, of the minutes that its notebook states. Exercises bring their "
        "own. What is left of the time is for questions. `make slides` makes one deck a route.",
        "",
    ]
    for route in ROUTES:
        read, solve = (sum(each) for each in zip(*map(minutes_of, route.parts), strict=True))
        left = f", {route.minutes - read - solve:.0f} for questions" if route.minutes else ""
        about = [route.name] if route.minutes else []
        call = f'quiz("before", about="{route.name}")' if about else 'quiz("before")'
        lines += [
            f"## {route.title}",
            "",
            f"People can say {route.goal}. {read:.0f} minutes of notebooks, {solve} of exercises{left}; up to "
            f"{ranks_of(route)} ranks at once for each person. `{call}` asks {len(questions_about(about))} questions.",
            "",
            "| notebook | sections | minutes | exercises | minutes |",
            "|---|---|---|---|---|",
        ]
        for part in route.parts:
            if path := path_of(part.notebook):
                minutes, more = minutes_of(part)
                titles = "; ".join(section.title for section in chosen(part)) if part.sections else "all"
                names = ", ".join(f"`{name}`" for name in part.exercises) or ("all" if not route.minutes else "")
                link = f"[{part.notebook}](../notebooks/{path.name})"
                lines.append(f"| {link} | {titles} | {minutes:.0f} | {names} | {more or ''} |")
        lines += ["", f"Skip: {route.skipped}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
