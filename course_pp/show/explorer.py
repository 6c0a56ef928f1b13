"""A panel that rebuilds, simulates and redraws a schedule whenever a slider moves.

Plain functions go from settings to a report, and from that to what is shown; :class:`Panel`
connects them to widgets.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from ipywidgets import HTML, Dropdown, FloatSlider, HBox, IntSlider, Layout, VBox, Widget
from matplotlib.patches import Rectangle

from course_pp.base.arguments import shown
from course_pp.schedule import Costs, Gap, Time, Timeline, build, format_time, names, theory
from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.timelines import ROW_FILL, timeline
from course_pp.show.wording import ScheduleReport, percent

# Sharper than one dot a pixel, and little enough to draw while a slider moves.
_DOTS_PER_INCH = 120
_NONE = -1  # a menu whose value is None shows nothing
_CELL = "padding:0 14px 0 0;text-align:left"
_DEFINITIONS = (
    "The bubble b is the idle share of all rank time, up to the makespan. Megatron-LM (Narayanan et"
    " al. 2021) divides the idle time by the work instead, which is b / (1 − b), and (p − 1) / m"
    " for GPipe and 1F1B; the zero-bubble papers (Qi et al. 2024) put T, the longest time from a"
    " rank's first action to its last, in place of the makespan: (T − work of the busiest rank) / T"
)
# Wide enough to hit the value one wants.
_WIDE: dict[str, Any] = {"style": {"description_width": "10em"}, "layout": {"width": "35em"}}


@dataclass(frozen=True)
class Settings:
    """The settings of the panel.

    Times are multiples of one unit; None is the schedule's own number.
    ``round_size`` goes from depth first (p) to breadth first (m), for ``interleaved_1f1b``.
    """

    schedule: str = "1f1b"
    n_ranks: int = 4
    n_microbatches: int = 8
    n_chunks: int | None = None
    round_size: int | None = None
    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    latency: float = 0.0
    slow_stage: int | None = None
    slowdown: float = 2.0


def explore(**settings: Any) -> "Panel":
    """Show a panel to try schedules, sizes and costs.

    It has the timeline, bubbles, memory, the formula and the reason for any gap. ``settings`` say
    where to start, by the names of :class:`Settings`: ``schedule="zb_h1", n_ranks=8``.
    """
    return Panel(Settings(**settings))


def report_of(settings: Settings) -> ScheduleReport:
    """Build and simulate the schedule of the settings; ValueError for sizes that it refuses."""
    sizes = (settings.schedule, settings.n_ranks, settings.n_microbatches, settings.n_chunks)
    schedule = build(*sizes, round_size=settings.round_size)
    times: dict[str, Any] = {
        "forward": settings.forward,
        "input_grad": settings.input_grad,
        "weight_grad": settings.weight_grad,
    }
    slow = settings.slow_stage
    if slow is not None:
        n_stages = schedule.n_stages
        if not 0 <= slow < n_stages:
            raise ValueError(
                f"slow stage {slow}: there are stages 0 to {n_stages - 1}; choose one of them, or"
                " none"
            )
        factors = [1.0] * n_stages
        factors[slow] = settings.slowdown
        for name, time in times.items():
            times[name] = tuple(time * factor for factor in factors)
    costs = Costs(**times, latency=settings.latency)
    report = ScheduleReport(*sizes, costs, settings.round_size)
    vars(report)["schedule"] = schedule  # the place where cached_property keeps its value
    report.timeline  # noqa: B018 - refuses a schedule that cannot be simulated
    return report


def figure_of(report: ScheduleReport, gap: Gap | None) -> ChartFigure:
    figure = timeline(report.timeline)
    if gap is not None:
        corner = (float(gap.start), gap.rank - ROW_FILL / 2)
        look: dict[str, Any] = {"edgecolor": "black", "linewidth": 2, "fill": False}
        frame = Rectangle(corner, float(gap.duration), ROW_FILL, clip_on=False, zorder=5, **look)
        figure.axes[0].add_patch(frame)
        figure.alt_text += f" Framed: {gap.cause}."
    return figure


def numbers_html(report: ScheduleReport) -> str:
    def of_the_work(bubble: Time) -> Time:
        return bubble / (1 - bubble) if bubble < 1 else 0

    def column(of: Timeline | theory.ClosedForm) -> list[str]:
        bubbles = (of.bubble_fraction, of_the_work(of.bubble_fraction), of.span_bubble_fraction)
        return [format_time(of.makespan), *map(percent, bubbles)]

    names = [
        "makespan",
        "bubble b, of all rank time",
        "b / (1 − b), of the work",
        "bubble, of the longest span",
    ]
    form = report.closed_form
    predicted = column(form) if form else ["–"] * len(names)
    rows = zip(names, column(report.timeline), predicted, strict=True)
    return _table([("", "simulated", "closed form"), *rows])


def formula_html(report: ScheduleReport) -> str:
    form = report.closed_form
    formula = f"makespan = {form.formula}; " if form else ""
    return _sentence(formula + report.verdict)


def _sentence(text: str) -> str:
    return f'<div style="line-height:1.4;padding:3px 0;max-width:912px">{escape(text)}.</div>'


def ranks_html(report: ScheduleReport) -> str:
    """Return the busy share of each rank and the most activations it holds, with a bar."""
    tl = report.timeline
    form = report.closed_form
    highest = max([*tl.peak_activations, 1])
    rows: list[tuple[str, ...]] = [("rank", "busy", "peak held", "closed form", "")]
    for rank, peak in enumerate(tl.peak_activations):
        predicted = str(form.peak_activations[rank]) if form else "–"
        busy = percent(tl.busy[rank] / tl.makespan if tl.makespan else 0)
        style = f"background:{chart.BLUE};height:0.7em;width:{round(120 * peak / highest)}px"
        bar = f'<div aria-hidden="true" style="{style}"></div>'
        rows.append((str(rank), busy, str(peak), predicted, bar))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    head, *body = rows
    heads = "".join(f'<th scope="col" style="{_CELL}">{cell}</th>' for cell in head)
    lines = f"<tr>{heads}</tr>"
    for row in body:
        cells = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in row)
        lines += f"<tr>{cells}</tr>"
    return f'<table style="line-height:1.2">{lines}</table>'


class Panel(VBox):
    """Widgets around a schedule.

    Where widgets cannot run, such as on GitHub, the notebook shows the figure.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.controls = _controls(settings)
        self.picture = HTML()
        self.cause = HTML()
        self.numbers = HTML()
        self.ranks = HTML()
        self.formula = HTML()
        self.gap = Dropdown(description="why idle:", **_WIDE)
        self._report: ScheduleReport | None = None
        self._figure: ChartFigure | None = None
        side_by_side = Layout(flex_flow="row wrap", grid_gap="0 1em")
        controls = list(self.controls.values())
        columns = [VBox(controls[::2]), VBox(controls[1::2])]
        numbers = VBox([self.numbers, self.formula], layout=Layout(width="35em"))
        super().__init__(
            [
                HBox(columns, layout=side_by_side),
                self.picture,
                HBox([self.gap, self.cause], layout=side_by_side),
                HBox([numbers, self.ranks], layout=side_by_side),
                HTML(_sentence(_DEFINITIONS)),
            ]
        )
        for control in controls:
            control.observe(self.update, "value")
        self.gap.observe(self.frame, "value")
        self.update()

    def update(self, _change: object = None) -> None:
        values = {name: _value(control) for name, control in self.controls.items()}
        self.settings = replace(self.settings, **values)
        try:
            self._report = report_of(self.settings)
        except ValueError as problem:
            self._report = None
            self._figure = None
            self._offer_gaps(())
            told = escape(str(problem))
            self.picture.value = f'<p role="alert" style="font-size:110%">{told}</p>'
            for words in (self.numbers, self.ranks, self.formula, self.cause):
                words.value = ""
            return
        self._offer_gaps(self._report.timeline.idle_gaps)
        self.numbers.value = numbers_html(self._report)
        self.ranks.value = ranks_html(self._report)
        self.formula.value = formula_html(self._report)
        self.frame()

    def frame(self, _change: object = None) -> None:
        """Draw the timeline with a frame around the gap that is chosen, and tell its cause."""
        if self._report is None:
            return
        gaps = self._report.timeline.idle_gaps
        gap = None if self.gap.value is None else gaps[self.gap.value]
        self._figure = figure_of(self._report, gap)
        self._figure.set_dpi(_DOTS_PER_INCH)
        data = b64encode(self._figure.png(quick=True)).decode("ascii")
        alt = escape(self._figure.alt_text)
        style = "display:block;width:100%;max-width:860px"
        self.picture.value = f'<img src="data:image/png;base64,{data}" alt="{alt}" style="{style}">'
        self.cause.value = _sentence(gap.cause if gap else "no rank is ever idle")

    def _offer_gaps(self, gaps: tuple[Gap, ...]) -> None:
        """Fill the menu and choose the longest gap, without drawing for every step of it."""
        options = []
        for i, gap in enumerate(gaps):
            when = f"{format_time(gap.start)} to {format_time(gap.end)}"
            options.append((f"rank {gap.rank}, {when}", i))
        longest = max(range(len(gaps)), key=lambda i: gaps[i].duration, default=None)
        self.gap.unobserve(self.frame, "value")
        self.gap.options = options
        self.gap.value = longest
        self.gap.disabled = not gaps
        self.gap.observe(self.frame, "value")

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        data = super()._repr_mimebundle_(**kwargs)
        if self._figure is None or not isinstance(data, dict):
            return data
        picture, metadata = self._figure._repr_mimebundle_()
        return {**picture, **data, "text/plain": self._figure.alt_text}, metadata


