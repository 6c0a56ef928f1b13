"""``python -m course_pp schedule``: a schedule in the terminal, with its numbers, or as a file."""

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import TextIO

from course_pp.base.files import naming
from course_pp.schedule import Costs, Time, format_time, names, to_torch_csv
from course_pp.show.text import timeline_text
from course_pp.show.trace import to_trace
from course_pp.show.wording import ScheduleReport, counted

HELP = "draw a pipeline schedule as text, and save it as a figure, trace or table"
_MOST_COLUMNS = 100
# Characters that the encoding of a terminal may lack, and plain ones in their place.
_PLAIN = str.maketrans({"·": ".", "─": "-", "→": ">", "Σ": "sum ", "⌊": "floor(", "⌋": ")"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help=f"one of {', '.join(names())}, or torch's name for it")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--ranks", type=int, default=4, metavar="P", help="pipeline-parallel size (4)"
    )
    sizes.add_argument(
        "--microbatches", type=int, default=8, metavar="M", help="microbatches a step (8)"
    )
    sizes.add_argument(
        "--chunks", type=int, metavar="V", help="stages a rank (the schedule's own number)"
    )
    costs = parser.add_argument_group(
        "costs", "one number such as 1, 0.5 or 1/3, or one for each stage: 1,1,2,1"
    )
    costs.add_argument("--forward", type=_times, default=1, metavar="T", help="time of F (1)")
    costs.add_argument(
        "--input-grad", type=_times, default=1, metavar="T", help="time of I (1); B is I and W"
    )
    costs.add_argument("--weight-grad", type=_times, default=1, metavar="T", help="time of W (1)")
    costs.add_argument(
        "--update", type=_times, default=0, metavar="T", help="time of U, an optimizer step (0)"
    )
    costs.add_argument(
        "--latency", type=_times, default=0, metavar="T", help="time of a message between ranks (0)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour the chart (auto)",
    )
    output.add_argument("--save", type=Path, metavar="FILE", help="save the figure as .svg or .png")
    for option, (what, _) in _WRITERS.items():
        output.add_argument(
            f"--{option}",
            nargs="?",
            const="-",
            metavar="FILE",
            help=f"{what}; without FILE, print it",
        )


def run(arguments: argparse.Namespace) -> None:
    """Print the chart and its numbers, and write the files asked for."""
    targets = {}
    printed = []
    for option in _WRITERS:
        target = getattr(arguments, option)
        if target is None:
            continue
        if not target:
            raise ValueError(f"--{option} has an empty name: give a FILE, or leave it out to print")
        targets[option] = target
        if target == "-":
            printed.append(option)
    if len(printed) > 1:
        raise ValueError(
            "only one of --csv, --trace and --json can be printed: give the others a FILE"
        )
    costs = Costs(
        forward=arguments.forward,
        input_grad=arguments.input_grad,
        weight_grad=arguments.weight_grad,
        update=arguments.update,
        latency=arguments.latency,
    )
    report = ScheduleReport(
        arguments.name,
        arguments.ranks,
        arguments.microbatches,
        n_chunks=arguments.chunks,
        costs=costs,
    )
    if arguments.save:
        from course_pp import show

        figure = show.timeline(report.timeline)
        with naming(arguments.save):
            figure.save(arguments.save)
    for option, target in targets.items():
        if target != "-":
            _, write = _WRITERS[option]
            with naming(target):
                Path(target).write_text(f"{write(report)}\n", encoding="utf-8")
    if printed:
        _, write = _WRITERS[printed[0]]
        print(write(report))
    else:
        print(_printable(_told(report, arguments.color), sys.stdout))


def _told(report: ScheduleReport, colour: str) -> str:
    """Return the sizes, the chart and the numbers of a schedule, for the terminal's width."""
    width = max(40, min(_MOST_COLUMNS, shutil.get_terminal_size((_MOST_COLUMNS, 24)).columns))
    chart = timeline_text(report.timeline, width, colour=_has_colour(colour, sys.stdout))
    schedule = report.schedule
    sizes = (
        counted(schedule.n_ranks, "rank"),
        counted(schedule.n_stages, "stage"),
        counted(schedule.n_microbatches, "microbatch"),
    )
    return f"{schedule.name}: {', '.join(sizes)}\n\n{chart}\n\n{_numbers(report, width)}"


