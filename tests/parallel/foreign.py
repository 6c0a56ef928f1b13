"""Models that nobody wrote for a pipeline, and their stages.

Their stages send a dict, several tensors or an image.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.equality import Trained, train

ROWS, DIM, VOCAB = 16, 8, 11


class Chain(nn.Module):
    """A chain of parts, called one after another.

    A stage is a chain of some of the parts, under the same names.
    """

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, *value: Any, scale: Tensor | None = None, **named: Any) -> Any:
        result: Any = named or value
        for part in self.parts.values():
            result = part(**result, scale=scale) if isinstance(result, dict) else part(*result)
            result = result if isinstance(result, dict | tuple) else (result,)
        return result[0] if type(result) is tuple and len(result) == 1 else result

    def cut(self, n_stages: int) -> list["Chain"]:
        """Return stages that share this chain's parts."""
        names = list(self.parts)
        bounds = [round(stage * len(names) / n_stages) for stage in range(n_stages + 1)]
        return [
            Chain({name: self.parts[name] for name in names[start:end]})
            for start, end in pairwise(bounds)
        ]


class Embedded(nn.Module):
    """Turns token ids (rows, seq) and numbers (rows, dim) into a dict with an empty place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)

    def forward(self, tokens: Tensor, numbers: Tensor) -> dict[str, Any]:
        hidden = self.embedding(tokens) + numbers[:, None]
        return {"hidden": hidden, "extras": [tokens % 2 == 0, None], "first": numbers}


class Mixed(nn.Module):
    """Reads the mask that came through all stages, and a keyword that every stage is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(
        self, hidden: Tensor, extras: list[Any], first: Tensor, scale: Tensor | None
    ) -> dict[str, Any]:
        mask, nothing = extras
        assert nothing is None
        assert not mask.requires_grad
        hidden = hidden + torch.tanh(self.linear(hidden)) * mask[..., None]
        if scale is not None:
            hidden = hidden * scale[..., None]
        return {"hidden": hidden, "extras": extras, "first": first}


class Judged(nn.Module):
    """The end: logits that share the embedding's weight, in a dict beside text."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(
        self, hidden: Tensor, extras: list[Any], first: Tensor, scale: Tensor | None
    ) -> dict[str, Any]:
        logits = F.linear(hidden, self.weight) + first.sum(-1)[:, None, None]
        return {"logits": logits, "kind": "logits", "mean": logits.mean()}


def masked_model() -> Chain:
    """Return a model with many features at once.

    It has several inputs of two dtypes, dicts with a bool tensor between stages, a tied weight, and
    a keyword.
    """
    first = Embedded()
    parts = (
        {"0": first}
        | {str(i): Mixed() for i in range(1, 7)}
        | {"7": Judged(first.embedding.weight)}
    )
    return Chain(parts).double()


def conv_model() -> Chain:
    """Return a model of images with a skip connection in a tuple and a frozen first part."""
    parts: dict[str, nn.Module] = {"0": nn.Conv2d(3, DIM, 3, padding=1)}
    parts |= {str(i): Skip() for i in range(1, 7)}
    parts["7"] = Classified()
    model = Chain(parts).double()
    model.parts["0"].requires_grad_(False)
    return model


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(DIM, DIM, 3, padding=1), nn.GroupNorm(2, DIM)

    def forward(self, image: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mixed = F.gelu(self.norm(self.conv(image)))
        return (mixed if before is None else mixed + before), image


class Classified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * DIM, VOCAB)

    def forward(self, image: Tensor, before: Tensor) -> Tensor:
        return self.linear(torch.cat([image, before], 1).mean((2, 3)))


class Codes(nn.Module):
    """A frozen tokenizer of numbers: only integers cross, so no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, VOCAB).requires_grad_(False)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.linear(numbers).argmax(-1)


class Twice(nn.Module):
    """Changes its input in place, and uses one parameter at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.activation, self.linear = nn.LeakyReLU(inplace=True), nn.Linear(DIM, DIM)
        self.shift = nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.activation(x)) + self.shift) + self.shift


def coded_model() -> Chain:
    parts: dict[str, nn.Module] = {"0": Codes(), "1": nn.Embedding(VOCAB, DIM)}
    return Chain(
        parts | {str(i): Twice() for i in range(2, 7)} | {"7": nn.Linear(DIM, VOCAB)}
    ).double()


@dataclass(frozen=True)
class Foreign:
    """A model, its arguments, and its loss.

    Attributes:
        inputs, kwargs, target: arguments and targets of a whole batch.
        evaluated: returns the part of the output that is compared.
    """

    build: Callable[[], Chain]
    loss: Callable[[Any, Tensor], Tensor]
    inputs: tuple[Tensor, ...]
    target: Tensor
    kwargs: dict[str, Tensor]

    def model(self) -> Chain:
        torch.manual_seed(0)
        return self.build()

    def example(self, n_microbatches: int) -> tuple[Tensor, ...]:
        """Return the arguments of one microbatch."""
        return tuple(tensor[: ROWS // n_microbatches].to("meta") for tensor in self.inputs)

    def train(self, steps: int = 2) -> Trained:
        """Train the reference in one process, each batch in one piece.

        Gradients are the first step's.
        """
        model = self.model()

        def step(_: int) -> Tensor:
            loss = self.loss(model(*self.inputs, **self.kwargs), self.target)
            loss.backward()
            freeze_gradients(model)
            return loss

        return train([model], steps, step)


def freeze_gradients(model: nn.Module) -> None:
    """Give frozen parameters a gradient of zero."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def masked_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    assert output["kind"] == "logits"
    return (
        F.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + output["mean"] ** 2 * 0
    )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def models() -> dict[str, Foreign]:
    tokens = torch.randint(VOCAB, (ROWS, 6), generator=_generator())
    numbers = torch.randn(ROWS, DIM, generator=_generator(), dtype=torch.float64)
    images = torch.randn(ROWS, 3, 5, 5, generator=_generator(), dtype=torch.float64)
    scale = torch.linspace(0.5, 1.5, ROWS, dtype=torch.float64)[:, None]
    return {
        "masked": Foreign(
            masked_model, masked_loss, (tokens, numbers), tokens.roll(1, 1), {"scale": scale}
        ),
        "codes": Foreign(coded_model, F.cross_entropy, (numbers,), tokens[:, 0], {}),
        "conv": Foreign(conv_model, F.cross_entropy, (images,), tokens[:, 0], {}),
    }
