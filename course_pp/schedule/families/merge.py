"""The order that most schedules share: some forwards, then one forward, one backward, then the backwards left over."""

from collections.abc import Sequence
from itertools import zip_longest

from course_pp.schedule.action import Action
from course_pp.schedule.schedule import Work


def merge(
    forwards: Sequence[Work], backwards: Sequence[Work], warm_up: int, kinds: str = "B", lag: int = 0
) -> tuple[Action, ...]:
    """The actions of one rank.

    Args:
        forwards: what the rank runs forward, in order.
        backwards: what it runs backward, in order.
        warm_up: how many forwards come before the first pair of one forward and one backward.
        kinds: ``B``; or two letters, such as ``IW``, where the second finishes what the first began.
        lag: how many more of the first letter than of the second are done; the second catches up at the end.
    """
    begin, finish = kinds[0], kinds[1:]
    actions = [Action(stage, "F", microbatch) for stage, microbatch in forwards[:warm_up]]
    unfinished = list(backwards[::-1])
    for done, (forward, backward) in enumerate(zip_longest(forwards[warm_up:], backwards)):
        if forward:
            actions.append(Action(forward[0], "F", forward[1]))
        actions.append(Action(backward[0], begin, backward[1]))
        if finish and done >= lag:
            stage, microbatch = unfinished.pop()
            actions.append(Action(stage, finish, microbatch))
    if finish:
        actions.extend(Action(stage, finish, microbatch) for stage, microbatch in reversed(unfinished))
    return tuple(actions)
