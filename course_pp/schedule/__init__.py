"""What each rank of a pipeline does, and when. Pure Python: no torch, no numpy, no matplotlib.

* :class:`Action` and :class:`Overlap`: one thing a rank does, written as torch writes it (``2F0``).
* :class:`Schedule`: for each rank its actions in order. :func:`build` makes those of the literature, :func:`names`
  lists them, :func:`check` says whether any schedule can run, and if not, why not.
* :class:`Edge`: a value that stages read beyond their neighbours, such as a skip connection.
* :func:`generation`: the order in which a pipeline generates tokens, the last stage's going back to the first.
* :func:`simulate`: when each rank does what, given :class:`Costs`. :mod:`theory` has the closed forms,
  :func:`bound` what no schedule can beat.
* :func:`search`: the best order that can be found in seconds, under a memory cap, and its gap to the bound.
* :func:`optimum`: the best order there is, proven as far as time allows. Needs OR-Tools. :func:`optima`: a
  table of those of small pipelines, which does not.
* :func:`to_torch_csv`, :func:`from_torch_csv`: the text form that torch's schedules load and dump.
* :class:`Span` and :class:`Timeline`: when each rank did it. A simulation and a measurement give the
  same type, so one function draws either (:func:`course_pp.show.timeline`).
* :class:`Receive`: an interval in which a rank of a real run was blocked until a message was there.
* :class:`Gap`: an interval in which a rank does nothing, with its cause in a sentence.
* :func:`ledger`: which version of its weights each action of an asynchronous schedule uses.
* :func:`partition`: PipeDream's planner, from what layers cost to stages and their replicas.
* :func:`fit`: from a measured timeline to costs, and to what was lost to imbalance, transfers, launches, stragglers.
"""

from course_pp.schedule import theory
from course_pp.schedule.action import KINDS, Action, Gap, Overlap, Product, Receive, Span, Time, format_time
from course_pp.schedule.bounds import bound
from course_pp.schedule.catalogue import Entry, build, find, names
from course_pp.schedule.costs import Costs
from course_pp.schedule.edges import Edge
from course_pp.schedule.families import generation
from course_pp.schedule.fitting import Fit, Loss, fit
from course_pp.schedule.layer_plan import ClusterLevel, LayerCost, Partition, PlannedStage, partition
from course_pp.schedule.ledger import Ledger, Use, Versions, ledger
from course_pp.schedule.legality import check
from course_pp.schedule.optima import optima
from course_pp.schedule.schedule import Schedule
from course_pp.schedule.searching.exact import Optimum, optimum
from course_pp.schedule.searching.search import Found, search
from course_pp.schedule.simulation import simulate
from course_pp.schedule.timeline import Timeline
from course_pp.schedule.torch_csv import from_torch_csv, to_torch_csv

__all__ = [
    "KINDS",
    "Action",
    "ClusterLevel",
    "Costs",
    "Edge",
    "Entry",
    "Fit",
    "Found",
    "Gap",
    "LayerCost",
    "Ledger",
    "Loss",
    "Optimum",
    "Overlap",
    "Partition",
    "PlannedStage",
    "Product",
    "Receive",
    "Schedule",
    "Span",
    "Time",
    "Timeline",
    "Use",
    "Versions",
    "bound",
    "build",
    "check",
    "find",
    "fit",
    "format_time",
    "from_torch_csv",
    "generation",
    "ledger",
    "names",
    "optima",
    "optimum",
    "partition",
    "search",
    "simulate",
    "theory",
    "to_torch_csv",
]
