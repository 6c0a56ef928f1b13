"""Stages cut from a model and an example, or the reason why it cannot be cut."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_pp.base.arguments import check_arguments, checked, refuse_below, refuse_unless
from course_pp.base.ranks import Ranks
from course_pp.base.sizes import LayerRange
from course_pp.base.torch_private import tree_map
from course_pp.model.stages import split_by_cost
from course_pp.parallel.meta_device import has_no_weights
from course_pp.parallel.split.recording import (
    Example,
    Output,
    Problem,
    Recording,
    as_call,
    is_of_model,
    left_as_it_was,
    record,
    replaced_on_the_way,
    tensors_in,
)
from course_pp.parallel.split.split_stage import SplitStage, carve
from course_pp.step.hooks import problem_of_wrappers
from course_pp.step.ties import find_ties

_LIMIT_S = 300.0  # one rank may take minutes longer than another to build the model
_ROUNDS, _REPEATS = 3, 2
_COPIES = 4  # a weight, its gradient and two moments
_SHOWN = 3

By = Literal["parameters", "time", "memory"]
"""The cost that a balanced cut evens out: the largest stage's cost is as small as possible."""


def auto_split(
    model: nn.Module,
    example: Any,
    n_stages: int | None = None,
    by: By = "parameters",
    *,
    at: Sequence[str] | None = None,
) -> list[nn.Module]:
    """Cut a model into stages that a pipeline can run.

    Embeddings and head count with their own cost.

    Each stage is a module of the model's class, holds the model's own modules and parameters under
    the model's names, and runs the model's forward without the modules of other stages. The first
    stage is called as the model is, and the last returns what the model returns; in between, stages
    pass on a dict, which both engines take. Each stage's ``ties`` names the weights that lie in
    several stages, as either engine's ``tied=`` takes them; its ``stage_id`` and ``num_stages`` say
    which stage it is, and of how many.

    The model runs on the example, and once more as stages, which must give the same result; on the
    meta device nothing can be compared. Before cutting, put it in the mode, training or eval, in
    which the stages will run.

    Args:
        model: any module. It is cut between the blocks it is mostly made of, and the modules beside
            these.
        example: arguments of the model for one microbatch: a tuple or list gives positional
            arguments, a dict keyword arguments, anything else is the only one. Arguments that are
            no tensors stay as in the example; sizes of tensors may change. Models of transformers
            need ``use_cache=False``: a cache cannot cross.
        n_stages: how many; may be left out where ``at`` says it.
        by: the cost to even out, unless ``at`` is given: ``parameters``; ``time`` of forward and
            backward, as rank 0 measures it, so call this on every rank of the process group; or
            ``memory`` of weights, gradients, two moments and the activations that 1F1B keeps, in
            bytes.
        at: names of the modules that a stage begins with, such as ``model.layers.5``, for each
            stage but the first.

    Raises:
        ValueError: also for a model that cannot be cut, as :func:`explain` says; by ``time`` on
            every rank.
    """
    on_all = isinstance(by, str) and by == "time" and at is None
    # who measures must not wait for one that has refused
    ranks = Ranks(alone=not on_all, limit_s=_LIMIT_S)
    with ranks.refusing_together():
        check_arguments(auto_split, locals())
        refuse_below(1, "auto_split", n_stages=n_stages)
        count = n_stages if at is None else len(at) + 1
        refuse_unless(
            count is not None, "auto_split", "n_stages", n_stages, "give a number, or names in at="
        )
        assert count is not None
        remedy = f"the names in at= make {count} stages, so give {count}, or leave it out"
        refuse_unless(n_stages in (None, count), "auto_split", "n_stages", n_stages, remedy)
        recording = _recorded(model, as_call(example), "auto_split")
        _refuse(model, recording.problems)
        n = len(recording.calls)
        remedy = (
            f"the example makes {n} calls of {type(model).__name__}'s modules, so give at most {n}"
            " stages"
        )
        refuse_unless(count <= n, "auto_split", "n_stages", count, remedy)
        measures = at is None and by != "parameters"
        remedy = (
            "nothing is computed on the meta device: give by='parameters', or a model with weights"
        )
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        refuse_unless(not (measures and on_meta), "auto_split", "by", by, remedy)

    cuts = (
        _partition(model, recording, count, by)
        if at is None
        else _partition_at(model, recording, at)
    )
    stages = [carve(model, recording, first, end) for first, end in cuts]
    places: dict[int, dict[int, str]] = {}  # of each parameter its name in each stage that holds it
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            places.setdefault(id(parameter), {})[index] = name
    ties = tuple(tie for tie in places.values() if len(tie) > 1)
    for number, stage in enumerate(stages):
        vars(stage).update(
            ties=ties, names_of_one=find_ties(stage), stage_id=number, num_stages=len(stages)
        )
    _refuse(model, _differences(model, stages, recording))
    return stages


