"""Pipeline parallelism on ``torch.distributed.pipelining``: stages, every schedule torch ships, evaluation.

    tokens ─► stage 0 ──(batch, seq, dim)──► stage 1 ──► … ──► stage n−1 ─► logits ─► loss
              rank 0                         rank 1            last rank          │
                 └────────────── mean loss, tied gradients, refusals ─────────────┘

A step is: agree that every rank's input fits, run torch's schedule, add up the gradients of tied weights, tell every
rank the loss. What torch leaves to the caller and is easy to get wrong is done here: the loss is divided exactly once,
gradients of earlier steps are not rescaled, and all ranks refuse a bad batch together instead of hanging.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_pp.collective import Ranks
from course_pp.loss import LossFn, TokenLoss, counted, loss_share
from course_pp.parallel.forward_only import forward_only
from course_pp.parallel.fsdp import reshard
from course_pp.parallel.mesh import has_dp_mesh
from course_pp.parallel.recompute import is_checkpointed
from course_pp.parallel.schedules import (
    check_microbatches,
    get_stage_indices,
    runnable,
    splits_backward,
    takes_one_stage,
    torch_class,
)
from course_pp.parallel.stage import ModelStage, problem_of_dtype
from course_pp.parallel.tied import tied_gradients
from course_pp.parallel.world import is_rank_zero

__all__ = ["PipelineSchedule", "build_pipeline_schedule"]


def build_pipeline_schedule(
    stage: ModelStage | Sequence[ModelStage],
    n_microbatches: int,
    loss_fn: LossFn | TokenLoss,
    schedule: str = "1f1b",
    *,
    timeout_s: float = 300.0,
) -> "PipelineSchedule":
    """Put stages under a schedule. Call it on every rank of the mesh at once: the ranks compare what they were given.

    Args:
        stage: this rank's stage, or the list of its stages for multi-stage schedules, placed as
            :func:`get_stage_indices` says.
        n_microbatches: microbatches in a batch.
        loss_fn: ``loss_fn(output, target)`` gives the mean loss of one microbatch. A :class:`TokenLoss` is averaged
            over the counted tokens of the whole batch instead of over microbatches.
        schedule: one of :func:`schedule_names`, or torch's class name.
        timeout_s: the longest that a rank waits here for the others. Steps wait as long as the process group says.

    Raises:
        RankMissing: if a rank has ended or does not come.
        TypeError: if given something other than stages from :func:`build_pipeline_stage`.
        ValueError: for an unknown schedule, stages placed otherwise than it needs, a number of microbatches it cannot
            run, or ranks that were given different pipelines.
    """
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    if not stages or not all(isinstance(s, ModelStage) for s in stages):
        raise TypeError(
            f"stage must come from build_pipeline_stage, not {[type(s).__name__ for s in stages]}: cut the model with "
            "build_stage_module and wrap this rank's stages"
        )
    stages.sort(key=lambda s: s.stage_index)
    everyone = Ranks(_everyone(stages[0]), limit_s=timeout_s)
    everyone.refuse(_problem_of_placement(stages, n_microbatches, schedule))
    everyone.require_equal(
        {
            "schedule": runnable(schedule).name,
            "n_microbatches": n_microbatches,
            "(batch_size, seq_len)": tuple(stages[0].tokens.shape),
            "param_dtype": stages[0].boundary.dtype,
            "config": stages[0].submod.config,
        }
    )
    everyone.refuse(_problem_of_model(stages, Ranks(stages[0].group, limit_s=timeout_s)))
    if splits_backward(schedule) != "none" and any(is_checkpointed(s.submod) for s in stages):
        _warn_of_recomputation(schedule)
    return PipelineSchedule(stages, n_microbatches, loss_fn, schedule)


def _problem_of_placement(stages: Sequence[ModelStage], n_microbatches: int, schedule: str) -> str | None:
    """What keeps this rank's stages from running under ``schedule``, as far as the rank can tell alone."""
    pp_rank, pp_size, n_stages = stages[0].group_rank, stages[0].group_size, stages[0].num_stages
    indices = [s.stage_index for s in stages]
    try:
        expected = get_stage_indices(schedule, pp_rank, pp_size, n_stages // pp_size)
        check_microbatches(schedule, n_microbatches, n_stages, pp_size)
    except ValueError as error:
        return str(error)
    if indices != expected or n_stages != len(indices) * pp_size:
        return (
            f"rank {pp_rank} holds stages {indices} of {n_stages}, but schedule {schedule!r} on {pp_size} ranks places "
            f"stages {expected} there: build those (get_stage_indices lists them)"
        )
    if len({(s.tokens.shape, s.boundary.dtype) for s in stages}) > 1:
        return f"rank {pp_rank} built its stages {indices} for different batches or dtypes: build them alike"
    return None


def _warn_of_recomputation(schedule: str) -> None:
    """Say once what every rank could say."""
    if is_rank_zero():
        warnings.warn(
            f"schedule={schedule!r} splits backward in two, and torch's weight-gradient half runs the forward of a "
            "checkpointed module again for each of its parameters: results are right, but far slower than without "
            "checkpointing. Use a schedule that does not split, such as 'interleaved_1f1b', or apply_ac(..., 'none')",
            stacklevel=3,
        )


def _everyone(stage: ModelStage) -> dist.ProcessGroup | None:
    """All ranks of the mesh: a rank that refuses leaves not only its own pipeline waiting, but also its replicas."""
    return stage.group if stage.device_mesh is None else dist.group.WORLD


def _problem_of_model(stages: Sequence[ModelStage], pipeline: Ranks) -> str | None:
    """What keeps all stages from making up the model: each layer once, both ends of a tie trained or none."""
    mine = [(s.stage_index, s.submod.layer_range, s.submod.tied_weight) for s in stages]
    ranks = pipeline.gather([(i, layers, tie is not None and tie.requires_grad) for i, layers, tie in mine])
    parts = sorted(part for rank in ranks for part in rank)
    end = 0
    for stage, (start, stop), _ in parts:
        if start != end:
            return (
                f"stage {stage} begins with layer {start}, but the stages before it end with layer {end - 1}: "
                "give every rank the same layer_ranges"
            )
        end = stop
    n_layers = stages[0].submod.config.n_layers
    if end != n_layers:
        return f"the stages hold {end} of {n_layers} layers: give every rank the same layer_ranges"
    if sum(trains for *_, trains in parts) == 1:
        return "one end of the tied embedding is frozen and the other is not: freeze both ends, or neither"
    return None


def _problem_of_divisor(divisor: float | None) -> str | None:
    if divisor is None or 0 < divisor < math.inf:
        return None
    return f"divisor is {divisor!r}: give the number of tokens that the mean is over, above 0"


def _data_parallel_groups(device_mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    if device_mesh is None or not has_dp_mesh(device_mesh):
        return []
    names = [name for name in device_mesh.mesh_dim_names or () if name.startswith("dp_")]
    return [device_mesh.get_group(name) for name in names]


class PipelineSchedule:
    """A schedule ready to train and evaluate; made by :func:`build_pipeline_schedule`."""

    def __init__(
        self,
        stages: Sequence[ModelStage],
        n_microbatches: int,
        loss_fn: LossFn | TokenLoss,
        schedule: str,
    ) -> None:
        self.stages = list(stages)
        self.n_microbatches = n_microbatches
        self._loss, self._counts_tokens = counted(loss_fn), isinstance(loss_fn, TokenLoss)
        self._group = stages[0].group
        self._everyone = Ranks(_everyone(stages[0]))
        self._dp_groups = _data_parallel_groups(stages[0].device_mesh)
        self._divisor: torch.Tensor | float = 1.0
        self._schedule = torch_class(schedule)(
            self.stages[0] if takes_one_stage(schedule) else self.stages,
            n_microbatches,
            loss_fn=self._share_of_loss,
            scale_grads=False,  # the loss is divided instead: torch would divide gradients of earlier steps again
        )
        owner = self.stages[0].stage_index_to_group_rank
        self._first_rank, self._last_rank = owner[0], owner[stages[0].num_stages - 1]

    @property
    def holds_last_stage(self) -> bool:
        """True on the rank that computes the loss."""
        return self.stages[-1].is_last

    def step(
        self,
        inputs: torch.Tensor | None = None,
        *,
        target: torch.Tensor | None = None,
        divisor: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward and backward over a whole batch; gradients are added to what is already there.

        Args:
            inputs: tokens (n_microbatches · batch_size, seq_len) int64; needed where the first stage is, ignored
                elsewhere.
            target: (n_microbatches · batch_size, seq_len); needed where the last stage is, ignored elsewhere.
            divisor: over how many tokens (samples, if the loss does not count tokens) of the global batch the mean is;
                None is over those of this batch. Where the gradients of several steps add up, give the number in all.
            kwargs: keyword arguments for every stage, such as ``attention_mask``. Tensors have the whole batch as
                their first dimension and are cut into microbatches.

        Returns:
            The mean loss of the global batch, a float64 scalar without gradient, the same on every rank.

        Raises:
            ValueError: on every rank, before any message, if an argument does not fit the declared shapes.
        """
        inputs, target = self._prepare(inputs, target, kwargs, divisor)
        losses: list[torch.Tensor] = []
        with tied_gradients(*self._tie(), group=self._group):
            args = () if inputs is None else (inputs,)
            self._schedule.step(*args, target=target, losses=losses, return_outputs=False, **kwargs)
        return self._tell_everyone(losses)

    def eval(
        self, inputs: torch.Tensor | None = None, *, target: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """The same as :meth:`step` without gradients: before, between or after training steps, for every schedule.

        Modules stay in the mode they are in: call ``module.eval()`` first if it has dropout.
        """
        inputs, target = self._prepare(inputs, target, kwargs)
        losses: list[torch.Tensor] = []
        targets = target.chunk(self.n_microbatches) if target is not None else ()
        cut = {
            key: value.chunk(self.n_microbatches) if isinstance(value, torch.Tensor) else [value] * self.n_microbatches
            for key, value in kwargs.items()
        }
        forward_only(
            self.stages,
            inputs=inputs.chunk(self.n_microbatches) if inputs is not None else None,
            kwargs=[{key: values[i] for key, values in cut.items()} for i in range(self.n_microbatches)],
            boundary=self.stages[0].boundary,
            consume=lambda i, output: losses.append(self._share_of_loss(output, targets[i])),
        )
        for stage in self.stages:
            reshard(stage.submod)  # forward alone may keep gathered parameters, in place of those that are trained
        return self._tell_everyone(losses)

    def _share_of_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_share(self._loss, output, target, self._divisor)

    def _divisor_of(self, target: torch.Tensor, divisor: float | None) -> torch.Tensor | float:
        """What the microbatches' sums are divided by.

        Data-parallel ranks average their gradients, so this is the global batch's number of tokens over theirs.
        """
        if divisor is not None:
            return divisor / math.prod(dist.get_world_size(group) for group in self._dp_groups)
        if not self._counts_tokens:
            return float(len(target))  # as many on every data-parallel rank
        count = self._loss.count(target).double()
        self._average_over_data(count)
        return torch.where(count > 0, count, 1.0)

    def _average_over_data(self, value: torch.Tensor) -> None:
        for group in self._dp_groups:
            dist.all_reduce(value, group=group)
            value /= dist.get_world_size(group)

    def _tie(self) -> tuple[list[torch.nn.Parameter], int | None]:
        ends = [stage.submod.tied_weight for stage in self.stages]
        mine = [end for end in ends if end is not None]
        if len(mine) != 1:
            return mine, None
        return mine, self._last_rank if self.stages[0].is_first else self._first_rank

    def _prepare(
        self,
        inputs: torch.Tensor | None,
        target: torch.Tensor | None,
        kwargs: dict[str, Any],
        divisor: float | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Drop what this rank does not need, refuse what does not fit (all ranks together), and count the tokens."""
        inputs = inputs if self.stages[0].is_first else None
        target = target if self.stages[-1].is_last else None
        self._everyone.refuse(self._problem(inputs, target, kwargs) or _problem_of_divisor(divisor))
        if inputs is not None:
            # torch before 2.12 refuses strides like those of tokens[:, :-1], which contiguous() keeps for a single row.
            inputs = inputs.clone(memory_format=torch.contiguous_format)
        if target is not None:
            self._divisor = self._divisor_of(target, divisor)
        return inputs, target

    def _problem(self, inputs: torch.Tensor | None, target: torch.Tensor | None, kwargs: dict[str, Any]) -> str | None:
        problems = [problem_of_dtype(stage.submod, stage.boundary.dtype) for stage in self.stages]
        if self.stages[0].is_first:
            problems.append(self._problem_of_tokens("inputs", inputs, "first"))
        if self.stages[-1].is_last:
            problems.append(self._problem_of_tokens("target", target, "last"))
        problems += [self._problem_of_keyword(name, value) for name, value in kwargs.items()]
        return next((problem for problem in problems if problem is not None), None)

    def _problem_of_keyword(self, name: str, value: object) -> str | None:
        batch = self.n_microbatches * self.stages[0].tokens.shape[0]
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 or value.shape[0] != batch:
                return (
                    f"keyword argument {name} has shape {tuple(value.shape)}, but its first dimension must be the "
                    f"whole batch, {batch}: expand it"
                )
        elif value is not None and not isinstance(value, bool | int | float | str):
            return (
                f"keyword argument {name} is a {type(value).__name__}: pass tensors whose first dimension is the "
                "whole batch, or plain numbers and strings, each under a name of its own"
            )
        return None

    def _problem_of_tokens(self, name: str, tokens: object, stage: str) -> str | None:
        """What is wrong with ``inputs`` or ``target``."""
        size, seq_len = self.stages[0].tokens.shape
        batch, vocab_size = self.n_microbatches * size, self.stages[0].submod.config.vocab_size
        if tokens is None:
            return f"{name} is missing on the rank that holds the {stage} stage"
        if not isinstance(tokens, torch.Tensor):
            return f"{name} is a {type(tokens).__name__}: pass a tensor of shape ({batch}, {seq_len})"
        if tokens.dim() < 2 or tokens.shape[0] != batch:
            return (
                f"{name} has shape {tuple(tokens.shape)}, but the pipeline was built for n_microbatches × batch_size = "
                f"{self.n_microbatches} × {size} = {batch}: drop or pad the remainder, or rebuild it"
            )
        if tokens.shape[1] != seq_len:
            return f"{name} has shape {tuple(tokens.shape)}, but the pipeline was built for seq_len={seq_len}"
        if name == "target" and not self._counts_tokens:
            return None  # what it may be is the loss function's own business
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            return (
                f"{name} is {tokens.dtype} of shape {tuple(tokens.shape)}: pass token ids, int64 ({batch}, {seq_len})"
            )
        if name == "inputs" and tokens.device.type == "cpu":  # on a GPU, looking would wait for the device
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocab_size:
                return f"inputs holds token ids from {low} to {high}, but vocab_size={vocab_size}: use its tokenizer"
        return None

    def _tell_everyone(self, losses: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=self.stages[0].device)
        if losses:
            loss = torch.stack([share.detach() for share in losses]).sum(dtype=torch.float64)
            self._average_over_data(loss)
        dist.broadcast(loss, group=self._group, group_src=self._last_rank)
        return loss
