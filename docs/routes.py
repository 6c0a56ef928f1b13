"""Ways through the course for 45 minutes to a semester, by the clock.

    python docs/routes.py --route a_day --start 9:30

The notebook states its minutes. A section takes one minute to turn to, and a share of the rest by
its length. Exercises bring their own minutes.
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
    """Sections of a notebook and exercises to do in the room.

    Attributes:
        notebook: number of the notebook: ``"02"``.
        sections: beginnings of headings: ``("1", "3")``; empty for all sections.
        exercises: names of functions.
        pause: minutes of a break after the part.
        running: extra minutes for *On the cluster*, where all start a run.
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
        name: name of the file of slides.
        title: length of the route in words.
        minutes: minutes of a meeting, breaks included.
        goal: ability that people gain, beside the goals of the shorter routes.
        parts: parts in order.
        skipped: topics to leave out, and to name as left out.
        set_up: minutes until all have opened their copy.
        hand_in: minutes until all have sent their file and filled in the form.
        weekly: whether each part has a meeting of its own, with its exercises as homework.
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
    """Return the route with this name. Raises ValueError, which lists the names, for any other."""
    for each in ROUTES:
        if each.name == name:
            return each
    wrong = f"there is no route {name!r}" if name else "give ROUTE=NAME"
    raise ValueError(f"{wrong}; choose one of {', '.join(each.name for each in ROUTES)}")


@dataclass(frozen=True)
class Section:
    """A section of a notebook: its heading, its cells, and its share of the notebook's minutes."""

    title: str
    cells: list[dict]
    minutes: int


@cache
def path_of(notebook: str) -> Path:
    """Return the file of the notebook with this number."""
    return next(iter(NOTEBOOKS.glob(f"{notebook}_*.ipynb")))


@cache
def read(notebook: str) -> dict:
    """Return the content of the notebook with this number."""
    return json.loads(path_of(notebook).read_text(encoding="utf-8"))


def title_of(notebook: dict) -> str:
    """Return the notebook's heading: ``"02 · GPipe: microbatches"``."""
    return re.match(r"# (.*)", "".join(notebook["cells"][0]["source"]))[1]


@cache
def sections_of(notebook: str) -> tuple[Section, ...]:
    """Return the sections. Words of prose and lines of code share out the notebook's minutes."""
    cells = read(notebook)["cells"]
    minutes = int(re.search(r"\*\*(\d+) minutes\*\*", "".join(cells[0]["source"]))[1])

    # A cell of prose may end one section and begin the next, so it is cut at its headings.
    titles: list[str] = []
    contents: list[list[dict]] = []
    for cell in cells:
        is_prose = cell["cell_type"] == "markdown"
        source = "".join(cell["source"])
        pieces = re.split(r"(?m)^(?=## )", source) if is_prose else [source]
        for piece in filter(str.strip, pieces):
            if is_prose and (heading := re.match(r"## (.*)", piece)):
                titles.append(heading[1])
                contents.append([])
            if contents:  # the cells before the first heading belong to no section
                contents[-1].append({**cell, "source": piece})

    lengths = [sum(map(_length, content)) for content in contents]
    shares = _shared_out(minutes - len(titles), lengths)
    sections = []
    for title, content, share in zip(titles, contents, shares, strict=True):
        sections.append(Section(title, content, minutes=1 + share))
    return tuple(sections)