@checked
def explain(model: nn.Module, example: Any) -> list[Problem]:
    """Say what stops :func:`auto_split`: which line of the model, what kind of problem, what to do.

    Args:
        model: any module.
        example: as for :func:`auto_split`.

    Returns:
        Nothing if the model can be cut wherever one of its modules is called.
    """
    try:
        recording = _recorded(model, as_call(example), "explain")
    except _DoesNotRun as error:
        return [error.problem]
    if recording.problems:
        return recording.problems
    stages = [carve(model, recording, number, number + 1) for number in range(len(recording.calls))]
    return _differences(model, stages, recording)


class _DoesNotRun(ValueError):
    def __init__(self, problem: Problem) -> None:
        super().__init__(f"example: {problem}")
        self.problem = problem


def _recorded(model: nn.Module, example: Example, function: str) -> Recording:
    wrapped = problem_of_wrappers(model, "the model")
    refuse_unless(wrapped is None, function, "model", model, str(wrapped))
    if (name := replaced_on_the_way(model)) is not None:
        which = name or "the model"
        what = (
            f"the forward of {which!r} was replaced (compiled, or hooked), and each stage would run"
            " all of it"
        )
        remedy = "cut the model first, and compile or hook the stages"
        line = _forward_of(model.get_submodule(name))
        return Recording({}, problems=[Problem("replaced forward", line, what, remedy)])
    try:
        recording = record(model, example)
    except Exception as error:  # whatever a foreign forward raises
        lines = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
        remedy = "give arguments it takes"
        if any(has_no_weights(unit) for unit in model.modules()):
            remedy += (
                ", or a model with weights: the meta device, where this one ran, has no values"
            )
        raise _DoesNotRun(Problem("does not run", _line_of(error), said, remedy)) from error
    if len(recording.calls) < 2:
        what = (
            f"{type(model).__name__} calls {len(recording.calls)} module on its way, so there is no"
            " place to cut"
        )
        recording.problems.append(
            Problem("one piece", _forward_of(model), what, "compute in modules of its own")
        )
    return recording


def _refuse(model: nn.Module, problems: Sequence[Problem]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more: see explain)" if len(problems) > 1 else ""
        raise ValueError(f"model: {type(model).__name__} cannot be cut: {problems[0]}{more}")


def _differences(
    model: nn.Module, stages: Sequence[nn.Module], recording: Recording
) -> list[Problem]:
    """Return the differences between the stages, one after another, and the whole model.

    Both begin with the same random numbers, so their dropouts must agree, too.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return []
    args, kwargs = recording.example
    with torch.no_grad():
        with left_as_it_was(model):
            expected = tensors_in(model(*args, **kwargs))
        with left_as_it_was(model):
            value = stages[0](*args, **kwargs)
            for stage in stages[1:]:
                value = stage(**value)
    if all(
        one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(expected, tensors_in(value), strict=True)
    ):
        return []
    what = "the stages, one after another, do not give what the model gives"
    remedy = "look for values that modules hand on otherwise than by arguments and results"
    return [Problem("differs", _forward_of(model), what, remedy)]


def _forward_of(module: nn.Module) -> str:
    """Return where a module's forward begins."""
    forward: Any = type(module).forward
    code = getattr(forward, "__wrapped__", forward).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _line_of(error: Exception) -> str:
    """Return the innermost line of the traceback that is not torch's."""
    line, traceback = "?", error.__traceback__
    while traceback is not None:
        if is_of_model(traceback.tb_frame.f_code.co_filename):
            line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _partition_at(model: nn.Module, recording: Recording, at: Sequence[str]) -> list[LayerRange]:
    """Return the calls of each stage as (first, end), end excluded.

    Each stage but the first begins with the unit of one name in ``at``.
    """
    units = {id(unit): first for first, unit in recording.units.items()}
    named = dict(model.named_modules(remove_duplicate=False))
    called = [call.unit for call in recording.calls]
    begins = [0]
    for name in at:
        unit = units.get(id(named.get(name)), "")  # a second name leads to the same calls
        times = called.count(unit)
        nearest = " or ".join(
            map(repr, get_close_matches(name, dict.fromkeys(called), _SHOWN, 0.0))
        )
        also = f", as {unit!r} is the same module" if unit != name else ""
        remedy = (
            f"it is called {times} times{also}: name one that is called once, or let n_stages find"
            " the places"
        )
        if not unit:
            remedy = (
                f"it is no module that one stage holds as a whole: name another, such as {nearest}"
            )
        refuse_unless(times == 1, "auto_split", "at", name, remedy)
        remedy = "name each module once, in the order of their calls, and not the first"
        refuse_unless(called.index(unit) > begins[-1], "auto_split", "at", name, remedy)
        begins.append(called.index(unit))
    return list(zip(begins, [*begins[1:], len(called)], strict=True))


