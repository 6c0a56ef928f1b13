"""Pipeline parallelism on ``torch.distributed.pipelining``.

It has stages, every schedule torch can run, and evaluation.

    inputs ─► stage 0 ──(tensors)──► stage 1 ──► … ──► stage n−1 ─► outputs ─► loss
              rank 0                 rank 1            last rank            │
                 └────────────── mean loss, tied gradients, refusals ───────┘

A step is: agree that every rank's input fits, run torch's schedule, add up the gradients of tied
weights, tell every rank the loss.
"""

import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from course_pp.base.arguments import check_arguments, refuse_bad_timeout
from course_pp.base.ranks import Ranks
from course_pp.base.torch_private import (
    all_reducing_as_set,
    carries_integers,
    run_step,
    tree_flatten,
    tree_map,
    tree_unflatten,
    uncompiled,
)
from course_pp.model import PipelineStageModule
from course_pp.parallel.batch import Batch, Microbatches, RankBatch, problem_between
from course_pp.parallel.crossing import Crossings, kinds_of
from course_pp.parallel.fsdp import reshard
from course_pp.parallel.mesh import get_dp_rank, has_dp_mesh
from course_pp.parallel.replaced_forward import Recomputed, has_replaced, is_compiled
from course_pp.parallel.schedules import (
    get_stage_indices,
    name_of,
    order_of,
    runnable,
    splits_backward,
    torch_schedule,
)
from course_pp.parallel.stage import ModelStage, find_outputs
from course_pp.parallel.tied_weights import SharedName, TiedWeights, agree_on_ties
from course_pp.parallel.world import is_rank_zero
from course_pp.schedule import Schedule
from course_pp.step.batch import ChunkSpec, Given
from course_pp.step.failure import StepFailed
from course_pp.step.hooks import called_once, problem_of_hooks
from course_pp.step.loss import (
    LossFn,
    Sums,
    TokenLoss,
    added_sums,
    attached_sums,
    average_over,
    counted,
    divisor_of,
    loss_share,
    weights_of,
)
from course_pp.step.random_streams import RandomStreams, move_on
from course_pp.step.scaler import MeshGradScaler
from course_pp.step.step import AnyPipeline
from course_pp.step.values import TensorMeta, ValueMeta, as_value, call, merge, meta_of, rows_of

_LIMIT_S = 300.0  # one rank may take minutes longer than another to build its stages


def build_pipeline_schedule(
    stage: ModelStage | Sequence[ModelStage],
    n_microbatches: int,
    loss_fn: LossFn | TokenLoss,
    schedule: str | Schedule = "1f1b",
    *,
    tied: Iterable[SharedName] | None = None,
    scaler: MeshGradScaler | None = None,
    timeout_s: float = _LIMIT_S,
) -> "PipelineSchedule":
    """Put stages under a schedule.

    Call it on every rank of the mesh at once: the ranks compare the arguments they were given.

    Args:
        stage: this rank's stage, or the list of its stages for multi-stage schedules, placed as
            :func:`get_stage_indices` says.
        n_microbatches: microbatches in a batch.
        loss_fn: ``loss_fn(output, target)`` gives the mean loss of one microbatch. A
            :class:`TokenLoss` is averaged over the counted tokens of the whole batch instead of
            over microbatches. The loss is divided before the backward, where torch divides
            gradients after it: a gradient that an autograd function of your own adds must be
            divided too, by ``n_microbatches`` where microbatches weigh alike; :func:`attach_loss`
            does so.
        schedule: one of :func:`schedule_names`, torch's class name, or an order of your own, whose
            stages are placed and whose microbatches are numbered as it says.
        tied: weights that several stages share: for each the parameter's name by stage, ``[{0:
            "embed.weight", 3: "head.weight"}]``, or its names in the whole model, as
            :func:`find_ties` lists them. This package's model knows its ties. For others, None
            refuses stages whose values look tied, with a list of all such weights. Layers that are
            copied or seeded alike pass if a stage holds two of them, or if both stages begin with
            them. ``[]`` says that nothing is tied. Two further weights that look like one, or like
            a declared tie, are refused too.
        scaler: scales the loss and attached losses in the backward, for float16; the loss returned
            is not scaled.
        timeout_s: the longest that a rank waits here for the others. Steps wait as long as the
            process group says.

    Raises:
        RankMissing: if a rank has ended or does not come.
        ValueError: on every rank, for stages that do not fit the schedule or one another, or ranks
            that were given different pipelines.
    """
    stages = list(stage) if isinstance(stage, Sequence) else [stage]
    problem = _problem_of_arguments(stages, locals())
    group = None
    if stages and isinstance(stages[0], ModelStage):
        group = _everyone_of(stages[0])
    # A time limit that is refused cannot be waited for.
    limit_s = float(timeout_s) if problem is None else _LIMIT_S
    Ranks(group, limit_s=limit_s).refuse(problem)

    stages.sort(key=lambda s: s.stage_index)
    tied = None if tied is None else list(tied)
    stages, rows = _agree(
        stages, n_microbatches, schedule=schedule, tied=tied, scaler=scaler, limit_s=limit_s
    )

    splits = splits_backward(schedule) != "none"
    for each in stages:
        each.can_split = each.can_split and splits
        each.defers = splits and not each.can_split and not is_compiled(each.submod)
    slow = [s for s in stages if s.can_split and has_replaced(s.submod, Recomputed)]
    if slow and is_rank_zero():
        warnings.warn(
            f"schedule={schedule!r} splits backward in two, and torch's weight-gradient half runs"
            " the forward of a checkpointed module again for each of its parameters: results are"
            " right, but far slower than without checkpointing. Use a schedule that does not"
            " split, such as 'interleaved_1f1b', or apply_ac(..., 'none')",
            stacklevel=2,
        )
    return PipelineSchedule(stages, n_microbatches, loss_fn, schedule, rows, scaler)


