"""The rules of the board: which actions may be placed where, why not, and who finishes it.

Every action starts as soon as its rank is free and its inputs have arrived, so times are those of
:func:`course_pp.schedule.simulate` at any moment of the game. An action goes to the end of its
rank's row, or into a gap that is long enough for it: a placed action never moves. So no order can
deadlock with buffered sends.

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
from course_pp.show.wording import listed

_KINDS = "FBIW"
_MOVE = re.compile(r"(-?)(\d{1,6}[FBIW]\d{1,6})(?:@(\d{1,6}))?", re.ASCII)
# Kinds in the order in which a policy takes them, among actions that could start together.
POLICIES = {"forward first": "FIBW", "backward first": "BIFW", "zero bubble": "IFWB"}

# The change of the activations that a rank holds, when an F starts or another kind ends.
_CHANGE = {"F": 1, "I": 0, "B": -1, "W": -1}

Rows = Sequence[Sequence[str]]
"""An order: the actions of each rank, as text."""


class Refused(ValueError):
    """A move that cannot be made; its message names the rule that forbids it, and what to do."""


@dataclass(frozen=True)
class Game:
    """The sizes, times and limits of a board.

    Attributes:
        placement: the rank of each stage.
        limits: the most activations that each rank may hold; None for no limit.
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
            least_time = min(self.durations[kind])
            if least_time <= 0:
                rule = "on the board every action takes time, give more than 0"
                raise ValueError(f"{name} is {least_time:g}: {rule}")
        if len(self.limits) != self.n_ranks:
            given = f"memory_limit has {len(self.limits)} values for {self.n_ranks} ranks"
            raise ValueError(f"{given}: give one number, or one for each")
        for rank, limit in enumerate(self.limits):
            least = self.placement.count(rank)
            if limit is not None and limit < least:
                rule = f"one microbatch is held by each of rank {rank}'s stages"
                raise ValueError(
                    f"memory_limit is {limit} on rank {rank}: {rule}, so give at least {least}"
                )

    @property
    def n_ranks(self) -> int:
        return 1 + max(self.placement)

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def kinds(self) -> str:
        """The letters of the actions that can be placed."""
        return _KINDS if self.split else "FB"

    @cached_property
    def durations(self) -> dict[str, tuple[float, ...]]:
        """The time of each kind of action in each stage."""
        times = self.costs.durations(self.n_stages)
        return {kind: tuple(map(float, times[kind])) for kind in _KINDS}

    @cached_property
    def transfers(self) -> tuple[float, ...]:
        """The time of a message between two ranks, for each boundary between stages."""
        return tuple(map(float, self.costs.transfers(self.n_stages)))

    @property
    def bound(self) -> Time:
        """The makespan that no order can beat."""
        costs = self.costs
        # A whole backward cannot leave its weight half for later.
        if not self.split:
            whole = costs.durations(self.n_stages)["B"]
            costs = replace(costs, recompute=0, input_grad=whole, weight_grad=0)
        return bound(
            self.n_ranks, self.n_microbatches, costs, self.limits, placement=self.placement
        )

    def as_json(self) -> dict[str, Any]:
        """Return the game in the form that the browser takes."""
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
    """Return a game; ``memory_limit`` is one number for every rank, or one for each."""
    n_ranks = 1 + max(placement)
    limits = memory_limit if isinstance(memory_limit, Sequence) else [memory_limit] * n_ranks
    return Game(tuple(placement), n_microbatches, costs, limits=tuple(limits), split=split)


def spelled(time: float) -> str:
    """Return a time for people: ``3``, ``2.5``."""
    return f"{round(time, 3):.12g}"


