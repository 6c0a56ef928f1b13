"""Evaluation works by the order of messages alone.

NCCL has no tags, so both ends must agree on the order.
"""

from types import SimpleNamespace

import pytest
import torch

from course_pp.parallel import get_stage_indices
from course_pp.parallel import pipeline as module
from course_pp.step.values import ValueMeta

N_MICROBATCHES = 3


def messages_of_rank(monkeypatch, schedule, rank, pp):
    """Return a rank's messages as (kind, peer), in order, without running any peer."""
    messages = []

    def isend(tensor, group, group_dst):
        messages.append(("send", group_dst))

    def recv(tensor, group, group_src):
        messages.append(("recv", group_src))

    monkeypatch.setattr(module, "dist", SimpleNamespace(isend=isend, recv=recv))
    owner = {stage: r for r in range(pp) for stage in get_stage_indices(schedule, r, pp)}
    tokens, consumed = torch.zeros(2, 4), []
    crosses = ValueMeta.of(tokens.to("meta"))
    stages = [
        SimpleNamespace(
            stage_index=i, is_first=i == 0, is_last=i == len(owner) - 1, stage_index_to_group_rank=owner,
            group_rank=rank, group=None, device="cpu", submod=lambda x: x, taken_by=lambda _: crosses,
            received=lambda tensors: tensors[0], message=lambda output, _: (output,),
        )
        for i in get_stage_indices(schedule, rank, pp)
    ]  # fmt: skip
    inputs = [(tokens,)] * N_MICROBATCHES if stages[0].is_first else None
    module.forward_only(stages, inputs, [{}] * N_MICROBATCHES, lambda i, _: consumed.append(i))
    assert consumed == (
        list(range(N_MICROBATCHES)) if any(stage.is_last for stage in stages) else []
    )
    return messages


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "looped_bfs", "zb_v"])
def test_two_ranks_send_and_receive_in_the_same_order(monkeypatch, schedule, pp):
    messages = [messages_of_rank(monkeypatch, schedule, rank, pp) for rank in range(pp)]
    opposite = {"send": "recv", "recv": "send"}
    for a in range(pp):
        for b in range(a):
            from_a = [kind for kind, peer in messages[a] if peer == b]
            from_b = [opposite[kind] for kind, peer in messages[b] if peer == a]
            assert from_a == from_b
    assert sum(kind == "send" for rank in messages for kind, _ in rank) == N_MICROBATCHES * sum(
        a != b for a, b in neighbours(schedule, pp)
    )


def neighbours(schedule, pp):
    """Return the owners of every two adjacent stages."""
    owner = {stage: rank for rank in range(pp) for stage in get_stage_indices(schedule, rank, pp)}
    return [(owner[stage], owner[stage + 1]) for stage in range(len(owner) - 1)]
