"""Reports of a run: speed, records on disk, progress in a terminal, and a trace of every rank.

    model FLOPs utilisation = tokens/s · FLOPs a token / (peak FLOPs/s of all devices)

Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B. The FLOPs are the ones that the model
needs, forward and backward. Recomputation, as in activation checkpointing, does not count, so
wasted arithmetic cannot raise the figure.
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
        loss: mean over the step's tokens, in nats, before the update. Where stages update their own
            weights, each token is measured with the weights of its microbatch.
        grad_norm: norm of the whole model's gradient before clipping; None where stages update
            their own weights.
        lr: learning rate of the update.
        seconds: wall time.
        skipped: True if the gradient was not finite and nothing was updated.
        loss_scale: factor on the loss.
        loads: load of the experts by layer, with names such as ``layers.3``.
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
    """The most FLOPs a second that all ranks can do together.

    Attributes:
        source: ``"given"`` from a data sheet, or ``"measured"`` with a matrix product on all ranks
            at once.
    """

    flops: float
    source: Literal["given", "measured"]


@dataclass(frozen=True)
class Speed:
    """The speed of steps of one size.

    Attributes:
        tokens_of_a_step: positions of its batch; padding counts, as it costs the same.
        flops_of_a_step: FLOPs that the model needs for a step.
        steps: number of steps so far.
        seconds: wall time of these steps together.
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
        """Tokens a second of all ranks; 0 before the first step."""
        if not self.steps:
            return 0.0
        return self.steps * self.tokens_of_a_step / self.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation, 1 at the peak; 0 before the first step."""
        if not self.steps:
            return 0.0
        return self.steps * self.flops_of_a_step / self.seconds / self.peak.flops


def find_peak(given: float | None, device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the peak of all ranks together; a collective.

    Args:
        given: FLOPs a second of one rank's device. None measures on all ranks at the same time, so
            that ranks that share a processor share its peak, too.
    """
    if given is not None:
        return Peak(given * dist.get_world_size(), "given")
    # All ranks begin together, or the first ones would measure a processor that is free.
    dist.barrier()
    return Peak(sum(Ranks().gather(matmul_flops(device, dtype))), "measured")


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs a second of a matrix product: the fastest of five, 2 · size³ FLOPs each."""
    on_gpu = device.type == "cuda"
    # Half precision is slow on a CPU.
    size = 768 if dtype.itemsize >= 4 else 256
    if on_gpu:
        size = 8192
    wait = torch.cuda.synchronize if on_gpu else lambda device: None
    a, b = torch.ones(2, size, size, device=device, dtype=dtype)
    product = a @ b  # not measured: the first product also loads the library
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

    An interrupted run may have written about steps after ``step``. These lines are dropped, because
    the steps are done again. A last line that a killed process left half is dropped, too.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int = 0) -> None:
        path = Path(folder) / METRICS
        path.parent.mkdir(parents=True, exist_ok=True)

        # A run from step 0 keeps nothing. Even a "start" record of step 0 is another run's.
        lines = path.read_text().splitlines() if path.exists() and step > 0 else []
        kept = [line for line in lines if _is_of_past(line, step)]
        # Written beside and renamed, so that a killed process leaves the old file or the new one.
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(f"{line}\n" for line in kept))
        os.replace(beside, path)
        self._file = path.open("a")
        self._board = _tensorboard(folder, path, step)

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one record; its numbers are TensorBoard's scalars, named ``event/name``."""
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        # A run that is killed in the next step has this one on record.
        self._file.flush()
        if self._board is None:
            return
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def close(self) -> None:
        """Write all records that are still in memory, and close the files."""
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


