"""Sheets of paper for a route: exercises for people, and solutions and mistakes for teachers.

    make handout ROUTE=a_day

Each of the two is one file in runs/handouts that needs nothing else. Print it from a browser, on A4
or Letter.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from as_html import after_a_guess, bare, figures, guessed, page, rendered, spoken, to_read
from out import folder_for
from routes import NOTEBOOKS, Route, exercises_in, route, sections_of

from course_pp.exercises.checking import judge
from course_pp.exercises.exercise import Exercise, number_of
from course_pp.exercises.wrong_answers import written, wrong_answers

OUT = NOTEBOOKS.parent / "runs" / "handouts"
MOST_MISTAKES = 10  # nobody reads more than that while a learner waits
MOST_LINES = 25  # lines to write on must fit on a page with the task
STYLE = """
@page { margin: 16mm 17mm }
html { font: 10.5pt/1.4 "DejaVu Sans", Verdana, sans-serif; color: #000; background: #fff }
body { max-width: 180mm; margin: 0 auto }
h1 { font-size: 17pt; margin: 0 } h2 { font-size: 12.5pt; margin: 0 } h3 { font-size: 10.5pt; margin: 3mm 0 1mm }
h1, h2, h3, .where { break-after: avoid }
article { border-top: 0.5pt solid #000; margin-top: 7mm; padding-top: 3mm }
p, ol { margin: 1.5mm 0; orphans: 3; widows: 3 }
.where, .seen { color: #444; font-size: 9pt }
pre, code { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 8.5pt }
pre { background: #f3f4f5; padding: 2mm; margin: 1.5mm 0; white-space: pre-wrap; break-inside: avoid }
img { max-width: 100%; max-height: 85mm; display: block; margin: 2mm 0; break-inside: avoid }
article:has(.line), .whole { break-inside: avoid }
pre:has(+ .line), pre + .line { break-after: avoid }
.line { height: 8mm; border-bottom: 0.5pt solid #999 }
table { border-collapse: collapse; width: 100% } tr { break-inside: avoid }
td { border: 0.5pt solid #999; padding: 1mm 2mm; vertical-align: top } td:first-child { width: 45% }
td pre { margin: 0; padding: 0 }
"""


def main() -> int:
    """Write both sheets of a route."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("route", nargs="?", default="", help="its name, as docs/routes.py has it")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the sheets")
    given = parser.parse_args()
    try:
        asked = route(given.route)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder_for(given.out)
    for kind, of_exercise in (("exercises", for_people), ("teacher", for_teachers)):
        path = given.out / f"{asked.name}_{kind}.html"
        path.write_text(sheet(asked, kind, of_exercise), encoding="utf-8")
        print(path)
    return 0


def sheet(asked: Route, kind: str, of_exercise: Callable[[Exercise], str]) -> str:
    """Return a page of its own with all exercises of a route."""
    exercises: list[Exercise] = []
    for part in asked.parts:
        exercises += exercises_in(part)
    title = f"Pipeline parallelism: {asked.title}"
    if kind == "teacher":
        title += ", for the teacher"
    minutes = sum(exercise.minutes for exercise in exercises)
    articles = "\n".join(f"<article>{of_exercise(exercise)}</article>" for exercise in exercises)
    head = f"<h1>{escape(title)}</h1><p>{len(exercises)} exercises, {minutes} minutes.</p>"
    return page(title, STYLE, f"<main>{head}\n{articles}\n</main>")


@dataclass(frozen=True)
class Task:
    """An exercise in its notebook: section, last output before it as HTML, statement, and stub."""

    section: str
    before: list[str]
    statement: str
    stub: str


def task_of(exercise: Exercise) -> Task:
    """Look an exercise up in its notebook. Raises ValueError if it is not there."""
    for section in sections_of(exercise.notebook):
        before: dict[str, str] = {}
        measured = False
        for cell, after in zip(section.cells, [*section.cells[1:], {}], strict=True):
            source = cell["source"]
            if cell["cell_type"] == "code":
                measured = guessed(cell)
                if shown := figures(cell):
                    before["figure"] = shown[-1]
                if to_read(cell):
                    before["code"] = code(bare(source))
                continue
            text, _, found = spoken(source).partition("### Exercise ")
            # A comment on a guess would tell its result, and folded text is a diagnosis.
            if measured:
                _, others = after_a_guess(text)
                text = "\n\n".join(others)
            text = re.sub(r"\A## [^\n]*|<details>.*?</details>", "", text, flags=re.S)
            before["text"] = rendered(text)
            measured = False
            heading, _, statement = found.partition("\n")
            if heading.startswith(f"{number_of(exercise)} "):
                shown = [before[kind] for kind in sorted(before)]
                return Task(section.title, shown, statement=statement, stub=after["source"])
            if found:
                before = {}
    raise ValueError(f"notebook {exercise.notebook} does not have the exercise {exercise.name}")


def heading(exercise: Exercise, section: str) -> str:
    """Return notebook, number, difficulty, minutes and section of an exercise."""
    name = f"{exercise.notebook}, exercise {number_of(exercise)}: {exercise.title}"
    return (
        f"<h2>{escape(name)} {exercise.stars} {exercise.minutes} minutes</h2>"
        f'<p class="where">Section <em>{escape(section)}</em></p>'
    )


def for_people(exercise: Exercise) -> str:
    """Return the exercise with the figure and code that it needs, and lines to write on."""
    task = task_of(exercise)
    stub = re.sub(r"  # noqa[^\n]*|\n    raise NotImplementedError\n.*", "", task.stub, flags=re.S)
    lines = '<div class="line"></div>' * min(2 + len(exercise.source.splitlines()), MOST_LINES)
    to_do = f'<div class="whole">{rendered(task.statement)}{code(stub)}{lines}</div>'
    return "".join([heading(exercise, task.section), *task.before, to_do])


def for_teachers(exercise: Exercise) -> str:
    """Return task, tested solution, common wrong answers with their messages, and hints."""
    task = task_of(exercise)
    rows = ""
    told: set[str] = set()
    print(f"{exercise.notebook} {exercise.name}: running its check on common mistakes", flush=True)
    for wrong in wrong_answers(exercise)[:MOST_MISTAKES]:
        verdict = judge(exercise, wrong)
        if verdict.cause and verdict.cause not in told:
            told.add(verdict.cause)
            seen = f'<div class="seen">{rendered(verdict.symptom)}</div>'
            answer = code(written(exercise, wrong))
            rows += f"<tr><td>{answer}</td><td>{rendered(verdict.cause)}{seen}</td></tr>"
    hints = "".join(f"<li>{rendered(hint)}</li>" for hint in exercise.hints)
    question = f"{heading(exercise, task.section)}{rendered(task.statement)}"
    return (
        f'<div class="whole">{question}<h3>Solution</h3>{code(exercise.source)}</div>'
        f"<h3>Common mistakes, and what to say</h3><table>{rows}</table>"
        f"<h3>Hints</h3><ol>{hints}</ol>"
    )


def code(source: str) -> str:
    return f"<pre><code>{escape(source)}</code></pre>"


if __name__ == "__main__":
    sys.exit(main())
