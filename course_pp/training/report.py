"""What a run says about itself while it goes on: times added up, logs, progress, traces."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course_pp.arguments import checked
from course_pp.collective import Ranks
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.logs import Logs, Progress, tracing
from course_pp.training.metrics import Speed

__all__ = ["Reporter", "StepResult"]


@checked
@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    Attributes:
        step: number of finished steps, this one included.
        loss: mean over the step's tokens, in nats, before the update; where stages update their own weights, each
            token's with the weights of its microbatch.
        grad_norm: norm of the whole model's gradient, before clipping; None where stages update their own weights.
        lr: learning rate of the update.
        seconds: wall time.
        skipped: the gradient was not finite, and nothing was updated.
        loss_scale: by what the loss was multiplied; 1 without scaling.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    seconds: float
    skipped: bool = False
    loss_scale: float = 1.0


class Reporter:
    """Tells logs, progress and profiler about each step. Make it on every rank; one of them writes.

    Args:
        speed: a :class:`Speed` of no steps, with the batch's tokens, its FLOPs and the peak.
        step: finished steps.
        stack: closes everything in the end.

    Attributes:
        speed: the speed of all steps since this reporter was made.

    Raises:
        ValueError: on every rank, if ``log_folder`` cannot be written.
    """

    def __init__(self, config: TrainConfig, speed: Speed, step: int, is_logging_rank: bool, stack: ExitStack) -> None:
        self._config, self._nothing_yet = config, speed
        self.speed = self._window = speed
        self._progress = Progress(step, config.steps, config.log_every, is_logging_rank)
        stack.callback(self._progress.close)
        self._logs = Ranks().collectively(lambda: _open(config.log_folder, step) if is_logging_rank else None)
        if self._logs is not None:
            stack.callback(self._logs.close)
        peak = speed.peak
        self._write("start", step, {"config": config.as_dict(), "peak_flops": peak.flops, "peak_source": peak.source})
        self._profiler: torch.profiler.profile | None = None
        if config.profile and config.log_folder is not None:
            self._profiler = stack.enter_context(tracing(config.log_folder, dist.get_rank(), config.profile))

    def step(self, result: StepResult, epoch: int) -> None:
        """Report a step that is done, and the pass over the data that it was in."""
        self.speed, self._window = self.speed.after(result.seconds), self._window.after(result.seconds)
        if self._profiler is not None:
            self._profiler.step()
        self._progress.advance(result.loss, epoch)
        if result.skipped:
            why = f"the norm of its gradient is {result.grad_norm}"
            scaled = f", at a loss scale of {result.loss_scale:.0f}" if result.loss_scale > 1 else ""
            self._progress.say(f"step {result.step}/{self._config.steps}  skipped: {why}{scaled}")
        if result.step % self._config.log_every == 0 or result.step == self._config.steps:
            values = {
                "loss": result.loss,
                **({} if result.grad_norm is None else {"grad_norm": result.grad_norm}),
                "lr": result.lr,
                "epoch": epoch,
                "tokens": result.step * self.speed.tokens_of_a_step,
                "tokens_per_s": self._window.tokens_per_s,
                "mfu": self._window.utilisation,
                **({"loss_scale": result.loss_scale} if self._config.precision == "fp16" else {}),
            }
            self._write("train", result.step, values)
            self._window = self._nothing_yet

    def validation(self, step: int, loss: float) -> None:
        """Report an evaluation that is done."""
        self._write("validation", step, {"loss": loss})
        if step < self._config.steps:  # the last is the result, which whoever called fit reports
            self._progress.say(f"step {step}/{self._config.steps}  validation loss {loss:.3f}")

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if self._logs is not None:
            # JSON has neither infinity nor NaN; in words they survive every parser.
            is_odd = {name: isinstance(v, float) and not math.isfinite(v) for name, v in values.items()}
            self._logs.write(event, step, {name: str(v) if is_odd[name] else v for name, v in values.items()})


def _open(folder: str | None, step: int) -> Logs | None:
    if folder is None:
        return None
    try:
        return Logs(folder, step)
    except OSError as error:
        raise SettingError(
            f"{{log_folder}} cannot be written ({error.strerror or 'no folder'}): give a folder that can, or None",
            {"log_folder": folder},
        ) from error
