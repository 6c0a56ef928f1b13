"""A timeline of stages that update their own weights: which version each action used, and which each update made."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course_pp.arguments import checked
from course_pp.schedule import Ledger, Timeline
from course_pp.show import chart, rows
from course_pp.show.chart import ChartFigure
from course_pp.show.rows import Box, Labels
from course_pp.show.timelines import sizes
from course_pp.show.wording import counted, listed

# All of them light enough for black letters; neighbours are told apart.
_COLOURS = (chart.SKY_BLUE, chart.ORANGE, chart.YELLOW, chart.PURPLE, chart.GREEN)
_FILL, _LOWER = 0.6, 0.16  # of a row: the boxes, and how far they sit below its middle
_SIZES = (8.5, 7.0, 6.0)


@dataclass(frozen=True)
class _Used:
    """A forward or backward to draw, and the version it used; whether its forward used another."""

    box: Box
    version: int
    differs: bool


@checked
def versions(tl: Timeline, ledger: Ledger, title: str | None = None) -> ChartFigure:
    """Draw which version of its stage's weights each forward and backward used, and which each update made.

    A box has the colour and the number of its version; backwards are hatched. A diamond is an update, with the version
    that it makes. A heavy frame and ``≠`` mark a backward that used another version than its forward.

    Args:
        tl: simulated, emulated or measured.
        ledger: of the same schedule, such as ``EmulatedRun.ledger`` or :func:`course_pp.schedule.ledger`.
        title: instead of the finding.

    Raises:
        ValueError: for a timeline without updates, or with an action that is not in the ledger.
    """
    if not any(part.kind == "U" for span in tl.spans for part in span.action.parts):
        raise ValueError(f"{tl!r} has no updates (U), so one version: draw it with show.timeline")
    figure, axes, scale, unit = rows.begin(tl, heights=(0.42, 0.66, 4.6), right=0.35)
    rows.draw_idle(axes, tl.n_ranks, float(tl.makespan) * scale, _LOWER, _FILL)
    boxes = rows.boxes_of(tl, scale, _LOWER, _FILL)
    used = list(_used(boxes, ledger))
    _draw_boxes(axes, used)
    _label(axes, used)
    _draw_updates(axes, tl, scale)
    rows.name_ranks(axes, tl.n_ranks)
    rows.name_time(axes, unit)
    _draw_key(axes, any(each.differs for each in used))
    finding = _finding(ledger)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _alt_text(tl, ledger, finding)
    return figure


def _used(boxes: Collection[Box], ledger: Ledger) -> Iterator[_Used]:
    for box in boxes:
        action = box.action
        if action.kind == "U":
            continue
        use = ledger.of(action.stage, action.microbatch)
        version = use.forward if action.kind == "F" else use.backward
        yield _Used(box, version, version != use.forward)


def _draw_boxes(axes: Axes, used: Collection[_Used]) -> None:
    points_x, points_y = chart.points_per_unit(axes)
    for hatch, kinds in (("", "F"), ("////", "BIW")):
        mine = [each for each in used if each.box.action.kind in kinds]
        corners = [_corners(each.box, 0.5 / points_x, 0.5 / points_y) for each in mine]
        colours = [_COLOURS[each.version % len(_COLOURS)] for each in mine]
        # The hatch takes the colour of the edge.
        axes.add_collection(
            PolyCollection(corners, facecolors=colours, edgecolors="#FFFFFF99", linewidths=0, hatch=hatch, zorder=1)
        )
    wrong = [_corners(each.box, 1.4 / points_x, 1.4 / points_y) for each in used if each.differs]
    if wrong:
        axes.add_collection(
            PolyCollection(wrong, facecolors="none", edgecolors=chart.BLACK, linewidths=2.0, zorder=1.5)
        )


def _corners(box: Box, gap_x: float, gap_y: float) -> list[tuple[float, float]]:
    left, right, bottom, top = box.left + gap_x, box.right - gap_x, box.bottom + gap_y, box.top - gap_y
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


def _label(axes: Axes, used: Collection[_Used]) -> None:
    """The action above, its version below, in one size; only the version, without its v, where room is scarce."""
    if not used:
        return
    points_x, points_y = chart.points_per_unit(axes)
    high = points_y * _FILL
    lines = [(each.box, f"{each.box.action.kind}{each.box.action.microbatch}", _version(each)) for each in used]

    def fits(size: float, n_lines: int) -> bool:
        """Return whether so many of the lower lines fit into every box."""
        return n_lines * 1.15 * size <= high and all(
            chart.text_width(text, size) <= points_x * (box.right - box.left) - 2
            for box, *texts in lines
            for text in texts[-n_lines:]
        )

    n_lines, size = next(((n, size) for n in (2, 1) for size in _SIZES if fits(size, n)), (1, _SIZES[-1]))
    labels, step = Labels(), 0.62 * size / points_y
    on_hatch = defaultdict[str, list[rows.Placed]](list)
    for each, (box, *texts) in zip(used, lines, strict=True):
        x, y = (box.left + box.right) / 2, (box.bottom + box.top) / 2
        places = (y - step, y + step) if n_lines == 2 else (y,)
        for at, text in zip(places, texts[-n_lines:], strict=True):
            labels.add(x, at, text, size)
            if box.action.kind != "F":
                on_hatch[_COLOURS[each.version % len(_COLOURS)]].append((text, size, x, at))
    rows.back_labels(axes, on_hatch)
    axes.add_artist(labels)


def _version(used: _Used) -> str:
    return f"{'≠' * used.differs}v{used.version}"


def _draw_updates(axes: Axes, tl: Timeline, scale: float) -> None:
    """A diamond on the upper edge of its row for each update, and the version it makes above."""
    points_x, points_y = chart.points_per_unit(axes)
    labels, diamonds, done = Labels(), [], Counter[tuple[int, int]]()
    for span in sorted(tl.spans, key=lambda span: (span.start, span.end)):
        for part in span.action.parts:
            if part.kind != "U":
                continue
            done[span.rank, part.stage] += 1
            x, y = scale * float(span.start + span.end) / 2, span.rank + _LOWER - _FILL / 2
            wide, high = 4.5 / points_x, 4.5 / points_y
            diamonds.append([(x - wide, y), (x, y - high), (x + wide, y), (x, y + high)])
            text = f"v{done[span.rank, part.stage]}"
            # Beside the diamond, on its left: on its right there is no room behind the last.
            labels.add(x - wide - (2 + chart.text_width(text, 7.5) / 2) / points_x, y - 5.5 / points_y, text, 7.5)
    axes.add_collection(
        PolyCollection(diamonds, facecolors=chart.BLACK, edgecolors="white", linewidths=0.8, zorder=4, clip_on=False)
    )
    axes.add_artist(labels)


def _draw_key(axes: Axes, has_differing: bool) -> None:
    handles: list[Patch | Line2D] = [
        Patch(facecolor=chart.SKY_BLUE, label="F  forward, with its version"),
        Patch(facecolor=chart.SKY_BLUE, hatch="////", edgecolor="white", label="B  backward"),
    ]
    if has_differing:
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=2, label="≠  not its forward's"))
    diamond = Line2D(
        [], [], linestyle="", marker="D", color=chart.BLACK, markersize=5, label="an update makes a version"
    )
    handles.append(diamond)
    rows.add_legend(axes, handles)


def _finding(ledger: Ledger) -> str:
    uses = ledger.uses
    stages = sorted({use.stage for use in uses})
    mixed = sum(use.forward != use.backward for use in uses)
    if mixed:
        n = counted(len(uses), "backward")
        return f"{ledger.versions}: {mixed} of {n} use another version than their forward"
    late = [max(ledger.staleness(stage)) for stage in stages]
    if len(set(late)) == 1:
        told = f"up to {counted(late[0], 'update')} late on every stage"
    else:
        told = f"up to {listed([str(each) for each in late])} updates late on stages 0 to {len(late) - 1}"
    return f"{ledger.versions}: gradients are {told}; forward and backward agree"


def _alt_text(tl: Timeline, ledger: Ledger, finding: str) -> str:
    rows_of = []
    for stage in sorted({use.stage for use in ledger.uses}):
        told = ", ".join(
            f"F{use.microbatch} v{use.forward}, B{use.microbatch} v{use.backward}"
            for use in ledger.uses
            if use.stage == stage
        )
        rows_of.append(f"Stage {stage}: {told}, {counted(len(ledger.updates(stage)), 'update')}")
    head = f"Timeline with the version of the weights that each action used; {sizes(tl)}"
    return f"{head}. {finding}. {'. '.join(rows_of)}."
