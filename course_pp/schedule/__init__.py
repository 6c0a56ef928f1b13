"""What each rank of a pipeline does, and when. Pure Python: no torch, no numpy, no matplotlib.

* :class:`Action` and :class:`Overlap`: one thing a rank does, written as torch writes it (``2F0``).
* :class:`Span` and :class:`Timeline`: when each rank did it. A simulation and a measurement give the
  same type, so one function draws either (:func:`course_pp.show.timeline`).
* :class:`Gap`: an interval in which a rank does nothing, with its cause in a sentence.
"""

from course_pp.schedule.action import KINDS, Action, Overlap, Product
from course_pp.schedule.timeline import Gap, Span, Time, Timeline, format_time

__all__ = ["KINDS", "Action", "Gap", "Overlap", "Product", "Span", "Time", "Timeline", "format_time"]
