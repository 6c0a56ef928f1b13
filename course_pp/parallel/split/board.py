"""What a stage shares with its units: which call is next, what was received, what will be sent."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.parallel._torch import tree_flatten, tree_unflatten
from course_pp.parallel.meta_device import run_on_meta, to_meta
from course_pp.parallel.split.calls import Output, Recording
from course_pp.parallel.split.inputs import Inputs

__all__ = ["Board", "Done", "OtherWay"]


class Done(BaseException):
    """The stage has made all that it sends. Not an Exception, so that the model does not catch it."""


class OtherWay(RuntimeError):
    """The model calls other units for a batch than it did for the example."""

    def __init__(self, unit: str, what: str) -> None:
        super().__init__(
            f"{unit!r} {what}: which units the model calls depends on its batch, so it was cut for another way through "
            "it; cut it with an example that goes this way, or put what branches into one module"
        )


@dataclass
class _Run:
    """One forward of a stage: the values that cross its boundaries, and how often each unit was called."""

    values: dict[Output, Tensor]
    counts: dict[str, int] = field(default_factory=dict)


class Board:
    """One stage's calls of a recording: ``first`` to ``end``, end excluded.

    Attributes:
        recording: of the whole model.
        inputs: how the model's own arguments travel.
        taken, given: which values the stage receives, and which it sends.
        run: the forward that is under way.
    """

    def __init__(self, recording: Recording, first: int, end: int) -> None:
        self.recording, self.first, self.end = recording, first, end
        self.taken = recording.crossing(first)
        self.given = recording.crossing(end) if end < len(recording.calls) else ()
        self.inputs = Inputs(recording.example, recording.inputs_read(first), recording.inputs_read(end))
        self.run: _Run | None = None
        self._numbers: dict[str, list[int]] = {}
        for number, call in enumerate(recording.calls):
            self._numbers.setdefault(call.unit, []).append(number)
        self._shapes: dict[int, dict[Any, tuple[Any, ...]]] = {
            number: {call.arguments: call.leaves} for number, call in enumerate(recording.calls)
        }

    def of_example(self) -> tuple[Any, Any]:
        """Return what the stage is called with and what it sends for the example, as meta tensors."""
        metas = self.inputs.of_example()
        values = [self.recording.calls[key.call].leaves[key.leaf] for key in self.taken]
        taken = {"inputs": self.inputs.packed_before(metas), "values": tuple(values)} if self.first else metas
        sent = tuple(self.recording.calls[key.call].leaves[key.leaf] for key in self.given)
        return taken, {"inputs": self.inputs.send(metas), "values": sent}

    @property
    def is_last(self) -> bool:
        return self.end == len(self.recording.calls)

    @property
    def units(self) -> list[str]:
        """What is called here, each once."""
        return self.recording.names(self.first, self.end)

    def is_called_elsewhere(self, unit: str) -> bool:
        """Return whether other stages call it too."""
        return not all(self.first <= number < self.end for number in self._numbers.get(unit, ()))

    def begin(self, received: tuple[Tensor, ...]) -> None:
        """Start a forward."""
        pairs = zip(self.taken, received, strict=True)
        # A received tensor is a leaf, which the model could not change in place.
        self.run = _Run({key: self._own(key, value) for key, value in pairs})

    def finish(self) -> tuple[Tensor, ...]:
        """End a forward, and return what the stage sends.

        Raises:
            OtherWay: if some of it was not made.
        """
        assert self.run is not None
        values, self.run = self.run.values, None
        for key in self.given:
            if key not in values:
                raise OtherWay(self.recording.calls[key.call].unit, "was not called")
        return tuple(values[key] for key in self.given)

    def count(self, unit: str) -> int:
        """Count a call of ``unit``, and return its number."""
        number = self.upcoming(unit)
        assert self.run is not None
        self.run.counts[unit] = self.run.counts.get(unit, 0) + 1
        return number

    def upcoming(self, unit: str) -> int:
        """Return the number of the next call of ``unit``."""
        if self.run is None:
            raise RuntimeError(f"{unit!r} is of another stage, or between two: call the stage as a whole")
        count, numbers = self.run.counts.get(unit, 0), self._numbers.get(unit, [])
        if count == len(numbers):
            raise OtherWay(unit, f"is called more than {count} times")
        return numbers[count]

    def last(self, unit: str) -> int:
        """Return the number of the last call of ``unit``."""
        assert self.run is not None
        return self._numbers[unit][self.run.counts[unit] - 1]

    def result(self, number: int, twin: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result of an absent unit: tensors that were received, and zeros that nobody reads.

        Raises:
            Done: after the last call of this stage.
        """
        if number >= self.end:
            raise Done
        assert self.run is not None
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        received = {key.leaf: value for key, value in self.run.values.items() if key.call == number}
        device = next((tensor.device for tensor in (*received.values(), *tensors)), None)
        shapes = self._shaped(number, twin, args, kwargs, tensors)
        leaves = [received.get(i, _zeros_like(leaf, device)) for i, leaf in enumerate(shapes)]
        return tree_unflatten(leaves, self.recording.calls[number].tree)

    def keep(self, number: int, output: Any) -> None:
        """Keep the parts of a result that will be sent."""
        assert self.run is not None
        wanted = [key for key in self.given if key.call == number]
        leaves = tree_flatten(output)[0] if wanted else []
        self.run.values |= {key: self._own(key, leaves[key.leaf]) for key in wanted}

    def _own(self, key: Output, value: Tensor) -> Tensor:
        """Return the value, or a copy where the model changes it in place later: each stage does so for itself."""
        return value.clone() if key.call in self.recording.changed else value

    def _shaped(self, number: int, twin: nn.Module, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
        """Return the leaves of a result as meta tensors, found once for each shape of the arguments."""
        key, known = tuple((tuple(t.shape), t.dtype) for t in tensors), self._shapes[number]
        if key not in known:
            args, kwargs = to_meta((args, kwargs))
            try:
                known[key] = run_on_meta(lambda: tuple(tree_flatten(twin(*args, **kwargs))[0]))
            except Exception as error:  # whatever a foreign forward raises
                unit = self.recording.calls[number].unit
                raise RuntimeError(
                    f"{unit!r} is of another stage, and does not say on the meta device what it returns for arguments "
                    "of other sizes than the example's: give auto_split an example of this size"
                ) from error
        return known[key]


def _zeros_like(leaf: Any, device: torch.device | None) -> Any:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Tensor) else leaf
