"""Where the values of a notebook's cells come from: from ranks that ran, or from paper."""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_BINDS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.comprehension)
_RUN = {"emulate", "on_ranks"}
_PAPER = {"bound", "optimum", "partition", "plan", "play", "predict", "search", "simulate"}
_TIMES = {"makespan", "bubble_fraction", "utilisation", "peak_activations", "transfers", "spans"}


@dataclass
class Origin:
    """The sources of a value.

    Attributes:
        ran: places of calls that run ranks.
        paper: places of calls that compute on paper.
        times: for each run whose times are used, the places of its calls.
        hows: for each run whose ``how`` is used, the places of its calls.
    """

    ran: set[str] = field(default_factory=set)
    paper: set[str] = field(default_factory=set)
    times: dict[str, set[str]] = field(default_factory=dict)
    hows: dict[str, set[str]] = field(default_factory=dict)

    def add(self, other: "Origin") -> None:
        self.ran |= other.ran
        self.paper |= other.paper
        self.times |= other.times
        self.hows |= other.hows


def wrongly_called(cells: Sequence[ast.Module]) -> Iterator[str]:
    """Yield each ``reveal`` that says "measured" of a computed value, or the reverse.

    On a busy machine ``emulate`` returns simulated times, so ``how=`` must name every run whose
    times are used.
    """
    known: dict[str, Origin] = {}
    for number, cell in enumerate(cells):
        nodes = [node for node in ast.walk(cell) if isinstance(node, (*_BINDS, ast.Call))]
        # The names of a comprehension are used by the statement around it, so they come first.
        nodes.sort(key=lambda node: (_line(node), not isinstance(node, ast.comprehension)))
        for node in nodes:
            if isinstance(node, ast.Call):
                if ast.unparse(node.func) == "reveal":
                    yield from _wrong(node, known, number)
                continue
            source = getattr(node, "value", None) or getattr(node, "iter", None)
            origin = Origin() if source is None else _origin(source, known, number)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in (each for each in ast.walk(target) if isinstance(each, ast.Name)):
                    grows = isinstance(target, ast.Subscript) or isinstance(node, ast.AugAssign)
                    if grows and name.id in known:
                        known[name.id].add(origin)
                    else:
                        known[name.id] = Origin()
                        known[name.id].add(origin)


def _line(node: ast.AST) -> int:
    return (node.iter if isinstance(node, ast.comprehension) else node).lineno


def _origin(value: ast.AST, known: dict[str, Origin], cell: int) -> Origin:
    found = Origin()
    for node in ast.walk(value):
        if isinstance(node, ast.Name) and node.id in known:
            found.add(known[node.id])
        elif isinstance(node, ast.Call):
            called = set(re.findall(r"\w+", ast.unparse(node.func)))
            place = {f"{cell}:{node.lineno}:{node.col_offset}"}
            if called & _RUN:
                found.ran |= place
            if called & _PAPER:
                found.paper |= place
        elif isinstance(node, ast.Attribute) and node.attr in _TIMES | {"how"}:
            ran = _origin(node.value, known, cell).ran
            kept = found.hows if node.attr == "how" else found.times
            if ran:
                kept[ast.unparse(node.value)] = ran
    return found


def _wrong(call: ast.Call, known: dict[str, Origin], cell: int) -> Iterator[str]:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    measured = call.args[2] if len(call.args) > 2 else keywords["measured"]
    how = keywords.get("how", ast.Constant("measured"))
    value = _origin(measured, known, cell)
    what = ast.unparse(call)
    if isinstance(how, ast.List | ast.Tuple):
        given = {ast.unparse(run): _origin(run, known, cell).ran for run in how.elts}
    else:
        given = _origin(how, known, cell).hows
    places = set().union(*given.values())
    for run, ran in value.times.items():
        # A name may stand for a run that how= takes from where it is kept.
        if run not in given and not (run.isidentifier() and ran <= places):
            yield f"{what} says nothing of {run}, which a busy machine simulates: add it to how="
    if isinstance(how, ast.Constant) and not value.times:
        if how.value == "measured" and value.paper and not value.ran:
            yield f"{what} calls measured what was computed: say so by how="
        if how.value != "measured" and value.ran and not value.paper:
            yield f"{what} says {how.value} of what ran: leave how= out"
