"""The board: draw a schedule by hand, learn why a move is illegal, and run it on real ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from anywidget import AnyWidget
from traitlets import Dict, Int, List, Unicode

from course_pp.base.arguments import checked, refuse_unless
from course_pp.base.files import locked, state_folder, write_atomically
from course_pp.schedule import Action, Costs, Schedule, Time, Timeline, names, to_torch_csv
from course_pp.show.board_levels import LEVELS, PAPERS, Level, references
from course_pp.show.board_rules import (
    POLICIES,
    Game,
    Position,
    advice,
    fill,
    game_of,
    recognised,
    replay,
    spelled,
    standstill,
)
from course_pp.show.chart import ChartFigure
from course_pp.show.player import asset
from course_pp.show.timelines import draw_idle, timeline
from course_pp.show.wording import counted, listed

_EQUAL = 1e-12
_MOST_ACTIONS = 600
_DONE = "levels done"


class Board(AnyWidget):
    """A grid of ranks and time in which actions are placed, by mouse, by keys or by its methods.

    Its state is :attr:`moves`, a list of texts that each language replays (``board_rules.play``).
    It is kept in a file beside the learner's progress, so the same board comes back after the
    kernel was restarted. A level's list opens another level on the same board.
    """

    _esm = asset("board_rules.js") + "\n" + asset("board.js")
    _css = asset("board.css")
    game = Dict().tag(sync=True)
    words = Dict().tag(sync=True)
    moves = List(Unicode()).tag(sync=True)
    undone = List(Unicode()).tag(sync=True)
    ran = Dict().tag(sync=True)
    done = List(Int()).tag(sync=True)  # numbers of levels
    chosen = Int().tag(sync=True)  # the level that is open; another number opens another

    def __init__(self, game: Game, costs: Costs, level: Level | None = None) -> None:
        super().__init__(**self._opened(game, costs, level))
        self.observe(self._follow, "moves")
        self.observe(self._choose, "chosen")
        self.observe(self._mark, "done")
        self.on_msg(self._asked)

    def _opened(self, game: Game, costs: Costs, level: Level | None) -> dict[str, Any]:
        """Take up a board where it was left; return its state."""
        self.level = level
        self.costs = costs
        self._game = game
        self.bound: Time = game.bound
        self.par: Time | None = None if level is None else level.par
        own = None if level is None else level.reference
        self._references = references(game.placement, game.n_microbatches, game.split, own=own)

        # Boards of the same game share one list of moves.
        told = json.dumps(game.as_json(), sort_keys=True)
        digest = sha256(told.encode()).hexdigest()[:12]
        self._name = f"level {level.number} {digest}" if level else f"board {digest}"
        self._position = Position(game)
        moves = kept(self._name)
        said = ""
        try:
            self._position = replay(game, moves)
        except ValueError:
            moves = []
            said = "What was kept of this board cannot be read; it begins anew."
        n_placed = sum(map(len, self._position.rows))
        if n_placed:
            said = f"{counted(n_placed, 'action')} from last time; clear the board to begin anew."
        return {
            "game": game.as_json(),
            "words": self._words(said),
            "moves": moves,
            "undone": [],
            "ran": {},
            "done": [int(number) for number in kept(_DONE) if number.isdecimal()],
            "chosen": level.number if level else 0,
        }

    def _words(self, said: str) -> dict[str, Any]:
        level = self.level
        game = self._game
        of = f"{game.n_ranks} ranks, {game.n_stages} stages, {game.n_microbatches} microbatches"
        title = f"A board of {of}"
        story = "Place every forward and backward; the fewer gaps, the better."
        titles: list[str] = []
        worked = {}
        if level is not None:
            title = f"Level {level.number} of {len(LEVELS)}: {level.title}"
            story = level.story
            titles = [each.title for each in LEVELS]
            name = level.reference.name
            worked[name] = self._references[name]
        # An order without a name is for hints alone: in a menu, one press would draw the answer.
        named = {name: order for name, order in self._references.items() if name in names()}
        return {
            "title": title,
            "story": story,
            "par": None if self.par is None else float(self.par),
            "bound": float(self.bound),
            "levels": titles,
            "worked": worked,
            "references": named,
            "papers": {name: PAPERS[name] for name in self._references if name in PAPERS},
            "said": said,
        }

    def _follow(self, change: Any) -> None:
        """Replay the moves that the browser or a method has set; take illegal ones back."""
        try:
            self._position = replay(self._game, self.moves)
        except ValueError as problem:
            self.moves = change["old"]
            self.words = {**self.words, "said": f"Not allowed: {problem}."}
            return
        failed = keep(self._name, list(self.moves))
        if failed:
            self.words = {**self.words, "said": failed}

    def _choose(self, change: Any) -> None:
        level = LEVELS[change["new"] - 1]
        if level is self.level:
            return
        keep(self._name, list(self.moves))  # they may have come with the choice
        with self.hold_sync():
            for name, value in self._opened(level.game, level.costs, level).items():
                setattr(self, name, value)

    def _mark(self, change: Any) -> None:
        # another board may have marked others
        keep(_DONE, sorted({*kept(_DONE), *map(str, change["new"])}))

    def _asked(self, _widget: Any, content: Any, _buffers: Any) -> None:
        """Answer the button."""
        if content.get("do") != "run":
            return
        try:
            self.set_state({"moves": content["moves"]})
            self.run()
        except Exception as problem:  # nobody would see it: it is told on the board
            self.ran = {"of": "", "said": f"It did not run: {problem}", "kind": "refused"}

    @property
    def schedule(self) -> Schedule:
        """The order on the board, complete or not.

        It can go to ``simulate``, ``check``, ``to_torch_csv`` or ``run_step``.
        """
        return self._position.schedule

    @property
    def timeline(self) -> Timeline:
        """The times of the actions on the board."""
        return self._position.timeline

    @property
    def is_complete(self) -> bool:
        return self._position.left == 0

    @property
    def score(self) -> float:
        """The bound over the makespan: 1 for an order that nothing can beat.

        It is 0 before the board is complete.
        """
        return float(self.bound / self.timeline.makespan) if self.is_complete else 0.0

    @property
    def recognised(self) -> tuple[str, ...]:
        return tuple(recognised(self._position, self._references))

    @property
    def figure(self) -> ChartFigure:
        """The board as a picture, for places where no browser runs it."""
        title = f"{self.words['title']}. {self._standing()}"
        figure = timeline(self.timeline, title)
        if not self.timeline.spans:  # rows that wait for their first action, and no times yet
            draw_idle(figure.axes[0], self._game.n_ranks, 1)
            figure.axes[0].set_xticks([])
            figure.axes[0].set_xlabel("")
        figure.alt_text = f"Board, one row a rank. {title}"
        return figure

    @checked
    def place(self, actions: str, at: Time | None = None) -> None:
        """Place one action or several, all or none: ``board.place("0F0 1F0 1B0")``.

        ``at`` is a time in the gap that they go to; the end of their rows unless given.
        """
        position = replay(self._game, self.moves)
        moves = list(self.moves)
        for text in actions.split():
            index = position.place(Action.parse(text), None if at is None else float(at))
            moves.append(text if index is None else f"{text}@{index}")
        self._commit(moves)

    @checked
    def remove(self, action: str) -> None:
        """Remove an action, later actions of its rank, and every action that depends on these."""
        replay(self._game, self.moves).remove(Action.parse(action))
        self._commit([*self.moves, f"-{action.strip()}"])

    @checked
    def why_not(self, action: str, at: Time | None = None) -> str:
        """Return why ``action`` cannot be placed; empty if it can."""
        return self._position.why_not(Action.parse(action), None if at is None else float(at))

    @checked
    def legal(self, rank: int) -> tuple[str, ...]:
        """Return the actions that ``rank`` could do next, the earliest start first."""
        if not 0 <= rank < self._game.n_ranks:
            raise ValueError(f"rank is {rank}: give a rank from 0 to {self._game.n_ranks - 1}")
        return tuple(map(str, self._position.legal(rank)))

    def undo(self) -> None:
        if self.moves:
            last = self.moves[-1]
            self.undone = [last, *self.undone]
            self.moves = self.moves[:-1]

    def redo(self) -> None:
        """Make the last move that was undone again, if there is one."""
        if self.undone:
            self.moves = [*self.moves, self.undone[0]]
            self.undone = self.undone[1:]

    def clear(self) -> None:
        """Take every action away; :meth:`undo` brings them back."""
        self._commit([*self.moves, "="] if self.moves else [])

    @checked
    def hint(self, policy: str = "") -> str:
        """Return the next action by a policy or a named order; empty if there is none.

        Without a name, the level's own order decides.
        """
        action = advice(self._position, self._policy(policy), self._references)
        return "" if action is None else str(action)

    @checked
    def fill(self, policy: str = "") -> None:
        """Place the other actions by ``policy``, or by a named order that the board follows."""
        policy = self._policy(policy)
        position = replay(self._game, self.moves)
        moves = fill(position, policy, self._references)
        if position.left:
            why = standstill(position, policy, self._references)
            policies = ", ".join(POLICIES)
            raise ValueError(
                f"{policy} does not finish this board: {why}; undo, or fill by one of {policies}"
            )
        self._commit([*self.moves, *moves])

    def _policy(self, policy: str) -> str:
        if not policy:
            if self.level is not None:
                return self.level.reference.name
            return "zero bubble" if self._game.split else "backward first"
        if policy not in POLICIES and policy not in self._references:
            known = ", ".join([*POLICIES, *self._references])
            raise ValueError(f"unknown policy {policy!r}: use one of {known}")
        return policy

    def _commit(self, moves: list[str]) -> None:
        self.undone = []
        self.moves = moves

    def to_csv(self) -> str:
        """Return the order as torch's schedules read it."""
        return to_torch_csv(self.schedule)

    def run(self) -> Timeline:
        """Run one step of the order on real ranks; lay its timeline under the drawn one.

        Every gradient is compared with one process's, and the board says whether they are equal.
        Then the same order runs at the pace of the board's costs: measured, or simulated if this
        machine is too busy.
        """
        from course_pp.notebook import compare_gradients, emulate

        self.ran = {}  # or the browser would not be told of the same outcome twice
        if not self.is_complete:
            raise ValueError(
                f"the board is not complete: {self._standing()} Place the rest, or let fill() do it"
            )
        schedule = self.schedule
        (difference,) = compare_gradients([schedule])
        equal = difference <= _EQUAL
        verdict = "gradients equal" if equal else f"gradients differ by {difference:.0e}"
        ran = emulate(schedule, self.costs)
        spans = []
        for span in ran.spans:
            spans.append([span.rank, str(span.action), float(span.start), float(span.end)])
        times = f"{ran.how} {float(ran.makespan):.2f}, drawn {self._makespan}"
        said = f"Ran on {schedule.n_ranks} ranks: {times}; {verdict} to one process's."
        self.ran = {
            "of": " ".join(self.moves),
            "spans": spans,
            "end": float(ran.makespan),
            "how": ran.how,
            "verdict": verdict,
            "said": said,
            "kind": "good" if equal else "refused",
        }
        return ran

    @property
    def _makespan(self) -> str:
        return spelled(float(self.timeline.makespan))

    def _standing(self) -> str:
        if self._position.left:
            n_placed = sum(map(len, self._position.rows))
            return f"{counted(n_placed, 'action')} placed, makespan {self._makespan}."
        told = f"Complete: makespan {self._makespan}"
        if self.par is not None:
            told += f", par {spelled(float(self.par))}"
        if self.recognised:
            told += f"; this is {listed(self.recognised)}"
        return f"{told}."

    def __repr__(self) -> str:
        return f"Board({self.words['title']}. {self._standing()})"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        found = super()._repr_mimebundle_(**kwargs)
        data = found[0] if isinstance(found, tuple) else found
        figure = self.figure
        picture, metadata = figure._repr_mimebundle_()
        return {**picture, **(data or {}), "text/plain": figure.alt_text}, metadata


