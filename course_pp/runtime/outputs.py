"""The outputs of microbatches as those of the batch."""

from collections.abc import Mapping
from typing import Any

import torch

from course_pp.runtime.payload import describe, map_tensors, tensors_of

__all__ = ["put_together"]


def put_together(outputs: Mapping[int, Any]) -> Any:
    """Merge the outputs of microbatches: concatenate tensors along their first dimension, stack scalars.

    If microbatches differ in more than their first dimension, return a list with one output for each.
    """
    values = [outputs[i] for i in sorted(outputs)]
    rows = [tensors_of(value) for value in values]
    alike = {
        (repr(describe(value)[0].skeleton), tuple(map(_kind, row))) for value, row in zip(values, rows, strict=True)
    }
    if len(alike) > 1:
        return values
    columns = iter(list(zip(*rows, strict=True)))

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        parts = next(columns)
        return torch.cat(parts) if tensor.dim() else torch.stack(parts)

    return map_tensors(whole, values[0])


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, int, tuple[int, ...]]:
    return tensor.dtype, tensor.dim(), tuple(tensor.shape[1:])
