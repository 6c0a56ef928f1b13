"""The pipeline step written out by hand, on nothing but send and receive: read it side by side with
the papers.

One stage a rank, in a line. Activations go down the line, gradients come back up::

    microbatch ──► stage 0 ── x ──► stage 1 ── x ──► stage 2 ──► loss
                           ◄─ dx ──         ◄─ dx ──         ◄── 1/m

``train_step_pipeline_gpipe`` and ``train_step_pipeline_1f1b`` differ in the order of the same eight
helpers, and in nothing else. Each adds to the parameters' ``.grad`` the gradient of the mean of the
m microbatches' losses, so steps accumulate until ``zero_grad``; the optimizer is the caller's, and
no hook may step it: hooks on gradients are called for each microbatch. Works for one process, with
or without a process group, and for fewer microbatches than ranks.

Messages. A receive blocks; a send does not, because with two blocking sends facing each other
neither ends: gloo's ``send`` waits for its receiver however small the message. Between two ranks
activations only go one way and gradients only the other, so a message is known by where it comes
from and no tag is needed. (A rank with several stages does need tags, or an agreed order.) Both
ends of every pair also post their messages in the same order, one that would work with blocking
sends. NCCL needs that: it ignores tags and runs a pair's messages one by one as posted, so two
sends that face each other can stall both. Use gloo for CPU tensors and NCCL for CUDA tensors.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.base.arguments import checked
from course_pp.base.sizes import check_stage_count, compute_layer_assignment

__all__ = [
    "Link",
    "backward_stage",
    "forward_stage",
    "get_stage_layers",
    "partition_model",
    "recv_activation",
    "recv_gradient",
    "send_activation",
    "send_gradient",
    "train_step_pipeline_1f1b",
    "train_step_pipeline_gpipe",
]

LossFn = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, target of the microbatch) -> one number."""


@checked
@dataclass(frozen=True)
class Link:
    """This rank's place in the line, and the one kind of tensor that crosses to a neighbour.

    Attributes:
        shape: shape of one microbatch's activation, for example (batch, seq, dim), and of its
            gradient.
        dtype: dtype of both.
        device: device on which they are received.
        group: the ranks of the line, in order. None means all ranks, or a single process if there
            is no process group.

    Raises:
        ValueError: a size below 1, a dtype that has no gradients, no such device, or this process
            is not in the group.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise ValueError(
                f"shape is {tuple(self.shape)}: give sizes of at least 1, as in (batch, seq, dim)"
            )
        if not self.dtype.is_floating_point:
            raise ValueError(
                f"dtype is {self.dtype}, which has no gradients: give a floating-point dtype"
            )
        try:
            torch.device(self.device)
        except RuntimeError as problem:
            raise ValueError(f"device is {self.device!r}: {str(problem).splitlines()[0]}") from None
        if self.rank < 0:
            raise ValueError(
                "this process is not in the link's group: pass the group of the pipeline it"
                " belongs to"
            )

    @property
    def rank(self) -> int:
        """Rank within the group, which is also the index of the stage held here."""
        return dist.get_rank(self.group) if dist.is_initialized() else 0

    @property
    def n_ranks(self) -> int:
        return dist.get_world_size(self.group) if dist.is_initialized() else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.n_ranks - 1


@checked
def train_step_pipeline_gpipe(
    stage: nn.Module,
    microbatches: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: LossFn,
    link: Link,
) -> list[Tensor]:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.3).

    Simple, and every rank holds the activations of all m microbatches when it starts its first
    backward.

    Args:
        stage: this rank's part of the model.
        microbatches: m inputs. The first rank reads them; every other passes as many of anything.
        targets: m targets. The last rank reads them; every other passes as many of anything.
        loss_fn: the loss of one microbatch, a mean over it; called on the last rank.
        link: the neighbours, and what crosses.

    Returns:
        The losses of the m microbatches, detached, on the last rank; an empty list on the others.

    Raises:
        ValueError: no microbatch, or another number of targets; a loss that is not one number; a
            stage whose output is not what ``link`` declares, before it is sent.
        RuntimeError: no gradient reaches what a stage received.
    """
    batch = _pair_up(microbatches, targets)
    in_flight: deque[tuple[Tensor, Tensor]] = deque()
    sends: list[dist.Work] = []

    for microbatch, target in batch:
        x = recv_activation(microbatch, link)
        y = forward_stage(stage, x, target, loss_fn, link)
        sends += send_activation(y, link)
        # x too: backward leaves in x.grad what goes back to the previous rank
        in_flight.append((x, y))
    losses = [y.detach() for _, y in in_flight] if link.is_last else []

    while in_flight:
        x, y = in_flight.popleft()
        dy = recv_gradient(y, len(batch), link)
        dx = backward_stage(x, y, dy)
        sends += send_gradient(dx, link)

    for send in sends:
        send.wait()
    return losses


