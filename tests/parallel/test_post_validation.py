"""An optimizer step that does not wait for the norm has exactly the plain step's result."""

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_pp.launch import on_ranks
from course_pp.parallel import OptimisticStep

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
# The limit of a norm that is about 6, and the stage in which an infinity is planted. It is planted
# in the second of three steps.
CASES = [*product(OPTIMIZERS, (1e3, 0.5), (None, 0, 1))]


def gradients(rank, step, planted):
    torch.manual_seed(10 * step + rank)
    found = torch.randn(6, 3), torch.randn(3)
    if step == 1 and planted == rank:
        found[0][2, 1] = math.inf
    return found


def plain_step(optimizer, parameters, max_norm):
    """Take the plain step: wait for the norm of all ranks, clip, then step or skip the step."""
    square = sum(p.grad.double().norm() ** 2 for p in parameters)
    squares = [torch.empty_like(square) for _ in range(dist.get_world_size())]
    dist.all_gather(squares, square)
    norm = torch.stack(squares).sum().sqrt()
    if torch.isfinite(norm):
        for p in parameters:
            p.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(p.grad.dtype))
        optimizer.step()
    return norm.item()


def trained(rank, name, max_norm, planted, optimistic):
    torch.manual_seed(rank)
    parameters = [nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.zeros(3))]
    optimizer = OPTIMIZERS[name](parameters)
    early = OptimisticStep(optimizer, max_norm)
    norms = []
    for step in range(3):
        for parameter, gradient in zip(parameters, gradients(rank, step, planted), strict=True):
            parameter.grad = gradient
        if optimistic:
            early.step()
            norms.append(early.settle())
        else:
            norms.append(plain_step(optimizer, parameters, max_norm))
    return norms, [p.detach() for p in parameters], optimizer.state_dict()["state"]


def both_on_rank(rank):
    return [[trained(rank, *case, optimistic) for optimistic in (True, False)] for case in CASES]


def test_the_early_step_equals_the_plain_one_exactly_clipped_or_not_and_with_an_infinity_in_any_stage(
    subtests,
):
    for rank, found in enumerate(on_ranks(2, both_on_rank)):
        for case, (early, plain) in zip(CASES, found, strict=True):
            with subtests.test(str(case), rank=rank):
                assert early[0][0] == pytest.approx(plain[0][0], rel=1e-12)
                assert math.isfinite(early[0][1]) == (case[2] is None)
                assert all(torch.equal(a, b) for a, b in zip(early[1], plain[1], strict=True))
                assert early[2].keys() == plain[2].keys()
                for number, state in plain[2].items():
                    assert state.keys() == early[2][number].keys()
                    for key, value in state.items():
                        assert torch.equal(
                            torch.as_tensor(value), torch.as_tensor(early[2][number][key])
                        ), key


def test_a_step_is_settled_once_and_before_the_next():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    early = OptimisticStep(torch.optim.SGD([parameter], lr=1.0), 10.0)
    with pytest.raises(RuntimeError, match=r"no step to settle: call step\(\) first"):
        early.settle()
    early.step()
    assert parameter.tolist() == [0, 0]  # at once
    with pytest.raises(RuntimeError, match=r"call settle\(\) before the next"):
        early.step()
    assert early.settle() == pytest.approx(2**0.5)
    with pytest.raises(ValueError, match=r"max_norm is 0.0 .*: give a norm above 0"):
        OptimisticStep(torch.optim.SGD([parameter], lr=1.0), 0.0)
