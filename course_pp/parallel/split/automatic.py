"""From a model and an example to stages, or to the reason why not."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from course_pp.arguments import check_arguments, checked, refuse_below, refuse_unless
from course_pp.collective import Ranks
from course_pp.parallel._torch import tree_flatten
from course_pp.parallel.split.balance import LIMIT_S, partition, refuse_unmeasurable
from course_pp.parallel.split.calls import Problem, Recording
from course_pp.parallel.split.named import partition_at
from course_pp.parallel.split.recording import Example, as_call, is_of_model, left_as_it_was, record
from course_pp.parallel.split.stage import carve
from course_pp.parallel.split.units import replaced_on_the_way
from course_pp.wrappers import problem_of_wrappers

__all__ = ["By", "auto_split", "explain"]

By = Literal["parameters", "time", "memory"]
"""The cost that a balanced cut evens out: the largest stage's share of it is as small as possible."""


def auto_split(
    model: nn.Module,
    example: Any,
    n_stages: int | None = None,
    by: By = "parameters",
    *,
    at: Sequence[str] | None = None,
) -> list[nn.Module]:
    """Cut a model into stages that a pipeline can run; embeddings and head count with their own cost.

    Each stage is a module of the model's class, holds the model's own modules and parameters under the model's names,
    and runs the model's forward without the modules of other stages. The first stage is called as the model is, and the
    last returns what the model returns; in between, stages pass on a dict, which both engines take. Each stage's
    ``ties`` names the weights that lie in several stages, by stage, as either engine's ``tied=`` takes them; its
    ``stage_id`` and ``num_stages`` say which stage it is, and of how many.

    The model runs on the example, and once more as stages, which must give the same result. A model on the meta device
    runs too, but nothing can be compared there. Before cutting, put it in the mode, training or eval, in which the
    stages will run.

    Args:
        model: any module. It is cut between the blocks it is mostly made of, and the modules beside these.
        example: what the model is called with for one microbatch: a tuple or list gives positional arguments, a dict
            keyword arguments, anything else is the only one. Arguments that are no tensors stay as in the example;
            sizes of tensors may change. Models of transformers need ``use_cache=False``: a cache cannot cross.
        n_stages: how many; may be left out where ``at`` says it.
        by: the cost to even out, unless ``at`` is given: ``parameters``; ``time`` of forward and backward, as rank 0
            measures it, so call this on every rank of the process group; or ``memory`` of weights, gradients, two
            moments and the activations that 1F1B keeps, in bytes.
        at: names of the modules that a stage begins with, such as ``model.layers.5``, for each stage but the first.

    Raises:
        ValueError: for more stages than there are places to cut, an unknown name, an example that the model does not
            take, or a model that cannot be cut, as :func:`explain` says; by ``time`` on every rank.
    """
    given, on_all = locals(), isinstance(by, str) and by == "time" and at is None
    ranks = Ranks(alone=not on_all, limit_s=LIMIT_S)  # who measures must not wait for one that has refused
    count, recording = ranks.collectively(lambda: _looked_at(given))
    cuts = partition(model, recording, count, by) if at is None else partition_at(model, recording, at)
    stages = [carve(model, recording, first, end) for first, end in cuts]
    ties = _ties_of(stages)
    for number, stage in enumerate(stages):
        vars(stage).update(ties=ties, stage_id=number, num_stages=len(stages))
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


def _looked_at(given: Mapping[str, Any]) -> tuple[int, Recording]:
    """Return how many stages of what, from the arguments of :func:`auto_split`."""
    check_arguments(auto_split, given)
    model, count = given["model"], _count_of(given["n_stages"], given["at"])
    recording = _recorded(model, as_call(given["example"]), "auto_split")
    _refuse(model, recording.problems)
    n_calls = len(recording.calls)
    remedy = f"the example makes {n_calls} calls of {type(model).__name__}'s modules, so give at most {n_calls} stages"
    refuse_unless(count <= n_calls, "auto_split", "n_stages", count, remedy)
    if given["at"] is None:
        refuse_unmeasurable(model, given["by"])
    return count, recording


