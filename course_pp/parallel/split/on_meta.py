"""Models without weights: how one is built, and how it is run on an example nevertheless.

A model whose parameters are on the meta device takes no memory. Its units then compute shapes and no numbers, and
return zeros; what the model computes between them, such as masks and positions, it computes from the example.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from course_pp.parallel._torch import tree_map

__all__ = ["has_no_weights", "to_meta", "weights_on_meta", "without_numbers"]


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Build the models of this block without weights: parameters on the meta device, buffers as they are.

    Give such a model to :func:`auto_split`, and fill the stages you keep with
    :func:`course_pp.training.checkpoint.load_stage`. Under ``torch.device("meta")`` tables such as rotary angles would
    be lost, as no file holds them.
    """
    register = nn.Module.register_parameter
    made: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()  # one that is tied stays one object

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if isinstance(parameter, nn.Parameter) and not parameter.is_meta:
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            parameter = made[parameter]
        register(self, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


def has_no_weights(unit: nn.Module) -> bool:
    """Return whether a unit computes nothing but shapes."""
    return any(parameter.is_meta for parameter in unit.parameters())


@contextmanager
def without_numbers(model: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[None]:
    """Make a model without weights fit to run on an example that is not on the meta device.

    Buffers of such a unit are on the meta device as well; parameters beside the units are zeros.
    """
    own: set[int] = set()
    with ExitStack() as puts_back:
        for unit in units.values():
            own.update(map(id, unit.modules()))
            for part in unit.modules() if has_no_weights(unit) else ():
                on_meta = {name: None if b is None else b.to("meta") for name, b in part._buffers.items()}
                puts_back.enter_context(patch.dict(part._buffers, on_meta))
        for part in model.modules():
            if id(part) not in own:
                zeros = {name: _zeros(p) for name, p in part._parameters.items() if p is not None and p.is_meta}
                puts_back.enter_context(patch.dict(part._parameters, zeros))
        yield


def _zeros(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape), parameter.requires_grad)


def to_meta(value: Any) -> Any:
    """Return the arguments as meta tensors."""
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, value)
