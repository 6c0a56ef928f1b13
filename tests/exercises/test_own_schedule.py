"""The graders of notebook 11, by what learners hand in; and what the notebook runs."""

from collections.abc import Callable
from typing import Any

import pytest

from course_pp import show
from course_pp.exercises.own_schedule.exercises import (
    _CHANGES,
    drawn,
    hanging,
    play,
    programs_of,
    run_in_torch,
    run_unbuffered,
    untangled,
)
from course_pp.schedule import (
    Action,
    Costs,
    Schedule,
    bound,
    build,
    check,
    names,
    optimum,
    search,
    simulate,
)
from course_pp.show.board_levels import LEVELS
from tests.exercises.grading import accepts, refuses

pytestmark = pytest.mark.ranks
Answer = Callable[..., Any]
Programs = list[list[Any]]


def swapped(key: Callable[[Any], Any], backwards: bool = False, rounds: int = 99) -> Answer:
    """Swaps that make ``key(timeline)`` less, from the first rank on or from the last."""

    def repair(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
        rows, least = [list(row) for row in schedule.actions], key(simulate(schedule, costs))
        for _ in range(rounds):
            before = least
            for row in reversed(rows) if backwards else rows:
                for i in range(len(row) - 1)[:: -1 if backwards else 1]:
                    row[i], row[i + 1] = row[i + 1], row[i]
                    changed = Schedule("own", schedule.placement, tuple(map(tuple, rows)))
                    tl = None if check(changed) else simulate(changed, costs)
                    if tl and key(tl) < least and max(tl.peak_activations) <= cap:
                        schedule, least = changed, key(tl)
                    else:
                        row[i], row[i + 1] = row[i + 1], row[i]
            if least == before:
                break
        return schedule

    return repair


def by_ends(tl: Any) -> Any:
    return tl.makespan, sum(span.end for span in tl.spans)


def by_makespan(tl: Any) -> Any:
    return tl.makespan


def searched(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    return search(schedule.n_ranks, schedule.n_microbatches, costs, cap, seconds=30).schedule


def reordered(order: Callable[[Any], Any]) -> Answer:
    """What is made of each row."""
    return lambda schedule, costs, cap: Schedule(
        "own", schedule.placement, tuple(map(tuple, map(order, schedule.actions)))
    )


def in_its_place(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    schedule.actions = schedule.actions[::-1]  # type: ignore[misc]
    return schedule


def unchecked(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    turned = Schedule("own", schedule.placement, tuple(row[::-1] for row in schedule.actions))
    return turned if simulate(turned, costs).makespan < 99 else schedule


def by(order: str) -> Callable[..., Action]:
    return lambda able, held, cap: min(able, key=lambda action: order.index(action.kind))


def weights_when_full(able: list[Action], held: int, cap: int) -> Action:
    return min(able, key=lambda action: ("WIF" if held == cap else "IFW").index(action.kind))


def receives_first(programs: Programs) -> Programs:
    return [sorted(program, key=lambda event: event[0] != "recv") for program in programs]


def sends_later(programs: Programs) -> Programs:
    return [sorted(program, key=lambda event: event[0] == "send") for program in programs]


def one_rank_as_it_was(programs: Programs) -> Programs:
    return [*untangled(programs)[:-1], list(programs[-1])]


def late(programs: Programs) -> Programs:
    first = programs[1]
    return [programs[0], [first[1], first[0], *first[2:]], *programs[2:]]


def healed_on_two(programs: Programs) -> Programs:
    return untangled(programs) if len(programs) == 2 else programs


WRONG = {
    "lower_bound": [
        (
            lambda p, m, f, i, w: m * (f + i + w),
            "The last rank cannot begin before a microbatch has come down",
        ),
        (
            lambda p, m, f, i, w: (p - 1) * f + m * (f + i + w),
            "the gradient still goes up through all the others",
        ),
        (
            lambda p, m, f, i, w: (p - 1 + m) * (f + i + w),
            "(4, 8, 1, 1, 1)` is 33, yet zb_h1 is done after 27",
        ),
        (lambda p, m, f, i, w: p * (f + i) + w, "One rank alone has `m` times all three kinds"),
        (lambda p, m, f, i, w: "27", "`lower_bound(4, 8, 1, 1, 1)` is"),
    ],
    "next_action": [
        (by("FIW"), "the next forward while an input gradient could start"),
        (by("WIF"), "the best takes"),
        (by("FWI"), "the best takes"),
        (lambda able, held, cap: able[0], "the best takes"),
        (lambda able, held, cap: Action(0, "F", 99), "Return one of the actions in `able`"),
        (lambda able, held, cap: None, "Return one of the actions in `able`"),
        (
            lambda able, held, cap: next(a for a in able if a.kind == "I"),
            "StopIteration",
            "choose among those",
        ),
        (lambda able, held, cap: {a.kind: a for a in able}["F"], "KeyError", "choose among those"),
    ],
    "repair": [
        (
            lambda schedule, costs, cap: schedule,
            "it took 31; now 31; 25 is possible.",
            "Simulate after each swap",
        ),
        (swapped(by_makespan), "is possible", "let actions end sooner"),
        (swapped(by_makespan, rounds=1), "is possible"),
        (
            lambda schedule, costs, cap: build("zb_h2", schedule.n_ranks, schedule.n_microbatches),
            "a rank holds 5 activations",
        ),
        (
            lambda schedule, costs, cap: build("1f1b", schedule.n_ranks, schedule.n_microbatches),
            "other actions",
        ),
        (reordered(reversed), "the order cannot run", "Not every swap is legal"),
        (unchecked, "raised ValueError", "Not every swap is legal"),
        (in_its_place, "FrozenInstanceError", "change lists"),
        (lambda schedule, costs, cap: schedule.actions, "returned tuple"),
    ],
    "untangled": [
        (lambda programs: programs, "hangs on rank 0, 1", "Two neighbours send to one another"),
        (healed_on_two, "1f1b with p = 3", "Two neighbours send to one another"),
        (receives_first, "hangs on rank 0, 1", "too many receives are early"),
        (sends_later, "changes the order in which rank 0 works and sends"),
        (one_rank_as_it_was, "hangs on rank"),
        (late, "after ('do', '1F0')", "never later"),
        (lambda programs: [program[:-1] for program in programs], "has other events on rank 0"),
        (lambda programs: programs[:1], "has 1 entry, not 2"),
        (lambda programs: None, "`untangled(… 1f1b, p = 2, m = 3 …)` is None; a list is asked for"),
    ],
}
RIGHT = {
    "lower_bound": [lambda p, m, f, i, w: float(bound(p, m, Costs(f, i, w)))],
    "next_action": [weights_when_full],
    "repair": [searched, swapped(by_ends, backwards=True)],
    "untangled": [
        lambda programs: [[list(event) for event in program] for program in untangled(programs)]
    ],
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, rows in WRONG.items() for case in rows]
)
def test_a_wrong_answer_is_told_why(name: str, case: tuple[Any, ...]) -> None:
    refuses(name, *case)


@pytest.mark.parametrize(
    ("name", "answer"), [(name, each) for name, answers in RIGHT.items() for each in answers]
)
def test_a_right_answer_may_be_written_in_another_way(name: str, answer: Answer) -> None:
    accepts(name, answer)


def test_a_repair_is_measured_against_the_proven_optimum() -> None:
    pytest.importorskip("ortools")
    for schedule, costs, cap, best in _CHANGES:
        found = optimum(schedule.n_ranks, schedule.n_microbatches, costs, cap)
        assert found.proven
        assert found.timeline.makespan == best
        assert simulate(schedule, costs).makespan > best


@pytest.mark.parametrize("cap", [1, 3, 8])
def test_whatever_the_rule_the_order_is_legal_and_fits(cap: int) -> None:
    order = play(by("FIW"), 3, 5, cap)
    assert check(order) == []
    assert max(simulate(order).peak_activations) <= cap


@pytest.mark.parametrize(
    "name", [name for name in names() if name not in ("pipedream", "chimera", "dualpipe")]
)
def test_every_order_can_be_untangled_and_keeps_its_events(name: str) -> None:
    programs = programs_of(build(name, 2, 4))
    assert hanging(untangled(programs)) == {}
    assert [sorted(map(str, program)) for program in untangled(programs)] == [
        sorted(map(str, program)) for program in programs
    ]


def test_1f1b_hangs_where_nobody_keeps_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    programs = programs_of(build("1f1b", 2, 2))
    assert hanging(programs) == {0: ("send", 1, "0F1"), 1: ("send", 0, "1B0")}
    assert not run_unbuffered(build("1f1b", 2, 2), timeout_s=1.0)
    assert "rank 0: send with rank 1\nrank 1: send with rank 0" in capsys.readouterr().out
    assert run_unbuffered(untangled(programs), timeout_s=30.0)


def test_torch_runs_an_order_without_a_name_with_the_gradients_of_one_process() -> None:
    assert run_in_torch(LEVELS[-1].reference) < 1e-12


def test_a_board_that_is_not_complete_gives_the_worked_order(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "progress.json"))
    board = show.board(3)
    assert drawn(board).actions == build("1f1b", 2, 3).actions
    assert capsys.readouterr().out == "Level 3 is not complete: this is its worked order, 1f1b.\n"
    board.fill()
    assert drawn(board).name == "drawn"
    assert simulate(drawn(board)).makespan == 12
    assert capsys.readouterr().out == ""
