"""What is raised when something went wrong, on whichever rank: one exception on all, with one account of it."""

from dataclasses import dataclass

from course_pp.schedule import Action, Overlap


@dataclass(frozen=True)
class Origin:
    """Where a failure began, and what it was.

    Attributes:
        rank: in the pipeline's group.
        at: the action in progress, or words for what comes before and after the actions.
        what: the exception that was raised there, ``"Type: message"``.
    """

    rank: int
    at: Action | Overlap | str
    what: str

    def __str__(self) -> str:
        at = self.at
        if not isinstance(at, str):
            at = " and ".join(f"stage {p.stage}, microbatch {p.microbatch}, action {p}" for p in at.parts)
        return f"rank {self.rank}, {at}: {self.what}"

    def encode(self) -> str:
        """As one text, for :meth:`decode`."""
        return f"{self.rank}\n{self.at}\n{self.what}"

    @staticmethod
    def decode(text: str) -> "Origin":
        rank, at, what = text.split("\n", 2)
        for parse in (Action.parse, Overlap.parse):
            try:
                return Origin(int(rank), parse(at), what)
            except ValueError:
                continue
        return Origin(int(rank), at, what)


class PipelineError(RuntimeError):
    """A step failed. Raised on every rank, with the same account of where it began.

    Attributes:
        origin: what happened, beginning with rank, stage, microbatch and action.
        rank: where it began, in the pipeline's group.
        stage: the stage where it began; None outside an action.
        microbatch: that of the action; None outside one.
        action: that in progress; None outside one. An :class:`Overlap` fails as a whole, and its forward gives stage
            and microbatch.
        began_elsewhere: whether this rank was told by another.

    After it a pipeline cannot go on: its ranks are at different places of the schedule, and the gradients of the step
    are incomplete. Build another one, and zero the gradients.
    """

    def __init__(self, origin: Origin, told: str = "") -> None:
        super().__init__(f"{origin}\n{told}" if told else str(origin))
        self._given = origin, told
        self.origin, self.rank, self.began_elsewhere = str(origin), origin.rank, bool(told)
        self.action = None if isinstance(origin.at, str) else origin.at
        first = None if self.action is None else self.action.parts[0]
        self.stage = None if first is None else first.stage
        self.microbatch = None if first is None else first.microbatch

    def __reduce__(self) -> tuple[type["PipelineError"], tuple[Origin, str]]:
        return type(self), self._given


class LossNotFinite(PipelineError):
    """A step's loss is infinite or not a number.

    The step ran to its end: zero the gradients, and the pipeline can go on.
    """


class MessageLost(RuntimeError):
    """A message did not come or could not be sent: its peer is gone, or late beyond the time limit."""


class PeerFailed(RuntimeError):
    """The peer's step has failed.

    Attributes:
        origin: where that began.
    """

    def __init__(self, origin: Origin) -> None:
        super().__init__(str(origin))
        self.origin = origin
