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
    """What a value was made from: calls that run and calls on paper, by their place; times and hows of which runs."""

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
    """Each ``reveal`` that calls measured what was not, or calls it otherwise though it was.

    What ``emulate`` returns is simulated on a busy machine, so ``how=`` must name every run whose
    times are used.
    """
    known: dict[str, Origin] = {}
    for number, cell in enumerate(cells):
        nodes = [node for node in ast.walk(cell) if isinstance(node, (*_BINDS, ast.Call))]
        # What a comprehension binds is used by the statement around it.
        for node in sorted(
            nodes, key=lambda node: (_line(node), not isinstance(node, ast.comprehension))
        ):
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
            found.ran |= place if called & _RUN else set()
            found.paper |= place if called & _PAPER else set()
        elif isinstance(node, ast.Attribute) and node.attr in _TIMES | {"how"}:
            kept, ran = (
                found.hows if node.attr == "how" else found.times,
                _origin(node.value, known, cell).ran,
            )
            kept |= {ast.unparse(node.value): ran} if ran else {}
    return found


def _wrong(call: ast.Call, known: dict[str, Origin], cell: int) -> Iterator[str]:
    measured = [
        *call.args[2:3],
        *(keyword.value for keyword in call.keywords if keyword.arg == "measured"),
    ]
    value = _origin(measured[0], known, cell)
    how = next(
        (keyword.value for keyword in call.keywords if keyword.arg == "how"),
        ast.Constant("measured"),
    )
    what = ast.unparse(call)
    if isinstance(how, ast.List | ast.Tuple):
        given = {ast.unparse(run): _origin(run, known, cell).ran for run in how.elts}
    else:
        given = _origin(how, known, cell).hows
    places = {place for ran in given.values() for place in ran}
    for run, ran in value.times.items():
        # A name may stand for a run that how= takes from where it is kept.
        if run not in given and not (run.isidentifier() and ran <= places):
            yield f"{what} says nothing of {run}, which a busy machine simulates: add it to how="
    if isinstance(how, ast.Constant) and not value.times:
        if how.value == "measured" and value.paper and not value.ran:
            yield f"{what} calls measured what was computed: say so by how="
        if how.value != "measured" and value.ran and not value.paper:
            yield f"{what} says {how.value} of what ran: leave how= out"
