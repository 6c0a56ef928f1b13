"""What it means when the ranks of a step wait for messages that never come, or send them to nobody."""

from __future__ import annotations

import re

from course_pp.exercises.exercise import Mistake, Stopped
from course_pp.launch.errors import COMPUTES, RETURNED

_LOST = (
    "Either a message was never sent, or it was lost: it lives as long as the handle that `isend` or "
    "`send_activation` returns. Keep that, and `wait()` for it at the end."
)


# As the launcher words it.
_NOBODY = re.compile(r"rank \d+ (?:sends to|receives from) rank (-?\d+), but the group's ranks are")


def explained_in_line(stopped: Stopped) -> Mistake:
    """Tell as `explained` does, for stages in a line, a stage a rank: also a message to a rank beyond its ends."""
    if found := _NOBODY.search(stopped.symptom):
        cause = "The last rank has nobody below it: it sends no activation and receives no gradient, `link.is_last`."
        if int(found[1]) < 0:
            cause = (
                "The first rank has nobody above it: it receives no activation and sends no gradient, `link.is_first`."
            )
        return Mistake(stopped.symptom, cause, stopped.example)
    return explained(stopped)


def explained(stopped: Stopped) -> Mistake:
    """Tell a hang in terms of what a pipeline's step sends; leave anything else as it is."""
    waiting = [wait for wait in stopped.waits if wait.peers]
    if not waiting:
        return stopped
    sending = [wait for wait in waiting if wait.operation == "send"]
    returned = {wait.rank for wait in stopped.waits if wait.operation == RETURNED}
    computing = {wait.rank for wait in stopped.waits if wait.operation == COMPUTES}
    unheard = [wait for wait in waiting if returned.intersection(wait.peers)]
    if any(computing.intersection(wait.peers) for wait in waiting):
        cause = f"{stopped.cause} A rank that computes waits for nobody: does a loop of it never end?"
    elif any(wait.operation == "send" for wait in unheard):
        cause = f"{stopped.cause} Each message that is sent to it has to be received there, by a `recv_…` of its own."
    elif unheard:
        cause = f"{stopped.cause} {_LOST}"
    # Of the learner's own lines: torch waits for a blocking send in the same way.
    elif any(".wait(" in wait.where for wait in sending):
        cause = (
            "To wait for a message at once is to send it blocking: wait after the last backward. Or nobody takes it: "
            "each forward and each backward receives one message."
        )
    elif sending:
        cause = (
            "A blocking `send` ends when its receiver takes the message, and that one is sending, too. Begin to send "
            "with `isend` or `send_activation`, and go on."
        )
    else:
        cause = f"Everyone receives, nobody sends. {_LOST}"
    return Mistake(stopped.symptom, cause, stopped.example)
