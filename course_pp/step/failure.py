"""A step that failed: one exception in both engines, with the same fields."""

from typing import Any


class StepFailed(RuntimeError):
    """A step failed, here or on another rank. Build another pipeline, and zero the gradients.

    In ``runtime`` every rank raises it, with the same account of where the failure began. In
    ``parallel`` the rank that failed raises its own exception, and the ranks that waited for it
    raise this one.

    Attributes:
        rank: the rank where the failure began: numbered in the pipeline's group in ``runtime``,
            within all ranks that share the step in ``parallel``.
        what: the failure itself, ``"Type: message"``.
        action: the action that failed; None outside an action, and in ``parallel``.
        stage, microbatch: the stage and the microbatch of the action, or None. An overlap of two
            actions fails as a whole, and its forward gives both numbers.
        began_elsewhere: whether another rank told this one. Launchers name the failure of ``rank``
            first.
    """

    def __init__(
        self, message: str, rank: int, what: str, action: Any = None, began_elsewhere: bool = False
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.what = what
        self.action = action
        self.began_elsewhere = began_elsewhere
        self.stage: int | None = None
        self.microbatch: int | None = None
        if action is not None:
            first = action.parts[0]
            self.stage = first.stage
            self.microbatch = first.microbatch

    def __reduce__(self) -> tuple[type["StepFailed"], tuple[Any, ...]]:
        return type(self), (str(self), self.rank, self.what, self.action, self.began_elsewhere)