def kept_in() -> Path:
    """Return the file of kept boards, beside the learner's progress; delete it to begin again."""
    path = state_folder() / "boards.json"
    with suppress(RuntimeError):  # nobody has that home directory
        path = path.expanduser()
    return path


def kept(name: str) -> list[str]:
    """Return the moves that are kept of a board; none if they cannot be read."""
    found = _boards().get(name)
    if isinstance(found, list) and all(isinstance(move, str) for move in found):
        return found
    return []


def keep(name: str, moves: list[str]) -> str:
    """Keep the moves of a board; an empty list forgets it.

    Returns a sentence if that failed, else an empty text.
    """
    path = kept_in()
    try:
        with locked(path) as file:  # another kernel may keep a board at the same time
            boards = {**_boards(), name: moves}
            boards = {each: made for each, made in boards.items() if made}
            write_atomically(file, json.dumps(boards, indent=1) + "\n")
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror or error})"
        return f"This board will not outlive its kernel: {why}."
    return ""


def _boards() -> dict[str, object]:
    try:
        boards = json.loads(kept_in().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return boards if isinstance(boards, dict) else {}


@checked
def board(
    level: int | None = None,
    *,
    n_ranks: int = 2,
    n_microbatches: int = 4,
    placement: Sequence[int] | None = None,
    costs: Costs | None = None,
    memory_limit: int | Sequence[int | None] | None = None,
    split: bool = False,
) -> Board:
    """Make a board on which to draw a schedule: a level of the course, or one of your own sizes.

    Args:
        level: from 1 to 12; it sets everything else.
        n_ranks: p, one stage a rank unless there is a placement.
        n_microbatches: m.
        placement: the rank of each stage, such as ``(0, 1, 1, 0)``; then ``n_ranks`` is not
            needed.
        costs: one unit for each of ``F``, ``I`` and ``W`` unless given.
        memory_limit: activations that a rank may hold, one number or one for each rank.
        split: whether the backward comes in halves, ``I`` and ``W``.
    """
    if level is not None:
        sizes = (n_ranks, n_microbatches, placement, costs, memory_limit, split)
        is_alone = sizes == (2, 4, None, None, None, False)
        remedy = "a level has its own sizes; give the level alone, or none"
        refuse_unless(is_alone, "board", "level", level, remedy)
        if not 1 <= level <= len(LEVELS):
            raise ValueError(
                f"level is {level}: give a level from 1 to {len(LEVELS)}, or leave it out"
            )
        chosen = LEVELS[level - 1]
        return Board(chosen.game, chosen.costs, chosen)

    if placement is None:
        placement = range(n_ranks)
    if not placement or set(placement) != set(range(1 + max(placement))):
        given = f"placement is {tuple(placement)}"
        raise ValueError(f"{given}: give every rank from 0 on at least one stage")
    n_actions = 3 * len(placement) * n_microbatches
    if n_actions > _MOST_ACTIONS:
        given = f"n_microbatches={n_microbatches} on {len(placement)} stages make up to"
        raise ValueError(
            f"{given} {n_actions:,} actions: nobody places more than {_MOST_ACTIONS} by hand, take"
            " fewer"
        )
    costs = costs or Costs()
    game = game_of(placement, n_microbatches, costs, memory_limit=memory_limit, split=split)
    return Board(game, costs)
