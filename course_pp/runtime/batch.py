"""A batch as microbatches: cut, its loss as shares of their losses, and their outputs put together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.loss import LossFn, Share, TokenLoss, counted, divisor_of, share_of, weights_of
from course_pp.runtime.payload import describe, map_tensors, tensors_of


def split(name: str, batch: Any, n: int) -> Sequence[Any]:
    """Cut ``batch`` into ``n`` microbatches.

    A list already holds the microbatches, which may differ in size and shape. Tensors (also in tuples and dicts) are
    cut along their first dimension, as evenly as possible.
    """
    if isinstance(batch, list):
        if len(batch) != n:
            raise ValueError(f"{name} is a list of {len(batch)} microbatches, but the schedule has {n}: give {n}")
        return batch
    try:
        tensors = tensors_of(batch)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if not tensors:
        given = repr(batch) if batch is None or isinstance(batch, tuple | dict) else f"a {type(batch).__name__}"
        raise ValueError(f"{name} is {given} on a rank that needs it: give a batch, or a list of {n} microbatches")
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) > 1 or min(sizes) < n:
        raise ValueError(
            f"{name} has tensors of {', '.join(map(str, sorted(sizes)))} samples, to be cut into {n} microbatches: "
            f"give tensors of the same first dimension, at least {n}, or a list of {n} microbatches"
        )
    pieces = [tensor.tensor_split(n) for tensor in tensors]

    def microbatch(i: int) -> Any:
        numbered = iter(pieces)
        return map_tensors(lambda _: next(numbered)[i], batch)

    return [microbatch(i) for i in range(n)]


def loss_shares(
    loss_fn: LossFn | TokenLoss,
    targets: Sequence[Any],
    divisor: float | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
) -> tuple[Callable[[int, Any], Share], Tensor]:
    """Return a function of i and the output, microbatch i's share of the batch's loss; and the microbatches' weights.

    The shares add up to the loss.

    Args:
        divisor: how many tokens (or samples) to average over; None counts those of ``targets`` on all ranks of
            ``groups``, over which gradients are averaged.
    """
    loss = counted(loss_fn, _samples)
    counts = [loss.count(target) for target in targets]
    if divisor is None and loss is not loss_fn and not sum(counts):
        raise ValueError(f"targets has no samples in any of {len(targets)} microbatches: give at least one")
    over = divisor_of(counts, divisor, groups, device)
    return lambda i, output: share_of(loss, output, targets[i], over), weights_of(counts, over, device)


def own_means(
    loss_fn: LossFn | TokenLoss, targets: Sequence[Any], divisor: float | None, groups: Sequence[Sequence[int]]
) -> Callable[[int, Any], Share]:
    """Return a function of i and the output: microbatch i's own mean loss, whose gradient an update takes.

    Microbatches of a group enter one update as the mean of their means, so they must be of equal size.
    """
    if divisor is not None:
        raise ValueError(f"divisor is {divisor}: with versions= each update takes a mean of its own; leave it out")
    loss = counted(loss_fn, _samples)
    counts = [max(float(loss.count(target)), 1.0) for target in targets]
    for group in groups:
        unequal = next((i for i in group if counts[i] != counts[group[0]]), None)
        if unequal is not None:
            raise ValueError(
                f"one update takes microbatches {group[0]} and {unequal}, of {counts[group[0]]:g} and "
                f"{counts[unequal]:g} samples or tokens: give microbatches of equal size"
            )
    return lambda i, output: share_of(loss, output, targets[i], counts[i])


def _samples(target: Any) -> int:
    tensors = tensors_of(target)
    return len(tensors[0]) if tensors and tensors[0].dim() else 1


def put_together(outputs: Mapping[int, Any]) -> Any:
    """Merge the outputs of microbatches: concatenate tensors along their first dimension, stack scalars.

    If microbatches differ in more than their first dimension, return a list with one output for each.
    """
    values = [outputs[i] for i in sorted(outputs)]
    rows = [tensors_of(value) for value in values]
    alike = {
        (repr(describe(value)[0].skeleton), tuple((t.dtype, t.dim(), tuple(t.shape[1:])) for t in row))
        for value, row in zip(values, rows, strict=True)
    }
    if len(alike) > 1:
        return values
    columns = iter(list(zip(*rows, strict=True)))

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        parts = next(columns)
        return torch.cat(parts) if tensor.dim() else torch.stack(parts)

    return map_tensors(whole, values[0])
