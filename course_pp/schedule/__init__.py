"""What each rank of a pipeline does, and when. Pure Python: no torch, no numpy, no matplotlib.

:func:`build` makes the :class:`Schedule` of a name, :func:`check` says whether any schedule can
run, :func:`simulate` when each rank does what, given :class:`Costs`: a :class:`Timeline`, the type
that a measurement has too.
:mod:`theory` has the closed forms, :func:`bound` what no schedule can beat, :func:`search` the best
order that seconds find, :func:`optimum` and :func:`optima` the best there is. :func:`fit` says why
a run took as long as it did, :func:`ledger` which weights an asynchronous schedule uses,
:func:`partition` which layers make a stage.
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
