"""The cheat sheet: one page with eight schedules, their closed forms, and the calls that run them.

`make images` draws it.
"""

from fractions import Fraction

from matplotlib.patches import Rectangle

from course_pp.schedule import Costs, build, simulate, theory
from course_pp.show.chart import IDLE_GREY, TEXT_GREY, ChartFigure
from course_pp.show.timelines import LOOKS
from course_pp.show.wording import listed

SHOWN = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "dualpipe_v")
RANKS = 4
MICROBATCHES = 8
_WIDTH, _HEIGHT = 11.69, 8.27  # A4
_TEXT = 7.3
WORDS = (
    (
        "Letters",
        (
            "F forward, B backward, I input gradient, W weight gradient; p ranks, m microbatches, v"
            " stages a rank; "
        ),
    ),
    (
        "",
        (
            "f, B, b, w their times on one stage (B = b + w), L a message. A black edge: a later"
            " stage of the rank."
        ),
    ),
    (
        "Bubble",
        (
            "waiting / (ranks × step). About half of it: twice the microbatches, or twice the"
            " stages a rank."
        ),
    ),
    (
        "Memory",
        (
            "activations held: of one rank's share of the model, for one microbatch, on the rank"
            " that holds most."
        ),
    ),
    (
        "Order",
        (
            "stage → tensor parallel → activation checkpointing → FSDP2 → optimizer; one clipped"
            " norm at the end."
        ),
    ),
    ("Mesh", "pp, dp_replicate, dp_shard, tp from outside in: tp inside a node, pp across nodes."),
    (
        "Hangs",
        (
            "two sends that face each other: begin both, or hand them over together"
            " (batch_isend_irecv)."
        ),
    ),
    (
        "Look",
        (
            'show.timeline(simulate(build("1f1b", 4, 8)))  or  python -m course_pp schedule 1f1b'
            " --ranks 4"
        ),
    ),
    ("Run", "torchrun --standalone --nproc-per-node=2 source_code/train.py --pp 2 --schedule 1f1b"),
)


def draw() -> ChartFigure:
    """Draw the sheet, A4 across."""
    figure = ChartFigure(_WIDTH, _HEIGHT)
    figure.text(0.03, 0.965, "Pipeline schedules on one page", size=15, va="top", weight="bold")
    note = (
        f"{RANKS} ranks, {MICROBATCHES} microbatches, one step; b = w = f. Every number is"
        " simulated by course_pp."
    )
    figure.text(0.97, 0.96, note, size=_TEXT + 1, va="top", ha="right", color=TEXT_GREY)
    told = [_draw_schedule(figure, name, *divmod(i, 2)) for i, name in enumerate(SHOWN)]
    for i, (head, words) in enumerate(WORDS):
        y = 0.215 - 0.0225 * i
        figure.text(0.03, y, head, size=_TEXT + 1, weight="bold", va="top")
        figure.text(0.09, y, words, size=_TEXT + 1, va="top")
    figure.alt_text = (
        f"Cheat sheet, {len(SHOWN)} schedules as timelines of {RANKS} ranks: {listed(told)}."
    )
    return figure


def _draw_schedule(figure: ChartFigure, name: str, row: int, column: int) -> str:
    """Draw one small timeline with its numbers and closed form; return the numbers in words."""
    schedule = build(name, RANKS, MICROBATCHES)
    share = Fraction(RANKS, schedule.n_stages)
    timeline = simulate(schedule, Costs(forward=share, input_grad=share, weight_grad=share))
    left = 0.03 + 0.48 * column
    bottom = 0.775 - 0.172 * row
    axes = figure.add_axes((left, bottom, 0.455, 0.105))
    axes.add_patch(Rectangle((0, 0), float(timeline.makespan), RANKS, color=IDLE_GREY, lw=0))
    for span in timeline.spans:
        begin = float(span.start)
        parts = span.action.parts
        high = 0.9 / len(parts)
        for i, part in enumerate(parts):
            look = LOOKS[part.kind]
            is_later = part.stage >= RANKS
            box = Rectangle(
                (begin, span.rank + 0.05 + i * high),
                float(span.end) - begin,
                high,
                facecolor=look.colour,
                edgecolor="black" if is_later else "white",
                lw=0.4,
                hatch=look.hatch,
                alpha=0.75 if is_later else 1.0,
            )
            axes.add_patch(box)
    axes.set_xlim(0, 37)
    axes.set_ylim(RANKS, 0)
    axes.set_axis_off()
    held = float(max(timeline.peak_activations) * share)
    bubble = f"bubble {float(timeline.bubble_fraction):.1%}"
    says = f"{bubble}, step {float(timeline.makespan):g}, holds {held:g}"
    title = f"{name}: {says}"
    figure.text(left, bottom + 0.125, title, size=_TEXT + 1.5, weight="bold", va="center")
    form = _closed_form(name)
    figure.text(left, bottom - 0.012, form, size=_TEXT, va="center", color=TEXT_GREY)
    return f"{name} {says}"


def _closed_form(name: str) -> str:
    """Return the first line of the docstring of the schedule's closed form."""
    function = {"1f1b": theory.one_f_one_b}.get(name) or getattr(theory, name)
    return (function.__doc__ or "").splitlines()[0]