class Position:
    """The actions placed so far: in ``rows``, the spans of each rank in order."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.rows: list[list[Span]] = [[] for _ in range(game.n_ranks)]
        self._maker: dict[Product, Span] = {}

    @property
    def left(self) -> int:
        """The results still to make: three for each stage and microbatch.

        They are the activation, the input gradient and the weight gradient.
        """
        return 3 * self.game.n_stages * self.game.n_microbatches - len(self._maker)

    @property
    def schedule(self) -> Schedule:
        """The order on the board, complete or not."""
        placement = tuple((rank,) for rank in self.game.placement)
        rows = [tuple(span.action for span in row) for row in self.rows]
        return Schedule("drawn", placement, tuple(rows))

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
        """Return how the cap refuses ``action`` at the end of its row.

        The text is empty if another rule refuses it, or if none does.
        """
        if any(product in self._maker for product in action.provides):
            return ""
        if any(product not in self._maker for product in self._needs(action)):
            return ""
        return self.why_not(action)

    def legal(self, rank: int, at: float | None = None) -> list[Action]:
        """Return the actions that can be placed on ``rank``, the earliest start first."""
        found = []
        for stage, home in enumerate(self.game.placement):
            if home != rank:
                continue
            for microbatch in range(self.game.n_microbatches):
                for order, kind in enumerate(self.game.kinds):
                    action = Action(stage, kind, microbatch)
                    try:
                        _, span = self.fit(action, at)
                    except Refused:
                        continue
                    found.append(((span.start, order, microbatch, stage), action))
        return [action for _, action in sorted(found, key=lambda each: each[0])]

    def remove(self, action: Action) -> None:
        """Remove ``action``, later actions of its rank, and every action that depends on these."""
        before = sorted((span for row in self.rows for span in row), key=lambda span: span.start)
        if action not in [span.action for span in before]:
            raise Refused(f"{action} is not on the board")
        self.rows = [[] for _ in self.rows]
        self._maker = {}

        # In the order of starts, makers come before takers: whatever lost a maker is cut in turn.
        cut = set()
        for span in before:
            part = span.action.parts[0]
            if span.action == action or any(
                product not in self._maker for product in self._needs(part)
            ):
                cut.add(span.rank)
            if span.rank not in cut:
                self.rows[span.rank].append(span)
                self._maker.update(dict.fromkeys(part.provides, span))

    def fit(
        self, action: Action, at: float | None = None, index: int | None = None
    ) -> tuple[int, Span]:
        """Return where in its row ``action`` would go and when it would run; raises Refused."""
        self._refuse_unknown(action)
        self._refuse_unready(action)
        rank = self.game.placement[action.stage]
        took = self.game.durations[action.kind][action.stage]
        row = self.rows[rank]

        if at is not None:
            for span in row:
                if span.start <= at < span.end:
                    start, end = spelled(float(span.start)), spelled(float(span.end))
                    busy = f"rank {rank} is busy with {span.action} from {start} to {end}"
                    raise Refused(f"{busy}: choose a time when it is free")
            index = sum(span.start <= at for span in row)
        if index is None or index > len(row):
            index = len(row)

        free = float(row[index - 1].end) if index else 0.0
        start_at = max([free, *(self._arrival(product, rank) for product in self._needs(action))])
        if index < len(row) and start_at + took > row[index].start:
            cannot = f"{action} takes {spelled(took)} and cannot start before {spelled(start_at)}"
            after = f"{row[index].action} starts at {spelled(float(row[index].start))}"
            raise Refused(f"{cannot} here, but {after}: choose a longer gap")
        new = Span(rank, action, start_at, start_at + took)
        self._refuse_over_cap(new, index)
        return index, new

    def _refuse_unknown(self, action: Action) -> None:
        """Raise Refused for a kind, stage or microbatch that the game does not have."""
        game = self.game
        if action.kind not in game.kinds:
            raise Refused(f"{action} is not for this board: it takes {listed(game.kinds)}")
        if action.stage >= game.n_stages or action.microbatch >= game.n_microbatches:
            stages = f"stages are 0 to {game.n_stages - 1}"
            microbatches = f"microbatches 0 to {game.n_microbatches - 1}"
            raise Refused(f"there is no {action} here: {stages}, {microbatches}")

    def _refuse_unready(self, action: Action) -> None:
        """Raise Refused for an action that was placed already, or whose inputs are not made."""
        for product in action.provides:
            placed = self._maker.get(product)
            if placed is not None:
                start = spelled(float(placed.start))
                raise Refused(f"{placed.action} is placed already, from {start}")

        for product in self._needs(action):
            if product in self._maker:
                continue
            kinds = "F"
            if product.what != "activation":
                kinds = "IB" if self.game.split else "B"
            makers = " or ".join(f"{product.stage}{kind}{product.microbatch}" for kind in kinds)
            what = str(product)
            if product.stage == action.stage:
                what = "its own input gradient" if action.kind == "W" else "its own forward"
            raise Refused(f"{action} needs {what}: place {makers} first")

    def _refuse_over_cap(self, new: Span, index: int) -> None:
        """Raise Refused if ``new`` at ``index`` of its row makes the rank hold too much."""
        limit = self.game.limits[new.rank]
        if limit is None or new.action.parts[0].kind != "F":
            return
        row = self.rows[new.rank]
        spans = [*row[:index], new, *row[index:]]
        held = list(accumulate(_CHANGE[span.action.parts[0].kind] for span in spans))
        most = max(held[index:])
        if most > limit:
            over = f"rank {new.rank} would hold {most} activations and its cap is {limit}"
            frees = "W or B" if self.game.split else "B"
            raise Refused(f"with {new.action}, {over}: place a {frees} first")

    def _needs(self, action: Action) -> tuple[Product, ...]:
        return action.needs(self.game.n_stages)

    def _arrival(self, product: Product, rank: int) -> float:
        """Return the time at which ``product`` is on ``rank``."""
        maker = self._maker[product]
        if maker.rank == rank:
            return float(maker.end)
        boundary = product.stage - (product.what == "gradient")
        return float(maker.end) + self.game.transfers[boundary]


def play(position: Position, move: str) -> None:
    """Make one move: ``0F0`` appends, ``0W0@3`` inserts before the fourth action, ``-0F0`` removes.

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
    minus, name, index = match.groups()
    action = Action.parse(name)
    if minus:
        position.remove(action)
    else:
        position.place(action, index=int(index) if index else None)


