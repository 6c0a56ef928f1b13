"""What the board allows, what it refuses and why; and its levels."""

from contextlib import suppress
from random import Random

import pytest

from course_pp.schedule import Action, Costs, build, check, simulate
from course_pp.show.board_levels import LEVELS, Level, references
from course_pp.show.board_rules import (
    POLICIES,
    Game,
    Position,
    Refused,
    advice,
    fill,
    game_of,
    play,
    recognised,
    replay,
    standstill,
)
from tests.browser.boards import random_board


def game(split: bool = False, memory_limit: int | None = None, costs: Costs | None = None) -> Game:
    return game_of((0, 1), 3, costs or Costs(), memory_limit, split)


def after(moves: str, **kind: object) -> Position:
    return replay(game(**kind), moves.split())  # type: ignore[arg-type]


def why_not(position: Position, action: str, at: float | None = None) -> str:
    return position.why_not(Action.parse(action), at)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: str(level.number))
def test_a_level_is_solved_to_par_by_the_order_it_teaches_and_nothing_can_beat_par(
    level: Level,
) -> None:
    position = Position(level.game)
    own = references(level.game.placement, level.n_microbatches, level.split, level.reference)
    fill(position, level.reference.name, own)
    assert position.left == 0
    assert position.timeline.makespan == level.par == level.game.bound
    assert simulate(level.reference, level.costs).makespan == level.par
    assert level.reference.name in recognised(position, own)


def test_the_levels_are_twelve_and_the_last_has_no_name() -> None:
    assert [level.number for level in LEVELS] == list(range(1, 13))
    last = LEVELS[-1]
    assert last.memory_limit is not None
    fitting = []
    for name in references(last.game.placement, last.n_microbatches, last.split):
        tl = simulate(build(name, last.n_ranks, last.n_microbatches), last.costs)
        peaks = zip(tl.peak_activations, last.memory_limit, strict=True)
        if all(held <= cap for held, cap in peaks):
            fitting.append((tl.makespan, name))
    assert min(fitting) == (28, "1f1b")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_can_run_at_the_times_the_board_shows(seed: int) -> None:
    random = Random(seed)
    split = random.random() < 0.7
    latency = random.choice([0, 0.5, 1])
    placement = random.choice([(0, 1), (0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)])
    costs = Costs(random.choice([1, 2]), 1, random.choice([0.5, 1]), latency=latency)
    position = Position(game_of(placement, 3, costs, memory_limit=4, split=split))
    moves = []
    for _ in range(40):
        rank = random.randrange(position.game.n_ranks)
        at = random.choice([None, None, random.randrange(20)])
        options = position.legal(rank, at)
        if random.random() < 0.05 and position.rows[rank]:
            action = random.choice(position.rows[rank]).action
            position.remove(action)
            moves.append(f"-{action}")
        elif options:
            action = random.choice(options)
            index = position.place(action, at)
            moves.append(str(action) if index is None else f"{action}@{index}")
    assert replay(position.game, moves).rows == position.rows
    fill(position, "zero bubble", {})
    if position.left == 0:
        assert check(position.schedule) == []
        assert simulate(position.schedule, costs) == position.timeline
    assert max(position.timeline.peak_activations) <= 4


@pytest.mark.parametrize(
    ("moves", "kind", "action", "at", "why"),
    [
        (
            "",
            {},
            "1F0",
            None,
            "1F0 needs the activation of microbatch 0 from stage 0: place 0F0 first",
        ),
        ("0F0 1F0", {"split": True}, "0B0", None, "from stage 1: place 1I0 or 1B0 first"),
        (
            "0F0",
            {"split": True},
            "0W0",
            None,
            "0W0 needs its own input gradient: place 0I0 or 0B0 first",
        ),
        (
            "0F0 0F1",
            {"memory_limit": 2},
            "0F2",
            None,
            "would hold 3 activations and its cap is 2: place a B first",
        ),
        ("0F0 1F0 1B0 0B0 0F1 0F2", {"memory_limit": 2}, "1F1", None, ""),
        # A gap may raise a later peak.
        ("0F0 1F0 1B0 0B0 0F1", {"memory_limit": 1}, "0F2", 1, "its cap is 1: place a B first"),
        (
            "0F0 1F0 1B0 0B0",
            {},
            "0F1",
            4.5,
            "rank 0 is busy with 0B0 from 4 to 6: choose a time when it is free",
        ),
        (
            *("0F0 1F0 1B0 0F1@1 0B0", {}, "1F1", 0),
            "1F1 takes 1 and cannot start before 2 here, but 1F0 starts at 1: choose a longer gap",
        ),
        ("0F0", {}, "0F0", None, "0F0 is placed already, from 0"),
        ("0F0 1F0 1B0", {"split": True}, "1W0", None, "1B0 is placed already, from 2"),
        ("", {}, "0W0", None, "0W0 is not for this board: it takes F and B"),
        ("", {}, "2F0", None, "there is no 2F0 here: stages are 0 to 1, microbatches 0 to 2"),
    ],
)
def test_a_refusal_names_its_rule_and_what_to_do(
    moves: str, kind: dict[str, object], action: str, at: float | None, why: str
) -> None:
    found = why_not(after(moves, **kind), action, at)
    assert found.endswith(why)
    assert bool(found) == bool(why)


