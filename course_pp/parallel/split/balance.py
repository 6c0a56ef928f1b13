"""Where to cut: contiguous calls for each stage, so that the largest share is the least there is."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_pp.arguments import refuse_unless
from course_pp.collective import Ranks
from course_pp.model.stages import split_by_cost
from course_pp.parallel._torch import tree_flatten, tree_map
from course_pp.parallel.split.calls import Recording
from course_pp.parallel.split.recording import left_as_it_was
from course_pp.sizes import LayerRange

__all__ = ["LIMIT_S", "partition", "refuse_unmeasurable"]

LIMIT_S = 300.0  # one rank may take minutes longer than another to build the model
_ROUNDS, _REPEATS = 3, 2
_COPIES = 4  # a weight, its gradient and two moments


def partition(model: nn.Module, recording: Recording, n_stages: int, by: str) -> list[LayerRange]:
    """Return the calls of each stage as (first, end), end excluded."""
    n_calls = len(recording.calls)
    measured = [] if by == "parameters" else _measured(model, recording)
    if by == "time":
        measured = Ranks(limit_s=LIMIT_S).gather(measured)[0]  # each rank measures otherwise, and all must cut alike
    held = [list(recording.units[call.unit].parameters()) for call in recording.calls]

    def parameters(_: int, first: int, end: int) -> int:
        return _total(held[first:end], Tensor.numel)

    def nanoseconds(_: int, first: int, end: int) -> int:
        return sum(cost.nanoseconds for cost in measured[first:end])

    def n_bytes(stage: int, first: int, end: int) -> int:
        in_flight = n_stages - stage  # microbatches under 1F1B
        weights = _total(held[first:end], lambda p: p.numel() * p.itemsize)
        return _COPIES * weights + in_flight * sum(cost.n_bytes for cost in measured[first:end])

    cost = {"parameters": parameters, "time": nanoseconds, "memory": n_bytes}[by]
    return split_by_cost(n_calls, n_stages, cost)


def refuse_unmeasurable(model: nn.Module, by: str) -> None:
    """Raise WrongArgument for time and memory on the meta device, where nothing is computed."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    remedy = "nothing is computed on the meta device: give by='parameters', or a model with weights"
    refuse_unless(by == "parameters" or not on_meta, "auto_split", "by", by, remedy)


def _total(held: list[list[nn.Parameter]], size: Callable[[Tensor], int]) -> int:
    """Return the size of parameters, each counted once, as a stage holds it once."""
    return sum({id(parameter): size(parameter) for each in held for parameter in each}.values())


@dataclass(frozen=True)
class _Cost:
    """The cost of one call: processor time of forward and backward, and bytes kept between them."""

    nanoseconds: int
    n_bytes: int


def _measured(model: nn.Module, recording: Recording) -> list[_Cost]:
    """Return what each call costs, with the arguments that it has in the example.

    The least of several rounds through the model: when the machine is busy with other things, it is so for longer than
    one call takes.
    """
    rounds = [_measured_once(model, recording) for _ in range(_ROUNDS)]
    return [_Cost(min(cost.nanoseconds for cost in call), call[0].n_bytes) for call in zip(*rounds, strict=True)]


def _measured_once(model: nn.Module, recording: Recording) -> list[_Cost]:
    costs: list[_Cost] = []
    busy: list[str] = []

    def measure(unit: nn.Module, args: Any, kwargs: Any) -> None:
        if not busy:  # a unit that another calls is that one's cost
            costs.append(_cost_of(unit, args, kwargs))
        busy.append("")

    def done(*_: Any) -> None:
        busy.pop()

    args, kwargs = recording.example
    with left_as_it_was(model), torch.no_grad(), ExitStack() as hooks:
        for unit in recording.units.values():
            for handle in (
                unit.register_forward_pre_hook(measure, with_kwargs=True),
                unit.register_forward_hook(done),
            ):
                hooks.callback(handle.remove)
        model(*args, **kwargs)
    return costs


def _cost_of(unit: nn.Module, args: Any, kwargs: Any) -> _Cost:
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in unit.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _run(unit, args, kwargs)
    return _Cost(min(_run(unit, args, kwargs) for _ in range(_REPEATS)), sum(kept.values()))


def _run(unit: nn.Module, args: Any, kwargs: Any) -> int:
    """Forward and backward once, without leaving gradients; nanoseconds."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.is_floating_point())

    args, kwargs = tree_map(leaf, (args, kwargs))
    start = _now(unit)
    with torch.enable_grad():
        result = [each for each in _tensors((unit.forward(*args, **kwargs),)) if each.requires_grad]
        wanted = [each for each in (*_tensors((args, kwargs)), *unit.parameters()) if each.requires_grad]
        if result and wanted:
            torch.autograd.grad(result, wanted, [torch.ones_like(each) for each in result], allow_unused=True)
    return _now(unit) - start


def _tensors(value: Any) -> Iterator[Tensor]:
    return (each for each in tree_flatten(value)[0] if isinstance(each, Tensor))


def _now(unit: nn.Module) -> int:
    if any(parameter.is_cuda for parameter in unit.parameters()):
        torch.cuda.synchronize()
        return time.perf_counter_ns()
    return time.process_time_ns()
