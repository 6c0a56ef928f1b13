"""The one exception of a pipeline in which something went wrong, on whichever rank."""

__all__ = ["PipelineError"]


class PipelineError(RuntimeError):
    """A step failed. Raised on every rank, with the same account of where it began.

    Attributes:
        origin: what happened, beginning with rank, stage, microbatch and action.
        began_elsewhere: whether another rank failed first, and this one was told of it.

    After it a pipeline cannot go on: its ranks are at different places of the schedule, and the gradients of the step
    are incomplete. Build another one, and zero the gradients.
    """

    def __init__(self, origin: str, here: str = "") -> None:
        self.origin = origin
        self.began_elsewhere = bool(here)
        super().__init__(f"{origin}\n{here}" if here else origin)
