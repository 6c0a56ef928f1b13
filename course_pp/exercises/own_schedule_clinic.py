"""The bug clinic of notebook 11: an order that is legal, and hangs where nobody keeps a message for its receiver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_list
from course_pp.schedule import Action, Schedule, build

__all__ = ["Program", "grade_untangled", "hanging", "programs_of", "untangled"]

Event = tuple[Any, ...]
Program = list[Event]
"""What a rank does, in order: ``("do", "0F1")``, ``("send", 1, "0F1")`` to rank 1, ``("recv", 1, "1B0")`` from it."""


def programs_of(schedule: Schedule) -> list[Program]:
    """Each action preceded by the receives that it needs, and followed by the send of what it makes."""
    last = schedule.n_stages - 1
    kinds = {(part.kind, part.stage, part.microbatch) for part in schedule.parts}
    programs: list[Program] = [[] for _ in range(schedule.n_ranks)]
    for rank, row in enumerate(schedule.actions):
        for action in (part for each in row for part in each.parts):
            stage, microbatch = action.stage, action.microbatch
            if action.kind == "F" and stage > 0:
                _receive(programs[rank], schedule, rank, Action(stage - 1, "F", microbatch))
            if action.kind in "BI" and stage < last:
                kind = "I" if ("I", stage + 1, microbatch) in kinds else "B"
                _receive(programs[rank], schedule, rank, Action(stage + 1, kind, microbatch))
            programs[rank].append(("do", str(action)))
            to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(action.kind, -1)
            if 0 <= to <= last and (peer := schedule.rank_of(to, microbatch)) != rank:
                programs[rank].append(("send", peer, str(action)))
    return programs


def _receive(program: Program, schedule: Schedule, rank: int, made_by: Action) -> None:
    if (peer := schedule.rank_of(made_by.stage, made_by.microbatch)) != rank:
        program.append(("recv", peer, str(made_by)))


def hanging(programs: Sequence[Sequence[Event]]) -> dict[int, Event]:
    """The ranks that never end where a send waits for its receiver, and at what each of them stands."""
    at = [0] * len(programs)

    def head(rank: int) -> Event | None:
        return tuple(programs[rank][at[rank]]) if at[rank] < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            event = head(rank)
            if event is None:
                continue
            if event[0] == "do":
                at[rank], moved = at[rank] + 1, True
            elif event[0] == "send" and head(event[1]) == ("recv", rank, event[2]):
                at[rank], at[event[1]], moved = at[rank] + 1, at[event[1]] + 1, True
    return {rank: event for rank in range(len(programs)) if (event := head(rank)) is not None}


def untangled(programs: list[list[tuple]]) -> list[list[tuple]]:
    """The same events on each rank, some receives earlier, so that no send waits for ever."""
    left = [list(program) for program in programs]
    done: list[list[tuple]] = [[] for _ in programs]
    while any(left):
        for rank, rest in enumerate(left):
            if not rest or rest[0][0] == "recv":
                continue
            event = rest.pop(0)
            done[rank].append(event)
            if event[0] == "send":
                taken = ("recv", rank, event[2])
                left[event[1]].remove(taken)
                done[event[1]].append(taken)
    return done


_ORDERS = [("1f1b", 2, 3), ("1f1b", 3, 4), ("zb_h1", 3, 5), ("zb_h2", 4, 7), ("zb_v", 2, 4), ("gpipe", 3, 3)]


def grade_untangled(answer: Answer) -> None:
    """Ask for the same events, receives earlier at most, that end although nothing is kept for a receiver."""
    rows = [(programs_of(build(name, p, m)),) for name, p, m in _ORDERS]
    for (name, p, m), (given,), got in zip(_ORDERS, rows, answer.calls(rows, "untangled(…)"), strict=True):
        what, call = f"`untangled` of {name} with p = {p} and m = {m}", f"untangled(… {name}, p = {p}, m = {m} …)"
        programs = [
            [
                tuple(event) if isinstance(event, list | tuple) else event
                for event in expect_list(program, f"{call}[{rank}]")
            ]
            for rank, program in enumerate(expect_list(got, call, p))
        ]
        for rank in range(p):
            _judge_rank(what, rank, given[rank], programs[rank])
        if stuck := hanging(programs):
            shown = "\n".join(f"rank {rank}: {' '.join(map(str, event))}" for rank, event in stuck.items())
            raise Mistake(f"{what} hangs on rank {', '.join(map(str, stuck))}.", _why(stuck), f"They stand at\n{shown}")


def _judge_rank(what: str, rank: int, given: Program, got: list[Any]) -> None:
    if Counter(map(repr, given)) != Counter(map(repr, got)):
        cause = "Every event stays on its rank, once. Only the order changes."
        raise Mistake(f"{what} has other events on rank {rank}.", cause)
    if [event for event in given if event[0] != "recv"] != [event for event in got if event[0] != "recv"]:
        cause = "The order is the schedule: leave what a rank does and sends as it is, and move receives."
        raise Mistake(f"{what} changes the order in which rank {rank} works and sends.", cause)
    for event in given:
        if event[0] == "recv":
            before = {repr(each) for each in given[given.index(event) :]}
            late = [each for each in got[: got.index(event)] if repr(each) in before and each[0] != "recv"]
            if late:
                cause = "What comes after a receive in the order needs it: it may come earlier, never later."
                raise Mistake(f"{what} has {event} on rank {rank} after {late[0]}.", cause)


def _why(stuck: dict[int, Event]) -> str:
    ways = {event[0] for event in stuck.values()}
    if ways == {"send"}:
        return "Two neighbours send to one another, and neither receives: one of them has to receive first."
    if ways == {"recv"}:
        return "Everybody receives, and what they wait for comes after their own sends: too many receives are early."
    return "A rank sends while its receiver waits for something else, which comes later: that receive is too early."
