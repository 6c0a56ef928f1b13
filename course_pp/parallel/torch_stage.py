"""torch's stage, made to take messages of any shape, and neighbours on its own rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from course_pp.base.torch_private import compares_nothing


@compares_nothing
class LocalNeighboursStage(PipelineStage):
    """A stage whose neighbours may live on its own rank, as under V placements or on a single rank.

    It compares no messages: :class:`course_pp.parallel.stage.ModelStage` does, in containers too.
    """

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        if not full_backward:
            self._gather_parameters()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if bwd_chunk_id in self.bwd_cache:  # what is sent back next
            self.bwd_cache[bwd_chunk_id] = self.sent_back(
                bwd_chunk_id, self.bwd_cache[bwd_chunk_id]
            )

    def sent_back(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients to send to the stage before.

        torch's own stage sends exactly the gradients it computed.
        """
        return tuple(gradients)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._gather_parameters()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _gather_parameters(self) -> None:
        """Put FSDP2's gathered parameters back in place: a forward may have freed them.

        torch looks for the graph's parameters in the module. If it finds shards there, it silently
        skips the gradients of a split backward.
        """
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()


def expect(received: Any, shape: tuple[int, ...]) -> None:
    """Let the next message of a receive of torch's have this shape, whatever was declared."""
    # from torch 2.15 on: it makes a buffer for each message
    if hasattr(received, "allocate_buffer"):
        declared = received.tensor_meta
        if declared is not None:
            like = torch.empty(shape, device="meta")
            received.tensor_meta = replace(declared, shape=like.shape, stride=like.stride())
        return
    buffer = received.buffer
    if buffer is not None and tuple(buffer.shape) != shape:
        received.buffer = buffer.new_empty(shape).requires_grad_(buffer.requires_grad)
