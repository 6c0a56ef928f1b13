"""The rules of the board: what may be placed where and why not, and who finishes it.

Every action starts as soon as its rank is free and its inputs have arrived, so times are those of
:func:`course_pp.schedule.simulate` at any moment of the game. An action goes to the end of its
rank's row or into a gap that is long enough for it: nothing that was placed ever moves. So no order
can deadlock with buffered sends.

``board_rules.js`` plays where no Python runs; a test holds its decisions, sentences and times
against these. Costs are floats here, so that both languages do the same additions and comparisons.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from course_pp.schedule import Action, Costs, Product, Schedule, Span, Time, Timeline, bound

_KINDS = "FBIW"
_MOVE = re.compile(r"(-?)(\d{1,6}[FBIW]\d{1,6})(?:@(\d{1,6}))?", re.ASCII)
# From what is done first to what is done last, among actions that could start at the same time.
POLICIES = {"forward first": "FIBW", "backward first": "BIFW", "zero bubble": "IFWB"}

# How many more activations a rank holds when an action has started (F) or ended (the others).
_CHANGE = {"F": 1, "I": 0, "B": -1, "W": -1}

Rows = Sequence[Sequence[str]]
"""An order: for each rank its actions, as text."""


class Refused(ValueError):
    """A move that cannot be made; its message names the rule that forbids it, and what to do."""


@dataclass(frozen=True)
class Game:
    """What a board is played with.

    Attributes:
        placement: the rank of each stage.
        limits: for each rank the most activations it may hold; None for no limit.
        split: whether the backward comes in halves, ``I`` and ``W``; a whole ``B`` is then allowed
            too.
    """

    placement: tuple[int, ...]
    n_microbatches: int
    costs: Costs
    limits: tuple[int | None, ...]
    split: bool = False

    def __post_init__(self) -> None:
        if self.n_microbatches < 1:
            raise ValueError(
                f"n_microbatches is {self.n_microbatches}: give an integer of at least 1"
            )
        for name, kind in (("forward", "F"), ("input_grad", "I"), ("weight_grad", "W")):
            if (least_time := min(self.durations[kind])) <= 0:
                raise ValueError(
                    f"{name} is {least_time:g}: on the board every action takes time, give more"
                    " than 0"
                )
        if len(self.limits) != self.n_ranks:
            given = f"memory_limit has {len(self.limits)} values for {self.n_ranks} ranks"
            raise ValueError(f"{given}: give one number, or one for each")
        for rank, limit in enumerate(self.limits):
            least = self.placement.count(rank)
            if limit is not None and limit < least:
                needs = (
                    f"one microbatch is held by each of rank {rank}'s stages, so give at least"
                    f" {least}"
                )
                raise ValueError(f"memory_limit is {limit} on rank {rank}: {needs}")

    @property
    def n_ranks(self) -> int:
        return 1 + max(self.placement)

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def kinds(self) -> str:
        """The letters that can be placed."""
        return _KINDS if self.split else "FB"

    @cached_property
    def durations(self) -> dict[str, tuple[float, ...]]:
        """For each kind of action its time in each stage."""
        times = self.costs.durations(self.n_stages)
        return {kind: tuple(map(float, times[kind])) for kind in _KINDS}

    @cached_property
    def transfers(self) -> tuple[float, ...]:
        """The time of a message between two ranks, for each boundary between stages."""
        return tuple(map(float, self.costs.transfers(self.n_stages)))

    @property
    def bound(self) -> Time:
        """The makespan that no order can beat. A whole backward cannot leave its weight half for later."""
        costs = self.costs
        if not self.split:
            costs = replace(
                costs, recompute=0, input_grad=costs.durations(self.n_stages)["B"], weight_grad=0
            )
        return bound(
            self.n_ranks, self.n_microbatches, costs, self.limits, placement=self.placement
        )

    def as_json(self) -> dict[str, Any]:
        """As the browser takes it."""
        return {
            "placement": list(self.placement),
            "microbatches": self.n_microbatches,
            "durations": {kind: list(times) for kind, times in self.durations.items()},
            "transfers": list(self.transfers),
            "limits": list(self.limits),
            "split": self.split,
        }


def game_of(
    placement: Sequence[int],
    n_microbatches: int,
    costs: Costs,
    memory_limit: int | Sequence[int | None] | None = None,
    split: bool = False,
) -> Game:
    """Return a game whose limit is one for every rank, or one for each."""
    each = isinstance(memory_limit, Sequence)
    limits = tuple(memory_limit) if each else (memory_limit,) * (1 + max(placement))  # type: ignore[arg-type]
    return Game(tuple(placement), n_microbatches, costs, limits, split)  # type: ignore[arg-type]


def spelled(time: float) -> str:
    """Return a time for people: ``3``, ``2.5``."""
    return f"{round(time, 3):.12g}"


class Position:
    """What has been placed so far: in ``rows``, for each rank its spans in order."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.rows: list[list[Span]] = [[] for _ in range(game.n_ranks)]
        self._maker: dict[Product, Span] = {}

    @property
    def left(self) -> int:
        """What is still to do: a forward, an input gradient and a weight gradient for each stage and microbatch."""
        return 3 * self.game.n_stages * self.game.n_microbatches - len(self._maker)

    @property
    def schedule(self) -> Schedule:
        """The order on the board, complete or not."""
        rows = tuple(tuple(span.action for span in row) for row in self.rows)
        return Schedule("drawn", tuple((rank,) for rank in self.game.placement), rows)

    @property
    def timeline(self) -> Timeline:
        spans = tuple(span for row in self.rows for span in row)
        return Timeline(self.game.n_ranks, spans, transfers=self.game.transfers, name="drawn")

    def place(
        self, action: Action, at: float | None = None, index: int | None = None
    ) -> int | None:
        """Put ``action`` at the end of its row, or into the gap in which time ``at`` lies, or at
        ``index``.

        Returns its index in the row; None at the end. Raises Refused.
        """
        index, span = self.fit(action, at, index)
        row = self.rows[span.rank]
        row.insert(index, span)
        self._maker.update(dict.fromkeys(action.provides, span))
        return None if index == len(row) - 1 else index

    def why_not(self, action: Action, at: float | None = None) -> str:
        """Return why ``action`` cannot be placed; empty if it can."""
        try:
            self.fit(action, at)
        except Refused as refused:
            return str(refused)
        return ""

    def why_full(self, action: Action) -> str:
        """Return how the cap refuses ``action`` at the end of its row; empty if something else does, or nothing."""
        is_placed = any(product in self._maker for product in action.provides)
        is_ready = all(product in self._maker for product in self._needs(action))
        return "" if is_placed or not is_ready else self.why_not(action)

    def legal(self, rank: int, at: float | None = None) -> list[Action]:
        """Return what can be placed on ``rank``, the earliest start first."""
        found = []
        for stage in (stage for stage, home in enumerate(self.game.placement) if home == rank):
            for microbatch in range(self.game.n_microbatches):
                for order, kind in enumerate(self.game.kinds):
                    action = Action(stage, kind, microbatch)
                    if not self.why_not(action, at):
                        found.append(
                            ((self.fit(action, at)[1].start, order, microbatch, stage), action)
                        )
        return [action for _, action in sorted(found, key=lambda each: each[0])]

    def remove(self, action: Action) -> None:
        """Remove ``action``, what came after it on its rank, and what depends on any of these."""
        before = sorted((span for row in self.rows for span in row), key=lambda span: span.start)
        if action not in [span.action for span in before]:
            raise Refused(f"{action} is not on the board")
        self.rows, self._maker = [[] for _ in self.rows], {}
        cut = set()
        for span in before:  # makers before takers
            if span.action == action or any(
                each not in self._maker for each in self._needs(span.action.parts[0])
            ):
                cut.add(span.rank)
            if span.rank not in cut:
                self.rows[span.rank].append(span)
                self._maker.update(dict.fromkeys(span.action.parts[0].provides, span))

    def fit(
        self, action: Action, at: float | None = None, index: int | None = None
    ) -> tuple[int, Span]:
        """Return where in its row ``action`` would go and when it would run; raises Refused."""
        game, stage, microbatch = self.game, action.stage, action.microbatch
        if action.kind not in game.kinds:
            kinds = " and ".join([", ".join(game.kinds[:-1]), game.kinds[-1]])
            raise Refused(f"{action} is not for this board: it takes {kinds}")
        if stage >= game.n_stages or microbatch >= game.n_microbatches:
            there = (
                f"stages are 0 to {game.n_stages - 1}, microbatches 0 to {game.n_microbatches - 1}"
            )
            raise Refused(f"there is no {action} here: {there}")
        for product in action.provides:
            if placed := self._maker.get(product):
                raise Refused(
                    f"{placed.action} is placed already, from {spelled(float(placed.start))}"
                )
        for product in self._needs(action):
            if product not in self._maker:
                kinds = "F" if product.what == "activation" else "IB" if game.split else "B"
                makers = " or ".join(f"{product.stage}{kind}{product.microbatch}" for kind in kinds)
                own = "its own input gradient" if action.kind == "W" else "its own forward"
                raise Refused(
                    f"{action} needs {own if product.stage == stage else product}: place {makers}"
                    " first"
                )
        rank, took = game.placement[stage], game.durations[action.kind][stage]
        row = self.rows[rank]
        if at is not None:
            for span in row:
                if span.start <= at < span.end:
                    busy = (
                        f"{span.action} from {spelled(float(span.start))} to"
                        f" {spelled(float(span.end))}"
                    )
                    raise Refused(f"rank {rank} is busy with {busy}: choose a time when it is free")
            index = sum(span.start <= at for span in row)
        index = len(row) if index is None else min(index, len(row))
        free = float(row[index - 1].end) if index else 0.0
        start = max([free, *(self._arrival(product, rank) for product in self._needs(action))])
        if index < len(row) and start + took > row[index].start:
            after = f"{row[index].action} starts at {spelled(float(row[index].start))}"
            cannot = (
                f"{action} takes {spelled(took)} and cannot start before {spelled(start)} here, but"
                f" {after}"
            )
            raise Refused(f"{cannot}: choose a longer gap")
        new, limit = Span(rank, action, start, start + took), game.limits[rank]
        if limit is not None and action.kind == "F":
            counts = [
                _CHANGE[span.action.parts[0].kind] for span in (*row[:index], new, *row[index:])
            ]
            most = max(list(accumulate(counts))[index:])
            if most > limit:
                over = f"rank {rank} would hold {most} activations and its cap is {limit}"
                raise Refused(
                    f"with {action}, {over}: place a {'W or B' if game.split else 'B'} first"
                )
        return index, new

    def _needs(self, action: Action) -> tuple[Product, ...]:
        return action.needs(self.game.n_stages)

    def _arrival(self, product: Product, rank: int) -> float:
        maker = self._maker[product]
        boundary = product.stage - (product.what == "gradient")
        return float(maker.end) + (0.0 if maker.rank == rank else self.game.transfers[boundary])


