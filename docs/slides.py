"""Slides of each route, made of the notebooks' headings, questions, results and code.

    make slides ROUTE=a_day

Each deck is one file in runs/slides that needs nothing else. Space, arrow keys and Page Down turn
the slides; N unfolds the speaker's notes, on the screen and on paper.
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
# Lines of code that fit on a slide 720 pixels high, and letters on one 1,024 wide, 16 pixels each.
LINES = 22
WIDTH = 86
# The first lines of %torchrun on a login node of a cluster. The notebooks ran on one machine.
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
    """One screen.

    Attributes:
        heading, body: HTML.
        minutes: minutes of the section or exercise that begins here.
        exercise: whether the slide is an exercise.
        wide: whether the body takes the width of the screen. Otherwise a short text has large
            letters.
        notes: paragraphs for the speaker, in Markdown.
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
    """Return a page of its own with all slides of a route."""
    rows = routes.timetable(route, start)
    slides = [(_first(route, rows), "", False)]
    for row in rows:
        until = clock(row.begins + row.minutes)
        foot = f"{row.when} to {until} · {escape(row.what.partition(':')[0])}"
        for slide in _slides_of_row(row, route):
            slides.append((slide, foot, row.week > 0))

    shown = []
    for i, (slide, foot, at_home) in enumerate(slides, start=1):
        shown.append(_html(slide, foot, number=f"{i} / {len(slides)}", at_home=at_home))
    pages = "\n".join(shown)
    body = f"<main>\n{pages}\n</main><script>{SCRIPT}</script>"
    return page(f"Pipeline parallelism: {route.title}", STYLE, body)


def _html(slide: Slide, foot: str, number: str, at_home: bool) -> str:
    home = at_home and slide.exercise
    minutes = ""
    if slide.minutes:
        told = "1 minute" if slide.minutes == 1 else f"{slide.minutes} minutes"
        minutes = f'<span class="minutes">{told}</span>'
        if home:
            minutes = f'<span class="home">{told} at home</span>'

    # The fewer letters a slide has, the larger they are.
    length = len(re.sub("<[^>]+>", "", slide.body))
    kind = ""
    if slide.wide:
        kind = "wide"
    elif length < 500:
        kind = "short"
    elif length < 800:
        kind = "middle"
    header = f"<header>{slide.heading}{minutes}</header>"
    body = f'<div class="body {kind}">{slide.body}</div>'
    footer = f"<footer><span>{foot}</span><span>{number}</span></footer>"
    notes = rendered("\n\n".join(slide.notes))
    if notes:
        notes = f'<details class="notes"><summary>notes</summary>{notes}</details>'
    return f"<section>{header}{body}{footer}{notes}</section>"


def _first(route: Route, rows: list[Row]) -> Slide:
    lines = []
    for row in rows:
        at_work = row.part is not None and not route.weekly
        lines.append((row.when, row.what, ", ".join(row.part.exercises) if at_work else ""))
    if not route.weekly:
        lines.append((clock(rows[-1].begins + rows[-1].minutes), "end", ""))
    table = ""
    for when, what, names in lines:
        table += f"<tr><td>{when}</td><td>{what}</td><td><code>{names}</code></td></tr>"
    goals = "".join(f"<li>{goal}</li>" for goal in routes.goals(route))
    body = f"<p>{escape(route.title)}. Afterwards you can</p><ul>{goals}</ul>"
    body += f'<table class="timetable">{table}</table>'
    return Slide("<h1>Pipeline parallelism</h1>", body)


def _slides_of_row(row: Row, route: Route) -> Iterator[Slide]:
    heading = f"<h2>{escape(row.what[0].upper() + row.what[1:])}</h2>"
    end = clock(row.begins + row.minutes)
    if row.part is None:
        call = routes.quiz_call(route, row.what.split()[-1])
        told = _AROUND.get(row.what.split()[0], "Back at {end}.").format(end=end, call=call)
        yield Slide(heading, rendered(told), row.minutes)
        return
    reading, solving = routes.minutes_of(row.part)
    chosen = routes.chosen(row.part)
    sections = "".join(f"<li>{escape(each.title)}</li>" for each in chosen)
    told = f"{reading} minutes, {solving} more for exercises"
    if route.weekly:
        told += " at home"
    if row.questions:
        told += f", {row.questions} for questions"
    named = []
    if now := routes.exercises_in(row.part):
        where = "At home" if route.weekly else "Exercises"
        named.append(f"{where}: {', '.join(f'`{each.name}`' for each in now)}.")
    if later := routes.left_for_home(row.part):
        named.append(f"At home: {', '.join(f'`{each.name}`' for each in later)}.")
    exercises = rendered(" ".join(named))
    yield Slide(heading, f'<ul class="sections">{sections}</ul><p>{told}.</p>{exercises}')
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

