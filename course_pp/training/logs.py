"""What a run says of itself: how fast it is, records on disk, progress in a terminal, and traces of
every rank.

    model FLOPs utilisation = tokens/s · FLOPs a token / (peak FLOPs/s of all devices)

Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B. The FLOPs are those the model needs,
forward and backward; recomputation, as in activation checkpointing, does not count, so wasted
arithmetic cannot raise the figure.
"""

import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from course_pp.base.imports import imports_of_extra
from course_pp.base.ranks import Ranks
from course_pp.model.experts import ExpertLoad
from course_pp.training.config import SettingError, TrainConfig

with imports_of_extra("train"):
    from tqdm import tqdm

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepResult:
    """One optimizer step.

    Attributes:
        step: number of finished steps, this one included.
        loss: mean over the step's tokens, in nats, before the update; where stages update their own
            weights, each token's with the weights of its microbatch.
        grad_norm: of the whole model, before clipping; None where stages update their own weights.
        lr: of the update.
        seconds: wall time.
        skipped: the gradient was not finite, and nothing was updated.
        loss_scale: by what the loss was multiplied.
        loads: how each layer with experts used them, by names such as ``layers.3``.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    seconds: float
    skipped: bool = False
    loss_scale: float = 1.0
    loads: Mapping[str, ExpertLoad] = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """FLOPs a second of all ranks at most, given from a data sheet or measured with a matrix product on all at once."""

    flops: float
    source: Literal["given", "measured"]


@dataclass(frozen=True)
class Speed:
    """How fast steps of one size went.

    Attributes:
        tokens_of_a_step: positions of its batch; padding counts, as it costs the same.
        flops_of_a_step: what the model needs for it.
        steps, seconds: how many, and the wall time spent in them.
    """

    tokens_of_a_step: int
    flops_of_a_step: float
    peak: Peak
    steps: int = 0
    seconds: float = 0.0

    def after(self, seconds: float) -> "Speed":
        """Return the speed with one more step, which took ``seconds``."""
        return replace(self, steps=self.steps + 1, seconds=self.seconds + seconds)

    @property
    def tokens_per_s(self) -> float:
        """0 before the first step."""
        return self.steps * self.tokens_of_a_step / self.seconds if self.steps else 0.0

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation, 1 at the peak; 0 before the first step."""
        return (
            self.steps * self.flops_of_a_step / self.seconds / self.peak.flops
            if self.steps
            else 0.0
        )