def _count_of(n_stages: int | None, at: Sequence[str] | None) -> int:
    """Return how many stages are asked for."""
    refuse_below(1, "auto_split", n_stages=n_stages)
    count = n_stages if at is None else len(at) + 1
    refuse_unless(count is not None, "auto_split", "n_stages", n_stages, "give a number, or names in at=")
    remedy = f"the names in at= make {count} stages, so give {count}, or leave it out"
    refuse_unless(n_stages in (None, count), "auto_split", "n_stages", n_stages, remedy)
    return cast(int, count)


class _DoesNotRun(ValueError):
    def __init__(self, problem: Problem) -> None:
        super().__init__(f"example: {problem}")
        self.problem = problem


def _recorded(model: nn.Module, example: Example, function: str) -> Recording:
    wrapped = problem_of_wrappers(model, "the model")
    refuse_unless(wrapped is None, function, "model", model, str(wrapped))
    if (name := replaced_on_the_way(model)) is not None:
        return Recording({}, problems=[_replaced(model.get_submodule(name), name)])
    try:
        recording = record(model, example)
    except Exception as error:  # whatever a foreign forward raises
        raise _DoesNotRun(Problem("does not run", _line_of(error), _said(error), "give arguments it takes")) from error
    if len(recording.calls) < 2:
        code = type(model).forward.__code__
        what = f"{type(model).__name__} calls {len(recording.calls)} module on its way, so there is no place to cut"
        recording.problems.append(
            Problem("one piece", f"{code.co_filename}:{code.co_firstlineno}", what, "compute in modules of its own")
        )
    return recording


def _replaced(part: nn.Module, name: str) -> Problem:
    code = type(part).forward.__code__
    what = (
        f"the forward of {name or 'the model'!r} was replaced (compiled, or hooked), and each stage would run all of it"
    )
    remedy = "cut the model first, and compile or hook the stages"
    return Problem("replaced forward", f"{code.co_filename}:{code.co_firstlineno}", what, remedy)


def _refuse(model: nn.Module, problems: Sequence[Problem]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more: see explain)" if len(problems) > 1 else ""
        raise ValueError(f"model: {type(model).__name__} cannot be cut: {problems[0]}{more}")


def _ties_of(stages: Sequence[nn.Module]) -> tuple[Mapping[int, str], ...]:
    """Return for each parameter that lies in several stages its name in each."""
    places: dict[int, dict[int, str]] = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            places.setdefault(id(parameter), {})[index] = name
    return tuple(tie for tie in places.values() if len(tie) > 1)


def _differences(model: nn.Module, stages: Sequence[nn.Module], recording: Recording) -> list[Problem]:
    """Return whether the stages, one after another, give what the model gives, random numbers included."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return []
    args, kwargs = recording.example
    with torch.no_grad():
        with left_as_it_was(model):
            expected = _tensors(model(*args, **kwargs))
        with left_as_it_was(model):
            value = stages[0](*args, **kwargs)
            for stage in stages[1:]:
                value = stage(**value)
    same = all(_is_equal(a, b) for a, b in zip(expected, _tensors(value), strict=True))
    code = getattr(type(model).forward, "__wrapped__", type(model).forward).__code__
    what = "the stages, one after another, do not give what the model gives"
    remedy = "look for values that modules hand on otherwise than by arguments and results"
    return [] if same else [Problem("differs", f"{code.co_filename}:{code.co_firstlineno}", what, remedy)]


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _line_of(error: Exception) -> str:
    """Return the innermost line of the traceback that is not torch's."""
    line, traceback = "?", error.__traceback__
    while traceback is not None:
        if is_of_model(traceback.tb_frame.f_code.co_filename):
            line = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
