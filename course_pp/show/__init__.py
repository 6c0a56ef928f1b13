"""Figures of schedules, timelines, memory and lost time; pictures of concepts; panels, the board,
text and traces.

Each figure is a :class:`ChartFigure`: a matplotlib figure that carries its finding as alt text,
shows itself in a notebook, and saves itself to PNG or SVG. Its title is the finding, unless
``title`` is given. What cannot be drawn is refused with a ValueError that says what to give. None
of them imports torch or touches pyplot. Colours are Okabe and Ito's; letters, hatches or line
styles say the same for those who see no colours.

Names are loaded when first used, so that drawing with text in a terminal does not wait for
matplotlib.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from course_pp.base.imports import MissingExtra, imports_of_extra

if TYPE_CHECKING:
    from course_pp.show.bars import bytes_by_kind, lost_time
    from course_pp.show.board_widget import Board, board
    from course_pp.show.chains import dependencies
    from course_pp.show.chart import ChartFigure
    from course_pp.show.comparison import compare
    from course_pp.show.course import course_map
    from course_pp.show.curves import break_even, pareto, speed_up
    from course_pp.show.cuts import carried, cut
    from course_pp.show.explorer import explore
    from course_pp.show.held_rows import memory, versions
    from course_pp.show.meshes import mesh
    from course_pp.show.mixture import exchange, loads, routing
    from course_pp.show.parallel_table import ParallelismTable, parallelisms
    from course_pp.show.piece_boxes import pieces
    from course_pp.show.planned import plan, published
    from course_pp.show.player import Player, play
    from course_pp.show.sending import message, ring
    from course_pp.show.sharding import fsdp_step, tensor_cut
    from course_pp.show.text import timeline_text
    from course_pp.show.through_ranks import autograd, microbatches, placement
    from course_pp.show.timelines import timeline
    from course_pp.show.trace import to_trace
    from course_pp.show.waiting import waits
    from course_pp.show.wording import format_bytes

# The public names of each module.
_HOMES = {
    "bars": "bytes_by_kind lost_time",
    "board_widget": "Board board",
    "chains": "dependencies",
    "chart": "ChartFigure",
    "comparison": "compare",
    "course": "course_map",
    "curves": "break_even pareto speed_up",
    "cuts": "carried cut",
    "explorer": "explore",
    "held_rows": "memory versions",
    "meshes": "mesh",
    "mixture": "exchange loads routing",
    "parallel_table": "ParallelismTable parallelisms",
    "piece_boxes": "pieces",
    "planned": "plan published",
    "player": "Player play",
    "sending": "message ring",
    "sharding": "fsdp_step tensor_cut",
    "text": "timeline_text",
    "through_ranks": "autograd microbatches placement",
    "timelines": "timeline",
    "trace": "to_trace",
    "waiting": "waits",
    "wording": "format_bytes",
}

__all__ = [
    "Board",
    "ChartFigure",
    "ParallelismTable",
    "Player",
    "autograd",
    "board",
    "break_even",
    "bytes_by_kind",
    "carried",
    "compare",
    "course_map",
    "cut",
    "dependencies",
    "exchange",
    "explore",
    "format_bytes",
    "fsdp_step",
    "loads",
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
    "routing",
    "speed_up",
    "tensor_cut",
    "timeline",
    "timeline_text",
    "to_trace",
    "versions",
    "waits",
]


def __getattr__(name: str) -> object:
    homes = [module for module, names in _HOMES.items() if name in names.split()]
    if not homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    # A missing package is told in one sentence, without the frames in which it was looked for.
    __tracebackhide__ = True
    try:
        with imports_of_extra("course"):
            return getattr(import_module(f"{__name__}.{homes[0]}"), name)
    except MissingExtra as error:
        raise error.with_traceback(None) from None


def __dir__() -> list[str]:
    return __all__
