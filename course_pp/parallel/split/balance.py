"""Where to cut: contiguous calls for each stage, so that the largest share is the least there is."""

from torch import Tensor

from course_pp.model.stages import LayerRange, split_by_cost
from course_pp.parallel.split.calls import Recording

__all__ = ["partition"]


def partition(recording: Recording, n_stages: int, by: str) -> list[LayerRange]:
    """The calls of each stage as (first, end), the last excluded."""
    held = [_numbers_of(recording, number) for number in range(len(recording.calls))]

    def parameters(_: int, first: int, end: int) -> int:
        return sum({key: n for each in held[first:end] for key, n in each.items()}.values())

    return split_by_cost(len(held), n_stages, parameters)


def _numbers_of(recording: Recording, number: int) -> dict[int, int]:
    """The parameters of a call by identity, as a stage holds each once."""
    tensors: list[Tensor] = list(recording.units[recording.calls[number].unit].parameters())
    return {id(tensor): tensor.numel() for tensor in tensors}