@checked
def train_step_pipeline_1f1b(
    stage: nn.Module,
    microbatches: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: LossFn,
    link: Link,
) -> list[Tensor]:
    """One forward, one backward, and a flush at the end of the step.

    PipeDream-Flush: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training",
    section 3.2. The bubble is that of all-forward-all-backward, but a rank holds the activations of
    at most n_ranks - rank microbatches.

    Arguments, returns and raises are those of :func:`train_step_pipeline_gpipe`.
    """
    batch = _pair_up(microbatches, targets)
    # enough to keep every later rank busy
    n_warm_up = min(len(batch), link.n_ranks - 1 - link.rank)
    in_flight: deque[tuple[Tensor, Tensor]] = deque()
    sends: list[dist.Work] = []
    losses: list[Tensor] = []

    for microbatch, target in batch[:n_warm_up]:
        x = recv_activation(microbatch, link)
        y = forward_stage(stage, x, target, loss_fn, link)
        sends += send_activation(y, link)
        in_flight.append((x, y))

    for microbatch, target in batch[n_warm_up:]:  # steady state
        x = recv_activation(microbatch, link)
        y = forward_stage(stage, x, target, loss_fn, link)
        losses += [y.detach()] if link.is_last else []
        in_flight.append((x, y))
        oldest_x, oldest_y = in_flight.popleft()
        dy = recv_gradient(oldest_y, len(batch), link)
        while sends:
            # at once: both neighbours have by now answered all that was sent before
            sends.pop().wait()
        # Only now, after the receive: the next rank sends its gradient first and takes this
        # activation after it.
        sends += send_activation(y, link)
        dx = backward_stage(oldest_x, oldest_y, dy)
        sends += send_gradient(dx, link)

    while in_flight:  # drain
        x, y = in_flight.popleft()
        dy = recv_gradient(y, len(batch), link)
        dx = backward_stage(x, y, dy)
        sends += send_gradient(dx, link)

    for send in sends:
        send.wait()
    return losses


@checked
def get_stage_layers(n_layers: int, n_stages: int, stage: int) -> range:
    """Return the indices of one stage's layers: the split is as even as can be, earlier stages take
    the extras.

    Raises:
        ValueError: fewer than one stage, more stages than layers, or no such stage.
    """
    check_stage_count(n_layers, n_stages, "n_stages")
    if not 0 <= stage < n_stages:
        raise ValueError(
            f"stage {stage} must lie between 0 and {n_stages - 1}, the last of {n_stages} stages"
        )
    return range(*compute_layer_assignment(n_layers, n_stages)[stage])


@checked
def partition_model(
    layers: nn.Sequential | nn.ModuleList | Sequence[nn.Module], n_stages: int, stage: int
) -> nn.Sequential:
    """Return the layers of one stage, under their names in the whole model ("4", "5"); nothing is
    copied.

    Raises:
        ValueError: as :func:`get_stage_layers`.
    """
    whole = layers if isinstance(layers, nn.Sequential) else nn.Sequential(*layers)
    here = get_stage_layers(len(whole), n_stages, stage)
    # unlike a list's, a Sequential's slice keeps its keys
    layers_here: Any = whole[here.start : here.stop]
    return layers_here  # torch types a slice in each release otherwise


