import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, PathPatch
from PIL import Image

from course_pp import show
from course_pp.schedule import (
    Action,
    Costs,
    Overlap,
    Schedule,
    Span,
    Timeline,
    build,
    fit,
    ledger,
    names,
    simulate,
)
from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.wording import spelled_peaks
from tests.schedule.layouts import gpipe, naive
from tests.show.layout import flaws
from tests.show.reading import labels, rank_names, texts, title


def wait(rank: int, operation: str, *peers: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, operation=operation, peers=peers)


PIPEDREAM = build("pipedream", 4, 8)
FIGURES = {
    "timeline": lambda: show.timeline(gpipe(4, 8)),
    "compare": lambda: show.compare(gpipe(4, 8), gpipe(4, 8, latency=1)),
    "memory": lambda: show.memory(gpipe(4, 8)),
    "pareto": lambda: show.pareto(),
    "dependencies": lambda: show.dependencies(gpipe(4, 8), "0B3"),
    "waits": lambda: show.waits([wait(0, "send", 1), wait(1, "send", 0)]),
    "bytes": lambda: show.bytes_by_kind({"weights": 2**20, "gradients": 2**20}, budget=2**20),
}


@pytest.fixture(params=FIGURES)
def figure(request: pytest.FixtureRequest) -> ChartFigure:
    return FIGURES[request.param]()


@pytest.mark.sample(3)
def test_a_figure_shows_itself_as_a_picture_with_its_alt_text(figure: ChartFigure) -> None:
    data, metadata = figure._repr_mimebundle_()
    picture = Image.open(io.BytesIO(data["image/png"]))
    assert data["text/plain"] == metadata["image/png"]["alt"] == figure.alt_text
    assert picture.size[0] == 2 * metadata["image/png"]["width"]
    assert len(data["image/png"]) < 100_000
    assert title(figure) in figure.alt_text


@pytest.mark.sample(3)
def test_a_notebook_with_matplotlib_inline_still_gets_the_alt_text_once(
    figure: ChartFigure,
) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.pylabtools import select_figure_formats
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    try:
        select_figure_formats(shell, {"png"})
        with capture_output() as captured:
            shell.displayhook(figure)
    finally:
        InteractiveShell.clear_instance()
    (output,) = captured.outputs
    assert output.metadata["image/png"]["alt"] == figure.alt_text
    assert output.data["text/plain"] == figure.alt_text


def test_no_words_are_over_each_other_or_out_of_their_place(figure: ChartFigure) -> None:
    assert flaws(figure) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("sizes", [(2, 4), (4, 8), (8, 32)])
def test_the_timeline_of_every_schedule_is_legible(name: str, sizes: tuple[int, int]) -> None:
    assert flaws(show.timeline(simulate(build(name, *sizes)))) == []


def test_later_chunks_of_a_rank_have_a_foot_as_high_as_their_number() -> None:
    def feet(name: str, n_chunks: int) -> set[float]:
        axes = show.timeline(simulate(build(name, 2, 4, n_chunks))).axes[0]
        heights = set()
        for patch in axes.findobj(PathPatch):
            if patch.get_facecolor()[:3] == to_rgb(chart.TEXT_GREY):
                for box in patch.get_path().vertices.reshape(-1, 5, 2):
                    heights.add(round(float(box[2, 1] - box[0, 1]), 6))
        return heights

    assert feet("1f1b", 1) == set()
    assert len(feet("zb_v", 2)) == 1
    lowest, middle, highest = sorted(feet("interleaved_1f1b", 4))
    assert (middle, highest) == pytest.approx((2 * lowest, 3 * lowest), rel=1e-4)


@pytest.mark.sample(3)
def test_figures_leave_pyplot_alone(figure: ChartFigure) -> None:
    from matplotlib import pyplot

    assert figure.png()
    assert pyplot.get_fignums() == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FIGURES)
def test_an_svg_is_the_same_every_time_with_text_and_description(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name]()
    first = figure.save(tmp_path / "a.svg").read_text(encoding="utf-8")
    assert first == FIGURES[name]().svg()
    assert f"<title>{figure.alt_text}</title>" in first
    assert f"<desc>{figure.alt_text}</desc>" in first
    assert "<text" in first
    assert "dc:date" not in first
    assert Image.open(figure.save(str(tmp_path / "a.PNG"))).format == "PNG"


def test_what_xml_would_misread_is_escaped_in_the_description() -> None:
    figure = next(iter(FIGURES.values()))()
    figure.alt_text = "a < b & c"
    assert "<desc>a &lt; b &amp; c</desc>" in figure.svg()


def test_a_timeline_is_titled_by_its_finding() -> None:
    finding = title(show.timeline(gpipe(4, 8)))
    assert finding == "4 ranks, 8 microbatches: busy 72.7 % of 33.0, bubble 27.3 %"
    assert title(show.timeline(gpipe(4, 8), title="GPipe")) == "GPipe"


