"""The actions of each rank of a pipeline, and their times. No torch, no numpy, no matplotlib.

:func:`build` makes the :class:`Schedule` of a name and :func:`check` says whether a schedule can
run. :func:`simulate` adds times, given :class:`Costs`, and returns a :class:`Timeline`, the type
that a measurement has too.

:mod:`theory` has the closed forms and :func:`bound` a time that no schedule can beat.
:func:`search` finds the best order within some seconds; :func:`optimum` and :func:`optima` know the
best order there is. :func:`fit` explains the time of a run, :func:`ledger` lists the weights that
an asynchronous schedule uses, and :func:`partition` cuts layers into stages.
"""

from course_pp.schedule import theory
from course_pp.schedule.action import (
    KINDS,
    Action,
    Gap,
    Overlap,
    Product,
    Receive,
    Span,
    Time,
    format_time,
)
from course_pp.schedule.bounds import bound
from course_pp.schedule.catalogue import Entry, build, find, names
from course_pp.schedule.costs import Costs
from course_pp.schedule.edges import Edge
from course_pp.schedule.families import generation
from course_pp.schedule.fitting import Fit, Loss, fit
from course_pp.schedule.layer_plan import (
    ClusterLevel,
    LayerCost,
    Partition,
    PlannedStage,
    partition,
)
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
