"""Ways through the course for 45 minutes to a semester, by the clock: python docs/routes.py --route
a_day --start 9:30

A section takes a minute to turn to and its share, by length, of the other minutes that its notebook
states. Exercises bring their own minutes.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

from course_pp.exercises.exercise import Exercise, exercises_of, find, number_of
from course_pp.exercises.inventory import Question, questions_about

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
_RANKS = re.compile(r"\*\*(?:\d+ to )?(\d+) ranks?\*\*")


@dataclass(frozen=True)
class Part:
    """Sections of a notebook, by the beginning of their headings, and exercises to do in the room.

    Attributes:
        notebook: ``"02"``.
        sections: ``("1", "3")``; empty for all of them.
        exercises: names of functions.
        pause: minutes of a break after it.
        running: minutes more for *On the cluster*, in which all start a run.
    """

    notebook: str
    sections: tuple[str, ...] = ()
    exercises: tuple[str, ...] = ()
    pause: int = 0
    running: int = 0


@dataclass(frozen=True)
class Route:
    """A way through the course.

    Attributes:
        name: of the file of slides.
        title: how long it takes.
        minutes: from the beginning to the end of a meeting, breaks included.
        goal: what people can do afterwards, beside the goals of the shorter routes.
        parts: in order.
        skipped: what to leave out, and say so.
        set_up: minutes until all have opened their copy.
        hand_in: minutes until all have sent their file and filled in the form.
        weekly: whether each part has a meeting of its own, and its exercises are homework.
    """

    name: str
    title: str
    minutes: int
    goal: str
    parts: tuple[Part, ...]
    skipped: str
    set_up: int
    hand_in: int
    weekly: bool = False


ROUTES = (
    Route(
        "45_minutes",
        "45 minutes",
        45,
        "say why ranks wait, and why 1F1B needs less memory for the same wait",
        (Part("02", ("1", "2"), ("bubble",)), Part("03", ("1", "2"), ("order_1f1b",))),
        "all steps by hand, messages, clusters; show the figures of 04 and 05 as an outlook",
        set_up=3,
        hand_in=2,
    ),
    Route(
        "90_minutes",
        "90 minutes",
        90,
        "write both orders, and one step that does not deadlock",
        (
            Part("00", ("2", "3"), ("shift",)),
            Part("02", ("1", "2"), ("bubble", "afab_order")),
            Part("03", ("1", "2", "3"), ("order_1f1b", "step_without_deadlock")),
        ),
        "memory budgets, latency, clinics",
        set_up=5,
        hand_in=2,
    ),
    Route(
        "180_minutes",
        "180 minutes",
        180,
        "choose a schedule for slow links or little memory",
        (
            Part("00", ("1", "2", "3"), ("shift",)),
            Part("01", ("1", "4")),
            Part("02", ("1", "2", "3", "4"), ("bubble", "afab_order"), pause=10),
            Part("03", ("1", "2", "3", "4"), ("order_1f1b", "step_without_deadlock")),
            Part("05", ("1", "2", "5"), ("order_zb_h1",)),
        ),
        "all-reduce, interleaved stages, bug clinics; give `accumulate` and one clinic as homework",
        set_up=10,
        hand_in=5,
    ),
    Route(
        "a_day",
        "A day (seven and a half hours with breaks)",
        450,
        "cut a model in two dimensions, and start it on a cluster",
        (
            Part("00", (), ("shift",), pause=15),
            Part(
                "01", ("1", "2", "3", "4", "On the cluster"), ("assign_layers",), pause=5, running=3
            ),
            Part("02", (), ("bubble", "afab_order", "accumulate"), pause=60),
            Part("03", (), ("order_1f1b", "step_without_deadlock"), pause=15),
            Part("04", ("1",)),
            Part("05", ("1", "2", "3", "5", "7"), ("order_zb_h1",), pause=5),
            Part("07", ("1", "2", "3", "4", "On the cluster"), ("neighbours",), running=7),
        ),
        "PipeDream, FSDP's policies, checkpoints",
        set_up=15,
        hand_in=5,
    ),
    Route(
        "a_semester",
        "A semester, a notebook a week",
        60,
        "plan a run, train it, and let it survive a crash",
        (
            *(Part(f"{number:02}") for number in range(13)),
            Part(
                "13",
                ("1", "2", "3", "4", "5", "6", "Recap"),
                tuple(each.name for each in exercises_of("13")[:-1]),
            ),
        ),
        "the last clinic, which leaves time to hand in; the exercises are homework",
        set_up=10,
        hand_in=5,
        weekly=True,
    ),
)


def route(name: str) -> Route:
    """The route with this name. Raises ValueError, which lists the names, for any other."""
    for each in ROUTES:
        if each.name == name:
            return each
    wrong = f"there is no route {name!r}" if name else "give ROUTE=NAME"
    raise ValueError(f"{wrong}; choose one of {', '.join(each.name for each in ROUTES)}")


@dataclass(frozen=True)
class Section:
    """A section of a notebook as the routes see it: its heading, its cells, and its share of the notebook's minutes."""

    title: str
    cells: list[dict]
    minutes: int