It writes exercises and quiz, and no name, to `ID.json` beside the notebook: send or upload that
file. If the teacher names a folder, write its path in place of the dot.

Then fill in the form."""
    ),
}


def slides_of(section: Section, part: Part) -> list[Slide]:
    """Return a slide for each question, result, exercise, figure and piece of code to read.

    The prose between them becomes the speaker's notes.
    """
    heading = f"<h2>{escape(section.title)}</h2>"
    clinic = section.title == "Bug clinic"
    recap = section.title == "Recap"
    slides: list[Slide] = []
    waiting: list[str] = []  # paragraphs that no slide has yet
    lead: Slide | None = None  # a slide of a clinic with one sentence, to which code will be added
    result: Slide | None = None  # the result of a guess, to which the notebook's comment is added

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
                slide.body += _pre(piece)
                slide.wide = True
            lead = None
            result = None
            for body, wide in _shown(cell):
                slide = add(Slide(heading, body, wide=wide))
                if guessed(cell) and body.startswith("<pre"):
                    result = slide
            continue
        lead = None
        source = spoken(cell["source"])
        if result:
            told, others = after_a_guess(source)
            result.body += rendered("\n\n".join(told))
            result = None
        else:
            others = blocks(source, joined=clinic)
        for block in others:
            if recap:
                if block.startswith("**References**"):
                    break
                if not block.startswith("#"):
                    waiting.append(block)
            elif found := re.match(r"### Exercise (\d+)(.*) · \d+ minutes\n", block):
                exercise = exercises_of(part.notebook)[int(found[1]) - 1]
                if exercise in routes.exercises_in(part):
                    title = f"<h2>Exercise {found[1]}{escape(found[2])}</h2>"
                    head = rf"^def {exercise.name}\(.*?\):$"
                    stub = re.search(head, after["source"], re.S | re.M)[0]
                    body = rendered(block[found.end() :]) + _pre(stub)
                    add(Slide(title, body, exercise.minutes, exercise=True))
            elif clinic and not block.startswith(("#", "<details>")):
                # A short question stands below the output of the cell that it asks about.
                if block is others[0] and len(block) < 2 * WIDTH and slides:
                    slides[-1].body += rendered(block)
                    continue
                slide = add(Slide(heading, rendered(block)))
                lead = slide if len(block) < WIDTH else None
            elif block.startswith("**Predict") or to_see(block):
                add(Slide(heading, rendered(f"{waiting.pop()}\n\n{block}" if waiting else block)))
            elif not block.startswith("#"):
                waiting.append(re.sub(r"</?details>|<summary>.*?</summary>", "", block))
    if not slides:
        add(Slide(heading, rendered("\n\n".join(waiting if recap else waiting[:1]))))
    else:
        slides[-1].notes += waiting
    next(each for each in slides if not each.exercise).minutes = section.minutes
    return slides


def _to_read(cell: dict) -> list[str]:
    """Return the code of a cell in pieces; none if the code is not there to be read."""
    return _pieces(bare(cell["source"])) if to_read(cell) else []


def _shown(cell: dict) -> Iterator[tuple[str, bool]]:
    """Yield (body, wide) of the slides for a cell's output."""
    source = bare(cell["source"])
    said = printed(cell).replace("; you have not guessed", "").strip()
    # A cell may only ask for a guess, in one line beside the place to write it.
    asks_only = source != cell["source"] and "\n" not in source
    if "check(" in cell["source"] or (asks_only and not guessed(cell)):
        return
    command = re.search(r"^%torchrun --nproc-per-node=(\d).*", source, re.M | re.S)
    if command:
        here = "\n".join(said[said.find("Ranks run") :].splitlines()[:3])
        there = ON_A_CLUSTER.format(n=command[1])
        yield _pre(command[0], f"# here it says\n{here}", f"# on a cluster it says\n{there}"), True
    stands_alone = not (command or guessed(cell) or _to_read(cell))
    if said and stands_alone and _height(f"{source}\n{said}") <= LINES:
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
    """Return the text in pieces that fit on a slide.

    A piece is cut before the least indented line, and of those before the nearest to the middle.
    """
    lines = text.strip("\n").split("\n")
    if _height(text) <= LINES or len(lines) < 4:
        return ["\n".join(lines)]

    def badness(i: int) -> tuple[int, float]:
        indent = len(lines[i]) - len(lines[i].lstrip())
        return indent, abs(i - len(lines) / 2)

    cut = min(range(len(lines) // 4, 3 * len(lines) // 4), key=badness)
    return _pieces("\n".join(lines[:cut])) + _pieces("\n".join(lines[cut:]))


if __name__ == "__main__":
    sys.exit(main())
