"""A microbatch's share of a batch's loss: its product agrees with the gradient of its backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    init_distributed,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.step.loss import counted, loss_share, share_of

SIZES = (3, 1, 4)


def over_samples(dtype: torch.dtype, as_tensor: bool):
    outputs = [torch.randn(n, 5, dtype=dtype) for n in SIZES]
    targets = [torch.zeros_like(output) for output in outputs]
    total = torch.tensor(sum(SIZES))
    return counted(F.mse_loss), outputs, targets, total if as_tensor else float(total)


def over_tokens(dtype: torch.dtype, as_tensor: bool):
    loss = CrossEntropy()
    outputs = [torch.randn(n, 2, 5, dtype=dtype) for n in SIZES]
    targets = [torch.randint(0, 5, (n, 2)) for n in SIZES]
    total = torch.stack([loss.count(target) for target in targets]).sum()
    return loss, outputs, targets, total if as_tensor else float(total)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("made", [over_samples, over_tokens])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_shares_add_up_to_the_mean_of_the_batch(dtype, made, as_tensor):
    torch.manual_seed(0)
    loss, outputs, targets, divisor = made(dtype, as_tensor)
    whole = torch.cat(outputs).requires_grad_()
    mean = loss.total(whole, torch.cat(targets)) / divisor
    mean.backward()

    leaves = [output.clone().requires_grad_() for output in outputs]
    products: list[Tensor] = []
    quotients: list[Tensor] = []
    for leaf, target in zip(leaves, targets, strict=True):
        share = share_of(loss, leaf, target, divisor)
        assert not share.product().requires_grad
        products.append(share.product())
        quotients.append(loss_share(loss, leaf, target, divisor).detach())
        share.value.backward(share.weight)

    within = {"rtol": 4 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps}
    for several in (products, quotients):
        torch.testing.assert_close(
            torch.stack(several).sum().double(), mean.detach().double(), **within
        )
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves]), whole.grad, **within)


def test_a_count_of_errors_is_averaged_too():
    """Its dtype has no fractions, the mean over the batch has."""
    errors = counted(lambda output, target: (output != target).sum())
    target = torch.zeros(4)
    assert share_of(errors, torch.ones(4), target, 32.0).product() == 0.5
    assert share_of(errors, torch.ones(4), target, torch.tensor(32)).product() == 0.5


class AddSquares(torch.autograd.Function):
    """The identity, whose backward adds the gradient of ``weight`` times the mean square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient + ctx.weight * 2 * x / x.numel(), None


class Penalised(nn.Linear):
    """A layer with a loss of its own, of this weight."""

    weight_of_loss = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return AddSquares.apply(super().forward(x), self.weight_of_loss)


def two_stages(weight_of_loss: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(0)
    stages = [Penalised(4, 4).double(), nn.Linear(4, 4).double()]
    stages[0].weight_of_loss = weight_of_loss
    return stages


def on_either_engine(
    mesh: Any, module: nn.Module, loss_fn: Any, engine: str
) -> Callable[[Tensor, Tensor], float]:
    if engine == "runtime":
        pipe = Pipeline(build("1f1b", 2, 4), module, loss_fn, group=mesh.get_group("pp"))
        return lambda x, y: pipe.step(x, target=y).item()
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=torch.empty(2, 4, dtype=torch.float64))
    pipeline = build_pipeline_schedule(stage, 4, loss_fn)
    return lambda x, y: pipeline.step(x, target=y).item()


def injected_on_rank(rank: int, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """Gradients of this rank's stage by either engine, the injected one divided as the loss is."""
    mesh = init_distributed(DistributedConfig(pp=2))
    found = []
    for engine in ("parallel", "runtime"):
        module = two_stages(1 / 4)[rank]
        on_either_engine(mesh, module, F.mse_loss, engine)(x, y)
        found.append({name: weight.grad for name, weight in module.named_parameters()})
    return found


def test_a_gradient_of_ones_own_is_divided_by_its_giver() -> None:
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)
    first, last = two_stages(1.0)
    F.mse_loss(last(first(x)), y).backward()
    for rank, engines in enumerate(on_ranks(2, injected_on_rank, x, y, timeout_s=60)):
        for gradients in engines:
            for name, gradient in gradients.items():
                expected = (first, last)[rank].get_parameter(name).grad
                torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
