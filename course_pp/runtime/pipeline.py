"""Run any legal schedule on real ranks.

    # on each rank, with its own stages
    pipeline = Pipeline(build("1f1b", 4, 8), {rank: stage}, loss_fn)
    loss = pipeline.step(inputs, target=target)  # gradients are in .grad

The messages between the actions are planned beforehand, in :mod:`course_pp.runtime.messages`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from course_pp.base.ranks import Ranks
from course_pp.runtime.agreement import PipelineOptions, Stages, agree
from course_pp.runtime.batch import (
    Counted,
    Cut,
    Form,
    count_targets,
    cut,
    joined,
    loss_shares,
    own_means,
    weights_of_means,
)
from course_pp.runtime.emulation import EmulatedCluster
from course_pp.runtime.executor import Executor, StepState
from course_pp.runtime.gradients import ShardedStages
from course_pp.runtime.messages import plan_messages
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.stage import Stage
from course_pp.runtime.versions import Optimizers, VersionedStage
from course_pp.runtime.wire import open_wire
from course_pp.schedule import Ledger, Schedule, Timeline, Versions
from course_pp.step.batch import ChunkSpec, Given
from course_pp.step.hooks import called_once, problem_of_hooks
from course_pp.step.loss import (
    LossFn,
    Share,
    Sums,
    TokenLoss,
    added_sums,
    attached_sums,
    average_over,
)
from course_pp.step.random_streams import RandomStreams, move_on
from course_pp.step.scaler import MeshGradScaler
from course_pp.step.step import AnyPipeline
from course_pp.step.ties import SharedWeights
from course_pp.step.values import merge, tensors_of

T = TypeVar("T")


class Pipeline(AnyPipeline):
    """One schedule over the ranks of a process group, for as many steps as you like.

    Args:
        schedule: any legal schedule. A schedule without backwards only evaluates. With ``U`` stages
            update their own weights within the step.
        stages: this rank's modules by stage; a module alone where the rank has one stage. None is
            an empty stage, which passes its input on. A module whose attribute ``writes`` has names
            returns ``(output, {name: value})``. A module whose ``reads`` has names gets these
            values as keyword arguments, from the earlier stage that writes them.
            ``pipeline.schedule`` then has the edges.
        loss_fn: a function ``loss_fn(output, target)`` that returns the mean loss of a microbatch,
            or a :class:`TokenLoss`. Only :meth:`step` and :meth:`eval` need it. The loss is divided
            before the backward. If your own autograd function adds a gradient, divide it too, or
            use :func:`attach_loss`.
        group: the ranks of the pipeline; None is all of them, or this process alone if there is no
            process group.
        device: device of the stages' computation; None is the device of their parameters.
        recompute: keep each microbatch's input only, and compute forwards again in the backward. A
            forward then changes its buffers twice, such as the statistics of BatchNorm.
        tied: tied weights, each as the parameter's name by stage: ``[{0: "embed.weight", 3:
            "head.weight"}]``. Their gradients are summed; give them equal values. None refuses
            stages that look tied, with a list of all such weights. Layers that are copied or seeded
            alike pass if a stage holds two of them, or if both stages begin with them. ``[]`` says
            that nothing is tied. Two further weights that look like one, or like a declared tie,
            are refused too.
        recorder: recorder of every action and every wait.
        cluster: cluster to emulate: ranks compute and send as fast as it would. All ranks must be
            on one host.
        transport: ``"nccl"``, ``"gloo"``, or None to choose by group and device
            (:func:`course_pp.runtime.wire.open_wire`).
        timeout_s: the longest that a rank waits for one message.
        optimizers: an optimizer for each of this rank's stages, over all its trained parameters,
            if the schedule has ``U``. An update takes the gradient of one microbatch's mean loss,
            or the mean of these over a group and all replicas. Parameters must have no hooks:
            gradients go to versions of them.
        versions: the rule by which a microbatch chooses its weights, if the schedule has ``U``:
            ``"stash"``, ``"vertical"``, ``"2bw"`` or ``"none"``; see
            :func:`course_pp.schedule.ledger`. Buffers have no versions, and each replica has its
            own.
        scaler: scaler of the loss and attached losses in the backward, for float16; the losses
            returned are not scaled.

    Make it on every rank at once: the ranks compare what they were given.

    Attributes:
        attached: the sums of the last step's attached losses by name, on every rank; see
            :func:`attach_loss`.
        shares: each microbatch's share of the last step's loss, on every rank: they add up to the
            loss. With ``versions=`` each microbatch's own mean loss.
        ties: the declared ties, each as the parameter's name by stage.

    Raises:
        ValueError: on every rank, if the schedule cannot run here or places other stages here, if
            ranks were given different pipelines, if weights look tied without ``tied``, or if
            ``versions`` lacks a part it needs.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Stages,
        loss_fn: LossFn | TokenLoss | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        recompute: bool = False,
        tied: Sequence[Mapping[int, str]] | None = None,
        recorder: Recorder | None = None,
        cluster: EmulatedCluster | None = None,
        transport: str | None = None,
        timeout_s: float = 60.0,
        optimizers: Optimizers | None = None,
        versions: Versions | None = None,
        scaler: MeshGradScaler | None = None,
    ) -> None:
        self._options = PipelineOptions(
            schedule,
            stages,
            loss_fn=loss_fn,
            group=group,
            device=device,
            recompute=recompute,
            tied=tied,
            recorder=recorder,
            cluster=cluster,
            transport=transport,
            timeout_s=timeout_s,
            optimizers=optimizers,
            versions=versions,
            scaler=scaler,
        )
        self._agreement = agreed = agree(self._options)
        self.schedule = agreed.schedule
        modules = agreed.modules
        meter = self._options.meter
        if meter is not None:
            # The stages hold their parameters anyway; the meter counts what a step adds.
            for module in modules.values():
                if module is not None:
                    meter.ignore([*module.parameters(), *module.buffers()])

        self._shared = SharedWeights(agreed.rank, agreed.weights, modules)
        self._sharded = ShardedStages(modules.values())
        self._weights: dict[int, VersionedStage] = {}
        for stage, module in modules.items():
            if agreed.planned is not None and optimizers is not None and module is not None:
                every = range(schedule.n_microbatches)
                here = [i for i in every if schedule.rank_of(stage, i) == agreed.rank]
                self._weights[stage] = VersionedStage(
                    stage,
                    module,
                    optimizer=optimizers.get(stage),
                    planned=agreed.planned,
                    mine=here,
                    meter=meter,
                )
        self._streams = RandomStreams(agreed.device, _data_rank(agreed.data_groups))
        self._stages: dict[int, Stage] = {}
        for stage, module in modules.items():
            self._stages[stage] = Stage(
                stage,
                module,
                device=agreed.device,
                recompute=recompute,
                meter=meter,
                weights=self._weights.get(stage),
                writes=agreed.declared[stage].writes,
                wanted=[edge.name for edge in agreed.schedule.edges if edge.writer == stage],
            )
            self._stages[stage].streams = self._streams

        # Every two ranks that hold one weight exchange its gradients at the end of a step.
        pairs: list[tuple[int, int]] = []
        for weight in agreed.weights:
            ranks = [place.rank for place in weight]
            pairs += product(ranks, ranks)
        plans = plan_messages(agreed.schedule, pairs)
        self._wire = open_wire(agreed, plans)
        self._executor = Executor(
            agreed,
            agreed.schedule,
            plans,
            wire=self._wire,
            stages=self._stages,
            weights=self._weights,
        )
        # Made by the first evaluation: many pipelines only train.
        self._evaluator: Executor | None = None
        self.attached: dict[str, float] = {}
        self.shares: tuple[float, ...] = ()
        self.ties = tuple(dict(tie) for tie in tied or ())
        if scaler is not None:
            scaler.in_pipeline = True

    def step(
        self,
        *inputs: Any,
        target: Any = None,
        divisor: float | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the schedule once; :meth:`AnyPipeline.step` describes each argument.

        A whole batch of any size is cut as evenly as possible. With ``versions=`` updates take the
        gradients, and leave none. A hook that raises does so on its own rank. If the step fails, no
        hook is called. After the step :attr:`shares` has each microbatch's share of the loss.

        Raises:
            StepFailed: on every rank, if a stage raises, or a rank is lost or late; it names rank,
                stage, microbatch and action. With ``versions=`` also if a loss is not finite,
                because stages update their weights within the step.
            ValueError: on a rank whose arguments cannot be used, and on FSDP2's other data ranks of
                its stages; the others get a StepFailed. A loss that counts samples needs at least
                one in each microbatch.
            RuntimeError: after a step that failed; and under ``no_grad``, on the same ranks as a
                ValueError.
        """
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
        self._refuse_without_a_loss()
        scaler = self._options.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()

        def step() -> tuple[torch.Tensor, tuple[float, ...]]:
            # Inside perform: if this rank refuses, the others must hear it, as they wait for it.
            for weights in self._weights.values():
                weights.begin()
            for stage in self._stages.values():
                stage.attached.clear()
                stage.scale = scale
            trains = self._executor.trains
            state = self._begun(given, trains)
            # Gradients of earlier steps are sums over all places already, so this step's gradients
            # of shared weights are added up apart from them.
            with self._shared.apart():
                with self._sharded.reduced_once(trains), self._streams.step():
                    self._executor.run(state)
                self._shared.add(self._executor.exchange("shared gradients", self._shared.for_rank))

            # Only the last stage has losses and only some stages attach some: all ranks tell all.
            mine: _Report = (
                self._losses_here(state),
                self._attached_here(),
                state.given.form,
                self._data_ranks_drew(),
            )
            losses, sums, _, drew = self._executor.tell_everyone(mine, _total)
            if drew:
                move_on()
            self.attached = {name: value.item() / scale for name, (_, value) in sums.items()}
            return _loss_and_shares(losses)

        with called_once(self._agreement.modules.values()):
            loss, self.shares = self._executor.perform(step)
        return loss

    def eval(
        self,
        *inputs: Any,
        target: Any = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the loss as :meth:`step` does, by the schedule's forwards alone."""
        given = Given(
            inputs=inputs,
            kwargs=kwargs,
            kwargs_chunk_spec=kwargs_chunk_spec,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
            target=target,
            target_mbs=target_mbs,
        )
        self._refuse_without_a_loss()
        evaluator = self._forwards()

        def step() -> tuple[torch.Tensor, tuple[float, ...]]:
            state = self._begun(given, trains=False)
            with self._sharded.reduced_once(trains=False):
                evaluator.run(state)
            mine: _Report = self._losses_here(state), {}, state.given.form, False
            losses, *_ = evaluator.tell_everyone(mine, _total)
            return _loss_and_shares(losses)

        loss, _ = evaluator.perform(step)
        return loss

    def evaluate(
        self,
        *inputs: Any,
        on: Literal["last", "all"] = "last",
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        kwargs_chunk_spec: ChunkSpec | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the outputs of a batch, by the schedule's forwards alone.

            outputs = Pipeline(schedule, stages).evaluate(inputs)  # None without the last stage

        The pipeline needs no ``loss_fn`` for it. The exceptions are those of :meth:`step`.
        """
        given = Given(
            inputs=inputs,
            kwargs=kwargs,
            kwargs_chunk_spec=kwargs_chunk_spec,
            arg_mbs=arg_mbs,
            kwarg_mbs=kwarg_mbs,
        )
        self._refuse_after_failure()
        evaluator = self._forwards()
        holders = self.schedule.placement[-1]

        def look() -> Cut:
            if on not in ("last", "all"):
                raise ValueError(f"on={on!r}: give 'last', for the last stage's ranks, or 'all'")
            n = self.schedule.n_microbatches
            return cut(given, n, is_first=0 in self._stages, is_last=False)

        def step() -> Any:
            # Within the step, as the other ranks wait for this one, and must hear if it refuses.
            state = StepState(self._with_data_ranks(look))
            self._ignore(state.given)
            with self._sharded.reduced_once(trains=False):
                evaluator.run(state)
            # Replicas of the last stage have some of the outputs each.
            travels = on == "all" or len(holders) > 1
            mine = on, state.outputs if travels else {}, state.given.form
            _, everyone, _ = evaluator.tell_everyone(mine, _both)
            return everyone if travels else state.outputs

        outputs = evaluator.perform(step)
        if on == "last" and self._agreement.rank not in holders:
            return None
        return merge([outputs[microbatch] for microbatch in sorted(outputs)])

    def _forwards(self) -> Executor:
        """Return the executor of the schedule's forwards, made once."""
        if self._evaluator is None:
            forwards = self.schedule.forward_only()
            self._evaluator = Executor(
                self._agreement,
                forwards,
                plan_messages(forwards),
                self._wire,
                self._stages,
                self._weights,
            )
        return self._evaluator

    def _losses_here(self, state: StepState) -> torch.Tensor:
        """Return the shares of this rank's microbatches, with 0 for others, (n,) float64.

        If shares are means, a second row has each microbatch's part of the loss, (2, n).
        """
        elsewhere = torch.zeros((), device=self._agreement.device)
        every = range(self.schedule.n_microbatches)
        shares = torch.stack([state.shares.get(i, elsewhere) for i in every]).double()
        if self._holds_last:
            average_over(self._agreement.data_groups, shares)
        if state.means is None:
            return shares
        return torch.stack((shares, shares * state.means.to(shares.device)))

    def _refuse_without_a_loss(self) -> None:
        self._refuse_after_failure()
        if self._options.loss_fn is None:
            raise ValueError(
                "this pipeline has no loss_fn: build it with one, or call evaluate for outputs"
            )

    def _refuse_after_failure(self) -> None:
        failed = self._executor.failed or (self._evaluator and self._evaluator.failed)
        if failed:
            raise RuntimeError(
                f"this pipeline cannot go on, build another one; its last step failed: {failed}"
            )

    @property
    def _holds_last(self) -> bool:
        return self.schedule.n_stages - 1 in self._stages

    def _begun(self, given: Given, trains: bool) -> StepState:
        """Return the values with which a step begins: microbatches and their weights."""
        microbatches, counts = self._with_data_ranks(partial(self._cut, given, trains))
        self._ignore(microbatches)
        state = StepState(microbatches)
        if counts is None:
            return state
        # Weights that update within the step take gradients of microbatches' own means.
        planned = self._agreement.planned if trains else None
        if planned is None:
            state.loss, state.weights = loss_shares(
                counts,
                given.divisor,
                groups=self._agreement.data_groups,
                device=self._agreement.device,
            )
            return state
        last = self.schedule.n_stages - 1
        updates: list[Sequence[int]] = []
        for stage in range(last + 1):
            updates += planned.updates(stage)
        state.loss = partial(_finite, own_means(counts, given.divisor, updates), planned, last)
        state.weights = torch.ones(len(counts.targets), dtype=torch.float64)
        state.means = weights_of_means(counts)
        return state

    def _cut(self, given: Given, trains: bool) -> tuple[Cut, Counted | None]:
        """Return this rank's microbatches, and its counted targets where the last stage is.

        Raises an exception for arguments that cannot be used.
        """
        if trains and not torch.is_grad_enabled():
            raise RuntimeError(
                "step was called under no_grad: call step outside of no_grad, or call eval"
            )
        if "targets" in given.kwargs and given.target is None and given.target_mbs is None:
            raise ValueError("targets= would reach the stages as a keyword argument: give target=")
        if problem := given.problem_of_divisor():
            raise ValueError(problem)
        if trains and (problem := problem_of_hooks(self._agreement.modules)):
            raise ValueError(problem)

        n = self.schedule.n_microbatches
        microbatches = cut(given, n, is_first=0 in self._stages, is_last=self._holds_last)
        if not self._holds_last:
            return microbatches, None
        loss_fn = self._options.loss_fn
        assert loss_fn is not None  # or step has refused
        return microbatches, count_targets(loss_fn, microbatches.targets)

    def _with_data_ranks(self, look: Callable[[], T]) -> T:
        """Return the result of ``look``; if it fails on one data rank of this stage, raise on all.

        FSDP2's data ranks wait for one another in each forward. They are in different pipelines,
        and a rank that fails tells its own pipeline alone. Data ranks that refuse together tell all
        their pipelines, before the first gather.
        """
        for group in self._agreement.data_groups:
            look = partial(Ranks(group).collectively, look)
        return look()

    def _attached_here(self) -> Sums:
        """Return this rank's sums of attached losses, or their mean over FSDP2's data ranks."""
        attached = {index: stage.attached.values() for index, stage in self._stages.items()}
        sums = attached_sums(attached)
        for group in self._agreement.data_groups if sums else ():
            mine = {name: value.item() for name, (_, value) in sums.items()}
            everyone = Ranks(group, limit_s=self._options.timeout_s).gather(mine)
            names = [sorted(theirs) for theirs in everyone]
            if any(theirs != sorted(sums) for theirs in names):
                raise ValueError(f"attach_loss: data ranks use the names {names}")
            for name, (stage, _) in sums.items():
                mean = sum(theirs[name] for theirs in everyone) / len(everyone)
                sums[name] = stage, torch.tensor(mean, dtype=torch.float64)
        return sums

    def _data_ranks_drew(self) -> bool:
        """Return whether a stage of this rank, or of its data ranks, drew a random number."""
        drew = int(self._streams.drew)
        for group in self._agreement.data_groups:
            drew = Ranks(group, limit_s=self._options.timeout_s).largest(drew)
        return bool(drew)

    def _ignore(self, given: Cut) -> None:
        """Do not count the batch as memory of the step: its owner keeps it anyway."""
        if self._options.meter is not None:
            self._options.meter.ignore(tensors_of([given.inputs, given.targets, given.kwargs]))

    @property
    def ledger(self) -> Ledger:
        """The version that each action of this rank used in the last step, and its update."""
        planned = self._agreement.planned
        if planned is None:
            raise ValueError(
                f"{self.schedule!r} flushes, so there is one version of the weights: there is no"
                " ledger"
            )
        uses = tuple(use for weights in self._weights.values() for use in weights.uses)
        return Ledger(planned.versions, uses)


def run_step(
    schedule: Schedule,
    stages: Stages,
    inputs: Any,
    target: Any,
    loss_fn: LossFn | TokenLoss,
    *,
    recorder: Recorder | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Timeline]:
    """Build a :class:`Pipeline`, run one recorded :meth:`Pipeline.step`, gather the timeline.

    The arguments are those of both, except that keyword arguments of stages must come by
    microbatch. For more steps keep a pipeline: its first step settles shapes for the others.

    Returns:
        The mean loss, and the timeline in seconds; both are the same on every rank.
    """
    recorder = Recorder() if recorder is None else recorder
    of_step = {}
    for name in ("divisor", "arg_mbs", "kwarg_mbs", "target_mbs"):
        if name in options:
            of_step[name] = options.pop(name)
    pipeline = Pipeline(schedule, stages, loss_fn, group=group, recorder=recorder, **options)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    loss = pipeline.step(*arguments, target=target, **of_step)
    return loss, recorder.timeline(group, name=schedule.name)


def _data_rank(groups: Sequence[dist.ProcessGroup]) -> int:
    """Return a number of this rank that no other data rank of its stage has."""
    number = 0
    for group in groups:
        number = number * group.size() + dist.get_rank(group)
    return number


_Report = tuple[torch.Tensor, Sums, Form, bool]
"""A rank's losses, its attached losses, the form of its batch, and whether it drew numbers."""

_Evaluated = tuple[str, Mapping[int, Any], Form]
"""A rank's argument ``on``, its outputs by microbatch, and the form of its batch."""


def _total(one: _Report, other: _Report) -> _Report:
    losses, sums, form, drew = one
    other_losses, other_sums, other_form, other_drew = other
    return (
        losses + other_losses,
        added_sums(sums, other_sums),
        joined(form, other_form),
        drew or other_drew,
    )


def _both(one: _Evaluated, other: _Evaluated) -> _Evaluated:
    on, outputs, form = one
    other_on, other_outputs, other_form = other
    if on != other_on:
        raise ValueError(
            f"evaluate: on is {on!r} on a rank and {other_on!r} on another: give every rank the"
            " same"
        )
    return on, {**outputs, **other_outputs}, joined(form, other_form)


def _loss_and_shares(losses: torch.Tensor) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Return the mean loss and the shares, given the losses of :meth:`Pipeline._losses_here`."""
    if losses.dim() == 1:
        return losses.sum(), tuple(losses.tolist())
    means, parts = losses
    return parts.sum(), tuple(means.tolist())


def _finite(
    loss: Callable[[int, Any], Share], planned: Ledger, last: int, microbatch: int, output: Any
) -> Share:
    """Return the loss of a microbatch; raise ArithmeticError if it is not finite.

    Weights that an update has made diverge show here first.
    """
    share = loss(microbatch, output)
    value = float(share.product())
    if not math.isfinite(value):
        version = planned.of(last, microbatch).forward
        when = "before the first update"
        if version:
            when = f"after update {version - 1} of stage {last}"
        raise ArithmeticError(
            f"the loss of microbatch {microbatch} is {value}, {when}: lower the learning rate, or"
            " look at the data"
        )
    return share