def test_an_action_goes_into_the_gap_of_its_time() -> None:
    position = after("0F0 1F0 1B0 0B0")
    assert position.place(Action(0, "F", 1), at=2) == 1
    assert [str(span.action) for span in position.rows[0]] == ["0F0", "0F1", "0B0"]
    assert position.place(Action(0, "F", 2), at=3) == 2
    assert position.place(Action(1, "F", 1)) is None


@pytest.mark.parametrize("move", ["", "0X0", "F0", "-0F0@1", "0F0@", "0F²", "0F0 ", "9999999F0"])
def test_moves_that_cannot_be_read_are_refused_with_their_number(move: str) -> None:
    with pytest.raises(ValueError, match=r"move 1, .*write stage, kind and microbatch"):
        replay(game(), ["0F0", move])


def test_taking_away_takes_what_came_after_on_the_rank_and_what_depends_on_it() -> None:
    position = after("0F0 0F1 1F0 1F1 1B0 0B0")
    play(position, "-0F1")
    assert [[str(span.action) for span in row] for row in position.rows] == [["0F0"], ["1F0"]]
    with pytest.raises(Refused, match="0F1 is not on the board"):
        position.remove(Action(0, "F", 1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("split", [False, True])
def test_policies_finish_a_board_within_its_cap(policy: str, split: bool) -> None:
    position = Position(game_of((0, 1, 2), 4, Costs(latency=0.5), 3, split))
    fill(position, policy, {})
    assert position.left == 0
    assert max(position.timeline.peak_activations) <= 3
    assert advice(position, policy, {}) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_also_does_the_w_of_an_i_that_was_placed_by_hand(policy: str) -> None:
    position = after("0F0 1F0 1I0 0I0", split=True, memory_limit=2)
    assert {"0W0", "1W0"} <= set(fill(position, policy, {}))
    assert (position.left, standstill(position, policy, {})) == (0, "")


def test_whoever_stops_says_why() -> None:
    stuck = 0
    for seed in range(60):
        board = random_board(seed)
        for policy in (*POLICIES, *board["references"]):
            position = Position(board["game"])
            for move in board["moves"]:
                with suppress(Refused):
                    play(position, move)
            fill(position, policy, board["references"])
            why = standstill(position, policy, board["references"])
            assert bool(why) == bool(position.left), (seed, policy)
            stuck += bool(why)
    assert stuck > 20


def test_backward_first_is_1f1b_and_a_board_is_recognised_until_it_leaves_the_order() -> None:
    orders = references((0, 1), 3, False)
    position = after("")
    assert recognised(position, orders) == []
    position.place(Action.parse("0F0"))
    assert {"naive", "gpipe", "1f1b", "1f1b_eager"} <= set(recognised(position, orders))
    fill(position, "backward first", orders)
    assert recognised(position, orders) == ["1f1b"]
    strayed = after("0F1")
    assert recognised(strayed, orders) == []
    assert fill(strayed, "1f1b", orders) == []


def test_where_no_row_can_be_continued_no_gap_can_be_filled_either() -> None:
    """So the board may say that nothing is legal when it has looked at the rows' ends alone."""
    full = after("0F0 1F0 1B0 0B0 0F1", memory_limit=1)
    assert (full.legal(0), full.legal(0, 1.0)) == ([], [])
    stuck = 0
    gaps = 0
    for seed in range(60):
        board = random_board(seed)
        position = Position(board["game"])
        for move in board["moves"]:
            with suppress(Refused):
                play(position, move)
        for gap in position.timeline.idle_gaps:
            gaps += 1
            assert set(position.legal(gap.rank, float(gap.start))) <= set(position.legal(gap.rank))
        can_go_on = any(position.legal(rank) for rank in range(board["game"].n_ranks))
        stuck += position.left > 0 and not can_go_on
    assert gaps > 100
    assert stuck
