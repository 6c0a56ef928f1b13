"""Figures of schedules, timelines, lost time, memory, ranks that wait, of where the bytes go and who wrote them.

Pictures of concepts come before timings: a message, a ring, a model and how it is cut between and within layers, a
mesh on its nodes, what FSDP holds, where stages live, microbatches on their way, the graph of a step, the map of the
course. :func:`parallelisms` is a table: data, FSDP, tensor and pipeline parallelism for one model.

Each figure is a :class:`ChartFigure`: a matplotlib figure that carries its finding as alt text, shows itself in a
notebook, and saves itself to PNG or SVG. None of them imports torch or touches pyplot. Colours are Okabe and Ito's;
letters, hatches or line styles say the same for those who see no colours.

:func:`play` is a timeline that moves, :func:`explore` a panel of widgets, :func:`board` a grid to draw schedules on;
:func:`timeline_text` draws in a terminal, :func:`to_trace` writes for Perfetto.

Names are loaded when first used, so that drawing with text in a terminal does not wait for matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_pp.show.board_widget import Board, board
    from course_pp.show.byte_bars import bytes_by_kind, format_bytes
    from course_pp.show.carried_values import carried
    from course_pp.show.chains import dependencies
    from course_pp.show.chart import ChartFigure
    from course_pp.show.comparison import compare
    from course_pp.show.course import course_map
    from course_pp.show.curves import bubble_curve, pareto
    from course_pp.show.explorer import explore
    from course_pp.show.gradient_graph import autograd
    from course_pp.show.lost_bars import lost_time
    from course_pp.show.matrix_cuts import tensor_cut
    from course_pp.show.memory_curves import memory
    from course_pp.show.mesh_grid import mesh
    from course_pp.show.parallel_table import ParallelismTable, parallelisms
    from course_pp.show.piece_boxes import pieces
    from course_pp.show.placements import placement
    from course_pp.show.plan_bars import plan
    from course_pp.show.player import Player, play
    from course_pp.show.processes import message
    from course_pp.show.published_rows import published
    from course_pp.show.ratios import break_even
    from course_pp.show.ring_steps import ring
    from course_pp.show.sharded_steps import fsdp_step
    from course_pp.show.speed_ups import speed_up
    from course_pp.show.stage_cuts import cut
    from course_pp.show.text import timeline_text
    from course_pp.show.timelines import timeline
    from course_pp.show.trace import to_trace
    from course_pp.show.travelling import microbatches
    from course_pp.show.version_rows import versions
    from course_pp.show.waiting import waits

_HOMES = {
    "Board": "board_widget",
    "ChartFigure": "chart",
    "ParallelismTable": "parallel_table",
    "Player": "player",
    "autograd": "gradient_graph",
    "board": "board_widget",
    "break_even": "ratios",
    "bubble_curve": "curves",
    "bytes_by_kind": "byte_bars",
    "carried": "carried_values",
    "compare": "comparison",
    "course_map": "course",
    "cut": "stage_cuts",
    "dependencies": "chains",
    "explore": "explorer",
    "format_bytes": "byte_bars",
    "fsdp_step": "sharded_steps",
    "lost_time": "lost_bars",
    "memory": "memory_curves",
    "mesh": "mesh_grid",
    "message": "processes",
    "microbatches": "travelling",
    "parallelisms": "parallel_table",
    "pareto": "curves",
    "pieces": "piece_boxes",
    "placement": "placements",
    "plan": "plan_bars",
    "play": "player",
    "published": "published_rows",
    "ring": "ring_steps",
    "speed_up": "speed_ups",
    "tensor_cut": "matrix_cuts",
    "timeline": "timelines",
    "timeline_text": "text",
    "to_trace": "trace",
    "versions": "version_rows",
    "waits": "waiting",
}

__all__ = [
    "Board",
    "ChartFigure",
    "ParallelismTable",
    "Player",
    "autograd",
    "board",
    "break_even",
    "bubble_curve",
    "bytes_by_kind",
    "carried",
    "compare",
    "course_map",
    "cut",
    "dependencies",
    "explore",
    "format_bytes",
    "fsdp_step",
    "lost_time",
    "memory",
    "mesh",
    "message",
    "microbatches",
    "parallelisms",
    "pareto",
    "pieces",
    "placement",
    "plan",
    "play",
    "published",
    "ring",
    "speed_up",
    "tensor_cut",
    "timeline",
    "timeline_text",
    "to_trace",
    "versions",
    "waits",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    __tracebackhide__ = True  # what is missing is said in a sentence, and not where it was looked for
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        raise error.with_traceback(None) from None


def __dir__() -> list[str]:
    return __all__
