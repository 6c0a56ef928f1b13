import math
from fractions import Fraction
from itertools import pairwise

import pytest

from course_pp.schedule import (
    Action,
    Costs,
    Overlap,
    Product,
    Receive,
    Schedule,
    Span,
    Timeline,
    build,
    format_time,
    names,
    simulate,
)
from tests.grids import folded
from tests.schedule.layouts import gpipe, naive
from tests.schedule.sizes import built


def on_rank(rank: int, *actions: tuple[str, float, float]) -> tuple[Span, ...]:
    return tuple(Span(rank, Action.parse(text), start, end) for text, start, end in actions)


def test_a_naive_split_over_two_ranks_is_busy_half_of_the_time() -> None:
    tl = naive(2)
    assert tl.makespan == 6
    assert tl.busy == (3, 3)
    assert tl.bubble_fraction == tl.utilisation == 0.5
    assert tl.span_bubble_fraction == 0.5
    assert tl.peak_activations == (1, 1)
    assert (tl.n_stages, tl.n_microbatches) == (2, 1)


def test_gpipe_of_four_ranks_and_eight_microbatches_takes_33() -> None:
    tl = gpipe(4, 8, Fraction(1), Fraction(2))
    assert tl.makespan == 33
    assert tl.bubble_fraction == Fraction(3, 11)  # (p-1)/(m+p-1): Huang et al., GPipe, section 2.3
    assert tl.span_bubble_fraction == Fraction(3, 11)
    assert tl.peak_activations == (8, 8, 8, 8)
    assert repr(tl) == "Timeline(4 ranks, 64 spans, makespan 33.0, bubble 27.3%)"


def test_the_span_bubble_does_not_count_a_late_start_and_compares_the_longest_span_with_the_busiest_rank() -> (
    None
):
    tl = Timeline(2, on_rank(0, ("0F0", 0, 2)) + on_rank(1, ("1F0", 2, 4)))
    assert tl.bubble_fraction == 0.5
    assert tl.span_bubble_fraction == 0
    tl = Timeline(
        2, on_rank(0, ("0F0", 0, 1), ("0B0", 7, 8)) + on_rank(1, ("1F0", 1, 4), ("1B0", 4, 7))
    )
    assert tl.span_bubble_fraction == (8 - 6) / 8


def test_an_activation_is_held_from_the_start_of_f_to_the_end_of_w_when_the_backward_is_split() -> (
    None
):
    whole = on_rank(0, ("0F0", 0, 1), ("0B0", 1, 3), ("0F1", 3, 4), ("0B1", 4, 6))
    split = on_rank(
        0, ("0F0", 0, 1), ("0I0", 1, 2), ("0F1", 2, 3), ("0W0", 3, 4), ("0I1", 4, 5), ("0W1", 5, 6)
    )
    assert Timeline(1, whole).peak_activations == (1,)
    assert Timeline(1, split).peak_activations == (2,)


def test_an_overlapped_pair_holds_both_activations_while_it_runs() -> None:
    pair = Span(0, Overlap(Action(0, "F", 1), Action(0, "B", 0)), 1, 4)
    tl = Timeline(1, (*on_rank(0, ("0F0", 0, 1)), pair, *on_rank(0, ("0B1", 4, 6))))
    assert tl.peak_activations == (2,)
    assert tl.busy == (6,)


def test_actions_that_cost_nothing_keep_their_order() -> None:
    spans = on_rank(0, ("0F0", 0, 0), ("0B0", 0, 0), ("0F1", 0, 0), ("0B1", 0, 2), ("0W1", 2, 2))
    tl = Timeline(1, spans)
    assert tl.spans == spans
    assert tl.peak_activations == (1,)


def test_every_gap_of_the_naive_split_has_its_cause() -> None:
    assert [gap.cause for gap in naive(2).idle_gaps] == [
        "rank 0 waits from 1.0 to 4.0 for the gradient of microbatch 0 from stage 1",
        "rank 1 waits from 0.0 to 1.0 for the activation of microbatch 0 from stage 0",
        "rank 1 waits from 4.0 to 6.0 because its work is done",
    ]


def test_a_gap_names_the_transfer_when_the_input_was_made_before_the_wait_began() -> None:
    spans = on_rank(0, ("0F0", 0, 1), ("0F1", 1, 2)) + on_rank(1, ("1F0", 2, 4), ("1F1", 5, 7))
    assert [gap.cause for gap in Timeline(2, spans).idle_gaps][1:] == [
        (
            "rank 1 waits from 0.0 to 2.0 for the activation of microbatch 0 from stage 0, "
            "ready on rank 0 at 1.0; the rest is transfer or overhead"
        ),
        (
            "rank 1 waits from 4.0 to 5.0 for the transfer of the activation of microbatch 1 from"
            " stage 0 or other overhead, ready on rank 0 at 2.0"
        ),
    ]
    (gap,) = Timeline(1, on_rank(0, ("0F0", 1, 2))).idle_gaps
    assert (
        gap.cause
        == "rank 0 waits from 0.0 to 1.0 before 0F0, which needs nothing from another rank"
    )


