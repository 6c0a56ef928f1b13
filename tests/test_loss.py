"""A microbatch's share of a batch's loss: the product and the gradient that backward begins with say the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from course_pp.loss import counted, loss_share, share_of
from course_pp.model import CrossEntropy

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
        torch.testing.assert_close(torch.stack(several).sum().double(), mean.detach().double(), **within)
    torch.testing.assert_close(torch.cat([leaf.grad for leaf in leaves]), whole.grad, **within)


def test_a_count_of_errors_is_averaged_too():
    """Its dtype has no fractions, the mean over the batch has."""
    errors = counted(lambda output, target: (output != target).sum())
    target = torch.zeros(4)
    assert share_of(errors, torch.ones(4), target, 32.0).product() == 0.5
    assert share_of(errors, torch.ones(4), target, torch.tensor(32)).product() == 0.5