def _controls(settings: Settings) -> dict[str, Widget]:
    def choice(text: str, options: dict[str, Any]) -> Widget:
        return Dropdown(description=text, options=list(options.items()), **_WIDE)

    def whole(text: str, most: int) -> Widget:
        return IntSlider(description=text, min=1, max=most, **_WIDE)

    def times(text: str, least: float = 0.0, most: float = 4.0) -> Widget:
        # Quarters are exact in binary, so simulation and formula agree to the last digit.
        look: dict[str, Any] = {"readout_format": ".2f", **_WIDE}
        return FloatSlider(description=text, min=least, max=most, step=0.25, **look)

    schedules = {name: name for name in names()}
    chunks = {"the schedule's own": _NONE, **{str(n): n for n in range(1, 5)}}
    stages = {"none": _NONE, **{str(n): n for n in range(32)}}
    # In two columns, from left to right.
    controls = {
        "schedule": choice("schedule", schedules),
        "forward": times("forward f"),
        "n_chunks": choice("chunks a rank", chunks),
        "input_grad": times("input gradient b"),
        "n_ranks": whole("ranks p", 16),
        "weight_grad": times("weight gradient w"),
        "n_microbatches": whole("microbatches m", 64),
        "slow_stage": choice("slow stage", stages),
        "latency": times("latency L"),
        "slowdown": times("times slower", 1.0),
        "round_size": IntSlider(description="round n (0: its own)", min=0, max=64, **_WIDE),
    }
    for name, control in controls.items():
        value = getattr(settings, name)
        try:
            control.value = _none_of(control) if value is None else value
            # Python takes True for 1
            is_shown = _value(control) == value and not isinstance(value, bool)
        except Exception:  # ipywidgets raises TraitError, which is no ValueError
            is_shown = False
        if not is_shown:
            raise ValueError(f"{name} is {shown(value)}: the panel has no such value")
    return controls


def _value(control: Widget) -> Any:
    return None if control.value == _none_of(control) else control.value


def _none_of(control: Widget) -> int | None:
    """Return the value that stands for None; None if none does."""
    if isinstance(control, Dropdown):
        return _NONE
    if isinstance(control, IntSlider) and control.min == 0:
        return 0
    return None
