"""Weight gradients that are added up by the product that makes them are those of ordinary backwards."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from course_pp import fused
from course_pp.fused import is_worth_fusing
from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.runtime.stage import Stage
from course_pp.schedule import build
from tests.runtime.small import stages_of
from tests.runtime.test_deferred import MODULES, SHAPES, WIDTH, gradients, layers, made

CPU = torch.device("cpu")
N = 3  # microbatches


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_LARGE_BYTES", 0)


class Additions(TorchDispatchMode):
    """Counts products that add to what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "addmm_"
        return func(*args, **(kwargs or {}))


def train(
    module: nn.Module,
    shape: tuple[int, ...],
    fuses: bool,
    recompute: bool = False,
    of_input: bool = True,
    split: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor | None], int]:
    """``N`` microbatches through a stage: its gradients, those of its inputs, and how many products have added."""
    stage = Stage(1, module, CPU, recompute, None)
    if not fuses:
        stage._fusing = None
    dtype, found = next(module.parameters()).dtype, []
    torch.manual_seed(2)
    with Additions() as additions:
        for microbatch in range(N):
            x = torch.randn(shape, dtype=dtype, requires_grad=of_input)
            output, _ = stage.forward(microbatch, x, None, split)
            found += stage.backward(microbatch, (torch.randn_like(output),))
    return gradients(module), found, additions.count


def assert_equal_but_for_rounding(found: Any, expected: Any, dtype: torch.dtype) -> None:
    error = 1e-12 if dtype.to_real() == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=error, atol=error)


# How many of a microbatch's weight gradients can be added by their product.
FUSED = {
    "layers": 2,
    "layers without bias": 2,
    "layers and norms": 2,
    "one layer used twice": 2,
    "the function itself": 1,
    "a frozen weight": 1,
    "a frozen bias": 2,
    "a frozen layer": 1,
    "a weight that is computed": 1,
    "complex layers": 0,
    "checkpointed, not reentrant": 1,
    "checkpointed, reentrant": 1,
    "hooks on what is saved": 0,
}


@pytest.mark.usefixtures("_any_size")
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_ordinary_backwards(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    make, _ = MODULES[name]
    expected, of_inputs, none = train(made(make, dtype), shape, fuses=False)
    found, of_fused_inputs, added = train(made(make, dtype), shape, fuses=True)
    assert set(found) == set(expected)
    assert_equal_but_for_rounding(found, expected, dtype)
    assert_equal_but_for_rounding(of_fused_inputs, of_inputs, dtype)
    assert (none, added) == (0, FUSED[name] * (N - 1))  # the first microbatch has nothing to add to


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("of_input", [False, True], ids=["first stage", "later stage"])
def test_a_stage_that_recomputes_and_one_without_gradient_of_its_input(recompute: bool, of_input: bool) -> None:
    expected, of_inputs, _ = train(made(layers, torch.float64), (5, WIDTH), False, recompute, of_input)
    found, of_fused_inputs, added = train(made(layers, torch.float64), (5, WIDTH), True, recompute, of_input)
    assert added == 2 * (N - 1)
    assert_equal_but_for_rounding((found, of_fused_inputs), (expected, of_inputs), torch.float64)


def watch_the_node(parameter: nn.Parameter, tell: Callable[..., None]) -> Any:
    """As those do who gather gradients in buckets."""
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(tell)
    return node


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize(
    "watch",
    [
        lambda parameter, tell: parameter.register_hook(tell),
        lambda parameter, tell: parameter.register_post_accumulate_grad_hook(tell),
        lambda parameter, tell: torch.autograd.graph.register_multi_grad_hook([parameter], tell),
        watch_the_node,
    ],
    ids=["on the gradient", "after accumulation", "on several", "on the node"],
)
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_whoever_watches_a_weight_hears_of_every_microbatch(watch: Any, split: bool) -> None:
    module, fired = made(layers), Counter[str]()
    stage = Stage(1, module, CPU, False, None)
    holds = watch(module.get_parameter("0.weight"), lambda *_: fired.update(["heard"]))
    with Additions() as additions:
        for microbatch in range(N):
            output, _ = stage.forward(microbatch, torch.randn(5, WIDTH, requires_grad=True), None, split)
            stage.backward(microbatch, (torch.randn_like(output),))
    del holds
    assert fired["heard"] == N
    assert additions.count == N - 1  # those of the other weight


class Penalised(nn.Module):
    """Differentiates in its forward, and what that gives is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        energy = self.inner(x).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


class LearnsInside(nn.Module):
    """Runs a backward of its own in its forward, and uses the sums of gradients that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x.detach()).pow(2).sum().backward()
        return self.inner(x) * sum(p.grad.sum() for p in self.inner.parameters())


