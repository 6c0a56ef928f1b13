"""Orders written as phases: a few letters and how often they repeat. Microbatches number themselves.

``F0`` is the next forward of the rank's first chunk, ``B1`` the next backward of its second, ``F1&B0`` both overlapped;
``W`` finishes the oldest ``I`` that has none yet, ``W0`` the oldest of that chunk.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from course_pp.schedule.action import Action, Overlap

Phase = tuple[str, int]
"""Steps with blanks between them, and how many times to do them."""


def spell_out(phases: Iterable[Phase], stages: Sequence[int]) -> tuple[Action | Overlap, ...]:
    """The actions of the rank that holds ``stages``, in the order of ``phases``."""
    count: Counter[tuple[str, int]] = Counter()
    unfinished: list[Action] = []

    def act(step: str) -> Action:
        kind, chunk = step[0], step[1:]
        if kind == "W":
            half = next(action for action in unfinished if not chunk or action.stage == stages[int(chunk)])
            unfinished.remove(half)
            return Action(half.stage, "W", half.microbatch)
        key = ("F" if kind == "F" else "backward", stages[int(chunk)])
        action = Action(key[1], kind, count[key])
        count[key] += 1
        if kind == "I":
            unfinished.append(action)
        return action

    return tuple(
        Overlap(*map(act, step.split("&"))) if "&" in step else act(step)
        for steps, repeats in phases
        for _ in range(repeats)
        for step in steps.split()
    )