@cache
def path_of(notebook: str) -> Path:
    """The notebook with this number."""
    return next(iter(NOTEBOOKS.glob(f"{notebook}_*.ipynb")))


@cache
def read(notebook: str) -> dict:
    """What the notebook with this number holds."""
    return json.loads(path_of(notebook).read_text(encoding="utf-8"))


def title_of(notebook: dict) -> str:
    """Its heading: ``"02 · GPipe: microbatches"``."""
    return re.match(r"# (.*)", "".join(notebook["cells"][0]["source"]))[1]


@cache
def sections_of(notebook: str) -> tuple[Section, ...]:
    """The sections of a notebook; its minutes are shared out by words of prose and lines of code."""
    cells = read(notebook)["cells"]
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
    shares = _shared_out(minutes - len(found), lengths)
    return tuple(
        Section(title, cells, 1 + share)
        for (title, cells), share in zip(found, shares, strict=True)
    )


def _shared_out(minutes: int, weights: Sequence[int]) -> list[int]:
    """Whole minutes, as near to their shares as a sum of exactly ``minutes`` allows."""
    reached = [minutes * each // sum(weights) for each in accumulate(weights, initial=0)]
    return [end - begin for begin, end in pairwise(reached)]


def _length(cell: dict) -> int:
    prose = cell["source"].partition("**References**")[0]
    return len(prose.split()) if cell["cell_type"] == "markdown" else 8 * prose.count("\n") + 8


def chosen(part: Part) -> list[Section]:
    """The sections of a part of a route. Raises ValueError for one that the notebook does not have."""
    sections = sections_of(part.notebook)
    for beginning in part.sections:
        if not any(_begins(section, beginning) for section in sections):
            raise ValueError(
                f"notebook {part.notebook} has no section {beginning!r}: mend docs/routes.py"
            )
    return [
        replace(
            section,
            minutes=section.minutes + part.running * section.title.startswith("On the cluster"),
        )
        for section in sections
        if not part.sections or any(_begins(section, each) for each in part.sections)
    ]


def _begins(section: Section, beginning: str) -> bool:
    return section.title.startswith(f"{beginning}." if beginning.isdigit() else beginning)


def exercises_in(part: Part) -> tuple[Exercise, ...]:
    """The exercises of a part of a route; a whole notebook that names none has all of its own."""
    return (
        tuple(map(find, part.exercises))
        if part.sections or part.exercises
        else exercises_of(part.notebook)
    )


def left_for_home(part: Part) -> list[Exercise]:
    """The exercises that stand in its sections and are not to be done in the room."""
    text = "".join(cell["source"] for section in chosen(part) for cell in section.cells)
    written = [
        each for each in exercises_of(part.notebook) if f"### Exercise {number_of(each)} " in text
    ]
    return [each for each in written if each not in exercises_in(part)]


def minutes_of(part: Part) -> tuple[int, int]:
    """Minutes of reading and running, and of the exercises."""
    exercises = exercises_in(part)
    return sum(section.minutes for section in chosen(part)), sum(
        exercise.minutes for exercise in exercises
    )


def goals(route: Route) -> list[str]:
    """What people can do after a route, its own goal last."""
    return [each.goal for each in ROUTES[: ROUTES.index(route) + 1]]


def ranks_of(route: Route) -> int:
    """The most ranks that its notebooks start at once."""
    texts = [path_of(part.notebook).read_text(encoding="utf-8") for part in route.parts]
    return max(int(found[1]) for text in texts if (found := _RANKS.search(text)))


@dataclass(frozen=True)
class Row:
    """A line of a timetable.

    Attributes:
        week: 1, 2, … where each part has a meeting of its own, else 0.
        begins: minutes after midnight.
        minutes: until the next line.
        what: ``"set-up"``, ``"quiz before"``, ``"quiz after"``, ``"hand in and form"``,
            ``"break"``, ``"lunch"``, or the notebook's title.
        part: of the route, None beside the notebooks.
        questions: those of the minutes that are left for questions.
    """

    week: int
    begins: int
    minutes: int
    what: str
    part: Part | None = None
    questions: int = 0

    @property
    def when(self) -> str:
        """``"9:05"``, in a weekly route ``"week 2, 9:00"``."""
        return f"week {self.week}, " * (self.week > 0) + clock(self.begins)


def timetable(route: Route, start: int = 9 * 60) -> list[Row]:
    """A route by the clock. What set-up, quiz, notebooks, exercises and breaks leave of it is for
    questions.

    Args:
        start: minutes after midnight; each meeting of a weekly route begins then.
    """
    asked = max(2, (len(quiz_of(route)) + 1) // 2)
    meetings = [[part] for part in route.parts] if route.weekly else [[*route.parts]]
    rows = []
    for meeting, parts in enumerate(meetings, start=1):
        first = [("set-up", route.set_up), ("quiz before", asked)] if meeting == 1 else []
        last = (
            [("quiz after", asked), ("hand in and form", route.hand_in)]
            if meeting == len(meetings)
            else []
        )
        work = [minutes_of(part)[0] if route.weekly else sum(minutes_of(part)) for part in parts]
        left = (
            route.minutes
            - sum(work)
            - sum(part.pause for part in parts)
            - sum(each for _, each in first + last)
        )
        lines: list[tuple] = [*first]
        for part, minutes, more in zip(parts, work, _shared_out(left, work), strict=True):
            lines.append((title_of(read(part.notebook)), minutes + more, part, more))
            if part.pause:
                lines.append(("lunch" if part.pause >= 45 else "break", part.pause))
        begins = start
        for what, minutes, *rest in lines + last:
            rows.append(Row(meeting if route.weekly else 0, begins, minutes, what, *rest))
            begins += minutes
    return rows


def quiz_of(route: Route) -> tuple[Question, ...]:
    """The questions before and after a route."""
    return questions_about([route.name])


def quiz_call(route: Route, when: str) -> str:
    """What asks them: ``quiz("before", about="a_day")``."""
    return f'quiz("{when}")' if route.weekly else f'quiz("{when}", about="{route.name}")'


def clock(minutes: int) -> str:
    """Minutes after midnight as ``9:05``."""
    return f"{minutes // 60 % 24}:{minutes % 60:02}"


def in_short(route: Route) -> str:
    """A timetable in a line, for INSTRUCTOR.md."""
    rows = timetable(route)
    if route.weekly:
        around = [f"{row.what} in week {row.week}" for row in rows if row.part is None]
        return f"{route.minutes} minutes a week; {', '.join(around)}"
    told = [f"{clock(row.begins)} {row.part.notebook if row.part else row.what}" for row in rows]
    return ", ".join([*told, f"{clock(rows[0].begins + route.minutes)} end"])


def page(routes: Sequence[Route] = ROUTES, start: int = 9 * 60) -> str:
    """Routes in Markdown."""
    lines = [
        "# Routes",
        "",
        (
            "A section takes a minute, and its share, by length, of the other minutes that its"
            " notebook states. Exercises bring their own, a question of the quiz half a minute,"
            " runs on a cluster some more. What is left of the time is for questions. `make slides`"
            " makes one deck a route."
        ),
        "",
    ]
    for route in routes:
        rows = timetable(route, start)
        reading, solving = (sum(each) for each in zip(*map(minutes_of, route.parts), strict=True))
        lines += [
            f"## {route.title}",
            "",
            (
                f"People can {'; '.join(goals(route))}. {reading} minutes of notebooks, {solving}"
                f" of exercises{' at home' * route.weekly}, {sum(row.questions for row in rows)}"
                f" for questions; up to {ranks_of(route)} ranks at once for each person."
                f" `{quiz_call(route, 'before')}` asks {len(quiz_of(route))} questions."
            ),
            "",
            "| from | notebook | sections | minutes | exercises | minutes | questions |",
            "|---|---|---|---|---|---|---|",
            *(_line(row) for row in rows),
        ]
        if not route.weekly:
            lines.append(f"| {clock(start + route.minutes)} | end | | | | | |")
        lines += ["", f"Skip: {route.skipped}.", ""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row.part is None:
        return f"| {row.when} | {row.what} | | {row.minutes} | | | |"
    minutes, more = minutes_of(row.part)
    titles = (
        "; ".join(section.title for section in chosen(row.part)) if row.part.sections else "all"
    )
    whole = exercises_in(row.part) == exercises_of(row.part.notebook)
    names = "all" if whole else ", ".join(f"`{name}`" for name in row.part.exercises)
    link = f"[{row.part.notebook}](../notebooks/{path_of(row.part.notebook).name})"
    return (
        f"| {row.when} | {link} | {titles} | {minutes} | {names} | {more or ''} | {row.questions} |"
    )


def asked_for(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Route], int]:
    """What a command line says, its routes, and the minute at which they start. Ends with a sentence if it is wrong."""
    parser.add_argument(
        "--route",
        metavar="NAME",
        help=f"one of {', '.join(each.name for each in ROUTES)}; else all",
    )
    parser.add_argument(
        "--start",
        default="9:00",
        metavar="H:MM",
        help="when a meeting begins (default: %(default)s)",
    )
    args = parser.parse_args()
    try:
        return args, [route(args.route)] if args.route else [*ROUTES], _minute(args.start)
    except ValueError as e:
        sys.exit(f"{e}.")


def _minute(text: str) -> int:
    if not (found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text)):
        raise ValueError(f"--start is {text!r}, and not a time such as 9:00 or 13:30")
    return 60 * int(found[1]) + int(found[2])


if __name__ == "__main__":
    _, routes, start = asked_for(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    print(page(routes, start))
