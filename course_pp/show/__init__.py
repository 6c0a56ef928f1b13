"""Figures of timelines, of ranks that wait, and of where the bytes go.

Each function returns a :class:`ChartFigure`: a matplotlib figure that carries its finding as alt text,
shows itself in a notebook, and saves itself to PNG or SVG. None of them imports torch or touches pyplot.
Colours are Okabe and Ito's; letters, hatches or line styles say the same for those who see no colours.
"""

from course_pp.show.chart import ChartFigure
from course_pp.show.memory import bytes_by_kind, format_bytes
from course_pp.show.timelines import timeline
from course_pp.show.waiting import waits

__all__ = ["ChartFigure", "bytes_by_kind", "format_bytes", "timeline", "waits"]