def play(position: Position, move: str) -> None:
    """Make one move: ``0F0`` at the end of a row, ``0W0@3`` before the fourth action, ``-0F0``
    taken away.

    ``=0F0.1F0`` puts these in place of all: a position that was loaded. ``=`` clears the board.
    """
    if isinstance(move, str) and move.startswith("="):
        new = Position(position.game)
        for each in filter(None, move[1:].split(".")):
            play(new, each)
        position.rows, position._maker = new.rows, new._maker
        return
    match = _MOVE.fullmatch(move) if isinstance(move, str) else None
    if match is None or (match[1] and match[3]):
        raise Refused("write stage, kind and microbatch, as in 0F0, 0W0@3 or -0F0")
    action = Action.parse(match[2])
    if match[1]:
        position.remove(action)
    else:
        position.place(action, index=int(match[3]) if match[3] else None)


def replay(game: Game, moves: Sequence[str]) -> Position:
    """Make ``moves`` from an empty board on. Raises ValueError for one that is refused, with its number."""
    position = Position(game)
    for number, move in enumerate(moves):
        try:
            play(position, move)
        except Refused as refused:
            raise ValueError(f"move {number}, {move!r}: {refused}") from refused
    return position


def fill(position: Position, policy: str, references: Mapping[str, Rows]) -> list[str]:
    """Place what is left by a policy, or by a named order that the board has followed so far;
    returns the moves.

    Under a tight cap, what was placed can make the rest impossible: it stops there, and
    :func:`standstill` says why.
    """
    moves = []
    while (action := advice(position, policy, references)) is not None:
        position.place(action)
        moves.append(str(action))
    return moves


