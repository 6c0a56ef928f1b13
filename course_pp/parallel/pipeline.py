"""Pipeline parallelism on ``torch.distributed.pipelining``: stages, every schedule torch ships, evaluation.

    tokens ─► stage 0 ──(batch, seq, dim)──► stage 1 ──► … ──► stage n−1 ─► logits ─► loss
              rank 0                         rank 1            last rank          │
                 └────────────── mean loss, tied gradients, refusals ─────────────┘

A step is: agree that every rank's input fits, run torch's schedule, add up the gradients of tied weights, tell every
rank the loss. What torch leaves to the caller and is easy to get wrong is done here: the loss is divided exactly once,
gradients of earlier steps are not rescaled, and all ranks refuse a bad batch together instead of hanging.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from course_pp.model import PipelineStageModule
from course_pp.parallel._torch import LocalNeighboursStage
from course_pp.parallel.agreement import agree, agree_on
from course_pp.parallel.forward_only import forward_only
from course_pp.parallel.mesh import get_pp_mesh
from course_pp.parallel.schedules import check_microbatches, find_schedule, get_stage_indices
from course_pp.parallel.tied import tied_gradients

__all__ = ["PipelineSchedule", "TokenLoss", "build_pipeline_schedule", "build_pipeline_stage"]


@runtime_checkable
class TokenLoss(Protocol):
    """A loss that averages over tokens and can say over how many, so that unequal microbatches are weighted right."""

    def total(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Sum of the loss over the tokens of ``target`` that count; a scalar."""

    def count(self, target: torch.Tensor) -> torch.Tensor:
        """Number of tokens of ``target`` that count; a scalar."""


class ModelStage(LocalNeighboursStage):
    """torch's stage, with the shapes it was declared for."""

    submod: PipelineStageModule

    def __init__(
        self, module: PipelineStageModule, tokens: torch.Tensor, boundary: torch.Tensor, **kwargs: Any
    ) -> None:
        first, last = module.stage_id == 0, module.stage_id == module.num_stages - 1
        logits = torch.empty(*tokens.shape, module.config.vocab_size, dtype=boundary.dtype, device="meta")
        super().__init__(
            module,
            module.stage_id,
            module.num_stages,
            input_args=tokens if first else boundary,
            output_args=logits if last else boundary,
            **kwargs,
        )
        self.tokens = tokens
        self.boundary = boundary


def build_pipeline_stage(
    stage_module: PipelineStageModule,
    device_mesh: DeviceMesh | None,
    device: torch.device | str,
    batch_size: int,
    seq_len: int,
    param_dtype: torch.dtype = torch.bfloat16,
) -> ModelStage:
    """Wrap a stage module for torch's schedules, with its shapes declared up front.

    Declared shapes need no trial run: torch would otherwise infer them by one extra forward, which changes buffers.

    Args:
        stage_module: one stage of the model, already on ``device``.
        device_mesh: the mesh of :func:`init_distributed`; without a ``pp`` dimension this rank holds every stage.
        batch_size: sequences in one *microbatch*.
        seq_len: tokens in a sequence.
        param_dtype: dtype of the activations and gradients that cross stage boundaries.

    Raises:
        TypeError: if ``stage_module`` is a whole model.
        ValueError: if a size is not positive, or the module computes in another dtype than ``param_dtype``: the
            neighbour would read the message's bytes as something else.
        RuntimeError: if there is no process group.
    """
    if not isinstance(stage_module, PipelineStageModule):
        raise TypeError(
            f"a pipeline stage must be a PipelineStageModule, not {type(stage_module).__name__}: "
            "cut the model with build_stage_module(config, stage, n_stages)"
        )
    for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number of at least 1")
    if seq_len > stage_module.config.max_seq_len:
        raise ValueError(f"seq_len={seq_len} is over the model's max_seq_len={stage_module.config.max_seq_len}")
    if not dist.is_initialized():
        raise RuntimeError("no process group: call init_distributed(config) before build_pipeline_stage")
    dtypes = {p.dtype for p in stage_module.parameters()}
    if dtypes - {param_dtype}:
        raise ValueError(
            f"stage {stage_module.stage_id} computes in {', '.join(sorted(map(str, dtypes)))}, but param_dtype "
            f"declares that {param_dtype} crosses its boundary: pass the module's own dtype, or convert it first"
        )
    pp_mesh = get_pp_mesh(device_mesh)
    group = None
    if pp_mesh is not None:
        group = pp_mesh.get_group()
    elif dist.get_world_size() > 1:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return ModelStage(
        stage_module,
        tokens=torch.empty(batch_size, seq_len, dtype=torch.int64, device="meta"),
        boundary=torch.empty(
            batch_size, seq_len, stage_module.config.dim, dtype=param_dtype, device="meta", requires_grad=True
        ),
        device=torch.device(device),
        group=group,
    )


