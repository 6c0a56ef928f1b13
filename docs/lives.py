"""Pictures of ARCHITECTURE.md: the rooms, the arrows between them, and four lives.

An arrow is an import. `make images` draws the pictures.
"""

import ast
from functools import cache
from pathlib import Path

from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.sketch import SMALL, Sketch, wrapped
from course_pp.show.wording import listed

PACKAGE = Path(chart.__file__).resolve().parents[1]
# The modules that a thing passes, and the work of each.
LIVES = {
    "schedule": (
        ("schedule/catalogue.py", "build: a name and sizes become a value"),
        ("schedule/legality.py", "check: can it run? if not, why not"),
        ("schedule/simulation.py", "simulate: costs make a timeline of it"),
        ("show/timelines.py", "timeline: draw it, predicted or measured"),
        ("runtime/messages.py", "which message goes where, for each rank"),
        ("runtime/recorder.py", "measure: again a timeline"),
    ),
    "batch": (
        ("training/feed.py", "the next batch, and where in the data it is"),
        ("training/trainer.py", "one step: batch, gradient, clip, update"),
        ("training/engines.py", "parallel or runtime, made alike"),
        ("parallel/batch.py", "does it fit? cut into microbatches"),
        ("parallel/pipeline.py", "torch runs the schedule, the loss is everyone's"),
        ("parallel/clipping.py", "one norm for the whole model"),
    ),
    "tensor": (
        ("runtime/stage.py", "forward: kept with its input until backward"),
        ("runtime/payload.py", "as bytes: shape and dtype go before"),
        ("runtime/wire.py", "send, without waiting"),
        ("runtime/mailbox.py", "receive, on the next rank"),
        ("runtime/executor.py", "the rank's next action that needs it"),
        ("step/ties.py", "in the end: gradients of tied weights summed"),
    ),
    "cell": (
        ("launch/ranks.py", "on_ranks(n, fn): called in a notebook's cell"),
        ("launch/where.py", "here, in a Slurm job, or in a new one"),
        ("launch/channel.py", "the function, by value"),
        ("launch/fork_server.py", "fork n ranks from a process that has torch"),
        ("launch/watch.py", "in each rank: answers who waits for whom"),
        ("launch/crew.py", "n results, or one error that says why"),
    ),
}
_FIRST = (
    "schedule",
    "step",
    "model",
    "launch",
    "show",
    "runtime",
    "parallel",
    "training",
    "notebook",
    "doctor",
    "exercises",
)
ROOMS = (
    *_FIRST,
    *sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"base", *_FIRST}),
)
_WIDE, _HIGH, _GAP = 1.36, 0.82, 0.16


def life(of: str) -> ChartFigure:
    """Draw the modules that a schedule, a batch, a tensor or a cell passes, from left to right."""
    steps = LIVES[of]
    title = f"The life of a {of}, in {len(steps)} modules"
    sketch = Sketch(len(steps) * (_WIDE + _GAP) - _GAP, _HIGH + 0.3, title)
    for i, (module, what) in enumerate(steps):
        x = i * (_WIDE + _GAP)
        text = wrapped(what, _WIDE - 0.16, SMALL)
        sketch.text((x + _WIDE / 2, 0.1), module, SMALL, align="center", bold=True)
        sketch.box((x, 0.28), (_WIDE, _HIGH), text, fill="#E8F3FA", sizes=(SMALL,))
        if i:
            sketch.arrow((x - _GAP, 0.28 + _HIGH / 2), (x, 0.28 + _HIGH / 2))
    told = listed([f"{module}, {what}" for module, what in steps])
    return sketch.finish(f"{title}. In order: {told}.")


@cache
def imports() -> dict[str, set[str]]:
    """Return the rooms that each room imports, also inside functions and for type checking."""
    found: dict[str, set[str]] = {}
    for room in ROOMS:
        found[room] = set()
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for name in _imported(node):
                    package, _, rest = name.partition(".")
                    other = rest.partition(".")[0]
                    if package == "course_pp" and other in ROOMS and other != room:
                        found[room].add(other)
    return found


def _imported(node: ast.AST) -> list[str]:
    """Return the dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "course_pp":
        return [f"course_pp.{alias.name}" for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def rooms() -> ChartFigure:
    """Draw a table of rooms with a dot where the row's room imports the column's."""
    cell = 0.58
    left = 1.0
    count = sum(map(len, imports().values()))
    alone = listed([room for room in ROOMS if not imports()[room]])
    title = f"{count} arrows between {len(ROOMS)} rooms; none leaves {alone}"
    sketch = Sketch(
        left + cell * len(ROOMS),
        0.4 + 0.3 * len(ROOMS),
        title,
        "row imports column; base, which all may import, is left out",
    )
    for i, room in enumerate(ROOMS):
        sketch.text((left + cell * (i + 0.5), 0.12), room, 7, align="center", bold=True)
        y = 0.28 + 0.3 * i
        sketch.text((left - 0.1, y + 0.15), room, SMALL, align="right", bold=True)
        for j, other in enumerate(ROOMS):
            dot = ""
            fill = "#DDDDDD" if room == other else "white"
            if other in imports()[room]:
                dot = "●"
                fill = chart.SKY_BLUE
            sketch.box((left + cell * j, y), (cell, 0.3), dot, fill=fill)
    told = []
    for room, found in imports().items():
        told.append(f"{room} imports {listed(sorted(found)) or 'none'}")
    return sketch.finish(f"{title}. {'; '.join(told)}.")