def find_peak(given: float | None, device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of all ranks together; a collective.

    Without the FLOPs a second of one rank's device it measures, on all ranks at the same time, so
    that ranks that share a processor are not promised all of it each.
    """
    if given is not None:
        return Peak(given * dist.get_world_size(), "given")
    dist.barrier()
    return Peak(sum(Ranks().gather(matmul_flops(device, dtype))), "measured")


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs a second of the fastest of five products of two square matrices: 2 · size³ each."""
    on_cpu = 768 if dtype.itemsize >= 4 else 256  # half precision is slow there
    size = 8192 if device.type == "cuda" else on_cpu
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    a, b = torch.ones(2, size, size, device=device, dtype=dtype)
    product = a @ b  # the first also loads the library
    seconds = []
    for _ in range(5):
        wait(device)
        begin = time.perf_counter()
        torch.mm(a, b, out=product)
        wait(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size**3 / min(seconds)


class Logs:
    """Records of a run: JSON lines, each on disk before the next step, and TensorBoard's files.

    What an interrupted run wrote about steps after ``step`` is dropped, as they are done again; so
    is a last line that a killed process left half.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0) -> None:
        path = Path(folder) / METRICS
        path.parent.mkdir(parents=True, exist_ok=True)
        # A run from the beginning keeps nothing, not even the heading that another wrote before its
        # first step.
        there = path.read_text().splitlines() if path.exists() and step > 0 else []
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in there if _is_of_past(line, step)))
        os.replace(beside, path)
        self._file = path.open("a")
        self._board = _tensorboard(folder, path, step)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one record; its numbers are TensorBoard's scalars, named ``event/name``."""
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        """Write what is still in memory."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: str | os.PathLike[str], path: Path, step: int) -> "SummaryWriter | None":
    """Open TensorBoard's file in ``folder``; without the package say so, and return None."""
    try:
        # Only the rank that writes pays for the import.
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        remedy = "pip install 'course_pp[tensorboard]'"
        print(f"metrics go to {path} alone: TensorBoard is not installed ({remedy})", flush=True)
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def _is_of_past(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except ValueError:
        return False


class Progress:
    """A bar in a terminal; where output is kept, a line now and then reads better."""

    def __init__(self, step: int, steps: int, every: int, is_logging_rank: bool) -> None:
        self._step, self._steps, self._every = step, steps, every
        self._shown, self._in_terminal = is_logging_rank, sys.stderr.isatty()
        self._bar = tqdm(
            total=steps,
            initial=step,
            unit="step",
            disable=not (is_logging_rank and self._in_terminal),
        )

    def advance(self, loss: float, epoch: int, more: str = "") -> None:
        """Show one more step: its loss, the pass over the data that it is in, and what more a line has to say."""
        self._step += 1
        self._bar.set_description(f"epoch {epoch}", refresh=False)
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self._bar.update()
        if not self._in_terminal and self._step % self._every == 0:
            self.say(f"step {self._step}/{self._steps}  loss {loss:.3f}{more}")

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._shown:
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        self._bar.close()


class Reporter:
    """Tells logs, progress and profiler about each step. Make it on every rank; one of them writes.

    Its ``speed`` is that of all steps since it was made; ``stack`` closes everything in the end.
    """

    def __init__(
        self, config: TrainConfig, speed: Speed, step: int, is_logging_rank: bool, stack: ExitStack
    ) -> None:
        self._config, self._nothing_yet = config, speed
        self.speed = self._window = speed
        self._progress = Progress(step, config.steps, config.log_every, is_logging_rank)
        stack.callback(self._progress.close)
        writes = is_logging_rank and config.log_folder is not None
        self._logs = Ranks().collectively(
            lambda: _open(config.log_folder, step) if writes else None
        )
        if self._logs is not None:
            stack.enter_context(_tensorboard_raises_in_its_caller_only())
        stack.callback(self._close_logs)
        peak = speed.peak
        self._write(
            "start",
            step,
            {"config": config.as_dict(), "peak_flops": peak.flops, "peak_source": peak.source},
        )
        self._profiler: torch.profiler.profile | None = None
        if config.profile and config.log_folder is not None:
            # To open in Perfetto or chrome://tracing. The first two steps open connections.
            path = str(Path(config.log_folder) / f"trace_rank{dist.get_rank()}.json")
            steps = torch.profiler.schedule(wait=1, warmup=1, active=config.profile, repeat=1)
            profile = torch.profiler.profile(
                schedule=steps, on_trace_ready=lambda p: p.export_chrome_trace(path)
            )
            self._profiler = stack.enter_context(profile)

    def step(self, result: StepResult, epoch: int) -> None:
        """Report a step, and the pass over the data that it was in."""
        self.speed, self._window = (
            self.speed.after(result.seconds),
            self._window.after(result.seconds),
        )
        if self._profiler is not None:
            self._profiler.step()
        self._progress.advance(result.loss, epoch, _load_in_words(result.loads))
        if result.skipped:
            why = f"the norm of its gradient is {result.grad_norm}"
            scaled = (
                f", at a loss scale of {result.loss_scale:.0f}" if result.loss_scale > 1 else ""
            )
            self._progress.say(f"step {result.step}/{self._config.steps}  skipped: {why}{scaled}")
        if result.step % self._config.log_every == 0 or result.step == self._config.steps:
            values: dict[str, Any] = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "lr": result.lr,
                "epoch": epoch,
                "tokens": result.step * self.speed.tokens_of_a_step,
                "tokens_per_s": self._window.tokens_per_s,
                "mfu": self._window.utilisation,
                "loss_scale": result.loss_scale if self._config.precision == "fp16" else None,
            }
            if result.loads:
                values["imbalance"] = max(load.imbalance for load in result.loads.values())
                values["dropped"] = sum(load.dropped for load in result.loads.values())
                values["tokens_by_expert"] = {
                    name: load.tokens for name, load in result.loads.items()
                }
            self._write(
                "train",
                result.step,
                {name: value for name, value in values.items() if value is not None},
            )
            self._window = self._nothing_yet

    def validation(self, step: int, loss: float) -> None:
        """Report an evaluation."""
        self._write("validation", step, {"loss": loss})
        if step < self._config.steps:  # the last is the result, which whoever called fit reports
            self._progress.say(f"step {step}/{self._config.steps}  validation loss {loss:.3f}")

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if self._logs is None:
            return
        # JSON has neither infinity nor NaN; in words they survive every parser.
        is_odd = {name: isinstance(v, float) and not math.isfinite(v) for name, v in values.items()}
        record = {name: str(v) if is_odd[name] else v for name, v in values.items()}
        try:
            self._logs.write(event, step, record)
        except OSError as error:
            self._go_on_without_logs(error)

    def _close_logs(self) -> None:
        if self._logs is None:
            return
        try:
            self._logs.close()
        except OSError as error:
            self._go_on_without_logs(error)

    def _go_on_without_logs(self, error: OSError) -> None:
        """Stop writing metrics, as to a full disk: they are not worth the end of a run."""
        logs, self._logs = self._logs, None
        warnings.warn(
            f"log_folder {self._config.log_folder} can no longer be written"
            f" ({error.strerror or error}): training goes on, and saves, without metrics; a resumed"
            " run writes them again",
            stacklevel=3,
        )
        if logs is not None:
            with suppress(OSError):
                logs.close()


@contextmanager
def _tensorboard_raises_in_its_caller_only() -> Iterator[None]:
    """Keep the traceback of TensorBoard's own thread away: the next call raises what failed there."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        is_tensorboards = type(args.thread).__module__.startswith("tensorboard.")
        if not (is_tensorboards and isinstance(args.exc_value, OSError)):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _load_in_words(loads: Mapping[str, ExpertLoad]) -> str:
    if not loads:
        return ""
    name, load = max(loads.items(), key=lambda item: item[1].imbalance)
    dropped = sum(load.dropped for load in loads.values())
    lost = f", {dropped} dropped" if dropped else ""
    return f"  busiest expert ({name}) {load.imbalance:.2f} × the mean{lost}"


def _open(folder: Any, step: int) -> Logs:
    try:
        return Logs(folder, step)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or 'no folder'})"
        raise SettingError(
            f"{{log_folder}} {problem}: give another folder, or None", log_folder=folder
        ) from error
