"""Help on a board: simple rules that finish it, orders that have a name, and which of them it has followed so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from course_pp.schedule import Action
from course_pp.show.board_rules import Position

# From what is done first to what is done last, among actions that could start at the same time.
POLICIES = {"forward first": "FIBW", "backward first": "BIFW", "zero bubble": "IFWB"}

Rows = Sequence[Sequence[str]]
"""An order: for each rank its actions, as text."""


def fill(position: Position, policy: str, references: Mapping[str, Rows]) -> list[str]:
    """Place what is left by a policy, or by a named order that the board has followed so far; returns the moves.

    It stops early where nothing is legal any more: under a tight cap, what was placed can make the rest impossible.
    """
    moves = []
    while (action := advice(position, policy, references)) is not None:
        position.place(action)
        moves.append(str(action))
    return moves


def advice(position: Position, policy: str, references: Mapping[str, Rows], rank: int | None = None) -> Action | None:
    """Return what comes next, on ``rank`` or on any; None if there is nothing."""
    ranks = range(position.game.n_ranks) if rank is None else (rank,)
    if policy in references:
        options = [_of_reference(position, references[policy], each) for each in ranks]
    else:
        options = [_of_policy(position, policy, each) for each in ranks]
    possible = [option for option in options if option is not None]
    return min(possible, key=lambda option: option[0])[1] if possible else None


def recognised(position: Position, references: Mapping[str, Rows]) -> list[str]:
    """Return the names of the orders that the board has followed so far; none of an empty board."""
    rows = [[str(span.action) for span in row] for row in position.rows]
    if not any(rows):
        return []
    return [name for name, order in references.items() if _follows(rows, order)]


def _follows(rows: Rows, order: Rows) -> bool:
    return all(list(row) == list(whole[: len(row)]) for row, whole in zip(rows, order, strict=True))


_Option = tuple[tuple[float, ...], Action]


def _of_reference(position: Position, order: Rows, rank: int) -> _Option | None:
    row = [str(span.action) for span in position.rows[rank]]
    if row != list(order[rank][: len(row)]) or len(row) == len(order[rank]):
        return None
    action = Action.parse(order[rank][len(row)])
    if position.why_not(action) is not None:
        return None
    return (position.start_of(action), 0, rank), action


def _of_policy(position: Position, policy: str, rank: int) -> _Option | None:
    ranking, game = POLICIES[policy], position.game
    best: _Option | None = None
    for action in position.legal(rank):
        if game.split and action.kind == "B" and policy == "zero bubble":
            continue
        if game.split and action.kind in "IW" and policy != "zero bubble":
            continue
        if (
            policy == "backward first"
            and action.kind == "F"
            and position.in_flight(action.stage) >= (game.n_stages - action.stage)
        ):
            continue
        key = (position.start_of(action), ranking.index(action.kind), action.microbatch, -action.stage, rank)
        if best is None or key < best[0]:
            best = key, action
    return best
