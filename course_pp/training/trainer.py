"""The training loop: batch, gradient, clip, step, and now and then a look at the validation data.

    mesh = init_distributed(DistributedConfig(pp=2)) config = TrainConfig(steps=200, batch=32,
    microbatches=8) indices, n_stages = stages_of_rank(config, get_pp_rank(mesh), get_pp_size(mesh))
    stages = [build_stage_module(model_config, i, n_stages) for i in indices]  # then TP,
    recomputation, FSDP2 trainer = Trainer(config, stages, train, validation, device_mesh=mesh)
    fitted = trainer.fit()

A step depends on the configuration, the data and the number of the step alone, so a run goes on
from any step.
"""

import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.ranks import Ranks
from course_pp.base.torch_private import with_good_steps, with_rates
from course_pp.model import CrossEntropy
from course_pp.model.experts import ExpertLoad, expert_loads, update_router_bias
from course_pp.model.stages import Tie
from course_pp.parallel import clip_grad_norm_, get_pp_size
from course_pp.parallel.mesh import limit_waiting
from course_pp.runtime import LossNotFinite, StepFailed
from course_pp.step.hooks import called_once
from course_pp.step.loss import LossFn, TokenLoss, counted
from course_pp.step.scaler import MeshGradScaler
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.data import Rows, Sequences, Stream, validation_batches
from course_pp.training.engines import (
    ParallelEngine,
    PipelineEngine,
    RuntimeEngine,
    Stages,
    device_and_dtype,
    flops_of_a_sequence,
    held_stages,
)
from course_pp.training.feed import Feed
from course_pp.training.logs import Reporter, Speed, StepResult, find_peak
from course_pp.training.optim import (
    build_optimizer,
    build_scheduler,
    check_precision,
    lr_factor,
    precision_of,
)

# What a checkpoint's run and the one that takes it up must share, or the second would not continue
# the first.
_FIXED = (
    *("batch", "seed", "lr", "lr_schedule", "min_lr", "warmup_steps", "decay_steps"),
    *(
        "optimizer",
        "betas",
        "eps",
        "optimizer_options",
        "weight_decay",
        "clip_norm",
        "precision",
        "versions",
        "group",
    ),
)


class NonFiniteGradient(RuntimeError):
    """A step whose gradient is infinite or not a number; raised on every rank, with nothing updated."""


@dataclass(frozen=True)
class Fitted:
    """What a call of :meth:`Trainer.fit` did, the same on every rank but for the times; losses in nats a token."""

    steps: int
    loss: float | None
    validation_loss: float | None
    speed: Speed


