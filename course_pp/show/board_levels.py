"""The levels of the board, as data: each teaches one schedule, whose makespan is its par."""

from __future__ import annotations

from dataclasses import dataclass, field

from course_pp.schedule import Action, Costs, Schedule, Time, build, names
from course_pp.schedule.schedule import normalised
from course_pp.show.board_rules import Game, game_of


@dataclass(frozen=True)
class Level:
    """A board to be solved: par is the makespan of the schedule that it ``teaches``.

    Where no named schedule is best, ``order`` has the actions of each rank in an order that reaches
    par.
    """

    number: int
    title: str
    story: str
    n_ranks: int
    n_microbatches: int
    teaches: str
    par: Time
    memory_limit: tuple[int, ...] | None = None
    costs: Costs = field(default_factory=Costs)
    split: bool = False
    order: tuple[str, ...] = ()

    @property
    def reference(self) -> Schedule:
        """The order that reaches par."""
        if not self.order:
            return build(self.teaches, self.n_ranks, self.n_microbatches)
        placement = tuple((rank,) for rank in range(self.n_ranks))
        rows = tuple(tuple(map(Action.parse, row.split())) for row in self.order)
        return Schedule(self.title, placement, rows)

    @property
    def game(self) -> Game:
        placement = [ranks[0] for ranks in self.reference.placement]
        return game_of(placement, self.n_microbatches, self.costs, self.memory_limit, self.split)


LEVELS = (
    Level(
        1,
        "First steps",
        "One microbatch goes down both stages and its gradient comes back. A backward takes twice a"
        " forward.",
        *(2, 1, "naive", 6),
    ),
    Level(
        2,
        "Fill the pipeline",
        "Three microbatches, one after another, would take 18. Let a second one start before the"
        " first is back.",
        *(2, 3, "gpipe", 12),
    ),
    Level(
        3,
        "The same with less memory",
        "Now rank 0 may hold two activations and rank 1 one. The makespan need not suffer.",
        *(2, 3, "1f1b", 12),
        memory_limit=(2, 1),
    ),
    Level(
        4,
        "Deeper",
        "Three stages, and each rank may hold as many activations as there are stages from it to"
        " the end.",
        *(3, 4, "1f1b", 18),
        memory_limit=(3, 2, 1),
    ),
    Level(
        5,
        "Half a backward",
        "B comes in halves: only I is waited for by the rank above, so W can fill a gap.",
        *(2, 2, "zb_h1", 7),
        memory_limit=(2, 2),
        split=True,
    ),
    Level(
        6,
        "Gaps filled with W",
        "Three stages with the memory of 1F1B's first rank. Late weight gradients bring 18 down"
        " to 14.",
        *(3, 4, "zb_h1", 14),
        memory_limit=(3, 3, 3),
        split=True,
    ),
    Level(
        7,
        "Memory for time",
        "W takes half of F here and fills less. One more activation a rank buys the rest.",
        *(2, 3, "zb_h2", 17),
        memory_limit=(3, 3),
        costs=Costs(2, 2, 1),
        split=True,
    ),
    Level(
        8,
        "Two stages a rank",
        "Rank 0 holds stages 0 and 2, rank 1 holds 1 and 3. Shorter stages fill the pipeline"
        " sooner.",
        *(2, 4, "interleaved_1f1b", 27),
        memory_limit=(5, 3),
    ),
    Level(
        9,
        "Down and up",
        "Rank 0 holds stages 0 and 3, so it starts and ends a microbatch. Split backwards leave it"
        " no gap.",
        *(2, 3, "zb_v", 19),
        memory_limit=(4, 4),
        split=True,
    ),
    Level(
        10,
        "Slow links",
        "A message takes 1. In 1F1B every return trip then shows; a microbatch more in flight"
        " hides it.",
        *(2, 4, "1f1b_eager", 17),
        memory_limit=(3, 1),
        costs=Costs(latency=1),
    ),
    Level(
        11,
        "Slow links, split backwards",
        "The same links, with I and W. Rank 0 need wait only once, for its first gradient.",
        *(2, 4, "zb_h2", 14),
        memory_limit=(3, 3),
        costs=Costs(latency=1),
        split=True,
    ),
    Level(
        12,
        "No name for it",
        "Stage 1's forward takes 2, a message 1, and memory is short. Of the named schedules, 1F1B"
        " does best with 28.",
        *(3, 4, "", 24),
        memory_limit=(3, 2, 2),
        costs=Costs(forward=(1, 2, 1), latency=1),
        split=True,
        order=(
            "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
            "1F0 1F1 1I0 1W0 1F2 1I1 1W1 1F3 1I2 1W2 1I3 1W3",
            "2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2W2 2F3 2I3 2W3",
        ),
    ),
)


_PAPERS = {
    "gpipe": "1811.06965",
    "1f1b": "2006.09503",
    "1f1b_eager": "2211.05322",
    "interleaved_1f1b": "2104.04473",
    "looped_bfs": "2211.05953",
    "hanayo": "2308.15762",
    **dict.fromkeys(("zb_h1", "zb_h2", "zb_v"), "2401.10241"),
    **dict.fromkeys(("v_half", "v_min"), "2405.15362"),
}
PAPERS = {name: f"https://arxiv.org/abs/{number}" for name, number in _PAPERS.items()}
"""For a schedule the paper that it is from."""


def references(
    placement: tuple[int, ...], n_microbatches: int, split: bool, own: Schedule | None = None
) -> dict[str, list[list[str]]]:
    """Return the orders that this board can hold, by name, with the actions of each rank as text.

    ``own`` comes first, then the named schedules.
    """
    p = 1 + max(placement)
    allowed = set("FBIW" if split else "FB")
    found = {} if own is None else {own.name: own}
    for name in names():
        try:
            schedule = build(name, p, n_microbatches)
        except ValueError:
            continue  # not of this size
        if schedule.placement != normalised(placement):
            continue
        # An overlapped pair is no action that a learner can place.
        is_plain = all(isinstance(action, Action) for row in schedule.actions for action in row)
        if is_plain and {part.kind for part in schedule.parts} <= allowed:
            found.setdefault(name, schedule)

    told = {}
    for name, schedule in found.items():
        told[name] = [list(map(str, row)) for row in schedule.actions]
    return told
