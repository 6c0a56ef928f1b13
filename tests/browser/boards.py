"""Random boards, and what Python says of them: what the browser must say too."""

from contextlib import suppress
from random import Random
from typing import Any

from course_pp.schedule import Action, Costs
from course_pp.show.board_levels import references
from course_pp.show.board_rules import (
    POLICIES,
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

_PLACEMENTS = (
    (0,),
    (0, 1),
    (0, 1, 2),
    (0, 1, 2, 3),
    (0, 1, 0, 1),
    (0, 1, 1, 0),
    (0, 1, 2, 2, 1, 0),
)
_TIMES = (0.5, 1, 1.25, 2, 3)

# Goes through the same boards in the browser, and answers in the same shape as `told`.
SCRIPT = """
async ([source, boards]) => {
  const rules = await import("data:text/javascript;charset=utf-8," + encodeURIComponent(source));
  const tried = (does) => {
    try { return does() ?? "done"; } catch (refused) { return [refused.message]; }
  };
  return boards.map(({ game, references, moves, asked }) => {
    const position = new rules.Position(game);
    const answers = moves.map((move) => tried(() => rules.play(position, move)));
    const ranks = [...position.rows.keys()];
    const state = () => [position.rows.map((row) => row.map((span) => [span.action, span.start, span.end])),
      position.makespan, position.left, position.peaks, position.gaps().map((gap) => gap.slice(0, 3)),
      position.criticalPath(),
      rules.recognised(position, references)];
    const before = state();
    const policies = [...Object.keys(rules.POLICIES), ...Object.keys(references)];
    const next = policies.map((policy) => [rules.advice(position, policy, references),
      ...ranks.map((rank) => rules.advice(position, policy, references, rank))]);
    const legal = asked.map(([rank, at]) => tried(() => position.legal(rank, at)));
    const where = asked.map(([rank, at, action]) => position.whyNot(action, at)?.message ?? "");
    const filled = policies.map((policy) => {
      const copy = new rules.Position(game);
      for (const [i, move] of moves.entries()) if (answers[i] === "done") rules.play(copy, move);
      const placed = rules.fill(copy, policy, references);
      return [placed, copy.makespan, copy.left, rules.standstill(copy, policy, references)];
    });
    return [answers, before, next, legal, where, filled];
  });
}
"""


def random_board(seed: int) -> dict[str, Any]:
    """A game, the moves tried on it, and what is asked afterwards; many moves are illegal."""
    random = Random(seed)
    placement = random.choice(_PLACEMENTS)
    n, m, split = len(placement), random.randint(1, 4), random.random() < 0.6
    each = [tuple(random.choice(_TIMES) for _ in placement) for _ in range(3)]
    costs = Costs(*each, latency=random.choice([0, 0.5, 1.5])) if random.random() < 0.6 else Costs()
    cap = random.choice([None, None, 2, 3, 4])
    cap = None if cap is None else max(cap, *map(placement.count, placement))
    game = game_of(placement, m, costs, cap, split)
    position, moves = Position(game), []
    for _ in range(random.randint(0, 3 * n * m)):
        move = _random_move(random, position, n, m)
        moves.append(move)
        with suppress(Refused):
            play(position, move)
    asked = [
        [
            random.randrange(game.n_ranks),
            random.choice([None, float(random.randint(0, 12)), random.randint(0, 40) / 4]),
            f"{random.randrange(n)}{random.choice('FBIW')}{random.randrange(m)}",
        ]
        for _ in range(6)
    ]
    return {
        "game": game,
        "references": references(placement, m, split),
        "moves": moves,
        "asked": asked,
    }


def _random_move(random: Random, position: Position, n: int, m: int) -> str:
    chance = random.random()
    placed = [span.action for row in position.rows for span in row]
    if chance < 0.05:
        loaded = ("=", "=0F0.0F1", "=0F0.1B0")
        others = (f"-{action}" for action in placed)
        return random.choice(["-0F0", "x", "0F0@", "99F1", "0F99", "00F0", *loaded, *others])
    if chance < 0.75:
        rank = random.randrange(position.game.n_ranks)
        at = random.choice([None, None, random.randint(0, 24) / 2])
        try:
            action = random.choice(position.legal(rank, at))
        except (Refused, IndexError):
            return f"0F{random.randrange(m)}"
        index, _ = position.fit(action, at)
        return str(action) if at is None else f"{action}@{index}"
    return f"{random.randrange(n)}{random.choice('FBIW')}{random.randrange(m)}" + random.choice(
        ["", "", "@0", "@2"]
    )


def told(board: dict[str, Any]) -> list[Any]:
    """What Python says of a board."""
    game, orders, moves = board["game"], board["references"], board["moves"]
    position = Position(game)
    answers = [_tried(lambda move=move: play(position, move)) for move in moves]  # type: ignore[misc]
    tl = position.timeline
    state = [
        [[[str(span.action), span.start, span.end] for span in row] for row in position.rows],
        tl.makespan,
        position.left,
        list(tl.peak_activations),
        [[gap.rank, gap.start, gap.end] for gap in tl.idle_gaps],
        [str(span.action) for span in tl.critical_path],
        recognised(position, orders),
    ]
    policies = [*POLICIES, *orders]
    next_ = [
        [_text(advice(position, policy, orders, rank)) for rank in (None, *range(game.n_ranks))]
        for policy in policies
    ]
    legal = [
        _tried(lambda r=rank, at=at: [*map(str, position.legal(r, at))])
        for rank, at, *_ in board["asked"]
    ]  # type: ignore[misc]
    where = [position.why_not(Action.parse(action), at) for _, at, action in board["asked"]]
    filled = []
    for policy in policies:
        copy = replay(
            game, [move for move, answer in zip(moves, answers, strict=True) if answer == "done"]
        )
        placed = fill(copy, policy, orders)
        filled.append([placed, copy.timeline.makespan, copy.left, standstill(copy, policy, orders)])
    return [answers, state, next_, legal, where, filled]


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _tried(does: Any) -> Any:
    try:
        answer = does()
    except Refused as refused:
        return [str(refused)]
    return "done" if answer is None else answer


def for_browser(board: dict[str, Any]) -> dict[str, Any]:
    return {**board, "game": board["game"].as_json()}
