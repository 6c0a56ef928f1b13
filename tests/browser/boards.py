"""Random boards, and Python's answers about them. The browser must give the same answers."""

from collections.abc import Callable
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
  const tried = (call) => {
    try { return call() ?? "done"; } catch (refused) { return [refused.message]; }
  };
  return boards.map(({ game, references, moves, asked }) => {
    const position = new rules.Position(game);
    const answers = moves.map((move) => tried(() => rules.play(position, move)));
    const ranks = [...position.rows.keys()];
    const spans = (row) => row.map((span) => [span.action, span.start, span.end]);
    const state = () => [position.rows.map(spans), position.makespan, position.left,
      position.peaks, position.gaps().map((gap) => gap.slice(0, 3)), position.criticalPath(),
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
    """Return a game, moves to try on it, and questions for later; many moves are illegal."""
    random = Random(seed)
    placement = random.choice(_PLACEMENTS)
    n = len(placement)
    m = random.randint(1, 4)
    split = random.random() < 0.6
    times = []
    for _ in range(3):
        times.append(tuple(random.choice(_TIMES) for _ in placement))
    costs = Costs()
    if random.random() < 0.6:
        costs = Costs(*times, latency=random.choice([0, 0.5, 1.5]))
    cap = random.choice([None, None, 2, 3, 4])
    if cap is not None:
        # A rank must have room for one microbatch of each of its stages.
        cap = max(cap, *map(placement.count, placement))
    game = game_of(placement, m, costs, cap, split)

    position = Position(game)
    moves = []
    for _ in range(random.randint(0, 3 * n * m)):
        move = _random_move(random, position, n, m)
        moves.append(move)
        with suppress(Refused):
            play(position, move)
    asked = []
    for _ in range(6):
        rank = random.randrange(game.n_ranks)
        at = random.choice([None, float(random.randint(0, 12)), random.randint(0, 40) / 4])
        asked.append([rank, at, _random_action(random, n, m)])
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
    return _random_action(random, n, m) + random.choice(["", "", "@0", "@2"])


def _random_action(random: Random, n: int, m: int) -> str:
    return f"{random.randrange(n)}{random.choice('FBIW')}{random.randrange(m)}"


def told(board: dict[str, Any]) -> list[Any]:
    """Return Python's answers about a board, in the shape of ``SCRIPT``."""
    game = board["game"]
    orders = board["references"]
    position = Position(game)
    answers = [_tried(play, position, move) for move in board["moves"]]
    timeline = position.timeline
    rows = []
    for row in position.rows:
        rows.append([[str(span.action), span.start, span.end] for span in row])
    state = [
        rows,
        timeline.makespan,
        position.left,
        list(timeline.peak_activations),
        [[gap.rank, gap.start, gap.end] for gap in timeline.idle_gaps],
        [str(span.action) for span in timeline.critical_path],
        recognised(position, orders),
    ]

    policies = [*POLICIES, *orders]
    next_ = []
    for policy in policies:
        ranks = (None, *range(game.n_ranks))
        next_.append([_text(advice(position, policy, orders, rank)) for rank in ranks])
    legal = []
    where = []
    for rank, at, action in board["asked"]:
        legal.append(_tried(lambda r, t: [*map(str, position.legal(r, t))], rank, at))
        where.append(position.why_not(Action.parse(action), at))

    played = [
        move for move, answer in zip(board["moves"], answers, strict=True) if answer == "done"
    ]
    filled = []
    for policy in policies:
        copy = replay(game, played)
        placed = fill(copy, policy, orders)
        filled.append([placed, copy.timeline.makespan, copy.left, standstill(copy, policy, orders)])
    return [answers, state, next_, legal, where, filled]


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _tried(call: Callable[..., Any], *args: Any) -> Any:
    try:
        answer = call(*args)
    except Refused as refused:
        return [str(refused)]
    return "done" if answer is None else answer


def for_browser(board: dict[str, Any]) -> dict[str, Any]:
    return {**board, "game": board["game"].as_json()}
