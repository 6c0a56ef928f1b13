"""The training loop: batch, gradient, clip, step, and now and then a look at the validation data.

    mesh = init_distributed(DistributedConfig(pp=2))
    config = TrainConfig(steps=200, batch=32, microbatches=8)
    indices, n_stages = stages_of_rank(config, get_pp_rank(mesh), get_pp_size(mesh))
    stages = [build_stage_module(model_config, i, n_stages) for i in indices]
    ...  # tensor parallelism, recomputation, FSDP2
    trainer = Trainer(config, stages, train, validation, device_mesh=mesh)
    fitted = trainer.fit()

A step depends only on the configuration, the data and its own number, so a run can go on from any
step.
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
from course_pp.runtime import StepFailed
from course_pp.step.hooks import called_once
from course_pp.step.loss import LossFn, TokenLoss, counted
from course_pp.step.scaler import MeshGradScaler
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.data import Rows, Sequences, Stream, validation_batches
from course_pp.training.engines import (
    Engine,
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

# Settings that a resumed run must share with its checkpoint. Any other value would train another
# model from here on.
_FIXED = (
    "batch",
    "seed",
    "lr",
    "lr_schedule",
    "min_lr",
    "warmup_steps",
    "decay_steps",
    "optimizer",
    "betas",
    "eps",
    "optimizer_options",
    "weight_decay",
    "clip_norm",
    "precision",
    "versions",
    "group",
)


class NonFiniteGradient(RuntimeError):
    """The gradient of a step is infinite or not a number. All ranks raise it and update nothing."""


@dataclass(frozen=True)
class Fitted:
    """The result of :meth:`Trainer.fit`. Losses are in nats a token; only times differ by rank."""

    steps: int
    loss: float | None
    validation_loss: float | None
    speed: Speed


class Trainer:
    """Trains this rank's stages. Make it on every rank, with the same arguments but the stages.

    Args:
        modules: this rank's stages, the ones that :func:`stages_of_rank` lists. They are ready to
            train: sharded by FSDP2 and on their device. A stage takes token ids or the output of
            the stage before, and ``attention_mask=`` if sequences are padded. In a list, parameters
            have the names of the full model, and a checkpoint fits any other cut of the model. In a
            dict by stage, a checkpoint fits the same cut only.
        train: all training sequences, in memory or on disk, or a stream; the same on every rank.
        validation: all validation sequences; None evaluates nothing.
        device_mesh: the mesh of :func:`course_pp.parallel.init_distributed`.
        loss_fn: ``loss_fn(output, target)``, the mean over the sequences, or a loss that can tell
            how many tokens it averages over; :class:`CrossEntropy` by default.
        tied: weights that several stages share, each as ``{stage: parameter name}``. Our own model
            knows its ties. For other models, None refuses weights that look tied, and ``[]`` says
            that nothing is tied.
        tokenizer_digest: digest of the tokenizer that made the sequences; kept in :meth:`state`.

    Attributes:
        config: the given configuration, with epochs turned into steps and ``precision`` resolved.
        step: number of finished steps.
        held: the modules by stage, for a checkpoint.
        is_logging_rank: True on the one rank that writes logs and shows progress. It holds the last
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

        # Only now: batches of unequal configurations would be refused in other words.
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

        self._engine = Engine(
            config,
            self.held,
            loss_fn=loss_fn,
            scaler=self._scaler,
            seq_len=train.seq_len,
            masked=train.is_padded,
            device_mesh=device_mesh,
            device=self.device,
            optimizer=self.optimizer,
        )
        self.scheduler = build_scheduler(self.optimizer, config)

        # Several ranks may hold the last stage: tensor and data ranks, and copies of the pipeline.
        ranks_of_a_stage = dist.get_world_size() // get_pp_size(device_mesh)
        has_last_stage = self.held.n_stages - 1 in self.held.modules
        is_first_of_its_stage = dist.get_rank() % ranks_of_a_stage == 0
        is_first_copy = self._engine.copies == 1 or dist.get_rank() == 0
        self.is_logging_rank = has_last_stage and is_first_of_its_stage and is_first_copy

    def train_step(self) -> StepResult:
        """Take one optimizer step.

        Hooks of ``register_post_accumulate_grad_hook`` are called once, before the update, with the
        clipped gradient of the whole batch. If the step is skipped, they are not called.

        Raises:
            NonFiniteGradient: on every rank, if a gradient is not finite and such steps are not
                skipped.
            StepFailed: on every rank, if a stage failed. Stages that update their own weights also
                raise it for a gradient that is not finite; by then some stages have been updated.
        """
        begin = time.perf_counter()
        batch = self._feed.batch(self.step)
        self.optimizer.zero_grad()
        if self.config.versions is not None:
            return self._asynchronous_step(batch, begin)

        with called_once(self.modules) as reached:
            loss, norm = self._gradient(batch)
            is_good = math.isfinite(norm)
            scale = self._scaler.get_scale()
            # A scale above 1 may itself have caused the overflow; the scaler then lowers it.
            if not is_good and scale <= 1 and self.config.on_nan == "refuse":
                raise NonFiniteGradient(
                    f"step {self.step + 1}: the norm of the gradient is {norm}: go on from a"
                    " checkpoint with a lower learning rate, or look for the batch that does it"
                )
            if not is_good:
                reached.clear()

        if is_good:
            self._scaler.step(self.optimizer)
        self._scaler.update()
        loads = self._use_loads(is_good)
        lr = self._end_step()
        return StepResult(
            self.step,
            loss,
            grad_norm=norm,
            lr=lr,
            seconds=time.perf_counter() - begin,
            skipped=not is_good,
            loss_scale=scale,
            loads=loads,
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
        return StepResult(
            self.step,
            loss,
            grad_norm=None,
            lr=lr,
            seconds=time.perf_counter() - begin,
            loads=loads,
        )

    def _use_loads(self, updated: bool) -> Mapping[str, ExpertLoad]:
        """Return each expert layer's load in this step; after an update, move the routers' biases.

        Without experts there are no loads.
        """
        ours = self.held.ours
        if not ours or not ours[0].config.n_experts:
            return {}
        loads = expert_loads(ours, self._mesh)
        if updated:
            update_router_bias(ours, loads)
        return loads

    def _end_step(self) -> float:
        """Count the step, set the next learning rate, and return this one."""
        lr = float(self.optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            # The scheduler warns if it steps before the optimizer, as it does when the first step
            # is skipped.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()
        self.step += 1
        return lr

    def _gradient(self, batch: Sequences) -> tuple[float, float]:
        """Compute and clip the gradient; return the loss and the norm before clipping.

        All ranks return the same norm, so that all update or none does.
        """
        divisor = max(1, self._count(batch))
        loss = sum(self._engine.step(part, divisor) for part in self._parts(batch))
        self._scaler.unscale_(self.optimizer)
        total = clip_grad_norm_(
            self.held.ours or self.held.modules,
            self.config.clip_norm,
            device_mesh=self._mesh,
            tied=self.held.declared,
            copies=self._engine.copies,
        )
        norm = total.item()
        # An infinite loss may have finite gradients. With a scaler the gradients alone decide.
        if not math.isfinite(loss) and not self._scaler.is_enabled():
            norm = math.nan
        return loss, norm

    def _count(self, batch: Sequences) -> int:
        """Return the tokens that the loss averages over, or sequences if it counts no tokens."""
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
        counts = [self._count(part) for part in parts]
        losses = [self._engine.evaluate(part) for part in parts]
        total = sum(n * loss for n, loss in zip(counts, losses, strict=True))

        for module, mode in zip(self.modules, modes, strict=True):
            module.train(mode)
        return total / max(1, sum(counts))

    def fit(self, after_step: Callable[["Trainer", StepResult], None] | None = None) -> Fitted:
        """Train from the current step to ``config.steps``, with logs, progress and evaluation.

        Args:
            after_step: called after each step on every rank; the place to save a checkpoint. Its
                time does not count as training. If it raises, the run ends and the logs are closed.
        """
        config = self.config
        first = self.step
        seq_len = self._feed.source.seq_len
        speed = Speed(
            tokens_of_a_step=config.batch * seq_len,
            flops_of_a_step=config.batch * flops_of_a_sequence(self.held, seq_len),
            peak=find_peak(config.peak_flops, self.device, self._dtype),
        )
        result = None
        validation_loss = None
        with ExitStack() as stack:
            self._feed.read_ahead(first, stack)
            reporter = Reporter(config, speed, first, self.is_logging_rank, stack)
            collects = config.gc_every is not None and gc.isenabled()
            if collects:
                gc.disable()
                stack.callback(gc.enable)

            while self.step < config.steps:
                result = self.train_step()
                reporter.step(result, self._feed.epoch(result.step - 1))
                if collects and self.step % (config.gc_every or 1) == 0:
                    gc.collect()
                # The first step also compiles and connects, which may take longer.
                if config.step_timeout is not None and self.step == first + 1:
                    limit_waiting(self._mesh, config.step_timeout)

                is_due = config.eval_every is not None and self.step % config.eval_every == 0
                if self._held_out and (is_due or self.step == config.steps):
                    validation_loss = self.evaluate()
                    reporter.validation(self.step, validation_loss)
                if after_step is not None:
                    after_step(self, result)

            # A run that was already finished has taken no step.
            if self._held_out and validation_loss is None:
                validation_loss = self.evaluate()

        loss = None if result is None else result.loss
        return Fitted(self.step - first, loss, validation_loss, reporter.speed)

    def state(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint, as JSON can hold it.

        It lacks weights, the optimizer's state and random numbers, which are saved beside it.
        """
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
        """Go on where :meth:`state` was taken.

        Call it on every rank, after the checkpoint has filled the optimizer.

        Layout, engine, schedule, microbatches, accumulation and logging may differ from the saved
        run. But if stages update their own weights, the number of stages and of microbatches must
        be the same. With other ``steps`` the learning rate follows the new curve from here on.

        A state of other data, another tokenizer or other hyperparameters is refused on every rank.
        """
        Ranks().collectively(lambda: self._check_state(state))
        self._feed.seek(state["step"], state["data"])
        self.step = state["step"]

        if self._scaler.is_enabled():
            kept = state.get("scaler")
            if kept is None:  # an older version kept two numbers of the scaler
                two = state["loss_scale"]
                kept = with_good_steps(self._scaler.state_dict(), two["good_steps"])
                kept["scale"] = two["value"]
            self._scaler.load_state_dict(kept)

        # The state of a version 1 has one rate for all parameter groups; compute a rate for each.
        base_lrs = self.scheduler.base_lrs
        rates = [base * lr_factor(self.step, self.config) for base in base_lrs]
        of_scheduler = {**state["scheduler"], "base_lrs": base_lrs}
        self.scheduler.load_state_dict(with_rates(of_scheduler, rates))
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _parts(self, batch: Sequences) -> Iterator[Sequences]:
        """Yield the parts of a batch whose gradients are accumulated, one pipeline step each."""
        rows = len(batch) // self.config.accumulation
        for first in range(0, len(batch), rows):
            yield batch[first : first + rows]

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that this run cannot continue."""
        missing = sorted({"step", "scheduler", "data", "config", "tokenizer"} - set(state))
        if missing:
            raise ValueError(
                f"the state has no {', '.join(missing)}: pass what Trainer.state() returned"
            )

        theirs = state["config"]
        mine = self.config.as_dict()
        pairs: list[tuple[str, Any, Any]] = [
            ("the digest of the training data", state["data"]["digest"], self._data_digest),
            ("the tokenizer", state["tokenizer"], self._tokenizer_digest),
        ]
        # A setting that is newer than the state had its default value then.
        usual = TrainConfig(precision="fp32").as_dict()
        for name in _FIXED:
            pairs.append((name, theirs.get(name, usual[name]), mine[name]))
        if self.config.versions is not None:
            pairs.append(("microbatches", theirs.get("microbatches"), mine["microbatches"]))
            pairs.append(("the number of stages", state.get("n_stages"), self.held.n_stages))
        for name, saved, here in pairs:
            if saved != here:
                raise ValueError(
                    f"{name} is {here!r} here and {saved!r} in the state: resume with what the run"
                    " began with, or begin another in a new folder"
                )

        step, steps = state["step"], self.config.steps
        if step > steps:
            raise SettingError(
                f"the state is of step {step}, past {{steps}}: raise steps to go on", steps=steps
            )