def _everyone_of(stage: ModelStage) -> dist.ProcessGroup | None:
    """Return the group of all ranks of the mesh.

    A rank that refuses alone leaves its pipeline waiting, and the replicas of its pipeline too.
    """
    return stage.group if stage.device_mesh is None else dist.group.WORLD


def _problem_of_arguments(stages: Sequence[object], given: dict[str, Any]) -> TypeError | None:
    if not stages or not all(isinstance(stage, ModelStage) for stage in stages):
        return TypeError(
            f"stage must come from build_pipeline_stage, not {[type(s).__name__ for s in stages]}:"
            " cut the model with build_stage_module, or by hand, and wrap this rank's stages"
        )
    try:
        check_arguments(build_pipeline_schedule, given)
        refuse_bad_timeout("build_pipeline_schedule", given["timeout_s"])
        counted(given["loss_fn"])
    except TypeError as problem:
        return problem
    return None


class _Habit(Enum):
    """Whether any stage does something in its steps, as the first step shows.

    HERE means that this rank's stages began later, and that the other ranks do not know yet.
    """

    UNKNOWN = "no step yet"
    NO = "no"
    HERE = "here"
    YES = "yes"


@dataclass(frozen=True)
class _Peers:
    """The ranks that this rank shares a step with.

    Attributes:
        everyone: all ranks of the mesh, which refuse together.
        pipeline: the group of its pipeline; None is the default group.
        data: the groups over which losses are averaged; none without data parallelism.
        owner: the rank within the pipeline, by stage.
        number: the lowest rank of the pipeline, which tells it from the others.
    """

    everyone: Ranks
    pipeline: dist.ProcessGroup | None
    data: tuple[dist.ProcessGroup, ...]
    owner: Mapping[int, int]
    number: int

    @classmethod
    def of(cls, stage: ModelStage) -> "_Peers":
        mesh = stage.device_mesh
        data = []
        if mesh is not None and has_dp_mesh(mesh):
            data = [
                mesh.get_group(name) for name in mesh.mesh_dim_names or () if name.startswith("dp_")
            ]
        return cls(
            everyone=Ranks(_everyone_of(stage)),
            pipeline=stage.group,
            data=tuple(data),
            owner=stage.stage_index_to_group_rank,
            number=min(dist.get_process_group_ranks(stage.group)),
        )

    @property
    def last_rank(self) -> int:
        """The rank within the pipeline that holds the last stage."""
        return self.owner[max(self.owner)]