def standstill(position: Position, policy: str, references: Mapping[str, Rows]) -> str:
    """Return why a policy, or a named order, has no next action; empty if the board is complete."""
    game, rows = position.game, [[str(span.action) for span in row] for row in position.rows]
    candidates = [
        Action(stage, "F", i) for stage in range(game.n_stages) for i in range(game.n_microbatches)
    ]
    if policy in references:
        order = references[policy]
        for rank, (row, whole) in enumerate(zip(rows, order, strict=True)):
            for done, named in zip(row, whole, strict=False):
                if done != named:
                    return f"rank {rank} has {done} where {policy} has {named}"
        candidates = [
            Action.parse(w[len(r)]) for r, w in zip(rows, order, strict=True) if len(r) < len(w)
        ]
    full = (position.why_full(action) for action in candidates)
    return next(filter(None, full), "")


def advice(
    position: Position, policy: str, references: Mapping[str, Rows], rank: int | None = None
) -> Action | None:
    """Return what comes next, on ``rank`` or on any; None if there is nothing."""
    options = [
        option
        for each in (range(position.game.n_ranks) if rank is None else (rank,))
        for option in _options(position, policy, references, each)
    ]
    return min(options, key=lambda option: option[0])[1] if options else None


def recognised(position: Position, references: Mapping[str, Rows]) -> list[str]:
    """Return the names of the orders that the board has followed so far; none of an empty board."""
    return [
        name
        for name, order in references.items()
        if any(position.rows) and _follows(position, order)
    ]


