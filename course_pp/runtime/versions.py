"""Stages that update their own weights while microbatches are under way, and their versions.

    p ──────────────► the optimizer's parameter: always the newest version, changed in place
    └─ alias v ─────► the weight in forwards of version v: the same memory, until an update
                      would write to it

If a later action still needs the version that the parameters hold, an update first moves them to
new memory, and that version keeps the old memory; otherwise nothing is copied. Gradients arrive at
the aliases. From there each microbatch's gradients are taken for the update that they enter.
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
"""This rank's optimizers by stage."""


class VersionedStage:
    """The weights of one stage on this rank, with the versions that actions use and updates make.

    Args:
        optimizer: optimizer of all trained parameters; None if there are none.
        planned: the versions that the actions of all ranks use.
        mine: the microbatches of this rank.
        meter: meter of the versions kept besides the newest.

    Attributes:
        newest: number of updates so far in this step.
        uses: the versions that each microbatch used, so far.
        gradients: the gradient of each trained parameter that waits for the next update, a sum over
            this rank's microbatches.
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
        self._stage = stage
        self._module = module
        self._optimizer = optimizer
        self._meter = meter
        # Without versions a backward may use newer weights than its forward.
        self._mixed = planned.versions == "none"
        self._backwards = _Backwards(module)
        self._parameters = trained_parameters(module)
        self._version_of = {i: planned.of(stage, i).forward for i in mine}
        self._sizes = [len(microbatches) for microbatches in planned.updates(stage)]
        self.begin()

    def begin(self) -> None:
        """Start a step: the parameters hold version 0, the only one."""
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
        """Call the module with the version of a microbatch."""
        aliases = self._aliases[self._version_of[microbatch]]
        return functional_call(self._module, aliases, args, kwargs)

    def go_backward(self, microbatch: int, backward: Callable[[], None]) -> None:
        """Run ``backward`` while the module holds the version of a microbatch.

        Checkpointed parts of the module compute their forward again there.
        """
        aliases = self._aliases[self._version_of[microbatch]]
        inner = {f"module.{name}": alias for name, alias in aliases.items()}
        functional_call(self._backwards, inner, (backward,))

    def begin_backward(self, microbatch: int) -> None:
        """Note the version with which a microbatch goes backward."""
        self._backward_of[microbatch] = self.newest if self._mixed else self._version_of[microbatch]

    def take(self, microbatch: int) -> None:
        """Take the gradients of a part of a microbatch's backward from the aliases."""
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise RuntimeError(
                    f"stage {self._stage} reaches the parameter {name!r} by another way than its"
                    " attribute, as through a list, so its forward cannot run with another version"
                    " of the weights: read the attribute in forward"
                )
        before = self._taken.get(microbatch, [None] * len(self._parameters))
        aliases = self._aliases[self._version_of[microbatch]].values()
        taken = []
        for old, alias in zip(before, aliases, strict=True):
            taken.append(add_up([old, alias.grad]))
            alias.grad = None
        self._taken[microbatch] = taken

    def finish(self, microbatch: int) -> None:
        """Put a microbatch's gradients into those of the next update, when its backward is done."""
        pairs = zip(self.gradients, self._taken.pop(microbatch), strict=True)
        self.gradients = [add_up(pair) for pair in pairs]
        version = self._version_of[microbatch]
        backward = self._backward_of.pop(microbatch)
        self.uses.append(Use(self._stage, microbatch, version, backward, self.newest))
        self._users[version] -= 1
        self._forget_unused()

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Make the next version by a step of the optimizer.

        Args:
            gradients: sums over the microbatches of all replicas; the optimizer gets their means.
        """
        size = self._sizes[self.newest]
        for (name, parameter), gradient in zip(self._parameters.items(), gradients, strict=True):
            values = gradient
            if gradient is not None and gradient.is_sparse:
                values = gradient.coalesce().values()
            if values is not None and not values.isfinite().all():
                raise ArithmeticError(
                    f"the gradient of {name!r} in update {self.newest} of stage {self._stage} is"
                    " not finite, so its weights are left as they are: lower the learning rate, or"
                    " look at the data"
                )
            if gradient is not None and size > 1:
                gradient = gradient / size
            parameter.grad = gradient
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
        """Return the parameters as leaves on the same memory.

        They do not share autograd's count of changes, so an update in place is not an error.
        """
        return {name: p.data.requires_grad_() for name, p in self._parameters.items()}

    def _move(self) -> None:
        """Move the parameters to new memory; the version still needed keeps the old memory."""
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
    """A module whose call is a backward, so that ``functional_call`` lends it weights for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, backward: Callable[[], None]) -> None:
        backward()


def problem_of_hooks(stage: int, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """Return which parameter has a hook, or None."""
    for name, parameter in parameters.items():
        if has_hooks(parameter):
            return (
                f"{name!r} of stage {stage} has a hook, which gradients of its versions do not"
                " call: remove it"
            )
    return None


def trained_parameters(module: nn.Module | None) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    named = () if module is None else module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def settings_of(optimizer: torch.optim.Optimizer, module: nn.Module | None) -> str:
    """Return the parameters and settings of each group, which replicas of a stage must share."""
    names = {id(parameter): name for name, parameter in trained_parameters(module).items()}
    groups = []
    for group in optimizer.param_groups:
        held = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        groups.append({**group, "params": held})
    return f"{type(optimizer).__name__} {groups}"
