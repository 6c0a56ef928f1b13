"""A ring of ranks with several stages each, for the hand-written steps of notebook 04."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ring"]

_ACTIVATION, _GRADIENT = 0, 1


@dataclass(frozen=True)
class Ring:
    """This rank among the others when stage s is on rank ``s % n_ranks``, and the one kind of tensor that travels.

    Messages from one rank to another arrive in the order in which they were sent; nothing else says which chunk one is
    for. Activations and gradients are kept apart, also where both neighbours are one rank.

    Attributes:
        shape: of one microbatch's activation; its gradient has the same.
        dtype: of both.
        n_stages: of the whole model.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    n_stages: int

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def n_ranks(self) -> int:
        return dist.get_world_size()

    @property
    def last_stage(self) -> int:
        return self.n_stages - 1

    def recv_activation(self) -> Tensor:
        """The next activation from the rank before this one."""
        return self._recv(self.rank - 1, _ACTIVATION).requires_grad_()

    def recv_gradient(self) -> Tensor:
        """The next gradient from the rank after this one."""
        return self._recv(self.rank + 1, _GRADIENT)

    def send_activation(self, y: Tensor) -> dist.Work:
        """Start to send y to the rank after this one."""
        return self._send(y.detach(), self.rank + 1, _ACTIVATION)

    def send_gradient(self, dx: Tensor | None) -> dist.Work:
        """Start to send dL/dx to the rank before this one. Raises ValueError where backward has left none."""
        if dx is None:
            raise ValueError("there is no gradient to send: run backward from a `y` that was computed from this `x`")
        return self._send(dx, self.rank - 1, _GRADIENT)

    def _recv(self, source: int, tag: int) -> Tensor:
        received = torch.empty(self.shape, dtype=self.dtype)
        dist.recv(received, source % self.n_ranks, tag=tag)
        return received

    def _send(self, message: Tensor, to: int, tag: int) -> dist.Work:
        work = dist.isend(message.contiguous(), to % self.n_ranks, tag=tag)
        assert work is not None, "a rank of the group sends"
        return work
