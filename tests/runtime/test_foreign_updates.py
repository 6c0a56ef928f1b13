"""Stages that update themselves, with modules and optimizers of other libraries."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.runtime import Pipeline, StepFailed
from course_pp.runtime.versions import settings_of
from tests.runtime.small import parse, take_step

WIDTH = 3
ORDER = "0F0 0F1 1F0 1B0 1U0 0B0 0U0 1F1 1B1 1U1 0B1 0U1"
Change = Callable[[nn.Linear], object]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def pipeline(first: nn.Module, last: nn.Module | None = None) -> Pipeline:
    stages = {0: first, 1: last or linear()}
    optimizers = {
        stage: torch.optim.SGD(module.parameters(), lr=0.1) for stage, module in stages.items()
    }
    schedule = parse(ORDER, placement=[(0,), (0,)])
    return Pipeline(schedule, stages, F.mse_loss, optimizers=optimizers, versions="stash")


def data() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randn(2, 4, WIDTH, dtype=torch.float64)
    return inputs, targets


def test_an_optimizer_may_hold_frozen_parameters_which_stay_as_they_are() -> None:
    module = linear()
    module.weight.requires_grad_(False)
    weight = module.weight.clone()
    bias = module.bias.detach().clone()
    take_step(pipeline(module), *data())
    assert torch.equal(module.weight, weight)
    assert not torch.equal(module.bias, bias)


HOOKS: dict[str, Change] = {
    "gradient": lambda m: m.weight.register_hook(lambda gradient: gradient.clamp(-1, 1)),
    "accumulated": lambda m: m.weight.register_post_accumulate_grad_hook(lambda parameter: None),
}


@pytest.mark.parametrize("add_hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_on_a_parameter_is_refused_as_versions_do_not_call_it(add_hook: Change) -> None:
    module = linear()
    built = pipeline(module)
    take_step(built, *data())
    add_hook(module)
    with pytest.raises(ValueError, match="'weight' of stage 0 has a hook"):
        take_step(built, *data())
    with pytest.raises(ValueError, match="'weight' of stage 0 has a hook"):
        pipeline(module)


class FromAList(nn.Linear):
    """Keeps its parameters in a list besides, and computes with those."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.kept = [self.weight, self.bias]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *self.kept)


def test_a_stage_that_keeps_its_parameters_in_a_list_is_named() -> None:
    with pytest.raises(StepFailed, match="'weight'"):
        take_step(pipeline(FromAList()), *data())


def test_a_parameter_that_is_frozen_after_the_pipeline_was_built_is_named() -> None:
    module = linear()
    built = pipeline(module)
    module.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="'weight' of stage 0 was frozen or unfrozen"):
        take_step(built, *data())


def test_replicas_must_put_the_same_parameters_into_each_group() -> None:
    module = linear()
    one, other = (
        settings_of(
            torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 1.0}]), module
        )
        for first, second in ((module.weight, module.bias), (module.bias, module.weight))
    )
    assert one != other


def test_a_parameter_that_two_stages_of_a_rank_share_is_refused() -> None:
    first = linear()
    last = linear()
    last.weight = first.weight
    with pytest.raises(ValueError, match="'weight' of stage 0 is in stage 1 too"):
        pipeline(first, last)


def test_sparse_gradients_of_an_embedding_enter_its_updates() -> None:
    module = nn.Embedding(5, WIDTH, sparse=True, dtype=torch.float64)
    before = module.weight.detach().clone()
    pipeline(module).step(torch.tensor([0, 1, 1, 3]), target=data()[1])
    changed = (module.weight != before).any(dim=1)
    assert changed.tolist() == [True, True, False, True, False]