def build_pipeline_schedule(
    stage: ModelStage | Sequence[ModelStage],
    n_microbatches: int,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    schedule: str = "1f1b",
) -> "PipelineSchedule":
    """Put stages under a schedule. Call it on every pipeline rank at once: the ranks compare what they were given.

    Args:
        stage: this rank's stage, or the list of its stages for multi-stage schedules, placed as
            :func:`get_stage_indices` says.
        n_microbatches: microbatches in a batch.
        loss_fn: ``loss_fn(output, target)`` gives the mean loss of one microbatch. A :class:`TokenLoss` is averaged
            over the counted tokens of the whole batch instead of over microbatches.
        schedule: one of :func:`schedule_names`, or torch's class name.

    Raises:
        TypeError: if given something other than stages from :func:`build_pipeline_stage`.
        ValueError: for an unknown schedule, stages placed otherwise than it needs, a number of microbatches it cannot
            run, or ranks that were given different pipelines.
    """
    stages = [stage] if isinstance(stage, PipelineStage) else list(stage)
    if not stages or not all(isinstance(s, ModelStage) for s in stages):
        raise TypeError(f"stage must come from build_pipeline_stage, not {type(stage).__name__}")
    stages.sort(key=lambda s: s.stage_index)
    for other in stages[1:]:
        other.group = stages[0].group  # without a pp dimension, each stage came with a group of this rank alone
    group, pp_size, n_stages = stages[0].group, stages[0].group_size, stages[0].num_stages
    pp_rank, indices = stages[0].group_rank, [s.stage_index for s in stages]
    expected = get_stage_indices(schedule, pp_rank, pp_size, n_stages // pp_size)
    problem = None
    if indices != expected or n_stages != len(indices) * pp_size:
        problem = (
            f"rank {pp_rank} holds stages {indices} of {n_stages}, but schedule {schedule!r} on {pp_size} ranks places "
            f"stages {expected} there: build those (get_stage_indices lists them)"
        )
    agree(problem, group)
    check_microbatches(schedule, n_microbatches, n_stages, pp_size)
    tokens, boundary = stages[0].tokens, stages[0].boundary
    agree_on(
        {
            "schedule": find_schedule(schedule).torch_class,
            "n_microbatches": n_microbatches,
            "(batch_size, seq_len)": tuple(tokens.shape),
            "param_dtype": boundary.dtype,
            "config": stages[0].submod.config,
        },
        group,
    )
    return PipelineSchedule(stages, n_microbatches, loss_fn, schedule)


class PipelineSchedule:
    """A schedule ready to train and evaluate; made by :func:`build_pipeline_schedule`."""

    def __init__(
        self,
        stages: Sequence[ModelStage],
        n_microbatches: int,
        loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        schedule: str,
    ) -> None:
        kind = find_schedule(schedule)
        self.stages = list(stages)
        self.n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._group = stages[0].group
        self._divisor: torch.Tensor | float = float(n_microbatches)
        self._schedule = kind.build(
            self.stages if kind.multi_stage else self.stages[0],
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
        self, inputs: torch.Tensor | None = None, *, target: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Forward and backward over a whole batch; gradients are added to what is already there.

        Args:
            inputs: tokens (n_microbatches · batch_size, seq_len) int64; needed where the first stage is, ignored
                elsewhere.
            target: (n_microbatches · batch_size, seq_len); needed where the last stage is, ignored elsewhere.
            kwargs: keyword arguments for every stage, such as ``attention_mask``. Tensors have the whole batch as
                their first dimension and are cut into microbatches.

        Returns:
            The mean loss of the batch, a scalar without gradient, the same on every pipeline rank.

        Raises:
            ValueError: on every rank, before any message, if an argument does not fit the declared shapes.
        """
        inputs, target = self._check(inputs, target, kwargs)
        losses: list[torch.Tensor] = []
        if target is not None:
            self._divisor = self._count(target)
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
        inputs, target = self._check(inputs, target, kwargs)
        targets = target.chunk(self.n_microbatches) if target is not None else ()
        losses: list[torch.Tensor] = []
        if target is not None:
            self._divisor = self._count(target)
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
        return self._tell_everyone(losses)

    def _share_of_loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """What one microbatch adds to the batch's mean loss. The only place where the loss is divided."""
        if isinstance(self._loss_fn, TokenLoss):
            return self._loss_fn.total(output, target) / self._divisor
        return self._loss_fn(output, target) / self._divisor

    def _count(self, target: torch.Tensor) -> torch.Tensor | float:
        if isinstance(self._loss_fn, TokenLoss):
            return self._loss_fn.count(target).clamp(min=1)
        return float(self.n_microbatches)

    def _tie(self) -> tuple[list[torch.nn.Parameter], int | None]:
        ends = [stage.submod.tied_weight for stage in self.stages]
        mine = [end for end in ends if end is not None]
        if len(mine) != 1:
            return mine, None
        return mine, self._last_rank if self.stages[0].is_first else self._first_rank

    def _check(
        self, inputs: torch.Tensor | None, target: torch.Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Drop what this rank does not need; refuse, on all ranks together, what does not fit."""
        inputs = inputs if self.stages[0].is_first else None
        target = target if self.stages[-1].is_last else None
        agree(self._problem(inputs, target, kwargs), self._group)
        if inputs is not None:
            inputs = inputs.contiguous()  # torch before 2.12 refuses a view, such as tokens[:, :-1]
        return inputs, target

    def _problem(self, inputs: torch.Tensor | None, target: torch.Tensor | None, kwargs: dict[str, Any]) -> str | None:
        size, seq_len = self.stages[0].tokens.shape
        batch = self.n_microbatches * size
        needed = {"inputs": (self.stages[0].is_first, inputs), "target": (self.stages[-1].is_last, target)}
        for name, (is_needed, tensor) in needed.items():
            if not is_needed:
                continue
            if tensor is None:
                return f"{name} is missing on the rank that holds the {'first' if name == 'inputs' else 'last'} stage"
            if tensor.dim() < 2 or tensor.shape[0] != batch:
                return (
                    f"{name} has shape {tuple(tensor.shape)}, but the pipeline was built for n_microbatches × "
                    f"batch_size = {self.n_microbatches} × {size} = {batch}: drop or pad the remainder, or rebuild it"
                )
            if tensor.shape[1] != seq_len:
                return f"{name} has shape {tuple(tensor.shape)}, but the pipeline was built for seq_len={seq_len}"
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and (value.dim() == 0 or value.shape[0] != batch):
                return (
                    f"keyword argument {name} has shape {tuple(value.shape)}, but its first dimension must be the "
                    f"whole batch, {batch}: expand it"
                )
        return None

    def _tell_everyone(self, losses: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=self.stages[0].device)
        if losses:
            loss = torch.stack([share.detach() for share in losses]).sum(dtype=torch.float64)
        dist.broadcast(loss, group=self._group, group_src=self._last_rank)
        return loss