def _partition(model: nn.Module, recording: Recording, n_stages: int, by: str) -> list[LayerRange]:
    """Return the calls of each stage as (first, end), end excluded."""
    n_calls = len(recording.calls)
    measured = [] if by == "parameters" else _measured(model, recording)
    if by == "time":
        # each rank measures otherwise, and all must cut alike
        measured = Ranks(limit_s=_LIMIT_S).gather(measured)[0]
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


def _total(held: list[list[nn.Parameter]], size: Callable[[Tensor], int]) -> int:
    return sum({id(parameter): size(parameter) for each in held for parameter in each}.values())


@dataclass(frozen=True)
class _Cost:
    """The cost of one call: processor time of forward and backward, and bytes kept between them."""

    nanoseconds: int
    n_bytes: int


def _measured(model: nn.Module, recording: Recording) -> list[_Cost]:
    """Return what each call costs, with the arguments that it has in the example.

    The least of several rounds through the model: when the machine is busy with other things, it is
    so for longer than one call takes.
    """
    rounds = [_measured_once(model, recording) for _ in range(_ROUNDS)]
    return [
        _Cost(min(cost.nanoseconds for cost in call), call[0].n_bytes)
        for call in zip(*rounds, strict=True)
    ]


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
        result = [
            each for each in tensors_in((unit.forward(*args, **kwargs),)) if each.requires_grad
        ]
        wanted = [
            each for each in (*tensors_in((args, kwargs)), *unit.parameters()) if each.requires_grad
        ]
        if result and wanted:
            torch.autograd.grad(
                result, wanted, [torch.ones_like(each) for each in result], allow_unused=True
            )
    return _now(unit) - start


def _now(unit: nn.Module) -> int:
    if any(parameter.is_cuda for parameter in unit.parameters()):
        torch.cuda.synchronize()
        return time.perf_counter_ns()
    return time.process_time_ns()


@dataclass(frozen=True)
class CrossingTensor:
    """A tensor that crosses a cut, of ``n_bytes`` for the example.

    Attributes:
        made: the number of the call that returns it.
        read: the numbers of the calls that read it, in order; the number of calls stands for the
            model's result.
    """

    made: int
    read: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class Crossing:
    """The calls of a model's modules in order, where it is cut, and what crosses.

    Attributes:
        calls: the name of the module that each calls.
        begins: the number of the call that each stage begins with, from the second on.
        values: each tensor that crosses a cut, once.
    """

    calls: tuple[str, ...]
    begins: tuple[int, ...]
    values: tuple[CrossingTensor, ...]

    def over(self, cut: int) -> tuple[CrossingTensor, ...]:
        """Return the values that the cut before stage ``cut + 1`` carries."""
        begin = self.begins[cut]
        return tuple(value for value in self.values if value.made < begin <= value.read[-1])


@checked
def crossing(stages: Sequence[nn.Module]) -> Crossing:
    """Return the values that cross the cuts between the stages of :func:`auto_split`."""
    others = [stage for stage in stages if not isinstance(stage, SplitStage)]
    refuse_unless(
        bool(stages) and not others,
        "crossing",
        "stages",
        stages,
        "give the list that auto_split returns",
    )
    segments = [stage._segment for stage in stages if isinstance(stage, SplitStage)]
    recording, calls = segments[0].recording, segments[0].recording.calls
    found: set[Output] = set().union(*(segment.given for segment in segments))
    values = []
    for output in sorted(found):
        read = [number for number, call in enumerate(calls) if output in call.reads]
        read += [len(calls)] if output in recording.result_reads else []
        values.append(
            CrossingTensor(output.call, tuple(read), calls[output.call].leaves[output.leaf].nbytes)
        )
    return Crossing(
        tuple(call.unit for call in calls),
        tuple(segment.first for segment in segments[1:]),
        tuple(values),
    )