def test_a_naive_split_is_called_one_rank_at_a_time() -> None:
    figure = show.timeline(naive(2, 0.2, 0.4, unit="s"))
    for words in ("One rank works at a time", "1 microbatch,", "busy 50 % of 1.2 s"):
        assert words in title(figure)
    assert figure.alt_text.startswith("Timeline")
    assert figure.alt_text.endswith("1 on every rank.")


def test_a_timeline_without_backwards_holds_nothing_for_one() -> None:
    rows = tuple(tuple(Action(stage, "F", i) for i in range(3)) for stage in range(2))
    figure = show.timeline(simulate(Schedule("writing", ((0,), (1,)), rows)))
    assert figure.alt_text.endswith("bubble 25 %; forwards only.")


@pytest.mark.parametrize(
    ("cost", "label", "end"), [(1, "time (s)", 4), (0.01, "time (ms)", 40), (1e-6, "time (µs)", 4)]
)
def test_a_measured_time_axis_has_a_unit_that_suits_it(cost: float, label: str, end: float) -> None:
    axes = show.timeline(naive(2, cost, cost, unit="s")).axes[0]
    assert axes.get_xlabel() == label
    assert axes.get_xlim()[1] == pytest.approx(end)


NAMED = simulate(build("1f1b", 4, 8))


@pytest.mark.parametrize(
    "figure",
    [show.timeline(NAMED), show.memory(NAMED), show.compare(NAMED, NAMED), show.explore()._figure],
    ids=["timeline", "memory", "compare", "explore"],
)
def test_the_alt_text_names_schedule_sizes_bubble_and_peaks(figure: ChartFigure) -> None:
    assert figure.alt_text.startswith("1f1b: ")
    for what in ("4 ranks, 8 microbatches", "bubble 27.3 %", "4, 3, 2 and 1 on ranks 0 to 3"):
        assert what in figure.alt_text


def test_two_schedules_compared_are_both_named() -> None:
    assert show.compare(NAMED, simulate(build("zb_h1", 4, 8))).alt_text.startswith(
        "1f1b and zb_h1: two timelines"
    )


@pytest.mark.parametrize(
    ("peaks", "spelled"),
    [
        ((4, 3, 2), "4, 3 and 2 on ranks 0 to 2"),
        ((3,) * 9, "3 on every rank"),
        (tuple(range(10, 0, -1)), "10 on rank 0 to 1 on rank 9"),
        ((2, 10, 100, 100, 100, 100, 100, 100, 1000), "2 on rank 0 to 1000 on rank 8"),
        ((10, 9, 8, 7, 600, 5, 4, 3, 2, 1), "at most 600, on rank 4; at least 1, on rank 9"),
    ],
)
def test_peaks_of_many_ranks_are_told_by_their_ends_only_if_nothing_between_sticks_out(
    peaks: tuple[int, ...], spelled: str
) -> None:
    assert spelled_peaks(peaks) == spelled


def test_rank_0_is_the_top_row() -> None:
    figure = show.timeline(gpipe(3, 2))
    assert rank_names(figure) == [("rank 0", 0), ("rank 1", 1), ("rank 2", 2)]
    assert figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]


def test_boxes_too_narrow_for_the_kind_keep_the_number_and_narrower_ones_nothing() -> None:
    written = [text for text, *_ in labels(show.timeline(gpipe(8, 32)))]
    assert written.count("31") == 8  # the backwards; a forward is half as wide
    assert not any(re.match("[FB]", label) for label in written)
    assert not labels(show.timeline(gpipe(4, 512)))


def test_a_name_too_long_for_letters_that_can_be_read_leaves_the_number() -> None:
    latency = tuple(float(boundary in (2, 5)) for boundary in range(7))
    eight = simulate(build("zb_h1", 8, 8), Costs(latency=latency))
    written = set()
    for text, size, *_ in labels(show.compare(eight, eight)):
        if not text.startswith("ends"):
            written.add((text, size))
    assert written == {(str(i), 8.5) for i in range(8)}


@pytest.mark.parametrize(
    ("draw", "kinds"),
    [
        (lambda: show.timeline(simulate(build("zb_h1", 4, 8))), "IW"),
        (
            lambda: show.versions(
                simulate(PIPEDREAM, Costs(update=0.25)), ledger(PIPEDREAM, "stash")
            ),
            "B",
        ),
    ],
    ids=["timeline", "versions"],
)
def test_no_hatch_runs_through_a_label(draw: Callable[[], ChartFigure], kinds: str) -> None:
    figure = draw()
    axes = figure.axes[0]
    plain = [patch.get_path() for patch in axes.findobj(PathPatch) if not patch.get_hatch()]
    points_x, points_y = chart.points_per_unit(axes)
    mine = [each for each in labels(figure) if each[0][0] in kinds]
    assert len(mine) == 32 * len(kinds)
    for text, size, x, y in mine:
        wide = 0.45 * chart.text_width(text, size) / points_x
        high = 0.3 * size / points_y
        corners = [(x - wide, y - high), (x - wide, y + high)]
        corners += [(x + wide, y - high), (x + wide, y + high)]
        assert any(all(map(path.contains_point, corners)) for path in plain), text