def test_a_gap_names_the_transfer_alone_when_the_simulation_knows_how_long_it_took() -> None:
    tl = simulate(build("1f1b", 2, 2), Costs(1, 1, 1, latency=3))
    assert [gap.cause for gap in tl.idle_gaps if gap.rank == 1] == [
        (
            "rank 1 waits from 0.0 to 4.0 for the activation of microbatch 0 from stage 0, ready on"
            " rank 0 at 1.0; the rest is transfer"
        ),
        "rank 1 waits from 10.0 to 15.0 because its work is done",
    ]
    tl = simulate(build("gpipe", 2, 2), Costs(1, 1, 1, latency=(3,)))
    assert (
        tl.idle_gaps[0].cause
        == "rank 0 waits from 2.0 to 11.0 for the gradient of microbatch 0 from stage 1, ready on"
        " rank 1 at 8.0; the rest is transfer"
    )


def test_a_gap_names_an_action_that_the_order_kept_for_later() -> None:
    tl = simulate(build("1f1b", 4, 8), Costs(1, 1, 1))
    _, later, *_ = (gap for gap in tl.idle_gaps if gap.rank == 2)
    assert (later.start, later.end) == (4.0, 6.0)
    assert "2F2" in later.cause
    assert not any("though" in gap.cause for gap in simulate(build("gpipe", 4, 8)).idle_gaps)


