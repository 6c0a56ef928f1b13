"""Weight gradients put off to ``W`` equal those of a backward, and are computed once."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from course_pp.runtime.memory import Meter
from course_pp.runtime.stage import Stage
from course_pp.step.grouped import grouped_product
from course_pp.step.late_weights import Deferring, WeightGradients, part_of

WIDTH, HIDDEN = 6, 8
CPU = torch.device("cpu")


class UsedTwice(nn.Module):
    """One layer, called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class UsedOtherwise(UsedTwice):
    """A layer whose weight is in a product of another kind too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.tanh(x @ self.layer.weight)


class ByName(nn.Module):
    """The function, with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(bias=self.layer.bias, input=x, weight=self.layer.weight)


class Checkpointed(nn.Module):
    """Two layers that are computed again in backward, then one that is not."""

    def __init__(self, reentrant: bool, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or layers()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class Autocast(nn.Module):
    """A module that computes in bfloat16 by itself."""

    def __init__(self, inner: nn.Module, enabled: bool) -> None:
        super().__init__()
        self.inner = inner
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return self.inner(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


class Offloaded(nn.Module):
    """Keeps what it saves elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return self.inner(x)


class Packed(nn.Module):
    """Two grouped products, the second group without rows; ``width`` 8 goes through torch's kernel
    in float32.

    Args:
        take: what it multiplies with, of a parameter.
    """

    def __init__(
        self, width: int, take: Callable[[Tensor], Tensor] = lambda parameter: parameter
    ) -> None:
        super().__init__()
        self.take = take
        self.first = nn.Linear(WIDTH, width)
        self.last = nn.Linear(width, WIDTH)
        self.up = nn.Parameter(torch.randn(3, width, 2 * width))
        self.down = nn.Parameter(torch.randn(3, 2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x.flatten(0, -2))
        counts = torch.tensor([len(rows) // 2, 0, len(rows) - len(rows) // 2])
        up = self.take(self.up)
        down = self.take(self.down)
        rows = grouped_product(F.gelu(grouped_product(rows, up, counts)), down, counts)
        return self.last(rows).unflatten(0, x.shape[:-1])


def layers(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def parametrised() -> nn.Module:
    module = layers()
    nn.utils.parametrizations.weight_norm(module[0])
    return module


def complex_layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN, dtype=torch.complex64),
        nn.Linear(HIDDEN, WIDTH, dtype=torch.complex64),
    )


# What may not wait and has its gradient after I, by name; every other parameter must wait for W.
MODULES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "layers": (layers, set()),
    "layers without bias": (lambda: layers(bias=False), set()),
    "layers and norms": (
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), layers(), nn.LayerNorm(WIDTH)),
        {"0.weight", "0.bias", "2.weight", "2.bias"},
    ),
    "one layer used twice": (UsedTwice, set()),
    "the function itself": (ByName, set()),
    "packed experts": (lambda: Packed(8), set()),
    "packed experts, one by one": (lambda: Packed(7), set()),
    "packed experts, frozen": (lambda: frozen(Packed(8), "up"), set()),
    "packed experts, computed": (
        lambda: Packed(8, lambda parameter: 2 * parameter),
        {"up", "down"},
    ),
    "packed experts, a part": (
        lambda: Packed(8, lambda parameter: part_of(parameter, 2 * parameter)),
        set(),
    ),
    "a frozen weight": (lambda: frozen(layers(), "0.weight"), {"0.bias"}),
    "a frozen bias": (lambda: frozen(layers(), "0.bias"), set()),
    "a frozen layer": (lambda: frozen(layers(), "0.weight", "0.bias"), set()),
    "a weight that is computed": (
        parametrised,
        {"0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"},
    ),
    "complex layers": (complex_layers, {"0.weight", "0.bias", "1.weight", "1.bias"}),
    "checkpointed, not reentrant": (
        lambda: Checkpointed(False),
        {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"},
    ),
    "checkpointed, reentrant": (
        lambda: Checkpointed(True),
        {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"},
    ),
    "hooks on what is saved": (
        Offloaded,
        {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"},
    ),
}
SHAPES = {"2-D": (5, WIDTH), "3-D": (2, 3, WIDTH), "4-D": (2, 1, 3, WIDTH), "no rows": (0, WIDTH)}


def made(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return make() if make is complex_layers else make().to(dtype)


def input_of(shape: tuple[int, ...], module: nn.Module, requires_grad: bool = True) -> Tensor:
    torch.manual_seed(1)
    dtype = next(module.parameters()).dtype
    return torch.randn(shape, dtype=dtype).requires_grad_(requires_grad)


def loss_of(output: Tensor) -> Tensor:
    """Its gradient differs from place to place."""
    return (output.abs().float() if output.dtype == torch.bfloat16 else output.abs()).pow(2).sum()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same_bits(found: Any, expected: Any) -> None:
    """Compare tensors, dicts of tensors, or None."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_equal_but_for_rounding(found: Any, expected: Any, dtype: torch.dtype) -> None:
    """For sums: some processors round differently where the product adds to what is there."""
    error = 1e-12 if dtype.to_real() == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=error, atol=error)


def ordinarily(module: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    output = module(x)
    loss_of(output).backward()
    return output, gradients(module), x.grad


def in_two_halves(
    module: nn.Module, x: Tensor
) -> tuple[Tensor, dict[str, Tensor], Tensor | None, set[str]]:
    """The same, and which parameters have their gradient between ``I`` and ``W``."""
    queue = WeightGradients()
    with Deferring(queue):
        output = module(x)
    with queue.collecting():
        loss_of(output).backward()
    early = set(gradients(module))
    queue.compute()
    return output, gradients(module), x.grad, early


def assert_halves_equal(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    of_input: bool = True,
    dtype: torch.dtype = torch.float64,
) -> set[str]:
    """Check the two halves against an ordinary backward; return the gradients after ``I``."""
    module = made(make, dtype)
    other = made(make, dtype)
    expected = ordinarily(module, input_of(shape, module, of_input))
    *found, early = in_two_halves(other, input_of(shape, other, of_input))
    assert_same_bits(found, [*expected])
    assert set(found[1]) == {name for name, p in module.named_parameters() if p.requires_grad}
    return early


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("make", "early"), MODULES.values(), ids=MODULES)
def test_the_two_halves_give_the_bits_of_an_ordinary_backward(
    make: Callable[[], nn.Module], early: set[str], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert assert_halves_equal(make, shape, dtype=dtype) == early


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_square_layer_is_not_taken_for_its_transpose(reentrant: bool) -> None:
    """A square weight: checkpointing would not notice if its transpose was saved."""

    def square() -> nn.Module:
        return Checkpointed(reentrant, nn.Linear(WIDTH, WIDTH))

    assert_halves_equal(square, (3, WIDTH))


@pytest.mark.parametrize("of_input", [True, False], ids=["a vector", "the first stage"])
def test_a_vector_is_left_to_the_ordinary_backward_and_the_first_layer_of_all_waits(
    of_input: bool,
) -> None:
    early = assert_halves_equal(layers, (WIDTH,) if of_input else (5, WIDTH), of_input)
    assert bool(early) == of_input


@pytest.mark.parametrize("shape", [SHAPES["2-D"], SHAPES["3-D"]], ids=["2-D", "3-D"])
@pytest.mark.parametrize(
    "make",
    [layers, lambda: layers(bias=False), MODULES["layers and norms"][0]],
    ids=["bias", "no bias", "norms"],
)
@pytest.mark.parametrize("inside", [True, False], ids=["around the step", "around the forward"])
def test_autocast_gives_the_bits_of_an_ordinary_backward_under_autocast(
    inside: bool, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        assert_halves_equal(lambda: Autocast(make(), not inside), shape, dtype=torch.float32)


def test_a_weight_used_twice_under_autocast_is_summed_in_float32() -> None:
    """An ordinary backward sums in bfloat16, to which the weight was cast once for both uses."""
    module = made(UsedTwice)
    other = made(UsedTwice)
    exact = made(UsedTwice, torch.float64)
    x = input_of((5, WIDTH), module)
    with torch.autocast("cpu", torch.bfloat16):
        _, expected, _ = ordinarily(module, x)
        _, found, _, _ = in_two_halves(other, input_of((5, WIDTH), other))
    _, reference, _ = ordinarily(exact, x.detach().double().requires_grad_())
    for name, gradient in reference.items():
        unit = torch.finfo(torch.bfloat16).eps * gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 4 * unit
        assert (found[name] - expected[name]).abs().max() <= 2 * unit


def test_weight_gradients_are_added_to_those_that_are_there() -> None:
    module = made(layers, torch.float64)
    other = made(layers, torch.float64)
    for _ in range(2):
        _, expected, _ = ordinarily(module, input_of((5, WIDTH), module))
        _, found, _, _ = in_two_halves(other, input_of((5, WIDTH), other))
    assert_equal_but_for_rounding(found, expected, torch.float64)


@pytest.mark.parametrize(
    "make",
    [layers, UsedTwice, UsedOtherwise],
    ids=["layers", "one layer used twice", "a weight used otherwise"],
)
def test_hooks_on_parameters_fire_once_and_see_the_whole_gradient(
    make: Callable[[], nn.Module],
) -> None:
    module = made(make, torch.float64)
    fired: Counter[str] = Counter()
    seen: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():

        def on_gradient(gradient: Tensor, name: str = name) -> None:
            fired[name] += 1
            seen[name] = gradient.clone()

        def after_accumulation(_: Tensor, name: str = name) -> None:
            fired[f"{name}, accumulated"] += 1

        parameter.register_hook(on_gradient)
        parameter.register_post_accumulate_grad_hook(after_accumulation)
    other = made(make, torch.float64)
    _, expected, _ = ordinarily(other, input_of((5, WIDTH), other))
    _, found, _, _ = in_two_halves(module, input_of((5, WIDTH), module))
    assert fired == dict.fromkeys([*expected, *(f"{name}, accumulated" for name in expected)], 1)
    assert_same_bits((seen, found), (expected, expected))


def test_a_hook_on_several_parameters_fires_once_though_some_could_wait() -> None:
    module = made(MODULES["layers and norms"][0])
    fired = []
    torch.autograd.graph.register_multi_grad_hook(list(module.parameters()), fired.append)
    _, found, _, _ = in_two_halves(module, input_of((5, WIDTH), module))
    assert_same_bits(fired, [tuple(found.values())])


def test_a_queue_that_was_computed_is_empty_and_holds_nothing() -> None:
    meter = Meter()
    module = made(layers, torch.float64)
    queue = WeightGradients(meter)
    with Deferring(queue):
        output = module(input_of((5, WIDTH), module))
    with queue.collecting():
        loss_of(output).backward()
    # The gradient of each layer's output; each layer's input counts as an activation.
    assert meter.kept["queued"] == 5 * (HIDDEN + WIDTH) * 8
    assert meter.kept["activation"] == 5 * (WIDTH + HIDDEN) * 8
    queue.compute()
    assert not any(meter.kept.values())
    before = gradients(module)
    queue.compute()
    assert_same_bits(gradients(module), before)


def test_weights_changed_between_forward_and_backward_are_refused() -> None:
    module = made(layers)
    queue = WeightGradients()
    with Deferring(queue):
        output = module(input_of((5, WIDTH), module))
    with torch.no_grad():
        module[0].weight.add_(1)  # type: ignore[index]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), queue.collecting():
        loss_of(output).backward()


class Reuses(nn.Module):
    """Writes the input of its layer into one place, microbatch after microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("place", torch.zeros(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.place.copy_(x.detach()))


@pytest.mark.parametrize("what", ["input", "gradient"])
def test_what_changes_between_the_halves_is_refused(what: str) -> None:
    stage = Stage(1, made(Reuses), CPU, False, None)
    output, _ = stage.forward(0, torch.randn(5, WIDTH, requires_grad=True), None, True)
    gradient = torch.ones_like(output)
    stage.backward_input(0, (gradient,))
    if what == "input":
        stage.forward(1, torch.randn(5, WIDTH, requires_grad=True), None, True)
    else:
        gradient.mul_(2)
    with pytest.raises(RuntimeError, match=r"\(5, 6\).*changed in place"):
        stage.backward_weight(0)


class Products(TorchDispatchMode):
    """Counts matrix products and, for scale, everything else that costs arithmetic here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "matmul", "linear", "gelu", "gelu_backward", "sum"):
            self.counts[
                "product" if name in ("mm", "addmm", "bmm", "matmul", "linear") else name
            ] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(counts: dict[str, Counter[str]], action: str) -> Iterator[None]:
    with Products() as products:
        yield
    counts[action] = products.counts


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("index", [0, 1], ids=["first stage", "later stage"])
def test_input_and_weight_halves_together_do_the_products_of_one_backward(
    index: int, recompute: bool
) -> None:
    n = 3
    stack = nn.Sequential(
        *(layer for _ in range(n) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    )
    counts: dict[str, Counter[str]] = {}
    for split in (False, True):
        stage = Stage(index, stack, CPU, recompute, None)
        x = torch.randn(5, WIDTH, requires_grad=index > 0)
        with counting(counts, f"F {split}"):
            output, _ = stage.forward(0, x, None, split)
        gradient = (torch.ones_like(output),)
        if split:
            with counting(counts, "I"):
                stage.backward_input(0, gradient)
            with counting(counts, "W"):
                stage.backward_weight(0)
        else:
            with counting(counts, "B"):
                stage.backward(0, gradient)
    assert counts["F False"] == counts["F True"] == Counter(product=n, gelu=n)
    assert counts["I"] + counts["W"] == counts["B"]
    again = n if recompute else 0
    # The first stage's input needs no gradient.
    assert counts["I"] == Counter(product=n - (index == 0) + again, gelu_backward=n, gelu=again)
    assert counts["W"] == Counter(product=n, sum=n)
