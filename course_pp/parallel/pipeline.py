"""Pipeline parallelism on ``torch.distributed.pipelining``: stages, every schedule torch can run, evaluation.

    inputs ─► stage 0 ──(tensors)──► stage 1 ──► … ──► stage n−1 ─► outputs ─► loss
              rank 0                 rank 1            last rank            │
                 └────────────── mean loss, tied gradients, refusals ───────┘

A step is: agree that every rank's input fits, run torch's schedule, add up the gradients of tied weights, tell every
rank the loss. What torch leaves to the caller and is easy to get wrong is done here: the loss is divided exactly once,
gradients of earlier steps are not rescaled, and all ranks refuse a bad batch together instead of hanging.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import WrongArgument, check_arguments, checked, refuse_bad_timeout, refuse_unless
from course_pp.collective import Ranks
from course_pp.loss import LossFn, TokenLoss, average_over, counted, divisor_of, loss_share
from course_pp.module_extras import called_once, problem_of_hooks
from course_pp.parallel._torch import tree_flatten, tree_map, tree_unflatten
from course_pp.parallel.agreeing import agree, everyone_of
from course_pp.parallel.batch import Batch
from course_pp.parallel.boundary import TensorMeta, merge, meta_of
from course_pp.parallel.forward_only import forward_only
from course_pp.parallel.fsdp import reshard
from course_pp.parallel.mesh import has_dp_mesh, is_rank_zero
from course_pp.parallel.model_stage import ModelStage
from course_pp.parallel.replaced_forward import Compiled, Recomputed, has_replaced
from course_pp.parallel.schedules import check_microbatches, splits_backward, torch_schedule
from course_pp.parallel.step_failure import Witness
from course_pp.parallel.tied import SharedName, TiedWeights
from course_pp.schedule import Schedule

__all__ = ["PipelineSchedule", "build_pipeline_schedule"]

_LIMIT_S = 300.0  # one rank may take minutes longer than another to build its stages


def build_pipeline_schedule(
    stage: ModelStage | Sequence[ModelStage],
    n_microbatches: int,
    loss_fn: LossFn | TokenLoss,
    schedule: str | Schedule = "1f1b",
    *,
    tied: Iterable[SharedName] | None = None,
    timeout_s: float = _LIMIT_S,
) -> "PipelineSchedule":
    """Put stages under a schedule. Call it on every rank of the mesh at once: the ranks compare what they were given.

    Args:
        stage: this rank's stage, or the list of its stages for multi-stage schedules, placed as
            :func:`get_stage_indices` says.
        n_microbatches: microbatches in a batch.
        loss_fn: ``loss_fn(output, target)`` gives the mean loss of one microbatch. A :class:`TokenLoss` is averaged
            over the counted tokens of the whole batch instead of over microbatches. The loss is divided before the
            backward, where torch divides gradients after it: a gradient that an autograd function of your own adds
            must be divided too, by ``n_microbatches`` where microbatches weigh alike. A loss scaled by
            ``torch.amp.GradScaler`` needs ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``, or a stage
            that finds an infinity skips its step alone.
        schedule: one of :func:`schedule_names`, torch's class name, or an order of your own, whose stages are placed
            and whose microbatches are numbered as it says.
        tied: weights that several stages share: for each the parameter's name by stage,
            ``[{0: "embed.weight", 3: "head.weight"}]``, or its names in the whole model, as :func:`find_ties` lists
            them. This package's model knows its ties. For others, None refuses stages whose values look tied, and
            ``[]`` says that nothing is tied. A further weight with the values of a declared tie is refused too.
        timeout_s: the longest that a rank waits here for the others. Steps wait as long as the process group says.

    Raises:
        RankMissing: if a rank has ended or does not come.
        TypeError: if given something other than stages from :func:`build_pipeline_stage`.
        ValueError: for an unknown schedule or one that torch cannot run, stages placed otherwise than it needs, a
            number of microbatches it cannot run, stages that do not fit one another, ties that do not exist, or ranks
            that were given different pipelines.
    """
    given = locals()
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    problem = _problem_of_stages(stages) or _problem_of_arguments(given)
    group = everyone_of(stages[0]) if stages and isinstance(stages[0], ModelStage) else None
    Ranks(group, limit_s=float(timeout_s) if problem is None else _LIMIT_S).refuse(problem)
    stages.sort(key=lambda s: s.stage_index)
    tied = None if tied is None else list(tied)
    rows = agree(stages, n_microbatches, schedule, tied, float(timeout_s))
    for each in stages if splits_backward(schedule) != "none" else ():
        each.defers = not each.can_split and not has_replaced(each.submod, Compiled)
    if splits_backward(schedule) != "none" and any(s.can_split and has_replaced(s.submod, Recomputed) for s in stages):
        _warn_of_recomputation(schedule)
    return PipelineSchedule(stages, n_microbatches, loss_fn, schedule, rows)


def _problem_of_stages(stages: Sequence[object]) -> TypeError | None:
    if stages and all(isinstance(stage, ModelStage) for stage in stages):
        return None
    return TypeError(
        f"stage must come from build_pipeline_stage, not {[type(s).__name__ for s in stages]}: cut the model with "
        "build_stage_module, or by hand, and wrap this rank's stages"
    )


def _problem_of_arguments(given: dict[str, Any]) -> TypeError | None:
    try:
        check_arguments(build_pipeline_schedule, given)
        refuse_bad_timeout("build_pipeline_schedule", given["timeout_s"])
        counted(given["loss_fn"])
    except TypeError as problem:
        return problem
    return None


def _warn_of_recomputation(schedule: str | Schedule) -> None:
    """Warn, on one rank, that a split backward multiplies recomputation."""
    if is_rank_zero():
        warnings.warn(
            f"schedule={schedule!r} splits backward in two, and torch's weight-gradient half runs the forward of a "
            "checkpointed module again for each of its parameters: results are right, but far slower than without "
            "checkpointing. Use a schedule that does not split, such as 'interleaved_1f1b', or apply_ac(..., 'none')",
            stacklevel=3,
        )


def _data_parallel_groups(device_mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    if device_mesh is None or not has_dp_mesh(device_mesh):
        return []
    names = [name for name in device_mesh.mesh_dim_names or () if name.startswith("dp_")]
    return [device_mesh.get_group(name) for name in names]


@checked
class PipelineSchedule:
    """A schedule ready to train and evaluate; made by :func:`build_pipeline_schedule`.

    Attributes:
        stages: this rank's stages, first to last.
        ties: for each weight that several stages share its name by stage.
    """

    def __init__(
        self,
        stages: Sequence[ModelStage],
        n_microbatches: int,
        loss_fn: LossFn | TokenLoss,
        schedule: str | Schedule,
        rows: int,
    ) -> None:
        self.stages = list(stages)
        refuse_unless(bool(stages), "PipelineSchedule", "stages", stages, "use build_pipeline_schedule")
        refuse_unless(rows >= 1, "PipelineSchedule", "rows", rows, "give the rows of a microbatch, at least 1")
        check_microbatches(schedule, n_microbatches, stages[0].num_stages, stages[0].group_size)
        self.n_microbatches = n_microbatches
        self._loss, self._counts_tokens = counted(loss_fn), isinstance(loss_fn, TokenLoss)
        self._batch = Batch(self.stages, n_microbatches, rows, self._counts_tokens)
        self._group = stages[0].group
        self._everyone = Ranks(everyone_of(stages[0]))
        self._dp_groups = _data_parallel_groups(stages[0].device_mesh)
        self._divisor: torch.Tensor | float = 1.0
        self._schedule = torch_schedule(schedule, self.stages, n_microbatches, self._share_of_loss)
        self._owner = self.stages[0].stage_index_to_group_rank
        self._last_rank = self._owner[stages[0].num_stages - 1]
        modules = {stage.stage_index: stage.submod for stage in self.stages}
        self.ties = self.stages[0].ties
        self._tied = TiedWeights(self.ties, modules, self._owner, Ranks(self._group))
        self._everyone.refuse(self._tied.problem(values=False))
        self._starts_equal = not self.ties
        self._witness = Witness(everyone_of(stages[0]))

    @property
    def modules(self) -> list[torch.nn.Module]:
        """This rank's stages as they are trained, first to last."""
        return [stage.submod for stage in self.stages]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return this rank's parameters, each once, for an optimizer."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    @property
    def holds_last_stage(self) -> bool:
        """True on the rank that computes the loss."""
        return self.stages[-1].is_last

    def step(
        self,
        *inputs: Any,
        target: torch.Tensor | None = None,
        divisor: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward and backward over a whole batch; gradients are added to what is already there.

        Hooks of ``parameter.register_hook`` are called for each microbatch, as in gradient accumulation. Those of
        ``register_post_accumulate_grad_hook`` are called once, when the loss is known: an optimizer may step there.
        None is called if the step fails; what one raises is raised on its own rank.

        Args:
            inputs: the arguments of the first stage for the whole batch, as it was built for one microbatch: its
                tensors have n_microbatches times the rows. Each is cut by rows. Needed where the first stage is,
                ignored elsewhere.
            target: its first dimension is the whole batch; needed where the last stage is, ignored elsewhere.
            divisor: how many tokens (samples, if the loss does not count tokens) of the global batch to average over;
                None counts those of this batch. If the gradients of several steps add up, give the number in all of
                them.
            kwargs: keyword arguments for every stage, such as ``attention_mask``. Each tensor is cut by rows: its first
                dimension must be the whole batch's. One that is as long only by chance, such as the offsets of packed
                sequences, is cut all the same, so give a row of offsets for each sequence. Numbers and strings go
                whole to each microbatch.

        Returns:
            The mean loss of the global batch, a float64 scalar without gradient, the same on every rank.

        Raises:
            ValueError: on every rank, before any message, if an argument does not fit what the stages were built for,
                tied weights are frozen, sharded or filled differently, or an optimizer of torch steps in the backward;
                on one rank, if a stage returns other shapes than it declared.
            StepFailed: on the other ranks, if one raises in mid-step and their messages to it fail.
        """
        problem = problem_of_hooks({stage.stage_index: stage.submod for stage in self.stages})
        inputs, target = self._prepare(inputs, target, kwargs, divisor, problem=problem)
        if not self._starts_equal:
            self._everyone.refuse(self._tied.problem(values=True))
            self._starts_equal = True
        losses: list[torch.Tensor] = []
        with called_once(self.modules), self._witness.watching():
            with self._tied.summed():
                self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **kwargs)
            return self._tell_everyone(losses)

    def eval(self, *inputs: Any, target: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Return the loss as :meth:`step` does, without gradients: at any time between steps, under every schedule.

        Modules stay in the mode they are in: call ``module.eval()`` first if it has dropout.
        """
        inputs, target = self._prepare(inputs, target, kwargs)
        targets = target.chunk(self.n_microbatches) if target is not None else ()
        losses: list[torch.Tensor] = []
        with self._witness.watching():
            self._forward(inputs, kwargs, lambda i, output: losses.append(self._share_of_loss(output, targets[i])))
            return self._tell_everyone(losses)

    def evaluate(self, *inputs: Any, on: Literal["last", "all"] = "last", **kwargs: Any) -> Any:
        """Return what the model returns for a whole batch: forwards only, without gradients or a loss.

        Args:
            inputs, kwargs: as in :meth:`step`.
            on: who gets it: the rank that holds the last stage, or every rank of the pipeline.

        Returns:
            The last stage's output for the whole batch, in its own containers: tensors are concatenated along their
            first dimension, scalars stacked. None on other ranks.

        Raises:
            ValueError: on every rank, as :meth:`step`; or for another ``on``, or one that differs between ranks.
        """
        problem = None if on in ("last", "all") else f"on={on!r} must be 'last' or 'all'"
        inputs, _ = self._prepare(inputs, None, kwargs, problem=problem, needs_target=False)
        self._everyone.require_equal({"on": on})
        outputs: list[Any] = []
        with self._witness.watching():
            self._forward(inputs, kwargs, lambda _, output: outputs.append(output))
            output = merge(outputs) if outputs else None
            return self._from_last(output) if on == "all" else output

    def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], consume: Any) -> None:
        """Take every microbatch through this rank's stages, without gradients."""
        forward_only(
            self.stages,
            self._batch.cut(inputs) if self.stages[0].is_first else None,
            self._batch.cut(kwargs),
            consume,
        )
        for stage in self.stages:
            reshard(stage.submod)  # forward alone may keep gathered parameters, in place of those that are trained

    def _from_last(self, output: Any) -> Any:
        """Return the last stage's ``output``, on every rank of the pipeline."""
        told = Ranks(self._group).gather((tree_map(meta_of, output),) if self.holds_last_stage else None)
        (tree,) = next(one for one in told if one is not None)
        mine, spec = tree_flatten(output if self.holds_last_stage else tree)
        whole = [leaf.empty(self.stages[0].device) if isinstance(leaf, TensorMeta) else leaf for leaf in mine]
        for leaf in whole:
            if isinstance(leaf, torch.Tensor):
                dist.broadcast(leaf, group=self._group, group_src=self._last_rank)
        return tree_unflatten(whole, spec)

    def _share_of_loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_share(self._loss, output, target, self._divisor)

    def _prepare(
        self,
        inputs: tuple[Any, ...],
        target: torch.Tensor | None,
        kwargs: dict[str, Any],
        divisor: float | None = None,
        *,
        problem: str | None = None,
        needs_target: bool = True,
    ) -> tuple[tuple[Any, ...], torch.Tensor | None]:
        """Drop what this rank does not need, refuse what does not fit (all ranks together), and count the tokens."""
        inputs = inputs if self.stages[0].is_first else ()
        target = target if self.stages[-1].is_last and needs_target else None
        problem = problem or self._batch.problem(inputs, target, kwargs, needs_target) or _problem_of_divisor(divisor)
        self._everyone.refuse(problem)
        # torch before 2.12 refuses strides like those of tokens[:, :-1], which contiguous() keeps for a single row.
        inputs = self._batch.copied(inputs)
        if target is not None:
            # Data-parallel ranks have equally many samples, and need not ask one another.
            groups = self._dp_groups if self._counts_tokens or divisor is not None else []
            self._divisor = divisor_of(self._loss, [target], divisor, groups, self.stages[0].device)
        return inputs, target

    def _tell_everyone(self, losses: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=self.stages[0].device)
        if losses:
            loss = torch.stack([share.detach() for share in losses]).sum(dtype=torch.float64)
            average_over(self._dp_groups, loss)
        # A sum with zeros and not a broadcast, which some ranks may leave while others fail in their last backward.
        dist.all_reduce(loss, group=self._group)
        return loss


def _problem_of_divisor(divisor: float | None) -> str | None:
    try:
        check_arguments(PipelineSchedule.step, {"divisor": divisor})
    except WrongArgument as problem:
        return str(problem)
    if divisor is None or 0 < divisor < math.inf:
        return None
    return f"divisor is {divisor!r}: give the number of tokens that the mean is over, above 0"
