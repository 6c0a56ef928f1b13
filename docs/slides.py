"""Slides of each route, made of the notebooks' own headings, questions, results and code: make
slides ROUTE=a_day

Each deck is one file in runs/slides that needs nothing else. Space, arrow keys and Page Down go on;
N unfolds what the speaker says, here and on paper.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import routes
from as_html import (
    after_a_guess,
    bare,
    blocks,
    figures,
    guessed,
    page,
    printed,
    rendered,
    spoken,
    to_read,
    to_see,
)
from out import folder_for
from routes import Part, Route, Row, Section, clock

from course_pp.exercises.exercise import exercises_of

OUT = routes.NOTEBOOKS.parent / "runs" / "slides"
LINES = 22  # of code that fit on a slide of 720 pixels, none smaller than 16
WIDTH = 86  # letters that fit beside each other on one of 1,024
# What %torchrun says first on a login node of a cluster, where the notebooks' own run says that
# ranks run here.
ON_A_CLUSTER = """\
Ranks run in a Slurm job of their own: 1 node, {n} GPUs.
$ srun -p gpu -N 1 -n 1 -c {n} --gres=gpu:{n} -t 6 torchrun --nproc-per-node={n} …"""
STYLE = """
html { scroll-snap-type: y mandatory; font: max(16px, min(2.5vh, 1.9vw))/1.45 "DejaVu Sans", Verdana, sans-serif }
html { color: #000; background: #fff }
body { margin: 0 }
section { box-sizing: border-box; min-height: 100vh; padding: 3vh 4vw 2vh; scroll-snap-align: start; display: grid;
  grid-template: auto 1fr auto / minmax(0, 1fr); justify-items: center; position: relative }
header, footer { width: 100%; display: flex; justify-content: space-between; gap: 2em; align-items: baseline }
h1, h2 { margin: 0; font-size: 1.4rem; color: #005a8c }
h1 { font-size: 2rem }
.minutes, .home { color: #444; white-space: nowrap }
footer { color: #555; font-size: .8rem }
.body { align-self: center; width: min(100%, 50rem); margin: 1vh 0 }
.short { font-size: 1.3rem }
.middle { font-size: 1.15rem }
.wide { width: 100% }
img { display: block; margin: auto; max-width: 100%; max-height: 76vh; object-fit: contain }
pre { background: #f3f4f5; padding: .7rem; margin: .5rem auto; font-size: max(16px, .85rem); line-height: 1.35;
  white-space: pre-wrap; overflow-wrap: anywhere }
.few, .short pre:not([class]) { font-size: 1.05rem }
code, pre { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace }
:not(pre) > code { font-size: max(16px, .92em) }
p, ul, ol { margin: .5em 0 }
.sections { list-style: none; padding: 0 }
table { border-collapse: collapse; margin: .5em auto }
td, th { padding: .15em .8em; border-bottom: 1px solid #ccc; text-align: left }
.timetable { font-size: max(16px, .9rem); line-height: 1.25 } .timetable td { padding: 0 1em }
.notes { position: absolute; left: 0; right: 0; bottom: 0; padding: 0 4vw 1vh; font-size: max(16px, .85rem) }
.notes summary { text-align: center; color: #555; font-size: .8rem; width: 6em; margin-left: 62%; line-height: 2.6vh }
.notes[open] { background: #fffbe6; border-top: 2px solid #c9a400; max-height: 55vh; overflow: auto }
@media print { section { break-after: page } .notes { position: static; max-height: none !important; width: 92vw }
  .notes:not([open]) { display: none } }
"""
SCRIPT = """
const all = [...document.querySelectorAll("section")];
const now = () => all.findIndex(each => each.getBoundingClientRect().bottom > innerHeight / 2);
const steps = {" ": 1, ArrowRight: 1, ArrowDown: 1, PageDown: 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1};
steps.Home = -Infinity; steps.End = Infinity;
// After a click of the mouse, which has a detail, the keyboard is the slides' again.
addEventListener("click", event => { if (event.detail) event.target.closest("summary")?.blur(); });
addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.target.closest("summary") && [" ", "Enter"].includes(event.key)) return;
  if (event.key.toLowerCase() === "n") {
    const notes = [...document.querySelectorAll(".notes")], open = !notes.some(each => each.open);
    notes.forEach(each => { each.open = open; });
  }
  const step = event.key === " " && event.shiftKey ? -1 : steps[event.key];
  if (!step) return;
  event.preventDefault();
  all[Math.min(all.length - 1, Math.max(0, now() + step))].scrollIntoView();
});
"""


@dataclass
class Slide:
    """One screen: heading and body in HTML, and in Markdown what the speaker says.

    Attributes:
        minutes: of the section or exercise that begins here.
        exercise: whether that is an exercise.
        wide: whether the body takes the width of the screen; letters of a short text are larger.
    """

    heading: str
    body: str
    minutes: int = 0
    exercise: bool = False
    wide: bool = False
    notes: list[str] = field(default_factory=list)


def main() -> int:
    """Write one deck a route."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the decks")
    args, chosen, start = routes.asked_for(parser)
    folder_for(args.out)
    for route in chosen:
        path = args.out / f"{route.name}.html"
        path.write_text(deck(route, start), encoding="utf-8")
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


def deck(route: Route, start: int = 9 * 60) -> str:
    """A page of its own with all slides of a route."""
    rows = routes.timetable(route, start)
    shown = [_html(_first(route, rows), "")]
    for row in rows:
        foot = (
            f"{row.when} to {clock(row.begins + row.minutes)} ·"
            f" {escape(row.what.partition(':')[0])}"
        )
        shown += [_html(slide, foot, at_home=row.week > 0) for slide in _slides_of_row(row, route)]
    pages = "\n".join(
        each.format(number=f"{i} / {len(shown)}") for i, each in enumerate(shown, start=1)
    )
    body = f"<main>\n{pages}\n</main><script>{SCRIPT}</script>"
    return page(f"Pipeline parallelism: {route.title}", STYLE, body)


def _html(slide: Slide, foot: str, at_home: bool = False) -> str:
    """A slide, in which the number is left open."""
    home = at_home and slide.exercise
    told = f"{slide.minutes} minute{'s' * (slide.minutes > 1)}{' at home' * home}"
    minutes = (
        f'<span class="{"home" if home else "minutes"}">{told}</span>' if slide.minutes else ""
    )
    length = len(re.sub("<[^>]+>", "", slide.body))
    kind = "wide" if slide.wide else "short" if length < 500 else "middle" if length < 800 else ""
    notes = rendered("\n\n".join(slide.notes))
    folded = f'<details class="notes"><summary>notes</summary>{notes}</details>' if notes else ""
    inner = f'<header>{slide.heading}{minutes}</header><div class="body {kind}">{slide.body}</div>'
    inner = inner.replace("{", "{{").replace("}", "}}")
    folded = folded.replace("{", "{{").replace("}", "}}")
    return f"<section>{inner}<footer><span>{foot}</span><span>{{number}}</span></footer>{folded}</section>"


def _first(route: Route, rows: list[Row]) -> Slide:
    lines = [
        (row.when, row.what, ", ".join(row.part.exercises) if row.part and not route.weekly else "")
        for row in rows
    ]
    if not route.weekly:
        lines.append((clock(rows[-1].begins + rows[-1].minutes), "end", ""))
    table = "".join(
        f"<tr><td>{when}</td><td>{what}</td><td><code>{names}</code></td></tr>"
        for when, what, names in lines
    )
    goals = "".join(f"<li>{goal}</li>" for goal in routes.goals(route))
    body = (
        f"<p>{escape(route.title)}. Afterwards you can</p><ul>{goals}</ul><table"
        f' class="timetable">{table}</table>'
    )
    return Slide("<h1>Pipeline parallelism</h1>", body)


def _slides_of_row(row: Row, route: Route) -> Iterator[Slide]:
    heading, end = (
        f"<h2>{escape(row.what[0].upper() + row.what[1:])}</h2>",
        clock(row.begins + row.minutes),
    )
    if row.part is None:
        call = routes.quiz_call(route, row.what.split()[-1])
        told = _AROUND.get(row.what.split()[0], "Back at {end}.").format(end=end, call=call)
        yield Slide(heading, rendered(told), row.minutes)
        return
    reading, solving = routes.minutes_of(row.part)
    chosen = routes.chosen(row.part)
    sections = "".join(f"<li>{escape(each.title)}</li>" for each in chosen)
    told = f"{reading} minutes, {solving} more for exercises{' at home' * route.weekly}"
    told += f", {row.questions} for questions" if row.questions else ""
    room, home = routes.exercises_in(row.part), routes.left_for_home(row.part)
    todo = (("At home" if route.weekly else "Exercises", room), ("At home", home))
    named = " ".join(
        f"{where}: {', '.join(f'`{each.name}`' for each in them)}." for where, them in todo if them
    )
    yield Slide(heading, f'<ul class="sections">{sections}</ul><p>{told}.</p>{rendered(named)}')
    for section in chosen:
        yield from slides_of(section, row.part)
    if row.questions:
        yield Slide(heading, f"<p>Questions, until {end}.</p>", row.questions)


_AROUND = {
    "set-up": (
        """\
Open your own copy and run the first cell. In the course's folder:

    make lab

On a login node that all share, in a folder of your own:

    PATH_TO/.venv/bin/python -m course_pp lab --folder my_course

Red? `make doctor`, or `PATH_TO/.venv/bin/python -m course_pp doctor`, says why."""
    ),
    "quiz": (
        """\
In a new cell:

    from course_pp.exercises import quiz
    {call}"""
    ),
    "hand": (
        """\
In a new cell:

    from course_pp.exercises import progress
    progress().to_json(".")

It writes exercises and quiz, and no name, to `ID.json` beside the notebook: send or upload that file. If the teacher
names a folder, write its path in place of the dot.

Then fill in the form."""
    ),
}


def slides_of(section: Section, part: Part) -> list[Slide]:
    """A question, its result, an exercise, a figure, code to read: a slide each. The prose between is the speaker's."""
    heading, clinic = f"<h2>{escape(section.title)}</h2>", section.title == "Bug clinic"
    slides: list[Slide] = []
    waiting: list[str] = []  # prose that no slide has yet
    lead: Slide | None = None  # a sentence of a clinic above code to read
    result: Slide | None = None  # of a guess, until the notebook has said what to think of it

    def add(slide: Slide) -> Slide:
        if not slides and slide.exercise and waiting:
            slides.append(Slide(heading, rendered(waiting.pop(0))))
        (slides[-1] if slides else slide).notes.extend(waiting)
        waiting.clear()
        slides.append(slide)
        return slide

    for cell, after in zip(section.cells, [*section.cells[1:], {"source": ""}], strict=True):
        if cell["cell_type"] == "code":
            for i, piece in enumerate(_to_read(cell)):
                slide = lead if lead and i == 0 else add(Slide(heading, ""))
                slide.body, slide.wide = slide.body + _pre(piece), True
            lead = None
            shown = [add(Slide(heading, body, wide=wide)) for body, wide in _shown(cell)]
            result = (
                [each for each in shown if each.body.startswith("<pre")][-1]
                if guessed(cell)
                else None
            )
            continue
        source, lead = spoken(cell["source"]), None
        told, others = after_a_guess(source) if result else ([], blocks(source, joined=clinic))
        if result:
            result.body += rendered("\n\n".join(told))
        result = None
        for block in others:
            if section.title == "Recap":
                if block.startswith("**References**"):
                    break
                waiting += [] if block.startswith("#") else [block]
            elif found := re.match(r"### Exercise (\d+)(.*) · \d+ minutes\n", block):
                exercise = exercises_of(part.notebook)[int(found[1]) - 1]
                if exercise in routes.exercises_in(part):
                    title = f"<h2>Exercise {found[1]}{escape(found[2])}</h2>"
                    stub = re.search(
                        rf"^def {exercise.name}\(.*?\):$", after["source"], re.S | re.M
                    )[0]
                    body = rendered(block[found.end() :]) + _pre(stub)
                    add(Slide(title, body, exercise.minutes, exercise=True))
            elif clinic and not block.startswith(("#", "<details>")):
                if block is others[0] and len(block) < 2 * WIDTH and slides:
                    slides[-1].body += rendered(block)  # the question below what patients put out
                    continue
                slide = add(Slide(heading, rendered(block)))
                lead = slide if len(block) < WIDTH else None
            elif block.startswith("**Predict") or to_see(block):
                add(Slide(heading, rendered(f"{waiting.pop()}\n\n{block}" if waiting else block)))
            elif not block.startswith("#"):
                waiting.append(re.sub(r"</?details>|<summary>.*?</summary>", "", block))
    if not slides:
        add(
            Slide(
                heading, rendered("\n\n".join(waiting if section.title == "Recap" else waiting[:1]))
            )
        )
    else:
        slides[-1].notes += waiting
    next(each for each in slides if not each.exercise).minutes = section.minutes
    return slides


def _to_read(cell: dict) -> list[str]:
    """The code of a cell that is there to be read, in pieces."""
    return _pieces(bare(cell["source"])) if to_read(cell) else []


def _shown(cell: dict) -> Iterator[tuple[str, bool]]:
    """Bodies of slides of what a cell put out, and whether they are wide."""
    source, said = bare(cell["source"]), printed(cell).replace("; you have not guessed", "").strip()
    # beside a guess to write down, a line
    asks_only = source != cell["source"] and "\n" not in source
    if "check(" in cell["source"] or (asks_only and not guessed(cell)):
        return
    if command := re.search(r"^%torchrun --nproc-per-node=(\d).*", source, re.M | re.S):
        here = "\n".join(said[said.find("Ranks run") :].splitlines()[:3])
        there = ON_A_CLUSTER.format(n=command[1])
        yield _pre(command[0], f"# here it says\n{here}", f"# on a cluster it says\n{there}"), True
    if (
        said
        and not (command or guessed(cell) or _to_read(cell))
        and _height(f"{source}\n{said}") <= LINES
    ):
        yield _pre(source, said), True
    elif said and (guessed(cell) or not command):
        yield from ((_pre(piece), False) for piece in _pieces(said))
    for output in cell.get("outputs", ()):
        if table := output.get("data", {}).get("text/markdown"):
            yield rendered("".join(table)), True
    yield from ((picture, True) for picture in figures(cell))


def _height(text: str) -> int:
    return sum(1 + len(line) // WIDTH for line in text.split("\n"))


def _pre(*texts: str) -> str:
    lines = "\n".join(texts).split("\n")
    kind = "few" if len(lines) <= 14 and max(map(len, lines)) <= 70 else ""
    return "".join(f'<pre class="{kind}"><code>{escape(text)}</code></pre>' for text in texts)


def _pieces(text: str) -> list[str]:
    """Lines in pieces that fit on a slide, cut before the least indented line nearest to the middle."""
    lines = text.strip("\n").split("\n")
    if _height(text) <= LINES or len(lines) < 4:
        return ["\n".join(lines)]
    places = range(len(lines) // 4, 3 * len(lines) // 4)
    cut = min(
        places, key=lambda i: (len(lines[i]) - len(lines[i].lstrip()), abs(i - len(lines) / 2))
    )
    return _pieces("\n".join(lines[:cut])) + _pieces("\n".join(lines[cut:]))


if __name__ == "__main__":
    sys.exit(main())