def replay(game: Game, moves: Sequence[str]) -> Position:
    """Make ``moves`` from an empty board on; raises ValueError with the number of a refused one."""
    position = Position(game)
    for number, move in enumerate(moves):
        try:
            play(position, move)
        except Refused as refused:
            raise ValueError(f"move {number}, {move!r}: {refused}") from refused
    return position


def fill(position: Position, policy: str, references: Mapping[str, Rows]) -> list[str]:
    """Place the other actions by a policy, or by a named order that the board has followed so far.

    Returns the moves. Under a tight cap, the actions on the board can make the rest impossible;
    filling then stops, and :func:`standstill` says why.
    """
    moves: list[str] = []
    while True:
        action = advice(position, policy, references)
        if action is None:
            return moves
        position.place(action)
        moves.append(str(action))


def standstill(position: Position, policy: str, references: Mapping[str, Rows]) -> str:
    """Return why a policy, or a named order, has no next action; empty if the board is complete."""
    game = position.game
    candidates = []
    if policy in references:
        for rank, (row, order) in enumerate(zip(position.rows, references[policy], strict=True)):
            for span, named in zip(row, order, strict=False):
                if str(span.action) != named:
                    return f"rank {rank} has {span.action} where {policy} has {named}"
            if len(row) < len(order):
                candidates.append(Action.parse(order[len(row)]))
    else:
        for stage in range(game.n_stages):
            candidates += [Action(stage, "F", i) for i in range(game.n_microbatches)]

    for action in candidates:
        why = position.why_full(action)
        if why:
            return why
    return ""


def advice(
    position: Position, policy: str, references: Mapping[str, Rows], rank: int | None = None
) -> Action | None:
    """Return the next action, on ``rank`` or on any; None if there is none."""
    ranks = range(position.game.n_ranks) if rank is None else (rank,)
    options: list[tuple[tuple[float, ...], Action]] = []
    for each in ranks:
        options += _options(position, policy, references, rank=each)
    if not options:
        return None
    _, action = min(options, key=lambda option: option[0])
    return action


def recognised(position: Position, references: Mapping[str, Rows]) -> list[str]:
    """Return the names of the orders that the board has followed so far; none of an empty board."""
    if not any(position.rows):
        return []
    return [name for name, order in references.items() if _follows(position, order)]


def _follows(position: Position, order: Rows) -> bool:
    for row, whole in zip(position.rows, order, strict=True):
        if [str(span.action) for span in row] != list(whole[: len(row)]):
            return False
    return True


def _options(
    position: Position, policy: str, references: Mapping[str, Rows], rank: int
) -> Iterator[tuple[tuple[float, ...], Action]]:
    """Yield the possible next actions of a policy or an order on a rank, as (sort key, action)."""
    if policy in references:
        placed = len(position.rows[rank])
        order = references[policy][rank]
        if placed < len(order) and _follows(position, references[policy]):
            action = Action.parse(order[placed])
            if not position.why_not(action):
                _, span = position.fit(action)
                yield (float(span.start), 0, rank), action
        return

    game = position.game
    # A W belongs to an I that was placed before: whichever the policy, it has to be done.
    excluded = ""
    if game.split:
        excluded = "B" if policy == "zero bubble" else "I"
    for action in position.legal(rank):
        stage, kind = action.stage, action.kind
        if kind in excluded:
            continue
        # 1F1B: as many microbatches in flight as there are stages from here to the end.
        if policy == "backward first" and kind == "F":
            done = [part.kind for part in position.timeline.actions if part.stage == stage]
            if done.count("F") - done.count("B") - done.count("I") >= game.n_stages - stage:
                continue
        _, span = position.fit(action)
        priority = POLICIES[policy].index(kind)
        yield (float(span.start), priority, action.microbatch, -stage, rank), action