def test_the_later_of_two_messages_is_named_even_if_it_was_sent_first() -> None:
    # The pair on rank 1 needs an activation over the slow boundary and a gradient over the fast
    # one.
    rows = (
        on_rank(0, ("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 20, 21)),
        (
            *on_rank(1, ("1F0", 6, 7)),
            Span(1, Overlap(Action(1, "F", 1), Action(1, "B", 0)), 9, 12),
        ),
        on_rank(2, ("2F0", 7, 8), ("2B0", 8, 8.5)),
    )
    tl = Timeline(3, tuple(span for row in rows for span in row), transfers=(7, 0))
    gap = next(gap for gap in tl.idle_gaps if gap.rank == 1 and gap.start == 7)
    assert (
        "the transfer of the activation of microbatch 1 from stage 0, ready on rank 0 at 2.0"
        in gap.cause
    )


def test_the_critical_path_of_1f1b_goes_down_and_up_once_for_every_round_of_microbatches() -> None:
    tl = simulate(build("1f1b", 3, 4), Costs(1, 1, 1, Fraction(1, 2)))
    assert (
        " ".join(str(span.action) for span in tl.critical_path)
        == "0F0 1F0 2F0 2B0 1B0 0B0 0F3 1F3 2F3 2B3 1B3 0B3"
    )


@pytest.mark.parametrize("name", names())
@folded("latency", [0, Fraction(1, 3), 4])
def test_the_critical_path_fills_the_makespan_but_for_transfers(
    name: str, latency: Fraction
) -> None:
    tl = simulate(built(name, 3, 6), Costs(1, 2, 1, latency))
    path = tl.critical_path
    assert path[0].start == 0
    assert path[-1].end == tl.makespan
    for before, after in pairwise(path):
        assert after.start - before.end == (0 if before.rank == after.rank else latency)


@pytest.mark.parametrize("name", names())
def test_the_memory_curve_counts_activations_unless_told_what_they_weigh(name: str) -> None:
    tl = simulate(built(name, 3, 6), Costs(1, 1, 1))
    assert tl.peak_memory() == tl.peak_activations
    assert all(curve[0] == (0, 0) and curve[-1][1] == 0 for curve in tl.memory_curve())


def test_the_input_gradient_releases_its_part_and_the_weight_gradient_the_rest() -> None:
    tl = simulate(
        Schedule("split", ((0,),), (tuple(map(Action.parse, ["0F0", "0I0", "0W0"])),)),
        Costs(1, 1, 1),
    )
    costs = Costs(activation=10, released_by_input_grad=4, weights=100)
    assert tl.memory_curve(costs) == (((0, 100), (0, 110), (2, 106), (3, 100)),)


def test_pipedream_keeps_a_version_of_the_weights_for_every_microbatch_in_flight() -> None:
    tl = simulate(build("pipedream", 4, 8), Costs(1, 1, 1))
    assert tl.weight_versions == (4, 3, 2, 1)
    assert tl.peak_memory(Costs(activation=0, weights=5)) == (20, 15, 10, 5)
    assert simulate(build("1f1b", 4, 8)).weight_versions == (1, 1, 1, 1)
    # Rank 0 updates while microbatch 1 is in flight, and no third comes to use the new weights.
    assert simulate(build("pipedream", 2, 2)).weight_versions == (2, 1)


def test_memory_of_stages_that_differ() -> None:
    tl = simulate(build("gpipe", 2, 3))
    assert tl.peak_memory(Costs(activation=(1, 10), weights=(100, 0))) == (103, 30)
    with pytest.raises(ValueError, match="activation has 3 values for 2 stages"):
        tl.memory_curve(Costs(activation=(1, 2, 3)))


def test_a_repeated_step_waits_for_its_own_activation_not_for_that_of_the_step_before() -> None:
    first, second = naive(2), naive(2)
    later = tuple(Span(s.rank, s.action, s.start + 10, s.end + 10) for s in second.spans)
    gaps = [gap for gap in Timeline(2, first.spans + later).idle_gaps if gap.rank == 0]
    assert [(gap.start, gap.end) for gap in gaps] == [(1, 4), (6, 10), (11, 14)]
    assert gaps[2].cause.endswith("for the gradient of microbatch 0 from stage 1")


def test_a_timeline_or_a_rank_without_spans_has_numbers_too() -> None:
    tl = Timeline(3, ())
    assert (tl.makespan, tl.bubble_fraction, tl.span_bubble_fraction, tl.utilisation) == (
        0,
        0,
        0,
        1,
    )
    assert tl.busy == tl.peak_activations == (0, 0, 0)
    assert tl.idle_gaps == ()
    assert (tl.n_stages, tl.n_microbatches) == (0, 0)
    idle = Timeline(2, on_rank(0, ("0F0", 0, 0.5)))
    assert [gap.cause for gap in idle.idle_gaps] == [
        "rank 1 waits from 0.0 to 0.5 because it has no work"
    ]


def test_spans_given_in_any_order_make_the_same_timeline() -> None:
    tl = gpipe(3, 4)
    assert Timeline(3, tl.spans[::-1]) == tl
    assert hash(Timeline(3, tl.spans[::-1])) == hash(tl)
    assert [len(row) for row in tl.by_rank] == [8, 8, 8]


def test_a_simulated_timeline_has_the_name_of_its_schedule_which_says_nothing_about_equality() -> (
    None
):
    tl = simulate(build("1f1b", 2, 2))
    assert tl.name == "1f1b"
    assert repr(tl).startswith("Timeline(1f1b, 2 ranks, ")
    assert Timeline(2, tl.spans, transfers=tl.transfers) == tl


def receive(rank: int, start: float, end: float) -> Receive:
    return Receive(rank, Product("activation", 0, 0), start, end)


def test_receives_are_sorted_as_spans_are_and_summed_up_rank_by_rank() -> None:
    spans = on_rank(0, ("0F0", 0, 2)) + on_rank(1, ("1F0", 3, 4))
    receives = (receive(1, 1, 3), receive(0, 2, 6), receive(1, 0, 1))
    tl = Timeline(3, spans, receives=receives)
    assert tl.receives == (receive(0, 2, 6), receive(1, 0, 1), receive(1, 1, 3))
    assert tl.waited == (4, 3, 0)
    assert tl.makespan == 4  # nothing is done after that
    assert tl.busy == (2, 1, 0)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        (
            receive(0, 1.5, 3),
            "0F0 and the receive of the activation of microbatch 0 from stage 0 overlap on rank 0",
        ),
        (receive(0, 4.5, 6), "the receive of .* and the receive of .* overlap"),
        (receive(0, 3, 2), "the start first"),
        (receive(1, 3, 4), "rank 1: give a rank from 0 to 0"),
        (Span(0, Action(0, "F", 1), 1.5, 2.5), "overlap on rank 0"),
        (Span(0, Action(0, "F", 1), -1, 1), "from 0 on"),
        (Span(0, Action(0, "F", 1), math.nan, 1), "finite"),
        (Span(0, Action(0, "F", 1), 0, math.nan), "finite"),
        (Span(0, Action(0, "F", 1), 0, math.inf), "finite"),
    ],
)
def test_impossible_spans_and_receives_are_refused(bad: Span | Receive, rule: str) -> None:
    done = (*on_rank(0, ("0F0", 1, 2)), receive(0, 4, 5), bad)
    spans = tuple(each for each in done if isinstance(each, Span))
    with pytest.raises(ValueError, match=rule):
        Timeline(1, spans, receives=tuple(each for each in done if isinstance(each, Receive)))


@pytest.mark.parametrize(("n_ranks", "unit"), [(0, ""), (-1, ""), (1, "ms")])
def test_impossible_sizes_and_units_are_refused(n_ranks: int, unit: str) -> None:
    with pytest.raises(ValueError, match=r"at least 1|'s' for seconds"):
        Timeline(n_ranks, (), unit)


@pytest.mark.parametrize(
    ("time", "unit", "text"),
    [
        (5, "", "5.0"),
        (Fraction(1, 3), "", "0.3333"),
        (1.25, "s", "1.25 s"),
        (0.0125, "s", "12.5 ms"),
        (3.1e-6, "s", "3.1 µs"),
        (0, "s", "0 ms"),
    ],
)
def test_times_are_written_in_units_people_read(time: float, unit: str, text: str) -> None:
    assert format_time(time, unit) == text
