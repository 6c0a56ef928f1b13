"""Pictures of ARCHITECTURE.md: rooms, the arrows that imports make, and four lives. `make images` draws them."""

import ast
from functools import cache
from pathlib import Path

from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.sketch import SMALL, Sketch, wrapped
from course_pp.show.wording import listed

PACKAGE = Path(chart.__file__).resolve().parents[1]
# Through which modules it goes, and what each does with it.
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
    """The modules through which a schedule, a batch, a tensor or a cell goes, from left to right."""
    steps = LIVES[of]
    title = f"The life of a {of}, in {len(steps)} modules"
    sketch = Sketch(len(steps) * (_WIDE + _GAP) - _GAP, _HIGH + 0.3, title)
    for i, (module, what) in enumerate(steps):
        x = i * (_WIDE + _GAP)
        sketch.text((x + _WIDE / 2, 0.1), module, SMALL, align="center", bold=True)
        sketch.box(
            (x, 0.28),
            (_WIDE, _HIGH),
            wrapped(what, _WIDE - 0.16, SMALL),
            fill="#E8F3FA",
            sizes=(SMALL,),
        )
        if i:
            sketch.arrow((x - _GAP, 0.28 + _HIGH / 2), (x, 0.28 + _HIGH / 2))
    told = listed([f"{module}, {what}" for module, what in steps])
    return sketch.finish(f"{title}. In order: {told}.")


@cache
def imports() -> dict[str, set[str]]:
    """Which of the rooms each room imports, read from its source, functions and type checking included."""
    found: dict[str, set[str]] = {}
    for room in ROOMS:
        found[room] = set()
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if isinstance(node, ast.ImportFrom) and node.module == "course_pp":
                    names = [f"course_pp.{alias.name}" for alias in node.names]
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                found[room] |= {
                    name.split(".")[1] for name in names if name.startswith("course_pp.")
                } & set(ROOMS)
        found[room] -= {room}
    return found


def rooms() -> ChartFigure:
    """A table of rooms: a dot where the room of the row imports that of the column."""
    cell, left = 0.58, 1.0
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
            is_there = other in imports()[room]
            fill = chart.SKY_BLUE if is_there else ("#DDDDDD" if room == other else "white")
            sketch.box((left + cell * j, y), (cell, 0.3), "●" if is_there else "", fill=fill)
    told = [
        f"{room} imports {listed(sorted(found)) if found else 'none'}"
        for room, found in imports().items()
    ]
    return sketch.finish(f"{title}. {'; '.join(told)}.")