class Equilibrium(nn.Module):
    """The fixed point of a layer, whose gradient is a fixed point as well, sought in the backward (Bai et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                state = (self.layer(state) / 4 + x).tanh()
        there = state.detach().requires_grad_()
        again = (self.layer(there) / 4 + x).tanh()

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(5):
                found = gradient + torch.autograd.grad(again, there, found, retain_graph=True)[0]
            return found

        state = (self.layer(state) / 4 + x).tanh()
        state.register_hook(solve)
        return state


class Pushed(nn.Module):
    """Uses the transforms of ``torch.func`` and forward-mode differentiation."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = layers(), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "jvp":
            return torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))[1]
        if self.how == "vjp":
            output, back = torch.func.vjp(self.inner, x)
            return back(output)[0]
        if self.how == "vmap":
            return torch.func.vmap(lambda row: self.inner(row[None])[0])(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(self.inner(dual)).tangent


DIFFERENTIATING = {
    "a derivative that is differentiated again": Penalised,
    "a backward in the forward": LearnsInside,
    "a fixed point": Equilibrium,
    **{how: partial(Pushed, how) for how in ("jvp", "vjp", "vmap", "dual numbers")},
}


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@pytest.mark.parametrize("make", DIFFERENTIATING.values(), ids=DIFFERENTIATING)
def test_a_stage_that_differentiates_by_itself(make: Callable[[], nn.Module], split: bool) -> None:
    expected, of_inputs, _ = train(made(make, torch.float64), (5, WIDTH), fuses=False)
    found, of_split_inputs, _ = train(made(make, torch.float64), (5, WIDTH), fuses=True, split=split)
    assert_equal_but_for_rounding((found, of_split_inputs), (expected, of_inputs), torch.float64)


class AsksForAGradient(nn.Module):
    """Has the gradient of a weight handed out in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.inner(x).sum(), self.inner[0].weight)
        return self.inner(x) * gradient.sum()


@pytest.mark.usefixtures("_any_size")
def test_a_stage_that_asks_for_the_gradient_of_a_weight() -> None:
    expected, of_inputs, _ = train(made(AsksForAGradient, torch.float64), (5, WIDTH), fuses=False)
    found, of_fused_inputs, _ = train(made(AsksForAGradient, torch.float64), (5, WIDTH), fuses=True)
    assert_equal_but_for_rounding((found, of_fused_inputs), (expected, of_inputs), torch.float64)


@pytest.mark.usefixtures("_any_size")
def test_under_autocast_layers_are_ordinary() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected, _, _ = train(made(layers), (5, WIDTH), fuses=False)
        found, _, added = train(made(layers), (5, WIDTH), fuses=True)
    assert added == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.usefixtures("_any_size")
def test_weights_changed_between_forward_and_backward_are_refused() -> None:
    module = made(layers)
    stage = Stage(1, module, CPU, False, None)
    output, _ = stage.forward(0, torch.randn(5, WIDTH, requires_grad=True), None, False)
    with torch.no_grad():
        module[0].weight.add_(1)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.backward(0, (torch.randn_like(output),))


def test_only_large_weights_are_worth_it() -> None:
    large, small = nn.Linear(512, 512), nn.Linear(512, 511)
    assert is_worth_fusing(nn.Sequential(small, large))
    assert not is_worth_fusing(small)
    assert not is_worth_fusing(None)
    assert not is_worth_fusing(nn.Conv2d(64, 64, 9))
    large.compile()
    assert not is_worth_fusing(nn.Sequential(small, large))
    both = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 511))
    assert train(both, (2, 512), fuses=True)[2] == N - 1


def wide_stage(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(512, 512), nn.Tanh()).double()


def step_twice(rank: int, name: str) -> dict[str, Tensor]:
    """Two steps whose gradients add up."""
    schedule = build(name, 2, 4)
    stages = {stage: wide_stage(stage) for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, stages, F.mse_loss, timeout_s=20)
    for seed in range(2):
        x, target = wide_batch(seed)
        pipeline.step(x, target)
    return {f"{s}.{key}": gradient for s, stage in stages.items() for key, gradient in gradients(stage).items()}


def wide_batch(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).unbind()


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_large_layers_on_ranks_equal_one_process(name: str) -> None:
    found = {key: gradient for rank in on_ranks(2, step_twice, name) for key, gradient in rank.items()}
    model = nn.Sequential(*(wide_stage(s) for s in range(build(name, 2, 4).n_stages)))
    for seed in range(2):
        x, target = wide_batch(seed)
        F.mse_loss(model(x), target).backward()
    assert_equal_but_for_rounding(found, gradients(model), torch.float64)
