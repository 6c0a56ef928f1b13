"""Two matrices cut over tensor-parallel ranks, and the exchanges that a plan of cuts needs."""

from dataclasses import dataclass
from typing import Literal

from course_pp.arguments import checked, refuse_below
from course_pp.show import chart
from course_pp.show.byte_bars import format_bytes
from course_pp.show.chart import ChartFigure
from course_pp.show.sketch import LEAST, SERIES, SMALL, WORDS, Point, Sketch
from course_pp.show.wording import counted, listed

How = Literal["column", "row"]

_MOST_RANKS = 8
_X, _A, _H, _B, _Z = (0.5, 0.55), (1.05, 0.55), (1.05, 0.5), (0.55, 1.05), (0.55, 0.5)  # width, height
_SIGN, _BAR, _HEAD = 0.3, 0.62, 0.62


@dataclass(frozen=True)
class _Plan:
    """What the two cuts imply: each rank's part of X, A, gelu(XA), B and Z, and the exchange after each product."""

    first: How
    second: How

    @property
    def after_first(self) -> str:
        if self.first == "row":
            return "all-reduce"  # gelu of a sum is not the sum of the gelus
        return "" if self.second == "row" else "all-gather"

    @property
    def after_second(self) -> str:
        return "all-reduce" if self.second == "row" else "all-gather"

    @property
    def exchanges(self) -> list[str]:
        return [each for each in (self.after_first, self.after_second) if each]


@checked
def tensor_cut(
    n_ranks: int = 2,
    plan: tuple[How, How] = ("column", "row"),
    tokens: int = 128,
    dim: int = 64,
    hidden: int = 256,
    itemsize: int = 4,
    title: str | None = None,
) -> ChartFigure:
    """Draw gelu(X A) B with both matrices cut over ``n_ranks``: what each rank computes, and where they must exchange.

    X is ``tokens × dim``, A ``dim × hidden``, B ``hidden × dim``. A striped result is a term that has to be summed
    first. Boxes are not to scale.

    Args:
        plan: how A and B are cut: by ``"column"`` or by ``"row"``.
        itemsize: bytes of a number.
        title: instead of the finding.

    Raises:
        ValueError: for another plan, fewer than 2 ranks or more than 8, and for sizes that the ranks do not divide.
    """
    refuse_below(1, "tensor_cut", tokens=tokens, dim=dim, hidden=hidden, itemsize=itemsize)
    _refuse(n_ranks, plan, dim, hidden)
    cuts = _Plan(*plan)
    moved = [itemsize * tokens * (hidden if i == 0 and cuts.after_first else dim) for i in range(len(cuts.exchanges))]
    finding = _finding(n_ranks, plan, cuts, moved)

    scale = {2: 1.0, 3: 0.9, 4: 0.8}.get(n_ranks, 0.62)
    high = _B[1] * scale + 0.2
    xs, width = _columns(scale, bool(cuts.after_first))
    sketch = Sketch(width, _HEAD + n_ranks * high, title or finding)
    _draw_headings(sketch, xs, scale, cuts, (tokens, dim, hidden))
    for rank in range(n_ranks):
        _draw_rank(sketch, cuts, rank, n_ranks, xs, _HEAD + (rank + 0.5) * high - 0.1, scale)
    for name, exchange in (("first", cuts.after_first), ("second", cuts.after_second)):
        if exchange:
            words = "sum" if exchange == "all-reduce" else "gather"
            text = f"{words}\n\n" + exchange.replace("-", "-\n")
            corner = (xs[name], _HEAD - 0.02)
            sketch.box(corner, (_BAR, n_ranks * high - 0.16), text, fill=chart.YELLOW, bold=True, sizes=(SMALL, LEAST))
    exchanged = listed(
        [f"an {exchange} of {format_bytes(size)}" for exchange, size in zip(cuts.exchanges, moved, strict=True)]
    )
    return sketch.finish(
        f"Products of gelu(X A) B, a row a rank, A cut by {plan[0]}, B by {plan[1]}, over {counted(n_ranks, 'rank')}. "
        f"{finding}. One forward needs {exchanged}."
    )


def _refuse(n_ranks: int, plan: tuple[How, How], dim: int, hidden: int) -> None:
    if not 2 <= n_ranks <= _MOST_RANKS:
        raise ValueError(f"n_ranks={n_ranks}: from 2 to {_MOST_RANKS} are drawn")
    if len(plan) != 2 or any(how not in ("column", "row") for how in plan):
        raise ValueError(f"plan {plan!r}: give 'column' or 'row' for each of the two matrices")
    for name, size, needed in (("hidden", hidden, True), ("dim", dim, plan[0] == "row" or plan[1] == "column")):
        if needed and size % n_ranks:
            raise ValueError(f"{name}={size} does not divide among {n_ranks} ranks: give a multiple")


