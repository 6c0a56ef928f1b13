"""Edges to stages beyond the neighbour: the possible ones, their messages' cost, their drawing."""

from fractions import Fraction

import pytest
from matplotlib.collections import LineCollection

from course_pp import show
from course_pp.schedule import Costs, Edge, Schedule, build, check, generation, simulate
from course_pp.show.chart import ChartFigure

SKIP = Edge("x", 0, (2, 3))


def test_edges_that_cannot_be_are_problems_by_name() -> None:
    schedule = build("1f1b", 4, 4)
    assert check(schedule.with_edges(SKIP)) == []
    assert check(
        schedule.with_edges(
            Edge("x", 3, (1,)), Edge("y", 2, (2,)), Edge("y", 0, (3,)), Edge("z", 0, (4,))
        )
    ) == [
        (
            "value 'x' goes backwards, from stage 3 to stage 1, which makes the cycle 1 → 2 → 3 →"
            " 1: make it in a stage before 1, or read it after 3"
        ),
        "stage 2 reads 'y', which it makes itself: use it there, or read it in a later stage",
        "value 'y' is made by stage 2 and by stage 0: give each value a name of its own",
        "edge 'z' names stage 4, but the stages are 0 to 3",
    ]
    assert check(schedule.with_edges(Edge("x", 0, (2,)), Edge("x", 0, (3,)))) == [
        "value 'x' of stage 0 has two edges: give one edge all its readers"
    ]
    with pytest.raises(ValueError, match="cannot run: value 'x' goes backwards"):
        simulate(schedule.with_edges(Edge("x", 3, (1,))))
    with pytest.raises(
        ValueError,
        match=r"edge 'x' has readers .1, 1.: give at least one stage, and each of them once",
    ):
        Edge("x", 0, (1, 1))
    assert (
        schedule.with_edges(SKIP).fingerprint
        != schedule.fingerprint
        == schedule.with_edges().fingerprint
    )


@pytest.mark.parametrize(
    ("placement", "late"),
    [(((0,), (1,), (2,)), 2), (((0,), (1,), (0,)), 0)],
    ids=["another rank", "the same rank"],
)
def test_a_message_of_an_edge_is_charged_between_ranks_only(
    placement: tuple[tuple[int, ...], ...], late: int
) -> None:
    rows = [[] for _ in range(1 + max(rank for (rank,) in placement))]
    order = build("naive", 3, 1)
    for row in order.actions:
        for action in row:
            rows[placement[action.parts[0].stage][0]].append(action)
    rows = [
        sorted(row, key=lambda a: (a.kind != "F", a.stage if a.kind == "F" else -a.stage))
        for row in rows
    ]
    schedule = Schedule("mine", placement, tuple(map(tuple, rows)), (Edge("x", 0, (2,)),))
    half = Fraction(1, 2)
    costs = Costs(
        forward=1, input_grad=1, weight_grad=1, latency=0, edge_latency=3, edge_bytes=1, bandwidth=2
    )
    # Forward: x is ready at 1 and takes 3 + 1/2; the chain would be there at 2. Back: the gradient
    # likewise.
    plain = simulate(schedule.with_edges(), costs).makespan
    assert plain == 3 * 1 + 3 * 2
    waits = 2 * (3 + half) - 1 - 2 if late else 0  # less what the chain takes meanwhile: 1F and 1B
    assert simulate(schedule, costs).makespan == plain + waits


def test_unless_given_an_edge_takes_the_longest_latency_it_passes_over() -> None:
    costs = Costs(latency=(1, 5, 2))
    assert costs.edge_transfers((SKIP, Edge("y", 2, (3,))), 4) == (5, 5, 2)
    with pytest.raises(ValueError, match="edge_latency has 2 values for 1 readers of edges"):
        Costs(edge_latency=(1, 2)).edge_transfers((Edge("x", 0, (1,)),), 4)


def lines(figure: ChartFigure) -> int:
    return sum(len(each.get_segments()) for each in figure.axes[0].findobj(LineCollection))


def test_what_waits_for_an_edge_says_so_and_the_chart_draws_it() -> None:
    timeline = simulate(build("1f1b", 4, 3).with_edges(SKIP), Costs(edge_latency=9))
    assert any(
        "for the value 'x' of microbatch 0 from stage 0" in g.cause for g in timeline.idle_gaps
    )
    figure = show.timeline(timeline)
    assert lines(figure) - lines(show.timeline(simulate(build("1f1b", 4, 3)))) == 3 * 2 * 2
    assert (
        "Lines show 'x' from stage 0 to stages 2 and 3: 6 messages forward, 6 back."
        in figure.alt_text
    )
    assert "8 tokens on their way" in show.timeline(simulate(generation(2, 2, 5))).alt_text