class ProgressBar:
    """A bar in a terminal. Anywhere else it prints a line now and then, which reads better."""

    def __init__(self, step: int, steps: int, every: int, is_logging_rank: bool) -> None:
        self._step = step
        self._steps = steps
        self._every = every
        self._shown = is_logging_rank
        self._in_terminal = sys.stderr.isatty()
        is_drawn = is_logging_rank and self._in_terminal
        self._bar = tqdm(total=steps, initial=step, unit="step", disable=not is_drawn)

    def advance(self, loss: float, epoch: int, more: str = "") -> None:
        """Show one more step: its loss, its pass over the data, and ``more`` words in a line."""
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
    """Tells logs, progress bar and profiler about each step.

    Make it on every rank; only the logging rank writes.

    Args:
        step: number of steps that are finished already.
        stack: stack that closes everything in the end.

    Attributes:
        speed: the speed of all steps since this was made.
    """

    def __init__(
        self, config: TrainConfig, speed: Speed, step: int, is_logging_rank: bool, stack: ExitStack
    ) -> None:
        self._config = config
        self._nothing_yet = speed
        self.speed = self._window = speed
        self._progress = ProgressBar(
            step, config.steps, every=config.log_every, is_logging_rank=is_logging_rank
        )
        stack.callback(self._progress.close)

        writes = is_logging_rank and config.log_folder is not None
        self._logs = Ranks().collectively(
            lambda: _open(config.log_folder, step) if writes else None
        )
        if self._logs is not None:
            stack.enter_context(_tensorboard_raises_in_its_caller_only())
        stack.callback(self._close_logs)
        start = {
            "config": config.as_dict(),
            "peak_flops": speed.peak.flops,
            "peak_source": speed.peak.source,
        }
        self._write("start", step, start)

        self._profiler: torch.profiler.profile | None = None
        if config.profile and config.log_folder is not None:
            # Perfetto and chrome://tracing open the file. The first two steps open connections and
            # are not in it.
            path = str(Path(config.log_folder) / f"trace_rank{dist.get_rank()}.json")
            steps = torch.profiler.schedule(wait=1, warmup=1, active=config.profile, repeat=1)
            profile = torch.profiler.profile(
                schedule=steps, on_trace_ready=lambda p: p.export_chrome_trace(path)
            )
            self._profiler = stack.enter_context(profile)

    def step(self, result: StepResult, epoch: int) -> None:
        """Report a step, and the pass over the data that it was in."""
        self.speed = self.speed.after(result.seconds)
        self._window = self._window.after(result.seconds)
        if self._profiler is not None:
            self._profiler.step()
        self._progress.advance(result.loss, epoch, _load_in_words(result.loads))
        last = self._config.steps
        if result.skipped:
            why = f"the norm of its gradient is {result.grad_norm}"
            if result.loss_scale > 1:
                why += f", at a loss scale of {result.loss_scale:.0f}"
            self._progress.say(f"step {result.step}/{last}  skipped: {why}")
        if result.step % self._config.log_every == 0 or result.step == last:
            self._write_metrics(result, epoch)
            self._window = self._nothing_yet

    def _write_metrics(self, result: StepResult, epoch: int) -> None:
        values: dict[str, Any] = {"loss": result.loss}
        if result.grad_norm is not None:
            values["grad_norm"] = result.grad_norm
        values |= {
            "lr": result.lr,
            "epoch": epoch,
            "tokens": result.step * self.speed.tokens_of_a_step,
            "tokens_per_s": self._window.tokens_per_s,
            "mfu": self._window.utilisation,
        }
        if self._config.precision == "fp16":
            values["loss_scale"] = result.loss_scale
        if result.loads:
            loads = result.loads.values()
            values["imbalance"] = max(load.imbalance for load in loads)
            values["dropped"] = sum(load.dropped for load in loads)
            values["tokens_by_expert"] = {name: load.tokens for name, load in result.loads.items()}
        self._write("train", result.step, values)

    def validation(self, step: int, loss: float) -> None:
        """Report an evaluation."""
        self._write("validation", step, {"loss": loss})
        # The last evaluation is the result; the caller of fit reports it.
        if step < self._config.steps:
            self._progress.say(f"step {step}/{self._config.steps}  validation loss {loss:.3f}")

    def _write(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if self._logs is None:
            return
        record = dict(values)
        for name, value in values.items():
            # JSON has neither infinity nor NaN; in words they survive every parser.
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = str(value)
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
        """Stop writing metrics, as to a full disk. They are not worth the end of a run."""
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
    """Hide the traceback of TensorBoard's own thread. Its error is raised by the next call, too."""
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
        problem = error.strerror or "no folder"
        raise SettingError(
            f"{{log_folder}} cannot be written ({problem}): give another folder, or None",
            log_folder=folder,
        ) from error