def _finding(n_ranks: int, plan: tuple[How, How], cuts: _Plan, moved: list[int]) -> str:
    number = "one exchange" if len(moved) == 1 else "two exchanges"
    kinds = listed([f"{kind} of {format_bytes(size)}" for kind, size in zip(cuts.exchanges, moved, strict=True)])
    return f"{plan[0].capitalize()}, then {plan[1]}, over {n_ranks} ranks: {number} in forward, {kinds}"


def _columns(scale: float, has_first: bool) -> tuple[dict[str, float], float]:
    """Return where each matrix and each exchange begins, and how wide all of it is."""
    xs, x = {}, 0.55
    widths = {"X": _X, "A": _A, "first": None, "H": _H, "B": _B, "Z": _Z, "second": None, "sum": _Z}
    for name, size in widths.items():
        if name == "first" and not has_first:
            x += 0.35  # where other plans exchange
            continue
        xs[name] = x
        x += (size[0] * scale if size else _BAR) + _SIGN
    return xs, x - _SIGN + 0.05


def _draw_headings(
    sketch: Sketch, xs: dict[str, float], scale: float, cuts: _Plan, sizes: tuple[int, int, int]
) -> None:
    tokens, dim, hidden = sizes
    shapes = {
        "X": (_X, f"X\n{tokens} × {dim}"),
        "A": (_A, f"A by {cuts.first}\n{dim} × {hidden}"),
        "H": (_H, f"gelu(X A)\n{tokens} × {hidden}"),
        "B": (_B, f"B by {cuts.second}\n{hidden} × {dim}"),
        "Z": (_Z, "a term of Z" if cuts.second == "row" else "a part of Z"),
        "sum": (_Z, f"Z\n{tokens} × {dim}"),
    }
    for name, (size, words) in shapes.items():
        sketch.text((xs[name] + size[0] * scale / 2, _HEAD - 0.32), words, SMALL, align="center")


def _draw_rank(sketch: Sketch, cuts: _Plan, rank: int, n: int, xs: dict[str, float], y: float, scale: float) -> None:
    sketch.text((0, y), f"rank {rank}", bold=True)
    whole, part = (0, 1), (rank, n)
    first_by_row, second_by_row = cuts.first == "row", cuts.second == "row"
    # Of each matrix: which part of the columns and of the rows is this rank's, and whether it is a term of a sum.
    pieces: dict[str, tuple[Point, tuple[int, int], tuple[int, int], bool]] = {
        "X": (_X, part if first_by_row else whole, whole, False),
        "A": (_A, whole if first_by_row else part, part if first_by_row else whole, False),
        "H": (_H, part if second_by_row else whole, whole, False),
        "B": (_B, whole if second_by_row else part, part if second_by_row else whole, False),
        "Z": (_Z, whole if second_by_row else part, whole, second_by_row),
        "sum": (_Z, whole, whole, False),
    }
    for name, (size, columns, rows, is_term) in pieces.items():
        shared = columns == rows == whole and not is_term
        _draw_matrix(sketch, (xs[name], y), (size[0] * scale, size[1] * scale), columns, rows, rank, is_term, shared)
    signs = [("X", "A", "×"), ("H", "B", "×"), ("B", "Z", "=")]
    for left, right, sign in signs:
        end = xs[left] + pieces[left][0][0] * scale
        sketch.text(((end + xs[right]) / 2, y), sign, WORDS + 1, align="center")
    arrows = [("A", "H"), ("Z", "sum")]
    stops = {"H": ("first", xs.get("first")), "sum": ("second", xs["second"])}
    for left, right in arrows:
        end, (_, bar) = xs[left] + pieces[left][0][0] * scale, stops[right]
        if bar is None:
            sketch.arrow((end + 0.06, y), (xs[right] - 0.06, y))
            continue
        sketch.arrow((end + 0.05, y), (bar - 0.03, y))
        sketch.arrow((bar + _BAR + 0.03, y), (xs[right] - 0.05, y))


def _draw_matrix(
    sketch: Sketch,
    place: Point,
    size: Point,
    columns: tuple[int, int],
    rows: tuple[int, int],
    rank: int,
    is_term: bool,
    shared: bool,
) -> None:
    (x, y), (width, height) = place, size
    top = y - height / 2
    sketch.box((x, top), size, edge="#999999", line=0.8, dashed=True, zorder=1.5)
    fill, ink = SERIES[rank % len(SERIES)]
    if shared:
        fill, ink = chart.IDLE_GREY, "black"
    (i, n), (j, m) = columns, rows
    corner, part = (x + width * i / n, top + height * j / m), (width / n, height / m)
    hatch = "////" if is_term else ""
    sketch.box(corner, part, "all" if shared else str(rank), fill=fill, ink=ink, hatch=hatch, sizes=(SMALL, LEAST, 6.0))
