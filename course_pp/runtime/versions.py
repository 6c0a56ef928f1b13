"""Stages that update their own weights while microbatches are under way, and the versions of the
weights that needs.

    p ──────────────► the optimizer's: always the newest version, changed in place
    └─ alias v ─────► what forwards of version v compute with: the same memory, until an update would write to it

If a later action still needs the version that the parameters hold, an update first moves them to
new memory, and that version keeps the old; otherwise nothing is copied. Gradients arrive at the
aliases. From there each microbatch's are taken for the update that they enter.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from course_pp.base.torch_private import has_hooks
from course_pp.runtime.memory import Hold, Meter
from course_pp.schedule import Ledger, Use
from course_pp.step.ties import add_up

Optimizers = Mapping[int, torch.optim.Optimizer]
"""This rank's, by stage."""


class VersionedStage:
    """The weights of one stage on this rank: which version an action uses, and what an update does.

    Args:
        optimizer: of all its parameters that are trained; None if there are none.
        planned: which versions the actions of all ranks use.
        mine: the microbatches that this rank works on.
        meter: counts the versions kept besides the newest.

    Attributes:
        newest: how many updates there were in this step.
        uses: what each microbatch has used, so far.
        gradients: what waits for the next update: for each trained parameter a sum over this rank's
            microbatches.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        planned: Ledger,
        mine: Sequence[int],
        meter: Meter | None,
    ) -> None:
        self._stage, self._module, self._optimizer, self._meter = stage, module, optimizer, meter
        self._mixed, self._backwards = planned.versions == "none", _Backwards(module)
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._version_of = {
            microbatch: planned.of(stage, microbatch).forward for microbatch in mine
        }
        self._sizes = [len(microbatches) for microbatches in planned.updates(stage)]
        self.begin()

    def begin(self) -> None:
        """Start a step: what the parameters hold is version 0, and the only one."""
        if changed := sorted(self._parameters.keys() ^ trained_parameters(self._module).keys()):
            raise ValueError(
                f"{changed[0]!r} of stage {self._stage} was frozen or unfrozen since the pipeline"
                " was built: build another one"
            )
        if problem := problem_of_hooks(self._stage, self._parameters):
            raise ValueError(problem)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise ValueError(
                    f"{name!r} of stage {self._stage} has a gradient before the step, which would"
                    " enter its first update: zero it, as optimizers= take the gradients of their"
                    " own steps"
                )
        self.newest = 0
        self.uses: list[Use] = []
        self._aliases = {0: self._alias()}
        self._holds: dict[int, Hold] = {}
        self._users = Counter(self._version_of.values())
        self._backward_of: dict[int, int] = {}
        self._taken: dict[int, list[Tensor | None]] = {}
        self.gradients: list[Tensor | None] = [None] * len(self._parameters)

    def call(self, microbatch: int, /, *args: Any, **kwargs: Any) -> Any:
        return functional_call(
            self._module, self._aliases[self._version_of[microbatch]], args, kwargs
        )

    def go_backward(self, microbatch: int, backward: Callable[[], None]) -> None:
        """Do ``backward`` while the module holds the version of a microbatch: checkpointed parts compute again."""
        aliases = self._aliases[self._version_of[microbatch]]
        functional_call(
            self._backwards,
            {f"module.{name}": alias for name, alias in aliases.items()},
            (backward,),
        )

    def begin_backward(self, microbatch: int) -> None:
        """Note with which weights a microbatch goes backward."""
        self._backward_of[microbatch] = self.newest if self._mixed else self._version_of[microbatch]

    def take(self, microbatch: int) -> None:
        """Take from the aliases what a part of the backward of a microbatch has left there."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise RuntimeError(
                    f"stage {self._stage} uses {name!r} past its attribute, as from a list, so its"
                    " forward cannot be lent another version: read the attribute in forward"
                )
        before = self._taken.get(microbatch, [None] * len(self._parameters))
        aliases = self._aliases[self._version_of[microbatch]].values()
        self._taken[microbatch] = [
            add_up([old, alias.grad]) for old, alias in zip(before, aliases, strict=True)
        ]
        for alias in aliases:
            alias.grad = None

    def finish(self, microbatch: int) -> None:
        """The backward of a microbatch is done: its gradients wait for the next update."""
        self.gradients = [
            add_up(pair) for pair in zip(self.gradients, self._taken.pop(microbatch), strict=True)
        ]
        version = self._version_of[microbatch]
        self.uses.append(
            Use(self._stage, microbatch, version, self._backward_of.pop(microbatch), self.newest)
        )
        self._users[version] -= 1
        self._forget_unused()

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Make the next version: a step of the optimizer with the mean of ``gradients``, sums over all replicas."""
        size = self._sizes[self.newest]
        for (name, parameter), gradient in zip(self._parameters.items(), gradients, strict=True):
            values = (
                gradient.coalesce().values()
                if gradient is not None and gradient.is_sparse
                else gradient
            )
            if values is not None and not values.isfinite().all():
                raise ArithmeticError(
                    f"the gradient of {name!r} in update {self.newest} of stage {self._stage} is"
                    " not finite, so its weights are left as they are: lower the learning rate, or"
                    " look at the data"
                )
            parameter.grad = gradient if gradient is None or size == 1 else gradient / size
        if self._users[self.newest] and not self._mixed:
            self._move()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        self.gradients = [None] * len(self._parameters)
        self.newest += 1
        self._aliases[self.newest] = self._alias()
        self._forget_unused()

    def _alias(self) -> dict[str, Tensor]:
        """Return the parameters as leaves that share their memory but not autograd's count of changes to it."""
        return {
            name: parameter.data.requires_grad_() for name, parameter in self._parameters.items()
        }

    def _move(self) -> None:
        """Give the parameters memory of their own; the version that is still needed keeps what it has."""
        if self._meter is not None:
            kept = [alias.untyped_storage() for alias in self._aliases[self.newest].values()]
            self._holds[self.newest] = Hold(self._meter, "version", kept)
        for parameter in self._parameters.values():
            parameter.data = parameter.data.clone()
        if self._meter is not None:
            self._meter.ignore(self._parameters.values())

    def _forget_unused(self) -> None:
        for version in [v for v in self._aliases if v != self.newest and not self._users[v]]:
            del self._aliases[version]
            if version in self._holds:
                self._holds.pop(version).release()


class _Backwards(nn.Module):
    """A module whose call is a backward, so that ``functional_call`` lends the module weights for that long."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, backward: Callable[[], None]) -> None:
        backward()


def problem_of_hooks(stage: int, parameters: Mapping[str, nn.Parameter]) -> str | None:
    hooked = next((name for name, parameter in parameters.items() if has_hooks(parameter)), None)
    if hooked is None:
        return None
    return (
        f"{hooked!r} of stage {stage} has a hook, which gradients of its versions do not call:"
        " remove it"
    )


def trained_parameters(module: nn.Module | None) -> dict[str, nn.Parameter]:
    if module is None:
        return {}
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def settings_of(optimizer: torch.optim.Optimizer, module: nn.Module | None) -> str:
    """Return what replicas of a stage must share to update alike: for each group its parameters and settings."""
    names = {id(parameter): name for name, parameter in trained_parameters(module).items()}
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} {groups}"
