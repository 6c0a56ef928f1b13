"""Weight gradients added up in their product equal those of ordinary backwards."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.runtime.stage import Stage
from course_pp.schedule import build
from course_pp.step import late_weights
from course_pp.step.late_weights import is_worth_fusing
from tests.runtime.small import stages_of, watch_the_node
from tests.runtime.test_deferred import (
    MODULES,
    SHAPES,
    WIDTH,
    Autocast,
    Products,
    assert_equal_but_for_rounding,
    gradients,
    layers,
    made,
)

CPU = torch.device("cpu")
N = 3  # microbatches


@pytest.fixture
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_weights, "_LARGE_BYTES", 0)


class Additions(TorchDispatchMode):
    """Counts products that add to what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.out
        return func(*args, **(kwargs or {}))


def train(
    module: nn.Module,
    shape: tuple[int, ...],
    fuses: bool,
    recompute: bool = False,
    of_input: bool = True,
    split: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor | None], int]:
    """Run ``N`` microbatches through a stage; return gradients and the number of fused products."""
    stage = Stage(1, module, CPU, recompute, None)
    if not fuses:
        stage._fusing = None
    dtype = next(module.parameters()).dtype
    found = []
    torch.manual_seed(2)
    with Additions() as additions:
        for microbatch in range(N):
            x = torch.randn(
                shape, dtype=dtype, device=next(module.parameters()).device, requires_grad=of_input
            )
            output, _ = stage.forward(microbatch, x, None, split)
            found += stage.backward(microbatch, (torch.randn_like(output),))
    return gradients(module), found, additions.count


