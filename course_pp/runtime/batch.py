"""A batch as microbatches: the batch is cut, and its loss is the sum of their shares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.runtime.payload import map_plain, plain_tensors
from course_pp.step.batch import Given, cut_keywords, cut_rows, rows_to_cut
from course_pp.step.loss import LossFn, Share, TokenLoss, counted, divisor_of, share_of, weights_of
from course_pp.step.values import as_value

Form = tuple[str, int]
"""``"whole"`` or ``"ready"``, or "" on a rank that was given nothing; and the number of rows before
the cut, 0 if unknown."""


def joined(one: Form, other: Form) -> Form:
    """Return the form of the batch from two ranks; raise ValueError if their batches differ."""
    # An empty kind, and 0 rows, agree with any other: the rank was given nothing that would tell.
    kind, rows = one
    other_kind, other_rows = other
    if kind and other_kind and kind != other_kind:
        raise ValueError(
            "one rank was given a whole batch, another ready-made microbatches: give all ranks"
            " arg_mbs, kwarg_mbs and target_mbs, as far as they need them, or none of these"
        )
    if rows and other_rows and rows != other_rows:
        raise ValueError(
            f"one rank has cut tensors of {rows} rows, another of {other_rows}: give all of them"
            " the same batch, and say kwargs_chunk_spec={name: 'same'} of keyword arguments that"
            " are no rows of it"
        )
    return kind or other_kind, rows or other_rows


class Cut(NamedTuple):
    """The microbatches of a rank.

    Attributes:
        inputs: the first stage's input for each microbatch; empty on other ranks.
        targets: the target of each microbatch; empty where the last stage is not.
        kwargs: the keyword arguments of this rank's stages for each microbatch; empty if there are
            none.
    """

    inputs: Sequence[Any]
    targets: Sequence[Any]
    kwargs: Sequence[Mapping[str, Any]]
    form: Form


def cut(given: Given, n: int, *, is_first: bool, is_last: bool) -> Cut:
    """Return a rank's ``n`` microbatches: inputs if ``is_first``, targets if ``is_last``."""
    if given.is_ready(n):
        for name, is_needed in {"arg_mbs": is_first, "target_mbs": is_last}.items():
            if is_needed and name not in given.lists:
                raise ValueError(
                    f"{name} is missing on a rank that needs it: give a list of {n} microbatches"
                )
        # Plain tuples: a stage takes a named tuple as one argument.
        arguments = [tuple(each) for each in given.arg_mbs or ()]
        return Cut(
            inputs=arguments if is_first else (),
            targets=given.target_mbs or () if is_last else (),
            kwargs=given.kwarg_mbs or (),
            form=("ready", 0),
        )

    kwargs, spec = given.kwargs, given.kwargs_chunk_spec
    value = None
    if any(each is not None for each in given.inputs):
        value = as_value(given.inputs)
    if is_first and value is None and "inputs" in kwargs:
        raise ValueError(
            "inputs= is no argument of a step: give the first stage's arguments by position"
        )
    inputs = split("inputs", value, n) if is_first else ()
    targets = split("target", given.target, n) if is_last else ()
    rows = len(plain_tensors(value)[0]) if is_first else 0
    if not kwargs and not spec:
        return Cut(inputs, targets, kwargs=(), form=("whole" if given.whole else "", rows))
    rows = rows or rows_to_cut(kwargs, spec)
    return Cut(inputs, targets, cut_keywords(kwargs, spec, rows, n), ("whole", rows))