def _shared_out(minutes: int, weights: Sequence[int]) -> list[int]:
    """Return whole minutes, as near to their shares as a sum of exactly ``minutes`` allows."""
    reached = [minutes * each // sum(weights) for each in accumulate(weights, initial=0)]
    return [end - begin for begin, end in pairwise(reached)]


def _length(cell: dict) -> int:
    source = cell["source"].partition("**References**")[0]  # nobody reads those in the room
    if cell["cell_type"] == "markdown":
        return len(source.split())
    return 8 * (source.count("\n") + 1)  # a line of code takes as long as eight words


def chosen(part: Part) -> list[Section]:
    """Return the sections of a part. Raises ValueError for one that the notebook does not have."""
    sections = sections_of(part.notebook)
    for beginning in part.sections:
        if not any(_begins(section, beginning) for section in sections):
            raise ValueError(
                f"notebook {part.notebook} has no section {beginning!r}: mend docs/routes.py"
            )
    wanted = []
    for section in sections:
        if part.sections and not any(_begins(section, each) for each in part.sections):
            continue
        if section.title.startswith("On the cluster"):
            section = replace(section, minutes=section.minutes + part.running)
        wanted.append(section)
    return wanted


def _begins(section: Section, beginning: str) -> bool:
    return section.title.startswith(f"{beginning}." if beginning.isdigit() else beginning)


def exercises_in(part: Part) -> tuple[Exercise, ...]:
    """Return the exercises of a part: all of a whole notebook that names none."""
    if part.sections or part.exercises:
        return tuple(map(find, part.exercises))
    return exercises_of(part.notebook)


def left_for_home(part: Part) -> list[Exercise]:
    """Return the exercises that stand in the part's sections and are not done in the room."""
    text = ""
    for section in chosen(part):
        text += "".join(cell["source"] for cell in section.cells)
    left = []
    for exercise in exercises_of(part.notebook):
        stands_here = f"### Exercise {number_of(exercise)} " in text
        if stands_here and exercise not in exercises_in(part):
            left.append(exercise)
    return left


def minutes_of(part: Part) -> tuple[int, int]:
    """Return (minutes of reading and running, minutes of the exercises)."""
    reading = sum(section.minutes for section in chosen(part))
    solving = sum(exercise.minutes for exercise in exercises_in(part))
    return reading, solving


def goals(route: Route) -> list[str]:
    """Return the abilities that people gain on a route, its own goal last."""
    return [each.goal for each in ROUTES[: ROUTES.index(route) + 1]]


def ranks_of(route: Route) -> int:
    """Return the most ranks that the route's notebooks start at once."""
    most = []
    for part in route.parts:
        text = path_of(part.notebook).read_text(encoding="utf-8")
        if found := _RANKS.search(text):
            most.append(int(found[1]))
    return max(most)


@dataclass(frozen=True)
class Row:
    """A line of a timetable.

    Attributes:
        week: number of the week, from 1, in a weekly route; else 0.
        begins: beginning in minutes after midnight.
        minutes: minutes until the next line.
        what: ``"set-up"``, ``"quiz before"``, ``"quiz after"``, ``"hand in and form"``,
            ``"break"``, ``"lunch"``, or the notebook's title.
        part: part of the route; None for a line without a notebook.
        questions: minutes, of those above, that are left for questions.
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
        return f"week {self.week}, {clock(self.begins)}" if self.week else clock(self.begins)


def timetable(route: Route, start: int = 9 * 60) -> list[Row]:
    """Return a route by the clock.

    Set-up, quiz, notebooks, exercises and breaks take their minutes; the rest is for questions.

    Args:
        route: the route.
        start: minutes after midnight at which it begins, as does each meeting of a weekly route.
    """
    if not route.weekly:
        return _meeting(route, route.parts, start=start)
    rows = []
    for week, part in enumerate(route.parts, start=1):
        rows += _meeting(route, (part,), start=start, week=week)
    return rows


def _meeting(route: Route, parts: Sequence[Part], start: int, week: int = 0) -> list[Row]:
    asked = max(2, (len(quiz_of(route)) + 1) // 2)
    first = []
    last = []
    if parts[0] is route.parts[0]:
        first = [("set-up", route.set_up), ("quiz before", asked)]
    if parts[-1] is route.parts[-1]:
        last = [("quiz after", asked), ("hand in and form", route.hand_in)]

    work = []
    for part in parts:
        reading, solving = minutes_of(part)
        work.append(reading if route.weekly else reading + solving)
    left = route.minutes - sum(work) - sum(part.pause for part in parts)
    left -= sum(minutes for _, minutes in first + last)

    rows: list[Row] = []
    begins = start

    def add(what: str, minutes: int, part: Part | None = None, questions: int = 0) -> None:
        nonlocal begins
        rows.append(Row(week, begins, minutes=minutes, what=what, part=part, questions=questions))
        begins += minutes

    for what, minutes in first:
        add(what, minutes)
    for part, minutes, questions in zip(parts, work, _shared_out(left, work), strict=True):
        title = title_of(read(part.notebook))
        add(title, minutes + questions, part=part, questions=questions)
        if part.pause:
            add("lunch" if part.pause >= 45 else "break", part.pause)
    for what, minutes in last:
        add(what, minutes)
    return rows


def quiz_of(route: Route) -> tuple[Question, ...]:
    """Return the questions before and after a route."""
    return questions_about([route.name])


def quiz_call(route: Route, when: str) -> str:
    """Return the call that asks the questions: ``quiz("before", about="a_day")``."""
    return f'quiz("{when}")' if route.weekly else f'quiz("{when}", about="{route.name}")'


def clock(minutes: int) -> str:
    """Return minutes after midnight as ``9:05``."""
    return f"{minutes // 60 % 24}:{minutes % 60:02}"


def in_short(route: Route) -> str:
    """Return a timetable in a line, for INSTRUCTOR.md."""
    rows = timetable(route)
    if route.weekly:
        around = [f"{row.what} in week {row.week}" for row in rows if row.part is None]
        return f"{route.minutes} minutes a week; {', '.join(around)}"
    told = []
    for row in rows:
        name = row.part.notebook if row.part else row.what
        told.append(f"{clock(row.begins)} {name}")
    told.append(f"{clock(rows[0].begins + route.minutes)} end")
    return ", ".join(told)


def page(routes: Sequence[Route] = ROUTES, start: int = 9 * 60) -> str:
    """Return the routes in Markdown."""
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
        reading, solving = map(sum, zip(*map(minutes_of, route.parts), strict=True))
        at_home = " at home" if route.weekly else ""
        questions = sum(row.questions for row in rows)
        lines += [
            f"## {route.title}",
            "",
            (
                f"People can {'; '.join(goals(route))}. {reading} minutes of notebooks, {solving}"
                f" of exercises{at_home}, {questions} for questions; up to {ranks_of(route)} ranks"
                f" at once for each person. `{quiz_call(route, 'before')}` asks"
                f" {len(quiz_of(route))} questions."
            ),
            "",
            "| from | notebook | sections | minutes | exercises | minutes | questions |",
            "|---|---|---|---|---|---|---|",
            *map(_line, rows),
        ]
        if not route.weekly:
            lines.append(f"| {clock(start + route.minutes)} | end | | | | | |")
        lines += ["", f"Skip: {route.skipped}.", ""]
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row.part is None:
        return f"| {row.when} | {row.what} | | {row.minutes} | | | |"
    reading, solving = minutes_of(row.part)
    titles = "all"
    if row.part.sections:
        titles = "; ".join(section.title for section in chosen(row.part))
    names = "all"
    if exercises_in(row.part) != exercises_of(row.part.notebook):
        names = ", ".join(f"`{name}`" for name in row.part.exercises)
    link = f"[{row.part.notebook}](../notebooks/{path_of(row.part.notebook).name})"
    cells = (row.when, link, titles, reading, names, solving or "", row.questions)
    return f"| {' | '.join(map(str, cells))} |"


def asked_for(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[Route], int]:
    """Return the arguments of the command line, the routes, and the minute at which they start.

    A wrong command line ends the process with a sentence.
    """
    known = ", ".join(each.name for each in ROUTES)
    parser.add_argument("--route", metavar="NAME", help=f"one of {known}; else all")
    parser.add_argument(
        "--start",
        default="9:00",
        metavar="H:MM",
        help="when a meeting begins (default: %(default)s)",
    )
    args = parser.parse_args()
    try:
        routes = [route(args.route)] if args.route else [*ROUTES]
        return args, routes, _minute(args.start)
    except ValueError as e:
        sys.exit(f"{e}.")


def _minute(text: str) -> int:
    if not (found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text)):
        raise ValueError(f"--start is {text!r}, and not a time such as 9:00 or 13:30")
    return 60 * int(found[1]) + int(found[2])


if __name__ == "__main__":
    _, routes, start = asked_for(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    print(page(routes, start))