# How many of a microbatch's weight gradients can be added by their product.
FUSED = {
    "layers": 2,
    "layers without bias": 2,
    "layers and norms": 2,
    "one layer used twice": 2,
    "the function itself": 1,
    "packed experts": 2,
    "packed experts, one by one": 2,
    "packed experts, frozen": 2,
    "packed experts, computed": 2,
    "packed experts, a part": 2,
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
def test_gradients_are_those_of_ordinary_backwards(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
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
def test_a_stage_that_recomputes_and_one_without_gradient_of_its_input(
    recompute: bool, of_input: bool
) -> None:
    expected, of_inputs, _ = train(
        made(layers, torch.float64), (5, WIDTH), False, recompute, of_input
    )
    found, of_fused_inputs, added = train(
        made(layers, torch.float64), (5, WIDTH), True, recompute, of_input
    )
    assert added == 2 * (N - 1)
    assert_equal_but_for_rounding((found, of_fused_inputs), (expected, of_inputs), torch.float64)


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
    module = made(layers)
    fired = Counter[str]()
    stage = Stage(1, module, CPU, False, None)
    holds = watch(module.get_parameter("0.weight"), lambda *_: fired.update(["heard"]))
    with Additions() as additions:
        for microbatch in range(N):
            output, _ = stage.forward(
                microbatch, torch.randn(5, WIDTH, requires_grad=True), None, split
            )
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
    """The fixed point of a layer; its backward seeks another fixed point (Bai et al. 2019)."""

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
    """A stage that differentiates itself, by ``torch.func``, forward mode or a gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = layers()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "jvp":
            return torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))[1]
        if self.how == "vjp":
            output, back = torch.func.vjp(self.inner, x)
            return back(output)[0]
        if self.how == "vmap":
            return torch.func.vmap(lambda row: self.inner(row[None])[0])(x)
        if self.how == "the gradient of a weight":
            (gradient,) = torch.autograd.grad(self.inner(x).sum(), self.inner[0].weight)
            return self.inner(x) * gradient.sum()
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
    found, of_split_inputs, _ = train(
        made(make, torch.float64), (5, WIDTH), fuses=True, split=split
    )
    assert_equal_but_for_rounding((found, of_split_inputs), (expected, of_inputs), torch.float64)


@pytest.mark.usefixtures("_any_size")
def test_a_stage_that_asks_for_the_gradient_of_a_weight() -> None:
    test_a_stage_that_differentiates_by_itself(
        partial(Pushed, "the gradient of a weight"), split=False
    )


def test_with_recomputation_it_is_refused_by_name() -> None:
    with pytest.raises(
        RuntimeError,
        match="recompute=True",
    ):
        train(made(Penalised), (5, WIDTH), fuses=True, recompute=True)


class Layer(nn.Module):
    """One call of the function, with a weight and a bias of any shape."""

    def __init__(
        self, weight: tuple[int, ...], bias: tuple[int, ...] | None, call: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(weight))
        self.bias = None if bias is None else nn.Parameter(torch.randn(bias))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight, self.bias)


def of_nested(layout: torch.layout, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat(
        F.linear(
            torch.nested.as_nested_tensor([x[:2], x[2:]], layout=layout), weight, bias
        ).unbind()
    )


def of_sparse(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.detach().to_sparse(), weight, bias) + x


def jacobian(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    found = torch.autograd.functional.jacobian(
        lambda row: F.linear(row, weight, bias), x[:2], vectorize=True
    )
    return F.linear(x, weight, bias) + found.sum()


def clipped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        weight.clamp_(-0.3, 0.3)
    return F.linear(x.detach(), weight, bias)


def frozen_later(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    output = F.linear(x, weight, bias)
    weight.requires_grad_(weight.grad is None)
    return output


def in_place_after(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A part of the output in place, as in attention that rotates its queries, then all of it."""
    output = F.linear(x[:, None].repeat(1, 3, 1), weight, bias)
    output[..., : WIDTH // 2].mul_(2)
    return output.relu_().sum(1)


def clamped_sum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A weight used twice in a backward inside the forward, with a hook that clamps."""
    handle = weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    F.linear(F.linear(x.detach(), weight, bias).tanh(), weight, bias).pow(2).sum().backward()
    handle.remove()
    return F.linear(x, weight, bias)


SQUARE = (WIDTH, WIDTH)
BIAS = (WIDTH,)
UNUSUAL = {
    "a row of biases": Layer(SQUARE, (1, WIDTH), F.linear),
    "a bias for each row": Layer(SQUARE, (5, WIDTH), F.linear),
    "one bias for all": Layer(SQUARE, (1,), F.linear),
    "a weight of one dimension": Layer(
        BIAS, None, lambda x, weight, _: x + F.linear(x, weight)[:, None]
    ),
    "nested": Layer(SQUARE, BIAS, partial(of_nested, torch.strided)),
    "jagged": Layer(SQUARE, BIAS, partial(of_nested, torch.jagged)),
    "sparse": Layer(SQUARE, BIAS, of_sparse),
    "a jacobian": Layer(SQUARE, BIAS, jacobian),
    "a weight that the forward clips": Layer(SQUARE, BIAS, clipped),
    "three dimensions, changed in place": Layer(SQUARE, BIAS, in_place_after),
    "a weight frozen before its backward": Layer(SQUARE, BIAS, frozen_later),
    "a hook in a backward of the forward": Layer(SQUARE, BIAS, clamped_sum),
}


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_layers_out_of_the_ordinary(name: str, split: bool) -> None:
    def make() -> nn.Module:
        return deepcopy(UNUSUAL[name])

    expected, of_inputs, _ = train(made(make, torch.float64), (5, WIDTH), fuses=False)
    found, of_split_inputs, _ = train(
        made(make, torch.float64), (5, WIDTH), fuses=True, split=split
    )
    assert set(found) == set(expected)
    assert_equal_but_for_rounding((found, of_split_inputs), (expected, of_inputs), torch.float64)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is F.linear else found


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_a_mode_of_somebody_else_is_obeyed_and_devices_are_none(split: bool) -> None:
    with Doubling():
        expected, of_inputs, _ = train(made(layers, torch.float64), (5, WIDTH), fuses=False)
        found, of_split_inputs, added = train(
            made(layers, torch.float64), (5, WIDTH), fuses=True, split=split
        )
    assert_equal_but_for_rounding((found, of_split_inputs), (expected, of_inputs), torch.float64)
    assert added == 0
    with torch.device("cpu"):
        assert train(made(layers), (5, WIDTH), fuses=True, split=split)[2] == 2 * (N - 1)
    assert train(layers().to("meta"), (5, WIDTH), fuses=True, split=split)[2] == 2 * (N - 1)


class LearnsToLearn(LearnsInside):
    """The same, with a graph of the gradients."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner[0].weight
        before = 0 if weight.grad is None else weight.grad.detach()
        self.inner(x.detach()).pow(2).sum().backward(create_graph=True)
        made = weight.grad - before
        for parameter in self.parameters():
            parameter.grad = parameter.grad.detach()
        return self.inner(x) * made.sum()


@pytest.mark.usefixtures("_any_size")
@pytest.mark.filterwarnings("ignore:Using backward. with create_graph=True")
def test_a_backward_in_the_forward_that_makes_a_graph_is_right_or_refused() -> None:
    expected, of_inputs, _ = train(made(LearnsToLearn, torch.float64), (5, WIDTH), fuses=False)
    found, of_fused_inputs, _ = train(made(LearnsToLearn, torch.float64), (5, WIDTH), fuses=True)
    assert_equal_but_for_rounding((found, of_fused_inputs), (expected, of_inputs), torch.float64)
    with pytest.raises(
        RuntimeError,
        match="create_graph=True",
    ):
        train(made(LearnsToLearn), (5, WIDTH), fuses=True, split=True)


@pytest.mark.usefixtures("_any_size")
def test_products_that_nobody_asks_for_are_not_computed_and_torch_counts_the_others() -> None:
    counts = []
    for fuses in (False, True):
        with Products() as products:
            train(made(Equilibrium), (5, WIDTH), fuses=fuses)
        with FlopCounterMode(display=False) as flops:
            train(made(layers), (5, WIDTH), fuses=fuses)
        counts.append((products.counts["product"], flops.get_total_flops()))
    assert counts[0] == counts[1] > (0, 0)


@pytest.mark.usefixtures("_any_size")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_search_for_nan_finds_them() -> None:
    module = made(partial(nn.Linear, WIDTH, WIDTH))
    stage = Stage(1, module, CPU, False, None)
    module.weight.grad = torch.zeros_like(module.weight)  # type: ignore[arg-type]
    with torch.autograd.detect_anomaly():
        output, _ = stage.forward(0, torch.full((5, WIDTH), torch.inf), None, False)
        with pytest.raises(RuntimeError, match="returned nan values"):
            stage.backward(0, (torch.zeros_like(output),))


def test_threads_that_share_a_weight_add_to_it_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(512, 512)
    at_work = 0
    most = 0

    def can_add(_: Tensor, __: Tensor) -> bool:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        time.sleep(0.02)
        at_work -= 1
        return True

    def work(_: int) -> None:
        stage = Stage(1, layer, CPU, False, None)
        output, _ = stage.forward(0, torch.ones(2, 512), None, False)
        stage.backward(0, (torch.ones_like(output),))

    monkeypatch.setattr(late_weights, "_can_add", can_add)
    layer.weight.grad = torch.zeros_like(layer.weight)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    assert most == 1
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 2 * 2))


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_a_first_stage_may_change_its_weights_between_two_forwards(split: bool) -> None:
    module = made(lambda: deepcopy(UNUSUAL["a weight that the forward clips"]))
    stage = Stage(0, module, CPU, False, None)
    inputs = [torch.randn(5, WIDTH) for _ in range(2)]
    outputs = [stage.forward(number, x, None, split)[0] for number, x in enumerate(inputs)]
    for number, output in enumerate(outputs):
        stage.backward(number, (torch.ones_like(output),))
    assert_equal_but_for_rounding(
        module.weight.grad, sum(inputs).sum(0).expand(WIDTH, WIDTH), torch.float32
    )


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@pytest.mark.parametrize(
    "kind", [Tensor.to_sparse, Tensor.requires_grad_], ids=["sparse", "with a graph"]
)
def test_sums_of_another_kind(kind: Callable[[Tensor], Tensor], split: bool) -> None:
    def start() -> nn.Module:
        layer = made(partial(nn.Linear, WIDTH, WIDTH))
        layer.weight.grad = kind(torch.ones(WIDTH, WIDTH))
        return layer

    expected, of_inputs, _ = train(start(), (5, WIDTH), fuses=False)
    found, of_split_inputs, _ = train(start(), (5, WIDTH), fuses=True, split=split)
    torch.testing.assert_close((found, of_split_inputs), (expected, of_inputs))


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_under_autocast_weights_have_the_gradients_of_ordinary_layers(split: bool) -> None:
    expected, _, _ = train(made(lambda: Autocast(layers(), True)), (5, WIDTH), fuses=False)
    found, _, added = train(
        made(lambda: Autocast(layers(), True)), (5, WIDTH), fuses=True, split=split
    )
    assert added == 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_only_large_weights_are_worth_it() -> None:
    large = nn.Linear(512, 512)
    small = nn.Linear(512, 511)
    for module in (small, None, nn.Conv2d(64, 64, 9)):
        assert not is_worth_fusing(module)
    assert is_worth_fusing(both := nn.Sequential(large, small))
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
        pipeline.step(x, target=target)
    return {
        f"{s}.{key}": gradient
        for s, stage in stages.items()
        for key, gradient in gradients(stage).items()
    }


def wide_batch(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randn(
        2, 8, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).unbind()


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_large_layers_on_ranks_equal_one_process(name: str) -> None:
    found = {
        key: gradient for rank in on_ranks(2, step_twice, name) for key, gradient in rank.items()
    }
    model = nn.Sequential(*(wide_stage(s) for s in range(build(name, 2, 4).n_stages)))
    for seed in range(2):
        x, target = wide_batch(seed)
        F.mse_loss(model(x), target).backward()
    assert_equal_but_for_rounding(found, gradients(model), torch.float64)