def split(name: str, batch: Any, n: int) -> Sequence[Any]:
    """Cut the tensors of ``batch``, alone or in tuples and dicts, by rows into equal parts.

    Earlier microbatches get one row more if the rows do not divide.
    """
    if name == "target" and batch is None:
        raise ValueError(
            "target is missing where the last stage is: give target=, a batch (arguments by"
            f" position are all the first stage's), or {n} microbatches as arg_mbs=[(x,), …] and"
            " target_mbs=[y, …]"
        )
    # The remedy names both lists, as one of them would not go with a whole batch.
    ready = "arg_mbs=[(x,), …] and, in a step, target_mbs=[y, …]"
    if isinstance(batch, list):
        raise ValueError(
            f"{name} is a list: give a batch in one piece, or {n} ready-made microbatches as"
            f" {ready}"
        )
    try:
        tensors = plain_tensors(batch)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if not tensors:
        given = f"a {type(batch).__name__}"
        if batch is None or isinstance(batch, tuple | dict):
            given = repr(batch)
        raise ValueError(
            f"{name} is {given} on a rank that needs it: give a batch, or {n} microbatches as"
            f" {ready}"
        )
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) > 1 or min(sizes) < n:
        spelled = ", ".join(map(str, sorted(sizes)))
        raise ValueError(
            f"{name} has tensors of {spelled} samples, to be cut into {n} microbatches: give"
            f" tensors of the same first dimension, at least {n}, or {n} microbatches as {ready}"
        )
    return cut_rows(batch, tensors, n, map_plain)


class Counted(NamedTuple):
    """The targets of a step with their counts.

    Attributes:
        loss: the caller's loss, or the same mean as a loss that counts samples.
        counts: the number of tokens or samples of each target.
    """

    loss: TokenLoss
    targets: Sequence[Any]
    counts: list[Any]


def count_targets(loss_fn: LossFn | TokenLoss, targets: Sequence[Any]) -> Counted:
    """Count the tokens of ``targets``, or samples if ``loss_fn`` does not count tokens.

    Raises:
        ValueError: if a microbatch without samples would need a mean.
    """
    loss = counted(loss_fn, _samples)
    counts: list[Any] = [loss.count(target) for target in targets]
    if loss is not loss_fn and 0 in counts:
        raise ValueError(
            f"the targets of microbatch {counts.index(0)} have no samples, and a mean over none is"
            " no number: give each microbatch at least one, or a loss that counts what it averages"
            " over (TokenLoss)"
        )
    return Counted(loss, targets, counts)


def loss_shares(
    given: Counted,
    divisor: float | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
) -> tuple[Callable[[int, Any], Share], Tensor]:
    """Return the shares of the batch's loss, and the microbatches' weights.

    The shares are a function of a microbatch's number and its output. They add up to the loss. A
    collective of ``groups`` unless ``divisor`` is given.

    Args:
        divisor: number of tokens (or samples) of the mean; None counts those of all targets on all
            ranks of ``groups``, over which gradients are averaged.
    """
    loss, targets, counts = given
    over = divisor_of(counts, divisor, groups, device)

    def share(i: int, output: Any) -> Share:
        return share_of(loss, output, targets[i], over)

    return share, weights_of(counts, over, device)


def weights_of_means(given: Counted) -> Tensor:
    """Return the weight of each microbatch's own mean in the mean of the batch, (n,) float64."""
    return weights_of(given.counts, max(1.0, float(sum(given.counts))))


def own_means(
    given: Counted, divisor: float | None, groups: Sequence[Sequence[int]]
) -> Callable[[int, Any], Share]:
    """Return a function from a microbatch's number and output to its own mean loss.

    An update takes the gradient of this mean. The microbatches of a group enter one update as the
    mean of their means, so they must be of equal size.
    """
    if divisor is not None:
        raise ValueError(
            f"divisor is {divisor}: with versions= each update takes a mean of its own; leave"
            " it out"
        )
    loss, targets, _ = given
    # A microbatch without a counted token has loss 0, not 0 / 0.
    counts = [max(float(count), 1.0) for count in given.counts]
    for group in groups:
        first = group[0]
        for other in group:
            if counts[other] != counts[first]:
                raise ValueError(
                    f"one update takes microbatches {first} and {other}, of {counts[first]:g} and"
                    f" {counts[other]:g} samples or tokens: give microbatches of equal size"
                )
    return lambda i, output: share_of(loss, output, targets[i], counts[i])


def _samples(target: Any) -> int:
    """Return the rows of the first tensor of a target; 1 if it has none."""
    tensors = plain_tensors(target)
    if not tensors or not tensors[0].dim():
        return 1
    return len(tensors[0])