class PipelineSchedule(AnyPipeline):
    """A schedule ready to train and evaluate; made by :func:`build_pipeline_schedule`.

    Attributes:
        stages: this rank's stages, first to last. They are new objects, not the stages given.
        ties: the weights that several stages share, each as its name by stage.
        attached: the sums of the last step's attached losses by name, on every rank; see
            :func:`attach_loss`.
    """

    def __init__(
        self,
        stages: Sequence[ModelStage],
        n_microbatches: int,
        loss_fn: LossFn | TokenLoss,
        schedule: str | Schedule,
        rows: int | None,
        scaler: MeshGradScaler | None,
    ) -> None:
        self.stages = list(stages)
        self.n_microbatches = n_microbatches
        self._loss = counted(loss_fn)
        self._counts_tokens = isinstance(loss_fn, TokenLoss)
        self._batch = Batch(self.stages, n_microbatches, rows, self._loss, self._counts_tokens)
        self._divisor: torch.Tensor | float = 1.0
        self._scaler = scaler
        if scaler is not None:
            scaler.in_pipeline = True

        self.attached: dict[str, float] = {}
        self._attaching = _Habit.UNKNOWN  # losses, by attach_loss
        self._drawing = _Habit.UNKNOWN  # random numbers
        self._streams = RandomStreams(stages[0].device, get_dp_rank(stages[0].device_mesh))
        for stage in self.stages:
            stage.streams = self._streams
            stage.unused = self.stages[0].unused

        self._schedule = torch_schedule(schedule, self.stages, n_microbatches, self._share_of_loss)
        self._peers = _Peers.of(self.stages[0])  # torch's schedule says which rank holds a stage

        modules = {stage.stage_index: stage.submod for stage in self.stages}
        self.ties = self.stages[0].ties
        self._tied = TiedWeights(self.ties, modules, self._peers.owner, Ranks(self._peers.pipeline))
        self._peers.everyone.refuse(self._tied.problem(values=False))
        self._starts_equal = not self.ties

        self._witness = _Witness(self._peers.everyone.group)
        self._crossings = Crossings(self.stages, self._peers.everyone)
        # The names of keyword arguments that ranks have compared, and whether these were None.
        self._names: dict[str, bool] = {}

    @property
    def modules(self) -> list[torch.nn.Module]:
        """This rank's modules, first to last."""
        return [stage.submod for stage in self.stages]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return this rank's parameters, each once, for an optimizer."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def step(
        self,
        *inputs: Any,
        target: torch.Tensor | None = None,
        divisor: float | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run torch's schedule once; :meth:`AnyPipeline.step` says what each argument is.

        A whole batch has ``n_microbatches`` times the rows that the stages were built for.
        Ready-made microbatches must have the containers and dtypes that the stages were built for,
        but may have other shapes. If any rank is given one of the three lists, no rank may give a
        whole batch.

        Ranks agree on the shapes between stages before the first message. That costs a small
        exchange. For shapes not seen before it costs one more exchange a stage, and each stage runs
        a copy on the meta device with the microbatch's keyword arguments. A stage that cannot run
        there runs once in place, on zeros and without gradients.

        The shapes that a stage returns may depend on the shapes of its arguments, and on numbers
        and strings among its keyword arguments. They may not depend on the content of tensors or
        objects. So a new value of a number counts as a shape not seen before, but a number inside
        an object or a tuple does not.

        A weight that no microbatch used has no gradient afterwards, as in one process. A weight
        that FSDP2 shards may have zeros.

        Raises:
            ValueError: on every rank, before any message, if an argument does not fit the stages,
                is missing on a rank, or belongs to a whole batch beside ready-made microbatches.
                Also if tied weights are frozen, sharded or filled differently. A loss that counts
                samples needs at least one in each microbatch.
            StepFailed: on the other ranks, if one raises in mid-step and their messages to it fail.
        """
        problem = problem_of_hooks({stage.stage_index: stage.submod for stage in self.stages})
        if not torch.is_grad_enabled():
            problem = problem or "step() without gradients, under torch.no_grad(): call eval()"
        given = Given(
            inputs=inputs,
            kwargs=kwargs,
            kwargs_chunk_spec=kwargs_chunk_spec,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target=target,
            target_mbs=target_mbs,
            divisor=divisor,
        )
        microbatches = self._prepare(given, problem=problem)
        # Only now: weights may be loaded between the building of a pipeline and its first step.
        if not self._starts_equal:
            self._peers.everyone.refuse(self._tied.problem(values=True))
            self._starts_equal = True

        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        if scale != 1.0 and microbatches.targets is not None:
            # A smaller divisor scales the loss and the attached losses up by the same factor.
            self._divisor = torch.as_tensor(self._divisor, dtype=torch.float64) / scale
        self._weigh(microbatches)
        for stage in self.stages:
            stage.keywords = microbatches.keywords

        losses: list[torch.Tensor] = []
        with called_once(self.modules), self._witness.watching():
            with self._tied.summed(), self._streams.step(), all_reducing_as_set(self.modules):
                run_step(
                    self._schedule,
                    self.stages,
                    microbatches.arguments,
                    microbatches.targets,
                    losses,
                )
                for each in self.stages:
                    each.end_step()
            loss = self._tell_everyone(losses) / scale
            self._tell_attached(scale)
            self._move_streams_on()
        for stage in self.stages:
            stage.keywords = ()
        return loss

    def eval(
        self,
        *inputs: Any,
        target: torch.Tensor | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the loss as :meth:`step` does, without gradients, under every schedule."""
        given = Given(
            inputs=inputs,
            kwargs=kwargs,
            kwargs_chunk_spec=kwargs_chunk_spec,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target=target,
            target_mbs=target_mbs,
        )
        microbatches = self._prepare(given)
        targets = microbatches.targets or []
        losses: list[torch.Tensor] = []

        def take_loss(microbatch: int, output: Any) -> None:
            losses.append(self._share_of_loss(output, targets[microbatch]))

        with self._witness.watching():
            self._forward(microbatches, take_loss)
            return self._tell_everyone(losses)

    def evaluate(
        self,
        *inputs: Any,
        on: Literal["last", "all"] = "last",
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the outputs of a batch, under every schedule."""
        problem = None if on in ("last", "all") else f"on={on!r} must be 'last' or 'all'"
        given = Given(
            inputs=inputs,
            kwargs=kwargs,
            kwargs_chunk_spec=kwargs_chunk_spec,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
        )
        microbatches = self._prepare(given, problem=problem, needs_target=False)
        self._peers.everyone.require_equal({"on": on})
        outputs: list[Any] = []
        with self._witness.watching():
            self._forward(microbatches, lambda _, output: outputs.append(output))
            output = merge(outputs) if outputs else None
            return self._from_last(output) if on == "all" else output

    def _forward(self, microbatches: Microbatches, consume: Callable[[int, Any], None]) -> None:
        inputs = microbatches.arguments if self.stages[0].is_first else None
        forward_only(self.stages, inputs, microbatches.keywords, consume)
        for stage in self.stages:
            # A forward without backward may leave FSDP2's parameters gathered, and an optimizer
            # would then change the wrong ones.
            reshard(stage.submod)

    def _from_last(self, output: Any) -> Any:
        """Return the last stage's ``output``, on every rank of the pipeline."""
        is_last = self.stages[-1].is_last
        # In a tuple, as the output itself may be None.
        described = (tree_map(meta_of, output),) if is_last else None
        told = Ranks(self._peers.pipeline).gather(described)
        if not is_last:
            (output,) = next(one for one in told if one is not None)

        leaves, spec = tree_flatten(output)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, TensorMeta):
                leaves[i] = leaf.empty(self.stages[0].device)
            if isinstance(leaves[i], torch.Tensor):
                dist.broadcast(
                    leaves[i], group=self._peers.pipeline, group_src=self._peers.last_rank
                )
        return tree_unflatten(leaves, spec)

    def _share_of_loss(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        return loss_share(self._loss, output, target, self._divisor)

    def _prepare(
        self,
        given: Given,
        *,
        problem: str | None = None,
        needs_target: bool = True,
    ) -> Microbatches:
        """Return this rank's microbatches, and count the tokens; refuse together."""
        for stage in self.stages:
            problem = problem or stage.problem_of_dtypes()
        problem = problem or given.problem_of_divisor()
        mine = self._agreed(given, problem, needs_target)
        if mine.targets is not None:
            # Data-parallel ranks have equally many samples of a whole batch, and need not ask one
            # another.
            differ = self._counts_tokens or mine.ready or given.divisor is not None
            groups = self._peers.data if differ else ()
            self._divisor = divisor_of(mine.counts, given.divisor, groups, self.stages[0].device)
        return mine

    def _agreed(self, given: Given, problem: str | None, needs_target: bool) -> Microbatches:
        """Return this rank's microbatches, once all ranks know that theirs fit; agree on shapes."""
        for stage in self.stages:
            stage.crossing = ()
        mine = self._batch.nothing()
        unfit = None
        try:
            mine = self._batch.microbatches(given, needs_target)
        except Exception as error:  # any exception, as the user's loss counts tokens in there
            unfit = Ranks.sentence(error)

        # Most batches are whole and fit, with the keywords of the last, which ranks tell one
        # another by one number.
        names = {name: value is None for name, value in given.kwargs.items()}
        draws_here = self._drawing is _Habit.HERE
        news = problem or unfit or given.lists or names != self._names or draws_here
        if not self._peers.everyone.largest(int(bool(news))):
            return mine

        named, lacking = [], []
        for keywords in mine.keywords:
            named.append({name for name, value in keywords.items() if value is not None})
            lacking.append(set().union(*[stage.lacking(keywords) for stage in self.stages]))
        fits = not (problem or unfit or given.whole)
        told = self._peers.everyone.gather(
            RankBatch(
                self._peers.number,
                list(given.lists),
                given.whole,
                problem,
                unfit,
                self._batch.missing(needs_target),
                named,
                lacking,
                kinds_of(mine) if fits else [],
                draws_here,
            )
        )
        if (refusal := problem_between(told)) is not None:
            raise ValueError(refusal)
        self._names = names
        if any(each.draws for each in told):
            self._drawing = _Habit.YES
            move_on()
        if any(each.lists for each in told):
            mine = mine if mine.ready else self._batch.nothing()
            self._crossings.agree(told, self._peers.number, mine)
            self._peers.everyone.refuse(self._batch.problem_of_sizes(mine))
        return mine

    def _weigh(self, microbatches: Microbatches) -> None:
        """Tell every rank of the pipeline the weights of microbatches, for attached losses.

        They come from the targets, which only the rank of the last stage has.
        """
        for stage in self.stages:
            stage.attached.clear()
        if self._attaching is _Habit.NO:
            return
        weights = torch.empty(
            self.n_microbatches, dtype=torch.float64, device=self.stages[0].device
        )
        if microbatches.targets is not None:
            weights = weights_of(microbatches.counts, self._divisor, weights.device)
        dist.broadcast(weights, group=self._peers.pipeline, group_src=self._peers.last_rank)
        for stage in self.stages:
            stage.weights = weights

    def _tell_attached(self, scale: float) -> None:
        """Sum the attached losses over stages, and average them over data ranks, on every rank.

        If any stage attached a loss in a wrong way, all ranks raise.
        """
        if self._attaching is _Habit.NO:
            return

        def mine() -> Sums:
            attached = {stage.stage_index: stage.attached.values() for stage in self.stages}
            sums = attached_sums(attached)
            return {name: (index, value.item()) for name, (index, value) in sums.items()}

        total: Sums = {}
        everyone = self._peers.everyone.each(mine)
        for theirs in everyone:
            total = added_sums(total, theirs)
        pipelines = len(everyone) / len(set(self._peers.owner.values()))
        self.attached = {name: value / pipelines / scale for name, (_, value) in total.items()}
        if total:
            self._attaching = _Habit.YES
        elif self._attaching is _Habit.UNKNOWN:
            self._attaching = _Habit.NO
            for stage in self.stages:
                stage.weights = None

    def _move_streams_on(self) -> None:
        """Take every rank to the next step's random numbers, if any stage draws some.

        Ranks agree on that once. A rank that draws later, as when dropout is switched on, must not
        move on alone: it tells the others at the next call, and all move on there.
        """
        if self._drawing is _Habit.UNKNOWN:
            drew = self._peers.everyone.largest(int(self._streams.drew))
            self._drawing = _Habit.YES if drew else _Habit.NO
        if self._drawing is _Habit.YES:
            move_on()
        elif self._streams.drew:
            self._drawing = _Habit.HERE

    def _tell_everyone(self, losses: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float64, device=self.stages[0].device)
        if losses:
            loss = torch.stack([share.detach() for share in losses]).sum(dtype=torch.float64)
            average_over(self._peers.data, loss)
        # A sum with zeros and not a broadcast, which some ranks may leave while others fail in
        # their last backward.
        dist.all_reduce(loss, group=self._peers.pipeline)
        return loss


# Evaluation: forwards alone, for any placement of stages.


@torch.no_grad()
def forward_only(
    stages: Sequence[ModelStage],
    inputs: Sequence[tuple[Any, ...]] | None,
    kwargs: Sequence[dict[str, Any]],
    consume: Callable[[int, Any], None],
) -> None:
    """Run every microbatch through this rank's stages, stage by stage.

    torch's own ``eval`` fails for V placements.

    All ranks order their work by (stage, microbatch). In this order an action comes after the
    actions it needs, so blocking receives cannot deadlock. Two ranks send and receive in the same
    order on both sides, as NCCL needs, which has no tags. Outputs are kept until all are sent, at
    most one a microbatch.

    Args:
        stages: this rank's stages, whose values are settled.
        inputs: the arguments of each microbatch, where this rank holds the first stage.
        kwargs: keyword arguments of each microbatch, for every stage.
        consume: called on the last stage's rank with each microbatch's index and output.
    """
    local: list[tuple[torch.Tensor, ...]] = []
    in_flight: list[dist.Work] = []
    for stage in sorted(stages, key=lambda stage: stage.stage_index):
        owner, here = stage.stage_index_to_group_rank, stage.group_rank
        source = None if stage.is_first else owner[stage.stage_index - 1]
        target = None if stage.is_last else owner[stage.stage_index + 1]
        outputs: list[tuple[torch.Tensor, ...]] = []
        for i, kwarg in enumerate(kwargs):
            if stage.is_first:
                value = None if inputs is None else as_value(inputs[i])
            else:
                value = stage.received(local[i] if source == here else _received(stage, source, i))
            output = call(stage.submod, value, kwarg)
            if stage.is_last:
                consume(i, output)
            elif target in (here, source):
                outputs.append(stage.message(output, i))
            else:
                in_flight += _sent(stage, stage.message(output, i), target)
        if target == here:
            local = outputs
        else:
            # Two ranks in a loop: all receives from the peer come before the first send to it.
            for tensors in outputs:
                in_flight += _sent(stage, tensors, target)
    for work in in_flight:
        work.wait()


def _received(stage: ModelStage, source: int | None, microbatch: int) -> tuple[torch.Tensor, ...]:
    tensors = stage.taken_by(microbatch).empty(stage.device)
    for tensor in tensors:
        dist.recv(tensor, group=stage.group, group_src=source)
    return tensors


def _sent(
    stage: ModelStage, tensors: tuple[torch.Tensor, ...], target: int | None
) -> list[dist.Work]:
    works = (dist.isend(tensor, group=stage.group, group_dst=target) for tensor in tensors)
    return [work for work in works if work is not None]


# Before the first step: do the stages of all ranks make up one pipeline?


def _agree(
    stages: Sequence[ModelStage],
    n_microbatches: int,
    *,
    schedule: str | Schedule,
    tied: Iterable[SharedName] | None,
    scaler: MeshGradScaler | None,
    limit_s: float | None,
) -> tuple[list[ModelStage], int | None]:
    """Agree on the values between stages, and on which weights are tied; a collective.

    Returns:
        The stages as torch runs them in this pipeline, and the rows of a microbatch. The rows are
        None if the first stage's tensors do not share their first dimension. A whole batch cannot
        be cut then, and only ready-made microbatches can come.
    """
    everyone = Ranks(_everyone_of(stages[0]), limit_s=limit_s)
    pipeline = Ranks(stages[0].group, limit_s=limit_s)
    everyone.refuse(
        _problem_of_placement(stages, n_microbatches, schedule)
        or _problem_of_sharding(stages, schedule)
        or _problem_of_compiling(stages, schedule)
    )

    ours = [stage.submod for stage in stages if isinstance(stage.submod, PipelineStageModule)]
    told_ties = None
    if tied is not None:
        told_ties = [dict(tie) if isinstance(tie, Mapping) else tuple(tie) for tie in tied]
    everyone.require_equal(
        {
            "schedule": name_of(schedule),
            "n_microbatches": n_microbatches,
            **_facts_of_transformer(stages[0]),
            "config": ours[0].config if ours else None,
            "tied": told_ties,
            "scaler": None if scaler is None else scaler.state_dict(),
        }
    )
    everyone.refuse(_problem_of_layers(stages, pipeline))
    everyone.refuse(_find_values(stages, pipeline))

    first = stages[0].takes if stages[0].is_first else None
    # In a tuple, as the rows themselves may be None.
    told = pipeline.gather(None if first is None else (rows_of(first),))
    (rows,) = next(one for one in told if one is not None)

    modules = {stage.stage_index: stage.submod for stage in stages}
    ties = everyone.collectively(lambda: agree_on_ties(modules, tied, pipeline))
    settled = [stage.settled() for stage in stages]
    for stage in (*stages, *settled):
        stage.ties = ties
    return settled, rows


def _problem_of_placement(
    stages: Sequence[ModelStage], n_microbatches: int, schedule: str | Schedule
) -> str | None:
    """Return the reason why this rank's stages cannot run under ``schedule``, if it knows one."""
    pp_rank, pp_size = stages[0].group_rank, stages[0].group_size
    n_stages = stages[0].num_stages
    indices = [s.stage_index for s in stages]
    try:
        expected = get_stage_indices(schedule, pp_rank, pp_size, n_stages // pp_size)
        order_of(schedule, n_microbatches, n_stages, pp_size)
    except ValueError as error:
        return str(error)
    if indices != expected or n_stages != len(indices) * pp_size:
        return (
            f"rank {pp_rank} holds stages {indices} of {n_stages}, but schedule {schedule!r} on"
            f" {pp_size} ranks places stages {expected} there: build those (get_stage_indices lists"
            " them)"
        )
    if len({isinstance(s.submod, PipelineStageModule) for s in stages}) > 1:
        return (
            f"rank {pp_rank} holds stages of different models:"
            f" {', '.join(type(s.submod).__name__ for s in stages)}"
        )
    facts = [_facts_of_transformer(stage) for stage in stages]
    if any(fact != facts[0] for fact in facts):
        return (
            f"rank {pp_rank} built its stages {indices} for different batches or dtypes: build them"
            " alike"
        )
    return None


def _problem_of_sharding(stages: Sequence[ModelStage], schedule: str | Schedule) -> str | None:
    """Return the reason why FSDP2 would miss the second half of a split backward, or None.

    torch tells the stage itself to reduce after the last microbatch. Parts that are sharded alone
    reduce at the end of every backward, and gradients that come later would be silently lost.
    """
    if splits_backward(schedule) == "none":
        return None
    for stage in stages:
        parts = stage.submod.named_modules()
        inside = [name for name, part in parts if isinstance(part, FSDPModule)]
        if inside and "" not in inside:
            return (
                f"schedule {name_of(schedule)!r} splits backward in two, and FSDP2 shards"
                f" {inside[0]!r} of stage {stage.stage_index}, but not the stage: call fully_shard"
                " on the stage too, after its parts, or apply_fsdp2(stage, mesh)"
            )
    return None


def _problem_of_compiling(stages: Sequence[ModelStage], schedule: str | Schedule) -> str | None:
    """Return the problem of a module from ``torch.compile`` in a stage; None without a problem.

    Only torch's own classes of schedules that split backward refuse it.
    """
    if splits_backward(schedule) == "none":
        return None
    if isinstance(schedule, Schedule) or not runnable(schedule).torch_name:
        return None
    for stage in stages:
        for path, part in stage.submod.named_modules():
            if uncompiled(part) is not part:
                what = f"stage {stage.stage_index}"
                if path:
                    what = f"{path!r} of {what}"
                return (
                    f"{what} is what torch.compile returned, and schedule {name_of(schedule)!r}"
                    " splits backward in two, which torch then refuses: leave torch.compile out,"
                    " and compile the stage's blocks with apply_compile(stage), before FSDP2"
                )
    return None


def _facts_of_transformer(stage: ModelStage) -> dict[str, object]:
    is_ours = isinstance(stage.submod, PipelineStageModule)
    if not is_ours or stage.takes is None or stage.returns is None:
        return {}
    return {
        "(batch_size, seq_len)": stage.takes.metas[0].shape[:2],
        "param_dtype": stage.returns.metas[0].dtype,
    }


def _problem_of_layers(stages: Sequence[ModelStage], pipeline: Ranks) -> str | None:
    ours = [(s.stage_index, s.submod) for s in stages if isinstance(s.submod, PipelineStageModule)]
    ranks = pipeline.gather([(index, module.layer_range) for index, module in ours])
    if not ours:
        return None
    end = 0
    for stage, (start, stop) in sorted(part for rank in ranks for part in rank):
        if start != end:
            return (
                f"stage {stage} begins with layer {start}, but the stages before it end with layer"
                f" {end - 1}: give every rank the same layer_ranges"
            )
        end = stop
    n_layers = ours[0][1].config.n_layers
    if end != n_layers:
        return f"the stages hold {end} of {n_layers} layers: give every rank the same layer_ranges"
    return None


def _find_values(stages: Sequence[ModelStage], pipeline: Ranks) -> str | None:
    """Find the values that every stage takes and returns; return the problem, or None.

    The problem is the same on all ranks. A stage can be run once its inputs are known, so each
    round settles at least one more stage.
    """
    n_stages = stages[0].num_stages
    taken: dict[int, ValueMeta] = {}
    given: dict[int, ValueMeta] = {}
    while len(given) < n_stages:
        found: dict[int, tuple[ValueMeta | None, ValueMeta | None]] = {}
        problem = None
        for stage in (s for s in stages if s.stage_index not in given):
            before = found.get(stage.stage_index - 1, (None, None))[1]
            stage.takes = stage.takes or given.get(stage.stage_index - 1) or before
            if stage.is_first and stage.takes is None:
                problem = (
                    "nothing says what the first stage takes: pass build_pipeline_stage(...,"
                    " inputs=...), the arguments of one microbatch, or batch_size= and seq_len= for"
                    " token ids"
                )
            if stage.takes is not None and stage.returns is None:
                try:
                    stage.returns = find_outputs(stage, stage.takes, {})
                except ValueError as error:
                    problem = problem or str(error)
            found[stage.stage_index] = (stage.takes, stage.returns)
        told = pipeline.gather((found, problem))
        problem = next((theirs for _, theirs in told if theirs is not None), None)
        if problem is not None:
            return problem
        for theirs, _ in told:
            for index, (inputs, outputs) in theirs.items():
                if inputs is not None:
                    taken[index] = inputs
                if outputs is not None:
                    given[index] = outputs
    problem = _problem_between(taken, given)
    if problem is None:
        for stage in stages:
            stage.takes, stage.returns = taken[stage.stage_index], given[stage.stage_index]
    return problem


def _problem_between(taken: dict[int, ValueMeta], given: dict[int, ValueMeta]) -> str | None:
    for before, after in pairwise(sorted(given)):
        # They differ if this package's model was built for two configurations.
        if taken.setdefault(after, given[before]) != given[before]:
            return (
                f"stage {before} returns {given[before]}, but stage {after} takes {taken[after]}:"
                " build them alike"
            )
        if not given[before].metas:
            return (
                f"stage {before} returns no tensor, so nothing reaches stage {after}: return what"
                " it needs"
            )
        whole = [meta for meta in given[before].metas if not meta.dtype.is_floating_point]
        if whole and not carries_integers():
            return (
                f"stage {before} returns {whole[0]}, and this release of torch sends only tensors"
                " that carry gradients between stages: give it to every stage as a keyword"
                " argument of step, or take torch 2.13 or newer"
            )
    return None


# A step that fails on one rank: the others, whose messages from there never come, are told why.


class _Witness:
    """The rank that was the first to fail in a step, kept in the group's store for the others.

    Args:
        group: the ranks that share the step; None is this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        ranks = Ranks(group, alone=group is None)
        self._rank = ranks.rank
        # Pipelines of one group are told apart: one may have failed before.
        self._key = f"course_pp: step of {ranks.gather(secrets.token_hex(8))[0]}"
        self._group = group if ranks.size > 1 else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run this rank's part of a step.

        If a message fails because another rank has failed, raise StepFailed with that rank's words.
        """
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # torch wraps what a stage raises
                cause = cause.__cause__
            mine = told = f"{self._rank}\n{type(cause).__name__}: {cause}"
            if self._group is not None:
                # Some releases of torch have no compare_set, and the store may have lived in the
                # rank that failed.
                with suppress(AttributeError, RuntimeError):
                    told = str(
                        self._group.get_group_store().compare_set(self._key, "", mine).decode()
                    )
            rank, what = told.split("\n", 1)
            if int(rank) != self._rank and isinstance(error, RuntimeError):
                message = f"the step failed on rank {rank}, for which this rank waited: {what}"
                raise StepFailed(message, int(rank), what, began_elsewhere=True) from error
            raise