@checked
def forward_stage(
    stage: nn.Module, x: Tensor, target: Tensor, loss_fn: LossFn, link: Link
) -> Tensor:
    """Return the stage's activation of ``link.shape``; on the last rank the microbatch's loss, ().

    Raises:
        ValueError: the activation has another shape or dtype than the link declares, or the loss is
            not one number.
    """
    y: Tensor = stage(x)
    if link.is_last:
        loss = loss_fn(y, target)
        if loss.shape != ():
            raise ValueError(
                f"loss_fn gave shape {tuple(loss.shape)}: return one number a microbatch, such as"
                " .mean()"
            )
        return loss
    if (tuple(y.shape), y.dtype) != (tuple(link.shape), link.dtype):
        raise ValueError(
            f"stage {link.rank} gave {y.dtype} of shape {tuple(y.shape)}, but the link declares"
            f" {link.dtype} of shape {tuple(link.shape)}, and the next rank would misread it:"
            " change the Link, or cut equal microbatches"
        )
    return y


@checked
def backward_stage(x: Tensor, y: Tensor, dy: Tensor) -> Tensor | None:
    """Add to the gradients of the stage's parameters, and return dL/dx; None on the first rank.

    Args:
        x: the stage's input.
        y: the stage's output with its graph: a detached y has lost the way back to x and to the
            parameters.
        dy: dL/dy, shaped as y.
    """
    if dy.shape != y.shape:
        raise ValueError(
            f"dy has shape {tuple(dy.shape)} and y {tuple(y.shape)}: give dL/dy, shaped as y"
        )
    torch.autograd.backward(y, dy)
    return x.grad


@checked
def recv_activation(microbatch: Tensor, link: Link) -> Tensor:
    """Return the stage's input, ``link.shape``: the microbatch, or what the previous rank sends."""
    if link.is_first:
        return microbatch
    x = torch.empty(link.shape, dtype=link.dtype, device=link.device)
    dist.recv(x, group=link.group, group_src=link.rank - 1)
    # a leaf: the graph of this stage begins here, that of the previous one is elsewhere
    return x.requires_grad_()


@checked
def send_activation(y: Tensor, link: Link) -> list[dist.Work]:
    """Start to send y to the next rank; nothing to do on the last."""
    return [] if link.is_last else _send(y.detach(), link.rank + 1, link)


@checked
def recv_gradient(y: Tensor, n_microbatches: int, link: Link) -> Tensor:
    """dL/dy, shaped as y: from the next rank; on the last rank, where y is one of m losses, it is
    1/m.

    L is the mean of the m losses. The factor enters here and nowhere else; the chain rule carries
    it to every stage.
    """
    if n_microbatches < 1:
        raise ValueError(f"n_microbatches is {n_microbatches}: a step has at least 1")
    if link.is_last:
        return torch.full_like(y, 1 / n_microbatches)
    dy = torch.empty(link.shape, dtype=link.dtype, device=link.device)
    dist.recv(dy, group=link.group, group_src=link.rank + 1)
    return dy


@checked
def send_gradient(dx: Tensor | None, link: Link) -> list[dist.Work]:
    """Start to send dL/dx to the previous rank; nothing to do on the first.

    Raises:
        RuntimeError: there is no dx, as nothing differentiable leads from the stage's input to its
            output.
    """
    if link.is_first:
        return []
    if dx is None:
        raise RuntimeError(
            f"stage {link.rank} has no gradient for rank {link.rank - 1}: its output does not"
            " depend on what it received; look for a detach(), a no_grad(), or an input that is"
            " not used"
        )
    return _send(dx, link.rank - 1, link)


def _send(message: Tensor, to: int, link: Link) -> list[dist.Work]:
    # isend does not copy. The work keeps the memory alive, and nobody may write to it, until wait()
    # has returned.
    work = dist.isend(message.contiguous(), group=link.group, group_dst=to)
    return [work] if work is not None else []


def _pair_up(
    microbatches: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    if len(microbatches) == 0:
        raise ValueError("0 microbatches: a step needs at least 1, the same number on every rank")
    if len(microbatches) != len(targets):
        raise ValueError(
            f"{len(microbatches)} microbatches and {len(targets)} targets: give one target a"
            " microbatch, on every rank"
        )
    return list(zip(microbatches, targets, strict=True))
