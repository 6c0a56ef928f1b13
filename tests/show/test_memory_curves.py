from matplotlib.collections import PolyCollection

from course_pp import show
from course_pp.schedule import Costs, Edge, build, simulate
from course_pp.show.chart import ChartFigure
from tests.schedule.layouts import gpipe, naive
from tests.show.reading import notes, title


def areas(figure: ChartFigure) -> list[set[tuple[float, float]]]:
    """The corners of each coloured area."""
    _, *coloured = [each for each in figure.axes[0].collections if isinstance(each, PolyCollection)]
    found = []
    for each in coloured:
        for path in each.get_paths():
            found.append({(x, round(y, 6)) for x, y in path.vertices})
    return found


def test_the_curve_rises_with_each_forward_and_falls_with_each_backward() -> None:
    (area,) = areas(show.memory(gpipe(1, 2)))
    low = 0.43
    half = 0.0
    high = -0.43
    forwards = {(0, low), (0, half), (1, half), (1, high)}
    backwards = {(4, high), (4, half), (6, half), (6, low)}
    assert area == forwards | backwards


def test_one_released_and_the_next_taken_at_once_is_no_step() -> None:
    first, _ = areas(show.memory(simulate(build("1f1b", 2, 3))))
    assert {y for x, y in first if x == 6} == {-0.43}  # 0B0 ends and 0F2 starts


def test_weights_are_drawn_under_the_activations_and_their_versions_named() -> None:
    costs = Costs(activation=2, weights=3)
    figure = show.memory(simulate(build("pipedream", 3, 6)), costs)
    assert title(figure) == "Peak memory: 15, 10 and 5 on ranks 0 to 2"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "weights, every version",
        "activations",
    ]
    assert figure.alt_text.endswith("Versions of the weights kept: rank 0 3 and rank 1 2.")
    assert figure.png()


def test_the_peaks_are_in_the_title_the_margin_and_the_alt_text() -> None:
    figure = show.memory(simulate(build("1f1b", 4, 8)))
    assert title(figure) == "Peak activations held: 4, 3, 2 and 1 on ranks 0 to 3"
    assert notes(figure) == ["4", "3", "2", "1"]
    assert figure.alt_text.endswith("Rank 0 reaches 4 at time 3.")
    assert show.memory(naive(2, 0.01, 0.02, "s")).alt_text.endswith(
        "Rank 0 reaches 1 at time 0 ms."
    )


def test_values_of_edges_are_memory_too() -> None:
    tl = simulate(build("1f1b", 4, 8).with_edges(Edge("skip", 0, (3,)), Edge("mask", 0, (2, 3))))
    assert tl.peak_values == (0, 0, 2, 2)
    heading = title(show.memory(tl))
    assert "values" in heading
    assert heading.endswith("4, 3, 4 and 3 on ranks 0 to 3")
    weighed = show.memory(tl, Costs(activation=4, edge_activation=(8, 1, 2), weights=1))
    assert title(weighed) == "Peak memory: 17, 13, 11 and 15 on ranks 0 to 3"
    assert weighed.axes[0].get_legend().get_texts()[1].get_text() == "activations and values"
    told = show.timeline(tl).alt_text
    assert "activations held: 4, 3, 2 and 1" in told
    assert "values of edges held: 0, 0, 2 and 2" in told
    assert "Values of edges held: predicted 0, 0, 2 and 2" in show.compare(tl, tl).alt_text


class Rank:
    """What a recorder counted on one rank."""

    def __init__(self, *curve: tuple[float, int]) -> None:
        self.curves = {
            "activation": curve,
            "total": tuple((time, 2 * held) for time, held in curve),
        }


def test_what_was_measured_is_drawn_in_bytes() -> None:
    tl = naive(2, 0.01, 0.02, "s")
    measured = [Rank((0.0, 0), (0.01, 4096), (0.05, 0)), Rank((0.0, 0), (0.02, 2048), (0.03, 0))]
    figure = show.memory(tl, measured=measured)
    assert title(figure) == "Peak activation bytes kept: 4 KiB and 2 KiB on ranks 0 to 1"
    assert notes(figure) == ["4 KiB", "2 KiB"]
    assert "Rank 0 reaches 4 KiB at time 10 ms." in figure.alt_text
    first, second = areas(figure)
    assert {(10.0, -0.43), (50.0, 0.43)} <= first
    assert {(20.0, 1.0), (30.0, 1.43)} <= second
    assert title(show.memory(tl, measured=measured, kind="total")).startswith(
        "Peak bytes kept in all: 8 KiB and 4 KiB"
    )