def _follows(position: Position, order: Rows) -> bool:
    rows = [[str(span.action) for span in row] for row in position.rows]
    return all(row == list(whole[: len(row)]) for row, whole in zip(rows, order, strict=True))


def _options(
    position: Position, policy: str, references: Mapping[str, Rows], rank: int
) -> Iterator[tuple[tuple[float, ...], Action]]:
    """Yield what a policy or an order could do next on a rank, with what to sort by."""
    if policy in references:
        placed, order = len(position.rows[rank]), references[policy][rank]
        if placed < len(order) and _follows(position, references[policy]):
            action = Action.parse(order[placed])
            if not position.why_not(action):
                yield (float(position.fit(action)[1].start), 0, rank), action
        return
    # A W belongs to an I that was placed before: by whichever policy, it has to be done.
    game, halves = position.game, "B" if policy == "zero bubble" else "I"
    for action in position.legal(rank):
        stage, kind = action.stage, action.kind
        if game.split and kind in halves:
            continue
        if policy == "backward first" and kind == "F":
            done = [part.kind for part in position.timeline.actions if part.stage == stage]
            if done.count("F") - done.count("B") - done.count("I") >= game.n_stages - stage:
                continue
        start = float(position.fit(action)[1].start)
        yield (start, POLICIES[policy].index(kind), action.microbatch, -stage, rank), action