class Trainer:
    """Trains this rank's stages. Make it on every rank, with the same arguments but the stages.

    Args:
        modules: this rank's stages, those that :func:`stages_of_rank` lists, as they are trained
            (after FSDP2), on their device, in a list or by stage. They take token ids or what the
            stage before returned, and ``attention_mask=`` if sequences are padded. In a list,
            parameters have the names of the full model, and a checkpoint fits any other cut of it;
            by stage, it fits the same cut alone.
        train, validation: all sequences, the same on every rank, in memory or on disk, or a stream
            to train on; without validation data nothing is evaluated.
        device_mesh: what :func:`course_pp.parallel.init_distributed` returned.
        loss_fn: ``loss_fn(output, target)``, the mean over the sequences, or a loss that can tell
            how many tokens it averages over; :class:`CrossEntropy` by default.
        tied: weights that several of the stages share: for each the parameter's name by stage. Our
            own model knows its ties. For others, None refuses weights that look tied, and ``[]``
            says that nothing is tied.
        tokenizer_digest: of the tokenizer that made the sequences; kept in :meth:`state`.

    Attributes:
        config: as given, with epochs as steps and the stages' precision.
        step: number of finished steps.
        held: the modules by stage, for a checkpoint.
        is_logging_rank: True on the one rank that writes logs and shows progress; it holds the last
            stage.
    """

    def __init__(
        self,
        config: TrainConfig,
        modules: Stages,
        train: Rows | Stream,
        validation: Rows | None = None,
        *,
        device_mesh: DeviceMesh | None,
        loss_fn: LossFn | TokenLoss | None = None,
        tied: Sequence[Tie] | None = None,
        tokenizer_digest: str | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("no process group: call init_distributed(config) before Trainer")
        everyone = Ranks()
        self.step = 0
        self._mesh = device_mesh
        self._tokenizer_digest = tokenizer_digest
        loss_fn = CrossEntropy() if loss_fn is None else loss_fn
        with everyone.refusing_together():
            self.held = held_stages(config, modules, tied, device_mesh)
            self._loss = counted(loss_fn)
        self.modules = list(self.held.modules.values())
        self._data_digest = train.digest
        everyone.require_equal(
            {
                "config": config,
                "the order in the schedule's file": config.order and config.order.fingerprint,
                "data": self._data_digest,
                "tokenizer": tokenizer_digest,
                "validation": None if validation is None else validation.digest,
            }
        )

        # The data only now: batches of different configurations would be refused with other words.
        self._held_out: Sequence[Sequences] = ()
        with everyone.refusing_together():
            self._feed = Feed(config, train)
            self.config = config = self._feed.config
            if validation is not None:
                self._held_out = validation_batches(validation, config.batch, config.eval_batches)

        # A stage without parameters learns its dtype from the other ranks.
        self.device, self._dtype = device_and_dtype(self.modules)
        if config.precision == "auto":
            with everyone.refusing_together():
                self.config = config = replace(config, precision=precision_of(self._dtype))
            everyone.require_equal({"precision": config.precision})
        with everyone.refusing_together():
            check_precision(config.precision, self.modules)
            self.optimizer = build_optimizer(self.modules, config, self.held.tied)
        self._scaler = MeshGradScaler(
            init_scale=config.loss_scale, enabled=config.precision == "fp16"
        )
        what, where = (config, self.held, loss_fn, self._scaler), (device_mesh, self.device)
        self._engine: PipelineEngine
        if config.engine == "parallel":
            self._engine = ParallelEngine(*what, train.seq_len, *where)
        else:
            self._engine = RuntimeEngine(*what, train.is_padded, *where, self.optimizer)
        self.scheduler = build_scheduler(self.optimizer, config)
        is_first_of_its_stage = (
            dist.get_rank() % (dist.get_world_size() // get_pp_size(device_mesh)) == 0
        )
        is_first_copy = self._engine.copies == 1 or dist.get_rank() == 0
        self.is_logging_rank = (
            self.held.n_stages - 1 in self.held.modules and is_first_of_its_stage and is_first_copy
        )

    def train_step(self) -> StepResult:
        """Take one optimizer step.

        Hooks of ``register_post_accumulate_grad_hook`` are called once, before it, with the clipped
        gradient of the whole batch; not if the step is skipped.

        Raises:
            NonFiniteGradient: on every rank, if a gradient is not finite and such steps are not
                skipped.
            StepFailed: on every rank, if a stage failed; where stages update their own weights,
                also for what is not finite. Some have been updated then.
        """
        begin = time.perf_counter()
        batch = self._feed.batch(self.step)
        self.optimizer.zero_grad()
        if self.config.versions is not None:
            return self._asynchronous_step(batch, begin)
        with called_once(self.modules) as reached:
            loss, norm = self._gradient(batch)
            is_good, scale = math.isfinite(norm), self._scaler.get_scale()
            # the scale is not what did it
            if not is_good and scale <= 1 and self.config.on_nan == "refuse":
                how = (
                    "go on from a checkpoint with a lower learning rate, or look for the batch that"
                    " does it"
                )
                raise NonFiniteGradient(
                    f"step {self.step + 1}: the norm of the gradient is {norm}: {how}"
                )
            if not is_good:
                reached.clear()
        if is_good:
            self._scaler.step(self.optimizer)
        self._scaler.update()
        loads = self._use_loads(is_good)
        lr = self._end_step()
        return StepResult(
            self.step, loss, norm, lr, time.perf_counter() - begin, not is_good, scale, loads
        )

    def _asynchronous_step(self, batch: Sequences, begin: float) -> StepResult:
        """Take a step with stages that update their own weights."""
        try:
            loss = self._engine.step(batch, 1.0)
        except StepFailed as error:
            error.add_note(
                f"It was in step {self.step + 1}, which counts its updates from 0: go on from a"
                " checkpoint."
            )
            raise
        loads = self._use_loads(True)
        lr = self._end_step()
        return StepResult(self.step, loss, None, lr, time.perf_counter() - begin, loads=loads)

    def _use_loads(self, updated: bool) -> Mapping[str, ExpertLoad]:
        """Return how the step used the experts, if there are any; move the routers' biases unless it was skipped."""
        if not (ours := self.held.ours) or not ours[0].config.n_experts:
            return {}
        loads = expert_loads(ours, self._mesh)
        if updated:
            update_router_bias(ours, loads)
        return loads

    def _end_step(self) -> float:
        """Count the step, set the next learning rate, and return this one."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            # It counts the optimizer's steps, and a first one that is skipped is none.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()
        self.step += 1
        return lr

    def _gradient(self, batch: Sequences) -> tuple[float, float]:
        """Return loss and norm of the gradient, which is clipped; the norm is not finite on every rank, or on none."""
        divisor = max(1, self._count(batch))
        try:
            loss = math.fsum(self._engine.step(part, divisor) for part in self._parts(batch))
        except LossNotFinite:
            return math.nan, math.nan
        self._scaler.unscale_(self.optimizer)
        stages, tied = self.held.ours or self.held.modules, self.held.declared
        limit, copies = self.config.clip_norm, self._engine.copies
        return (
            loss,
            clip_grad_norm_(stages, limit, device_mesh=self._mesh, tied=tied, copies=copies).item(),
        )

    def _count(self, batch: Sequences) -> int:
        """Return the tokens over which the loss is a mean, or sequences if it does not count tokens."""
        return int(self._loss.count(batch.targets))

    def evaluate(self) -> float:
        """Return the mean loss over the validation batches, in nats a token."""
        if not self._held_out:
            raise ValueError(
                "validation=None, so there is nothing to evaluate on: give Trainer validation data"
            )
        modes = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        parts = [part for batch in self._held_out for part in self._parts(batch)]
        total = sum(self._count(part) * self._engine.evaluate(part) for part in parts)
        for module, mode in zip(self.modules, modes, strict=True):
            module.train(mode)
        return total / max(1, sum(map(self._count, parts)))

    def fit(self, after_step: Callable[["Trainer", StepResult], None] | None = None) -> Fitted:
        """Train from the current step to ``config.steps``, with logs, progress and evaluation.

        Args:
            after_step: called after each step on every rank; the place to save a checkpoint. Its
                time does not count as training. If it raises, the run ends and the logs are closed.
        """
        config, first, seq_len = self.config, self.step, self._feed.source.seq_len
        peak = find_peak(config.peak_flops, self.device, self._dtype)
        speed = Speed(
            config.batch * seq_len, config.batch * flops_of_a_sequence(self.held, seq_len), peak
        )
        result, validation_loss = None, None
        with ExitStack() as stack:
            self._feed.read_ahead(first, stack)
            reporter = Reporter(config, speed, first, self.is_logging_rank, stack)
            if collects := config.gc_every is not None and gc.isenabled():
                gc.disable()
                stack.callback(gc.enable)
            while self.step < config.steps:
                result = self.train_step()
                reporter.step(result, self._feed.epoch(result.step - 1))
                if collects and self.step % (config.gc_every or 1) == 0:
                    gc.collect()
                if config.step_timeout is not None and self.step == first + 1:
                    limit_waiting(self._mesh, config.step_timeout)
                is_due = config.eval_every is not None and self.step % config.eval_every == 0
                if self._held_out and (is_due or self.step == config.steps):
                    validation_loss = self.evaluate()
                    reporter.validation(self.step, validation_loss)
                if after_step is not None:
                    after_step(self, result)
            if self._held_out and validation_loss is None:
                validation_loss = self.evaluate()
        loss = None if result is None else result.loss
        return Fitted(self.step - first, loss, validation_loss, reporter.speed)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides weights, optimizer and random numbers, as JSON can hold it."""
        return {
            "step": self.step,
            "scheduler": self.scheduler.state_dict(),
            "data": self._feed.state(self.step),
            "config": self.config.as_dict(),
            "tokenizer": self._tokenizer_digest,
            "scaler": self._scaler.state_dict(),
            "n_stages": self.held.n_stages,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state` was taken; call it on every rank, after the checkpoint filled
        the optimizer.

        Layout, engine, schedule, microbatches, accumulation and logging may differ; but if stages
        update their own weights, stages and microbatches must be those of the state. With other
        ``steps`` the learning rate follows the new curve from here on.

        A state of other data, another tokenizer or other hyperparameters is refused on every rank.
        """
        Ranks().collectively(lambda: self._check_state(state))
        self._feed.seek(state["step"], state["data"])
        self.step = state["step"]
        if self._scaler.is_enabled():
            kept = state.get("scaler")
            if kept is None:  # of a version that kept two numbers
                two = state["loss_scale"]
                kept = with_good_steps(self._scaler.state_dict(), two["good_steps"])
                kept["scale"] = two["value"]
            self._scaler.load_state_dict(kept)
        # A rate for each parameter group: the state of a version 1 has one group.
        base_lrs = self.scheduler.base_lrs
        rates = [base * lr_factor(self.step, self.config) for base in base_lrs]
        of_scheduler = {**state["scheduler"], "base_lrs": base_lrs}
        self.scheduler.load_state_dict(with_rates(of_scheduler, rates))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _parts(self, batch: Sequences) -> Iterator[Sequences]:
        """Return the batch as the pipeline steps that are accumulated."""
        rows = len(batch) // self.config.accumulation
        return (batch[first : first + rows] for first in range(0, len(batch), rows))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"step", "scheduler", "data", "config", "tokenizer"} - set(state))
        if missing:
            raise ValueError(
                f"the state has no {', '.join(missing)}: pass what Trainer.state() returned"
            )
        # Older states lack what was not there to set.
        mine, usual = self.config.as_dict(), TrainConfig(precision="fp32").as_dict()
        pairs = [
            ("the digest of the training data", state["data"]["digest"], self._data_digest),
            ("the tokenizer", state["tokenizer"], self._tokenizer_digest),
            *((name, state["config"].get(name, usual[name]), mine[name]) for name in _FIXED),
        ]
        if self.config.versions is not None:
            pairs.append(
                ("microbatches", state["config"].get("microbatches"), mine["microbatches"])
            )
            pairs.append(("the number of stages", state.get("n_stages"), self.held.n_stages))
        for name, saved, here in pairs:
            if saved != here:
                how = "resume with what the run began with, or begin another in a new folder"
                raise ValueError(f"{name} is {here!r} here and {saved!r} in the state: {how}")
        step, steps = state["step"], self.config.steps
        if step > steps:
            raise SettingError(
                f"the state is of step {step}, past {{steps}}: raise steps to go on", steps=steps
            )
