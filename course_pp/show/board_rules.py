"""The rules of the board: what may be placed where, and why not. ``board_rules.js`` holds the same rules, line by line.

A :class:`Position` is an order under construction. Every action starts as soon as its rank is free and its inputs have
arrived, so its times are those of :func:`course_pp.schedule.simulate`, at any moment of the game. An action goes to the
end of its rank's row or into a gap that is long enough for it: nothing that was placed ever moves. So no order can be
drawn that deadlocks with buffered sends.

Costs are floats here. Both languages then do the same additions and comparisons, and find the same times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from course_pp.schedule import Action, Product, Schedule, Span, Timeline
from course_pp.show.board_game import KINDS_IN_ORDER, Game, Placed, Refused, held_after, spelled

_MOVE = re.compile(r"(-?)(\d{1,6}[FBIW]\d{1,6})(?:@(\d{1,6}))?", re.ASCII)


class Position:
    """What has been placed so far.

    Attributes:
        rows: for each rank its spans, in order.
    """

    def __init__(self, game: Game) -> None:
        self.game = game
        self.rows: list[list[Placed]] = [[] for _ in range(game.n_ranks)]
        self._spans: dict[Action, Placed] = {}
        self._maker: dict[Product, Placed] = {}

    def rank_of(self, action: Action) -> int:
        return self.game.placement[action.stage]

    @property
    def makespan(self) -> float:
        return max((row[-1].end for row in self.rows if row), default=0.0)

    @property
    def left(self) -> int:
        """What is still to do: a forward, an input gradient and a weight gradient for each stage and microbatch."""
        done = sum(len(action.provides) for action in self._spans)
        return 3 * self.game.n_stages * self.game.n_microbatches - done

    @property
    def schedule(self) -> Schedule:
        """The order on the board, complete or not."""
        return Schedule(
            "drawn",
            tuple((rank,) for rank in self.game.placement),
            tuple(tuple(span.action for span in row) for row in self.rows),
        )

    @property
    def timeline(self) -> Timeline:
        return Timeline(
            self.game.n_ranks,
            tuple(Span(each.rank, each.action, each.start, each.end) for row in self.rows for each in row),
            transfers=self.game.transfers,
            name="drawn",
        )

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each rank the most activations it holds."""
        return tuple(max(held, default=0) for held in map(held_after, self.rows))

    def place(self, action: Action, at: float | None = None) -> int | None:
        """Put ``action`` at the end of its row, or into the gap in which time ``at`` lies.

        Returns:
            its index in the row; None at the end.

        Raises:
            Refused: with the rule that forbids it and what to do.
        """
        self._refuse_unless_possible(action)
        index = self.index_at(self.rank_of(action), at)
        return self._insert(action, index)

    def place_at(self, action: Action, index: int) -> None:
        """Put ``action`` before the one at ``index`` of its row. Raises Refused as :meth:`place` does."""
        self._refuse_unless_possible(action)
        self._insert(action, min(index, len(self.rows[self.rank_of(action)])))

    def why_not(self, action: Action, at: float | None = None) -> Refused | None:
        """Return why ``action`` cannot be placed; None if it can."""
        try:
            self._refuse_unless_possible(action)
            self._fit(action, self.index_at(self.rank_of(action), at))
        except Refused as refused:
            return refused
        return None

    def legal(self, rank: int, at: float | None = None) -> list[Action]:
        """Return what can be placed on ``rank``, the earliest start first."""
        found = []
        for stage in self.game.stages_of[rank]:
            for microbatch in range(self.game.n_microbatches):
                for kind in self.game.kinds:
                    action = Action(stage, kind, microbatch)
                    if self.why_not(action, at) is None:
                        start = self._fit(action, self.index_at(rank, at))
                        found.append(((start, KINDS_IN_ORDER.index(kind), microbatch, stage), action))
        return [action for _, action in sorted(found, key=lambda each: each[0])]

    def start_of(self, action: Action) -> float:
        """Return when ``action`` would start at the end of its row. Raises Refused."""
        self._refuse_unless_possible(action)
        return self._fit(action, len(self.rows[self.rank_of(action)]))

    def in_flight(self, stage: int) -> int:
        """Return how many microbatches have passed ``stage`` forward and not backward."""
        kinds = [action.kind for action in self._spans if action.stage == stage]
        return kinds.count("F") - kinds.count("B") - kinds.count("I")

    def next_of(self, rank: int, kind: str, at: float | None = None) -> Action:
        """Return the first action of ``kind`` that can be placed on ``rank``. Raises Refused if none can."""
        self.index_at(rank, at)  # a busy rank is the first reason
        for action in self.legal(rank, at):
            if action.kind == kind:
                return action
        for microbatch in range(self.game.n_microbatches):
            for stage in self.game.stages_of[rank]:
                refused = self.why_not(Action(stage, kind, microbatch), at)
                if refused is not None and refused.why != "placed":
                    raise refused
        raise Refused("nothing", f"rank {rank} has no {kind} left to place")

    def remove(self, action: Action) -> None:
        """Remove ``action``, what came after it on its rank, and what depends on any of these.

        Raises:
            Refused: if it is not on the board.
        """
        if action not in self._spans:
            raise Refused("nothing", f"{action} is not on the board")
        keep = [len(row) for row in self.rows]
        rank = self.rank_of(action)
        keep[rank] = self.rows[rank].index(self._spans[action])
        while True:
            gone = {span.action for row, n in zip(self.rows, keep, strict=True) for span in row[n:]}
            before = list(keep)
            for rank, row in enumerate(self.rows):
                for index, span in enumerate(row[: keep[rank]]):
                    if any(self._maker[product].action in gone for product in self._needs(span.action)):
                        keep[rank] = index
                        break
            if keep == before:
                break
        for row, n in zip(self.rows, keep, strict=True):
            for span in row[n:]:
                del self._spans[span.action]
                for product in span.action.provides:
                    del self._maker[product]
            del row[n:]

    def gaps(self) -> list[tuple[int, float, float, str]]:
        """Return each interval up to the makespan in which a rank does nothing: rank, start, end, and why."""
        found = []
        for rank, row in enumerate(self.rows):
            free = 0.0
            for span in row:
                if span.start > free:
                    found.append((rank, free, span.start, self._why_waits(span, free)))
                free = span.end
            if self.makespan > free:
                why = f"rank {rank} has nothing placed after {spelled(free)}"
                if not self._left_on(rank):
                    why = f"rank {rank} is done at {spelled(free)}, the others at {spelled(self.makespan)}"
                found.append((rank, free, self.makespan, why))
        return found

    def critical_path(self) -> list[Action]:
        """Return the chain that sets the makespan: each action starts when the one before, or its message, allows."""
        span: Placed | None = None
        for row in self.rows:
            if row and (span is None or row[-1].end > span.end):
                span = row[-1]
        path = []
        while span is not None:
            path.append(span.action)
            row = self.rows[span.rank]
            causes = [(self._arrival(product, span.rank), self._maker[product]) for product in self._needs(span.action)]
            if index := row.index(span):
                causes.append((row[index - 1].end, row[index - 1]))
            span, latest = None, -1.0
            for time, maker in causes:
                if time > latest:
                    span, latest = maker, time
        return path[::-1]

    def _needs(self, action: Action) -> tuple[Product, ...]:
        return action.needs(self.game.n_stages)

    def _arrival(self, product: Product, rank: int) -> float:
        """Return when something that was made is there on ``rank``."""
        maker = self._maker[product]
        if maker.rank == rank:
            return maker.end
        boundary = product.stage if product.what == "activation" else product.stage - 1
        return maker.end + self.game.transfers[boundary]

    def _refuse_unless_possible(self, action: Action) -> None:
        game, stage, microbatch = self.game, action.stage, action.microbatch
        if action.kind not in game.kinds:
            kinds = " and ".join([", ".join(game.kinds[:-1]), game.kinds[-1]])
            raise Refused("unknown", f"{action} is not for this board: it takes {kinds}")
        if stage >= game.n_stages or microbatch >= game.n_microbatches:
            raise Refused(
                "unknown",
                f"there is no {action} here: stages are 0 to {game.n_stages - 1}, microbatches 0 to "
                f"{game.n_microbatches - 1}",
            )
        for product in action.provides:
            if product in self._maker:
                placed = self._maker[product]
                raise Refused("placed", f"{placed.action} is placed already, from {spelled(placed.start)}")
        for product in self._needs(action):
            if product not in self._maker:
                raise Refused("missing", f"{action} needs {product}: place {self._makers(product)} first")

    def _makers(self, product: Product) -> str:
        """Return the actions that would make ``product``, spelled."""
        kinds = "F" if product.what == "activation" else "IB" if self.game.split else "B"
        return " or ".join(f"{product.stage}{kind}{product.microbatch}" for kind in kinds)

    def index_at(self, rank: int, at: float | None) -> int:
        """Return where in the row of ``rank`` an action placed at time ``at`` goes. Raises Refused if it is busy."""
        row = self.rows[rank]
        if at is None:
            return len(row)
        for span in row:
            if span.start <= at < span.end:
                raise Refused(
                    "busy",
                    f"rank {rank} is busy with {span.action} from {spelled(span.start)} to "
                    f"{spelled(span.end)}: choose a time when it is free",
                )
        return sum(span.start <= at for span in row)

    def _fit(self, action: Action, index: int) -> float:
        """Return when ``action`` would start before that at ``index``. Raises Refused without time or memory for it."""
        rank = self.rank_of(action)
        row, took = self.rows[rank], self.game.durations[action.kind][action.stage]
        start = row[index - 1].end if index else 0.0
        for product in self._needs(action):
            start = max(start, self._arrival(product, rank))
        if index < len(row) and start + took > row[index].start:
            after = row[index]
            raise Refused(
                "room",
                f"{action} takes {spelled(took)} and cannot start before {spelled(start)} here, but "
                f"{after.action} starts at {spelled(after.start)}: choose a longer gap",
            )
        limit = self.game.limits[rank]
        if limit is not None and action.kind == "F":
            held = max(held_after([*row[:index], Placed(rank, action, start, start + took), *row[index:]])[index:])
            if held > limit:
                raise Refused(
                    "memory",
                    f"with {action}, rank {rank} would hold {held} activations and its cap is {limit}: place a "
                    f"{'W or B' if self.game.split else 'B'} first",
                )
        return start

    def _insert(self, action: Action, index: int) -> int | None:
        start = self._fit(action, index)
        rank = self.rank_of(action)
        span = Placed(rank, action, start, start + self.game.durations[action.kind][action.stage])
        is_last = index == len(self.rows[rank])
        self.rows[rank].insert(index, span)
        self._spans[action] = span
        self._maker.update(dict.fromkeys(action.provides, span))
        return None if is_last else index

    def _left_on(self, rank: int) -> int:
        done = sum(len(span.action.provides) for span in self.rows[rank])
        return 3 * len(self.game.stages_of[rank]) * self.game.n_microbatches - done

    def _why_waits(self, span: Placed, free: float) -> str:
        latest = max(self._needs(span.action), key=lambda product: self._arrival(product, span.rank))
        maker = self._maker[latest]
        waits = f"rank {span.rank} waits from {spelled(free)} to {spelled(span.start)} for {latest}"
        if maker.end == span.start:
            return f"{waits}: rank {maker.rank} makes it until then"
        return f"{waits}: rank {maker.rank} sent it at {spelled(maker.end)}"


def replay(game: Game, moves: Sequence[str]) -> Position:
    """Replay ``moves``: ``0F0`` at the end of a row, ``0W0@3`` before the fourth action, ``-0F0`` taken away.

    Raises:
        ValueError: for a move that cannot be read or is not allowed, with its number.
    """
    position = Position(game)
    for number, move in enumerate(moves):
        try:
            play(position, move)
        except Refused as refused:
            raise ValueError(f"move {number}, {move!r}: {refused}") from refused
    return position


def play(position: Position, move: str) -> None:
    """Make one move, written as for :func:`replay`. Raises Refused."""
    match = _MOVE.fullmatch(move) if isinstance(move, str) else None
    if match is None or (match[1] and match[3]):
        raise Refused("unknown", "write stage, kind and microbatch, as in 0F0, 0W0@3 or -0F0")
    action = Action.parse(match[2])
    if match[1]:
        position.remove(action)
    elif match[3]:
        position.place_at(action, int(match[3]))
    else:
        position.place(action)
