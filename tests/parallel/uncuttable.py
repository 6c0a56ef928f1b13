"""Models that cannot be cut.

Each has one line, marked ``# here``, that a pipeline could not compute like one process.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 4


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Hidden(nn.Module):
    """A module leaves a result in an attribute, and another fetches it there."""

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.skipped = F.relu(x)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.First(WIDTH, WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x + self.first.skipped  # here: hidden state


class Hooked(nn.Module):
    """A hook takes a result out of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.first, self.second = nn.Sequential(linear(), nn.ReLU()), linear()
        self.first[0].register_forward_hook(lambda _, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        x = self.second(self.first(x))
        return x * self.seen[0].mean()  # here: hidden state


class Unknown(nn.Module):
    """A value that crosses is in a class of its own."""

    @dataclass
    class State:
        x: Tensor

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Unknown.State(super().forward(x))

    class Second(nn.Linear):
        def forward(self, state: Any) -> Tensor:
            return super().forward(state.x)  # here: unknown container

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.First(WIDTH, WIDTH), self.Second(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Borrowed(nn.Module):
    """A module uses the weight of another, which it does not hold."""

    class Head(nn.Module):
        def __init__(self, other: nn.Linear) -> None:
            super().__init__()
            self.bias, self.others = nn.Parameter(torch.zeros(WIDTH)), (other,)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.others[0].weight, self.bias)  # here: borrowed weight

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.head = self.Head(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


class OnePiece(nn.Module):
    """Everything is computed in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:  # here: one piece
        return x @ self.weight @ self.weight


class Noisy(nn.Module):
    """Noise is drawn between modules, and used before and behind a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)  # here: random numbers
        return self.second(self.first(x + noise) + noise)


class InPlace(nn.Module):
    """A module changes its argument, which is used once more."""

    class Clamp(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu_())  # here: changed in place

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), self.Clamp(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) + x


class HandedOn(nn.Module):
    """A module returns its argument, so that two results are one tensor.

    The tensor is then both changed and used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.second = linear(), nn.Identity(), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.same(x)
        y += 1  # here: changed in place
        return self.second(y) + x


class Nested(nn.Module):
    """A module calls another that the model calls as well."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.own, self.inner = linear(), inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.own(x))  # here: nested call

    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.second = self.Outer(self.first)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Misfit(nn.Module):
    """It takes another shape than the example has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH + 1, WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # here: does not run


class Escaped(nn.Module):
    """A result goes through NumPy to where nobody sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:  # here: differs
        x = self.first(x)
        scale = float(x.detach().numpy().mean())
        return self.third(self.second(x)) * scale


UNCUTTABLE = (
    Hidden,
    Hooked,
    Unknown,
    Borrowed,
    OnePiece,
    Noisy,
    InPlace,
    HandedOn,
    Nested,
    Misfit,
    Escaped,
)