def test_a_rank_with_several_stages_names_the_stage() -> None:
    spans = [Span(0, Action(stage, "F", 0), stage, stage + 1) for stage in (0, 1)]
    pair = Span(0, Overlap(Action(0, "F", 1), Action(1, "B", 0)), 2, 5)
    assert {"0F0", "1F0", "0F1", "1B0"} <= set(texts(show.timeline(Timeline(1, (*spans, pair)))))


def test_every_kind_differs_in_letter_and_in_lightness_or_hatch() -> None:
    spans = tuple(Span(0, Action(0, kind, 0), i, i + 1) for i, kind in enumerate("FBIWU"))
    legend = show.timeline(Timeline(2, spans)).axes[0].get_legend()
    keys = [text.get_text() for text in legend.get_texts()]
    assert [key[0] for key in keys] == ["F", "B", "I", "W", "U", "i"]
    looks = []
    for patch in legend.get_patches():
        red, green, blue, _ = patch.get_facecolor()
        lightness = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
        looks.append((lightness, patch.get_hatch()))
    for i, (lightness, hatch) in enumerate(looks):
        for other_lightness, other_hatch in looks[:i]:
            assert hatch != other_hatch or abs(lightness - other_lightness) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [1, 3, 64])
@pytest.mark.parametrize(
    "draw",
    [
        show.timeline,
        show.memory,
        lambda tl: show.compare(Timeline(tl.n_ranks, ()), tl),
        lambda tl: show.compare(tl, Timeline(tl.n_ranks, ())),
        lambda tl: show.lost_time(fit(tl)),
    ],
    ids=["timeline", "memory", "compare", "compare with nothing", "lost time"],
)
def test_empty_and_tall_timelines_are_drawn(
    draw: Callable[[Timeline], ChartFigure], n_ranks: int
) -> None:
    assert draw(gpipe(n_ranks, 1)).png()
    assert draw(Timeline(n_ranks, (Span(0, Action(0, "F", 0), 0, 0),))).png()


@pytest.mark.parametrize(
    ("waiting", "finding"),
    [
        (
            [wait(0, "send", 1), wait(1, "send", 0)],
            "rank 0 waits for rank 1 and rank 1 for rank 0: none can move",
        ),
        ([wait(1, "recv", 2), wait(2, "recv", 1), wait(0, "recv", 1)], "none can move"),
        ([wait(1, "recv", 2), wait(2, "recv", 1), wait(0, "computing")], "none of them can move"),
        (
            [wait(i, "send", (i + 1) % 5) for i in range(5)],
            "ranks 0, 1, 2, 3 and 4 wait for each other",
        ),
        ([wait(0, "recv", 1), wait(1, "computing")], "rank 0 waits for rank 1: no cycle"),
        ([wait(0, "recv", 0)], "rank 0 waits for itself"),
        ([wait(0, ""), wait(1, "done")], "No rank waits for another"),
        (
            [wait(0, "recv", 1, 2), wait(1, "recv", 0), wait(2, "computing")],
            "none of them can move",
        ),
    ],
)
def test_waits_are_summed_up(waiting: list[SimpleNamespace], finding: str) -> None:
    figure = show.waits(waiting)
    assert finding in title(figure)
    assert all(f"rank {each.rank} waits" in figure.alt_text for each in waiting)


def test_only_the_cycle_is_drawn_thick_and_solid() -> None:
    figure = show.waits([wait(0, "recv", 1), wait(1, "recv", 0), wait(2, "recv", 0)])
    looks = []
    for patch in figure.axes[0].patches:
        if isinstance(patch, FancyArrowPatch):
            looks.append((patch.get_linewidth() > 2, patch.get_linestyle() == "-"))
    assert looks == [(True, True), (True, True), (False, False)]


def test_a_peer_without_a_report_is_drawn() -> None:
    assert "no report" in texts(show.waits([wait(0, "recv", 1)]))


def test_bytes_over_the_budget_are_said_to_be() -> None:
    figure = show.bytes_by_kind({"weights": 3 * 2**20, "activations": 2**20}, budget=3 * 2**20)
    assert title(figure) == "4 MiB in all, 1 MiB over the budget"
    assert "weights 3 MiB" in figure.alt_text
    assert "budget 3 MiB" in texts(figure)


def test_bytes_are_drawn_beside_each_other_by_name() -> None:
    parts = {"weights": 1024, "activations": 2048}
    figure = show.bytes_by_kind({"predicted": parts, "measured": {**parts, "other": 1024}})
    assert title(figure) == "predicted 3 KiB; measured 4 KiB"
    names_of_rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names_of_rows == ["predicted", "measured"]


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (1000 * 2**20, "1000 MiB"),
        (1023.9 * 2**20, "1 GiB"),
        (2**31, "2 GiB"),
        (3 * 2**40, "3 TiB"),
    ],
)
def test_bytes_are_written_in_powers_of_1024(n_bytes: float, text: str) -> None:
    assert show.format_bytes(n_bytes) == text
