"""Properties of every schedule with every size and cost."""

from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_pp.schedule import Costs, Schedule, Timeline, bound, build, check, names, simulate
from tests.grids import examples
from tests.schedule.sizes import TWO_COPIES

times = st.fractions(min_value=0, max_value=9, max_denominator=7)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Draw any schedule of any small size that it allows."""
    name = draw(st.sampled_from(names()))
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    if name in TWO_COPIES:
        p += p % 2
    if name.startswith("dualpipe"):
        m = 2 * p + m + m % 2
    if name == "pipedream":
        replicas = draw(st.lists(st.integers(1, 3), min_size=p, max_size=p))
        return build(name, sum(replicas), m, replicas=replicas)
    chunked = name in ("interleaved_1f1b", "looped_bfs", "zb_h1")
    v = (
        draw(st.integers(1, 3))
        if chunked
        else 2 * draw(st.integers(1, 2))
        if name == "hanayo"
        else None
    )
    return build(name, p, m * p if chunked else m, v)


@st.composite
def costs_for(draw: st.DrawFn, schedule: Schedule) -> Costs:
    """Costs that differ from stage to stage and from boundary to boundary, zero included."""
    n = schedule.n_stages

    def each(values: st.SearchStrategy[Fraction], many: int) -> st.SearchStrategy[list[Fraction]]:
        return st.lists(values, min_size=many, max_size=many)

    activation = draw(each(times, n))
    return Costs(
        forward=draw(each(times, n)),
        input_grad=draw(each(times, n)),
        weight_grad=draw(each(times, n)),
        recompute=draw(st.sampled_from([0, Fraction(1, 2)])),
        latency=draw(each(times, n - 1)),
        update=draw(times),
        overlapped=draw(st.none() | times),
        activation=activation,
        released_by_input_grad=[
            kept * draw(st.sampled_from([0, Fraction(1, 2), 1])) for kept in activation
        ],
        weights=draw(times),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    schedule = draw(schedules())
    return schedule, draw(costs_for(schedule))


@given(cases())
@examples(150)
@pytest.mark.slow
def test_every_schedule_runs_and_keeps_every_promise(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    assert check(schedule) == []
    tl = simulate(schedule, costs)
    assert_each_rank_keeps_its_order(schedule, tl)
    assert_nothing_starts_before_its_inputs_arrive(schedule, costs, tl)
    assert_each_action_starts_as_early_as_it_can(tl)
    assert_work_is_conserved(schedule, costs, tl)
    assert_every_idle_moment_has_a_cause(tl)
    assert tl.makespan >= bound(
        schedule.n_ranks, schedule.n_microbatches, costs, placement=schedule.placement
    )
    assert tl.makespan >= bound(
        schedule.n_ranks,
        schedule.n_microbatches,
        costs,
        tl.peak_memory(costs),
        placement=schedule.placement,
    )


def floats(value: object) -> object:
    """``value`` with every fraction in it rounded."""
    if isinstance(value, tuple):
        return tuple(map(floats, value))
    return value if value is None else float(value)  # type: ignore[arg-type]


@given(cases())
@examples(100)
@pytest.mark.slow
def test_no_schedule_beats_the_bound_in_floats_either_and_its_own_memory_is_enough(
    case: tuple[Schedule, Costs],
) -> None:
    schedule, exact = case
    costs = Costs(**{field.name: floats(getattr(exact, field.name)) for field in fields(exact)})
    tl = simulate(schedule, costs)
    least = bound(
        schedule.n_ranks,
        schedule.n_microbatches,
        costs,
        tl.peak_memory(costs),
        placement=schedule.placement,
    )
    assert tl.makespan >= least * (1 - 1e-9)


def assert_each_rank_keeps_its_order(schedule: Schedule, tl: Timeline) -> None:
    assert tuple(tuple(span.action for span in row) for row in tl.by_rank) == schedule.actions


def assert_nothing_starts_before_its_inputs_arrive(
    schedule: Schedule, costs: Costs, tl: Timeline
) -> None:
    made = {
        product: span
        for span in tl.spans
        for part in span.action.parts
        for product in part.provides
    }
    transfers = costs.transfers(schedule.n_stages)
    for span in tl.spans:
        for part in span.action.parts:
            for product in part.needs(schedule.n_stages):
                maker = made[product]
                boundary = min(product.stage, part.stage)
                delay = transfers[boundary] if maker.rank != span.rank else 0
                assert span.start >= maker.end + delay


def assert_each_action_starts_as_early_as_it_can(tl: Timeline) -> None:
    for row in tl.by_rank:
        free = 0
        for span in row:
            ready = max((each.arrival for each in tl._inputs.of(span)), default=0)
            assert span.start == max(free, ready)
            free = span.end


def assert_work_is_conserved(schedule: Schedule, costs: Costs, tl: Timeline) -> None:
    kinds = costs.durations(schedule.n_stages)
    for row, busy in zip(schedule.actions, tl.busy, strict=True):
        pairs = sum(len(action.parts) == 2 for action in row) if costs.overlapped is not None else 0
        apart = [
            part for action in row if not pairs or len(action.parts) == 1 for part in action.parts
        ]
        alone = sum(kinds[part.kind][part.stage] for part in apart)
        assert busy == alone + pairs * (costs.overlapped or 0)


def assert_every_idle_moment_has_a_cause(tl: Timeline) -> None:
    idle = [0] * tl.n_ranks
    for gap in tl.idle_gaps:
        idle[gap.rank] += gap.duration
        assert gap.cause.startswith(f"rank {gap.rank} waits from ")
        assert any(
            word in gap.cause
            for word in ("for the", "because its work is done", "because it has no work")
        )
    assert all(work + rest == tl.makespan for work, rest in zip(tl.busy, idle, strict=True))
