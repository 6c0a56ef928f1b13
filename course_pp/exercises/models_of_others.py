"""Exercises of notebook 10: what cuts carry, weights that lie on two stages, skip connections, and a lost mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise, Mistake
from course_pp.exercises.expect import expect_dict, expect_int, expect_list
from course_pp.exercises.models_of_others_clinic import grade_masked_loss, masked_loss

__all__ = ["EXERCISES"]


def carries(reads: list[set[int]], begins: list[int]) -> list[list[int]]:
    """For each cut the calls whose results it carries, in order."""
    found = []
    for begin in begins:
        behind = set()
        for call in range(begin, len(reads)):
            for source in reads[call]:
                if source < begin:
                    behind.add(source)
        found.append(sorted(behind))
    return found


_CHAIN: list[set[int]] = [set(), {0}, {1}, {2}, {3}]
_SKIPS: list[set[int]] = [set(), {0}, {1}, {2}, {3, 1}, {4, 0}]
_ENCODER: list[set[int]] = [set(), {0}, {1}, set(), {3, 2}, {4, 2}, {5, 2}, {6}]
_GRAPHS: list[tuple[list[set[int]], list[int]]] = [
    (_CHAIN, [1, 3]),
    (_CHAIN, [2]),
    (_SKIPS, [2, 3, 5]),
    (_SKIPS, [1]),
    (_ENCODER, [2, 3, 4, 6]),
    (_ENCODER, [7]),
    ([set(), {0}, {0, 1}, {0}], [1, 2, 3]),
    ([set(), set(), {0, 1}], [1, 2]),
]


def _grade_carries(answer: Answer) -> None:
    for (reads, begins), got in zip(_GRAPHS, answer.calls(_GRAPHS), strict=True):
        call = f"carries({reads}, {begins})"
        rows = expect_list(got, call, len(begins))
        wanted = carries(reads, begins)
        for begin, row, right in zip(begins, rows, wanted, strict=True):
            _judge_cut(reads, begin, row, right, call)


def _judge_cut(reads: list[set[int]], begin: int, row: Any, right: list[int], call: str) -> None:
    what = f"the cut before call {begin}"
    sources = [expect_int(each, f"{call}: {what}") for each in expect_list(row, f"{call}: {what}")]
    shown = f"In {reads}, cut before {begin}: {sources}, and it carries {right}."
    if sources == right:
        return
    if sorted(set(sources)) == right:
        cause = "Each result once, in the order of the calls: a set, sorted."
        raise Mistake(f"For {what} you list {sources}.", cause, shown)
    if lost := sorted(set(right) - set(sources)):
        readers = [call for call in range(begin, len(reads)) if lost[0] in reads[call]]
        cause = f"Call {readers[-1]} reads it. A call behind the cut may read what was made long before it."
        if readers == [begin]:
            cause = f"Call {begin} is the first behind the cut, and reads it."
        raise Mistake(f"For {what} the result of call {lost[0]} is lost.", cause, shown)
    extra = min(set(sources) - set(right))
    cause = "It is made behind the cut." if extra >= begin else "No call behind the cut reads it: it stays where it is."
    raise Mistake(f"For {what} the result of call {extra} is too many.", cause, shown)


def tied_across(stages: list[dict[str, int]]) -> list[dict[int, str]]:
    """For each weight that lies on several stages its name on each, by stage."""
    places: dict[int, dict[int, str]] = {}
    for stage, weights in enumerate(stages):
        for name, weight in weights.items():
            where = places.setdefault(weight, {})
            if stage not in where:
                where[stage] = name
    return [where for where in places.values() if len(where) > 1]


_HELD: list[list[dict[str, int]]] = [
    [{"embed": 7, "a": 1}, {"b": 2}, {"c": 3, "head": 7}],
    [{"embed": 7, "a": 1}, {"b": 2}, {"c": 3, "head": 8}],
    [{"embed": 7, "head": 7, "a": 1}, {"b": 2}],
    [{"embed": 5, "also": 5}, {"a": 1}, {"head": 5}],
    [{"a": 1, "b": 2}, {"c": 2, "d": 1}],
    [{"shared": 4}, {"x": 1, "shared": 4}, {"shared": 4, "y": 1}],
    [{"a": 0}, {"b": 0}],
    [{}, {"a": 3}, {"b": 3, "again": 3}],
    [{"a": 1}],
]


def _grade_tied(answer: Answer) -> None:
    for stages, got in zip(_HELD, answer.calls([(stages,) for stages in _HELD]), strict=True):
        call, right = f"tied_across({stages})", tied_across(stages)
        rows = [expect_dict(each, f"{call}[{i}]") for i, each in enumerate(expect_list(got, call))]
        if sorted(map(_items, rows)) == sorted(map(_items, right)):
            continue
        shown = f"Expected {right}, got {rows}."
        if any(len(row) < 2 for row in rows):
            cause = "A weight on one stage, under however many names, is there once: nothing has to be added up."
            raise Mistake(f"`{call}` has a weight of one stage.", cause, shown)
        about = [each for row in rows if (each := _weight(stages, row)) is not None]
        if len(set(about)) < len(about):
            cause = "One entry for each weight, with all its stages; of two names on a stage the first."
            raise Mistake(f"`{call}` has a weight in two entries.", cause, shown)
        if len(rows) > len(right):
            raise Mistake(f"`{call}` finds {len(rows)}, and {len(right)} are tied.", _WHEN_TIED, shown)
        if len(rows) < len(right):
            raise Mistake(f"`{call}` finds {len(rows)} of {len(right)}.", _WHEN_TIED, shown)
        cause = "One entry for each stage that holds it, whichever they are; of two names on a stage the first."
        raise Mistake(f"`{call}` has other stages or names.", cause, shown)


_WHEN_TIED = "Two entries are one weight if their number is the same, whatever they are called."


def _weight(stages: Sequence[Mapping[str, int]], row: Mapping[Any, Any]) -> int | None:
    """The number of the weight that an entry of an answer is about, None if it names none."""
    return next(
        (
            stages[stage][name]
            for stage, name in row.items()
            if isinstance(stage, int) and 0 <= stage < len(stages) and isinstance(name, str) and name in stages[stage]
        ),
        None,
    )


def _items(row: dict[Any, Any]) -> str:
    return str(sorted((str(key), str(value)) for key, value in row.items()))


Values = Sequence[tuple[int, Sequence[int], int]]
"""Of each value the stage that makes it, those that read it, and its bytes."""


def skip_bytes(values: list[tuple[int, list[int], int]], rank_of: list[int]) -> tuple[int, int]:
    """Bytes sent in the forward of one microbatch: handed on from stage to stage, and straight to each rank."""
    handed, straight = 0, 0
    for writer, readers, size in values:
        for stage in range(writer, max(readers)):
            if rank_of[stage] != rank_of[stage + 1]:
                handed += size
        ranks = {rank_of[stage] for stage in readers}
        straight += size * len(ranks - {rank_of[writer]})
    return handed, straight


_LINE, _V, _LOOP = [0, 1, 2, 3], [0, 1, 1, 0], [0, 1, 0, 1]
_SENT: list[tuple[list[tuple[int, list[int], int]], list[int]]] = [
    ([(0, [3], 10)], _LINE),
    ([(0, [1], 10)], _LINE),
    ([(0, [3], 10), (1, [2], 4)], _LINE),
    ([(0, [2, 3], 10)], _LINE),
    ([(0, [3], 10), (1, [2], 4)], _V),
    ([(0, [2], 7)], _LOOP),
    ([(0, [1, 3], 6)], _LOOP),
    ([(1, [3], 5)], [0, 0, 1, 1]),
    ([(1, [2, 3], 5), (0, [3, 1], 2)], [0, 0, 1, 1]),
    ([(1, [4, 2], 3)], [0, 1, 2, 2, 1]),
    ([], _LINE),
]


def _grade_skip_bytes(answer: Answer) -> None:
    for (values, rank_of), got in zip(_SENT, answer.calls(_SENT), strict=True):
        call = f"skip_bytes({values}, {rank_of})"
        pair = expect_list(list(got) if isinstance(got, tuple) else got, call, 2)
        handed, straight = (expect_int(each, f"{call}[{i}]") for i, each in enumerate(pair))
        wanted = skip_bytes(values, rank_of)
        shown = f"Expected {wanted}, got {(handed, straight)}."
        if handed != wanted[0]:
            raise Mistake(f"`{call}`: handed on, it is not {handed} bytes.", _why_handed(handed, wanted[0]), shown)
        if straight != wanted[1]:
            cause = "Once to each *rank* that reads it, however many stages it has; the rank that makes it has it."
            raise Mistake(f"`{call}`: straight, it is not {straight} bytes.", cause, shown)


def _why_handed(found: int, right: int) -> str:
    if found > right:
        return "From a stage to the next on the same rank nothing is sent, and behind the last reader nobody needs it."
    return "It crosses every boundary from the stage that makes it to the last that reads it."


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "carries",
        "10",
        "what a cut carries",
        2,
        7,
        (
            "For one cut: which calls are behind it, and what do they read?",
            "Collect in a set what the calls `begin`, `begin + 1`, … read. Of that, keep what was made before the cut.",
            "`source < begin` was made before. Sort the set, and do the same for every cut.",
        ),
        carries,
        _grade_carries,
    ),
    Exercise(
        "tied_across",
        "10",
        "one weight, two stages",
        1,
        5,
        (
            "Collect for each weight, by its number, where it lies: a dictionary of dictionaries.",
            "`places.setdefault(weight, {})` is the entry of a weight; put `stage: name` into it, unless the stage is "
            "there already.",
            "Return the entries with more than one stage.",
        ),
        tied_across,
        _grade_tied,
    ),
    Exercise(
        "skip_bytes",
        "10",
        "handed on, or straight",
        2,
        7,
        (
            "Handed on, a value crosses each boundary between the stage that makes it and the last that reads it.",
            "A boundary costs nothing if both stages are on one rank: `rank_of[stage] == rank_of[stage + 1]`.",
            "Straight, it goes once to each rank in `{rank_of[stage] for stage in readers}`, but not to its own.",
        ),
        skip_bytes,
        _grade_skip_bytes,
    ),
    Exercise(
        "masked_loss",
        "10",
        "bug clinic",
        2,
        6,
        (
            "Which stages attend to other positions? What do those know of the padding?",
            "`stage(x)` attends to every position before: pass `attention_mask=` to each stage.",
            "Each microbatch has its own rows of the mask: `mask.chunk(m)`.",
        ),
        masked_loss,
        grade_masked_loss,
        limit_s=10.0,
    ),
)
