"""The comparison of ranks with one process that every distributed test makes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.model import ModelConfig, Transformer

GRADIENT_TOLERANCE = 1e-12  # float64
PARAMETER_TOLERANCE = 1e-11  # after two or three AdamW steps
LEARNING_RATE = 1e-2


@dataclass
class Trained:
    """The result of a training run, by the full model's parameter names."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def full(tensor: Any) -> Tensor:
    """Return a copy of the whole tensor, also if it is sharded."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


def snapshot_gradients(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the gradients of one rank's modules; a missing gradient is an error."""
    named = [pair for module in modules for pair in module.named_parameters()]
    missing = [name for name, p in named if p.grad is None]
    assert not missing, f"no gradient for {missing}"
    return {name: full(p.grad) for name, p in named}


def snapshot_parameters(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return the parameters of one rank's modules."""
    return {name: full(p) for module in modules for name, p in module.named_parameters()}


def train(
    modules: Iterable[nn.Module],
    n_steps: int,
    step: Callable[[int], Tensor | float],
    optimizer: torch.optim.Optimizer | None = None,
) -> Trained:
    """Take ``n_steps`` of AdamW; ``step(i)`` computes gradients and returns the loss."""
    modules = list(modules)
    trained = Trained([], {}, {})
    if optimizer is None and modules:
        optimizer = adamw(modules)
    for i in range(n_steps):
        if optimizer is not None:
            optimizer.zero_grad()
        trained.losses.append(float(step(i)))
        trained.gradients = trained.gradients or snapshot_gradients(modules)
        if optimizer is not None:
            optimizer.step()
    trained.parameters = snapshot_parameters(modules)
    return trained


def adamw(modules: Iterable[nn.Module]) -> torch.optim.AdamW:
    """The optimizer of every comparison."""
    return torch.optim.AdamW(_parameters(modules), lr=LEARNING_RATE)


def sharded_adamw(modules: Iterable[nn.Module]) -> torch.optim.AdamW:
    """Return :func:`adamw` with one operation for all parameters of a mesh.

    DTensor needs milliseconds to plan each operation.
    """
    by_mesh: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in _parameters(modules):
        by_mesh[getattr(parameter, "device_mesh", None)].append(parameter)
    return torch.optim.AdamW(
        [{"params": each} for each in by_mesh.values()], lr=LEARNING_RATE, fused=True
    )


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return each parameter once, also if two modules share it."""
    return list(dict.fromkeys(p for m in modules for p in m.parameters()))


def batches(
    config: ModelConfig, batch: int, seq_len: int, n: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """``n`` random batches of (inputs, target), each (batch, seq_len)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (n, batch, seq_len + 1), generator=generator)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def train_in_one_process(
    config: ModelConfig,
    data: list[tuple[Tensor, Tensor]],
    loss_fn: nn.Module,
    seed: int = 0,
    **kwargs: Tensor,
) -> Trained:
    """Train the whole model in float64, each batch in one piece; gradients are the first step's."""
    torch.manual_seed(seed)
    model = Transformer(config).double()

    def step(i: int) -> Tensor:
        loss: Tensor = loss_fn(model(data[i][0], **kwargs), data[i][1])
        loss.backward()
        return loss

    return train([model], len(data), step)


def assert_equals_one_process(
    ranks: list[Trained], reference: Trained, config: ModelConfig
) -> None:
    """Call :func:`assert_same_training` for our model, whose tied weights have a second name."""
    tied = (("embed.weight", "head.weight"),) if config.tie_embeddings else ()
    assert_same_training(ranks, reference, tied)


def assert_same_training(
    ranks: list[Trained],
    reference: Trained,
    tied: Sequence[Sequence[str]] = (),
    tolerances: tuple[float, float] = (GRADIENT_TOLERANCE, PARAMETER_TOLERANCE),
) -> None:
    """Assert that losses, gradients and parameters of all ranks equal the reference's.

    Args:
        tied: the names of each weight that has several. The reference has the first of them.
        tolerances: one tolerance for losses and gradients, one for parameters.
    """
    first_name = {name: names[0] for names in tied for name in names}
    for rank, trained in enumerate(ranks):
        torch.testing.assert_close(
            trained.losses,
            reference.losses,
            rtol=tolerances[0],
            atol=0,
            msg=lambda m, r=rank: f"rank {r}: {m}",
        )
    for kind, tolerance in zip(("gradients", "parameters"), tolerances, strict=True):
        expected = getattr(reference, kind)
        seen = set()
        for rank, trained in enumerate(ranks):
            for name, value in getattr(trained, kind).items():
                source = first_name.get(name, name)
                seen.add(source)
                _assert_close(
                    value, expected[source], tolerance, f"{kind} of {name} on rank {rank}"
                )
        assert seen == set(expected), f"{kind} held by no rank: {set(expected) - seen}"


def _assert_close(value: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert value.shape == expected.shape, f"{what}: shape {value.shape}, expected {expected.shape}"
    difference = (value - expected).abs().max().item() / max(1.0, expected.abs().max().item())
    assert difference <= tolerance, f"{what} differ by {difference:.1e}, more than {tolerance:.0e}"