def _times(text: str) -> Time | tuple[Time, ...]:
    """Read ``2``, ``0.5``, ``1/3`` or several of them, exactly."""
    try:
        values = tuple(map(_time, text.split(",")))
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: give a number, or one for each stage, as in 1,1,2,1"
        ) from None
    except OverflowError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None
    return values if len(values) > 1 else values[0]


def _time(text: str) -> Time:
    """Return a time as an exact fraction.

    Raises OverflowError for numbers that no float can hold, before an exact 1e99999999 fills the
    memory.
    """
    mantissa = Fraction(text.lower().partition("e")[0])
    if not mantissa:
        float(Fraction(text) if "/" in text else text)  # refuses 0x
        return mantissa
    if "/" not in text and not 0 < abs(float(text)) < inf:
        raise OverflowError(
            f"{text} is too large or too small: give a time between 1e-300 and 1e300"
        )
    return Fraction(text)


def _numbers(report: ScheduleReport, width: int) -> str:
    tl = report.timeline
    form = report.closed_form
    gap = report.longest_gap
    bubble = f"{float(tl.bubble_fraction):.2%} of all rank time"
    span_bubble = f"{float(tl.span_bubble_fraction):.2%} of the longest span"
    n_chunks = tl.n_stages // tl.n_ranks
    unit = f" of a stage, {n_chunks} of which make one of a rank," if n_chunks > 1 else ""
    peaks = " ".join(map(str, tl.peak_activations))
    lines = {
        "makespan": format_time(tl.makespan),
        "bubble": bubble,
        "span bubble": f"{span_bubble}, as zero-bubble papers count",
        "peaks": f"{peaks} activations{unit} held, rank by rank",
        "formula": f"{form.formula} = {format_time(form.makespan)}" if form else "none",
        "": report.verdict,
        "longest gap": gap.cause if gap else "none",
    }
    told = []
    for name, text in lines.items():
        line = f"{name:<12} {text}"
        indent = " " * 13
        told.append(textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False))
    return "\n".join(told)


def _as_json(report: ScheduleReport) -> str:
    tl = report.timeline
    schedule = report.schedule
    form = report.closed_form
    return json.dumps(
        {
            "schedule": schedule.name,
            "n_ranks": schedule.n_ranks,
            "n_stages": schedule.n_stages,
            "n_microbatches": schedule.n_microbatches,
            "placement": schedule.placement,
            "makespan": float(tl.makespan),
            "bubble_fraction": float(tl.bubble_fraction),
            "span_bubble_fraction": float(tl.span_bubble_fraction),
            "peak_activations": tl.peak_activations,
            "formula": form.formula if form else None,
            "formula_makespan": float(form.makespan) if form else None,
            "spans": [[s.rank, str(s.action), float(s.start), float(s.end)] for s in tl.spans],
            "idle_gaps": [[g.rank, float(g.start), float(g.end), g.cause] for g in tl.idle_gaps],
        }
    )


_WRITERS: dict[str, tuple[str, Callable[[ScheduleReport], str]]] = {
    "csv": (
        "the order of actions as torch reads it",
        lambda report: to_torch_csv(report.schedule).rstrip("\n"),
    ),
    "trace": (
        "the timeline for Perfetto or chrome://tracing",
        lambda report: to_trace(report.timeline, report.schedule.name),
    ),
    "json": ("numbers, spans (rank, action, start, end) and idle gaps", _as_json),
}


def _has_colour(wish: str, stream: TextIO) -> bool:
    """Return whether to colour: on a terminal with colours, unless NO_COLOR is set.

    See https://no-color.org.
    """
    if wish != "auto":
        return wish == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _printable(text: str, stream: TextIO) -> str:
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text
