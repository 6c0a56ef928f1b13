"""What a training run is, checked when it is written down."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["ENGINES", "Engine", "TrainConfig"]

Engine = Literal["parallel", "runtime"]
ENGINES: tuple[Engine, ...] = ("parallel", "runtime")


@dataclass(frozen=True)
class TrainConfig:
    """How to train, the same on every rank. Where the ranks stand is the mesh's business, not this one's.

    Raises:
        ValueError: a value that no run can have; the message names the value, the rule and the remedy.
    """

    steps: int = 200
    """Optimizer steps of the whole run."""
    batch: int = 32
    """Sequences that an optimizer step learns from, over all ranks."""
    microbatches: int = 8
    """Microbatches of a pipeline step."""
    accumulation: int = 1
    """Pipeline steps whose gradients make one optimizer step; it changes memory and speed, not the result."""
    engine: Engine = "parallel"
    """`"parallel"` runs `course_pp.parallel`, `"runtime"` the pipeline of `course_pp.runtime`."""
    schedule: str = "1f1b"
    lr: float = 3e-3
    """Peak learning rate of AdamW, reached after the warm-up."""
    min_lr: float = 0.1
    """Learning rate at the end of the cosine, as a share of the peak."""
    warmup_steps: int | None = None
    """Steps until the learning rate is at its peak; None: see `warmup`."""
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    """Largest norm of the whole model's gradient; `math.inf` only measures it."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates at the end only."""
    eval_batches: int = 8
    """Validation batches of an evaluation, each of `batch` sequences."""
    log_every: int = 10
    """Steps between lines of the log."""
    log_folder: str | None = None
    """Where one rank writes `metrics.jsonl` and TensorBoard's files; None writes none."""
    profile: int = 0
    """Steps to trace on every rank into `log_folder`; 0 traces none."""
    peak_flops: float | None = None
    """FLOPs a second that one device can do, from its data sheet; None measures it with a matrix product."""
    seed: int = 42
    """Of the order of the data. Weights are drawn from `init_distributed`'s seed."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "microbatches", "accumulation", "eval_batches", "log_every"):
            _check_whole(name, getattr(self, name), 1)
        for name in ("profile", "seed"):
            _check_whole(name, getattr(self, name), 0)
        for name, least in (("warmup_steps", 0), ("eval_every", 1)):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), least)
        for name in ("lr", "min_lr", "weight_decay", "clip_norm"):
            _check_number(name, getattr(self, name))
        self._check_rules()

    def _check_rules(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine!r} must be one of {', '.join(map(repr, ENGINES))}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr={self.lr} must be above 0 and finite, such as 3e-3")
        if not 0 <= self.min_lr <= 1:
            raise ValueError(f"min_lr={self.min_lr} must lie between 0 and 1: it is a share of the peak, such as 0.1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay} must be 0 or more and finite, such as 0.01")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} must be above 0: use math.inf to measure without clipping")
        if self.warmup > self.steps:
            raise ValueError(f"warmup_steps={self.warmup} must be at most steps={self.steps}: shorten the warm-up")
        if self.peak_flops is not None:
            _check_number("peak_flops", self.peak_flops)
            if not 0 < self.peak_flops < math.inf:
                raise ValueError(f"peak_flops={self.peak_flops} must be above 0: leave it out to have it measured")
        if self.profile and self.log_folder is None:
            raise ValueError(f"profile={self.profile} writes a trace, but log_folder is None: give a folder")
        if self.profile and self.profile + 2 > self.steps:
            raise ValueError(
                f"profile={self.profile} steps are traced after 2 that warm up, but steps={self.steps}: "
                f"train at least {self.profile + 2} steps, or trace fewer"
            )
        self.rows_of_a_microbatch(1)

    @property
    def warmup(self) -> int:
        """Steps of the warm-up, resolved: by default a tenth of the run, at most 100."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    def rows_of_a_microbatch(self, n_data: int) -> int:
        """Sequences in a microbatch where `n_data` data-parallel ranks share the batch.

        Raises:
            ValueError: if the batch does not divide.
        """
        factors = {"accumulation": self.accumulation, "microbatches": self.microbatches, "data-parallel ranks": n_data}
        parts = math.prod(factors.values())
        if self.batch % parts:
            spelled = " × ".join(f"{size} {name}" for name, size in factors.items() if size > 1)
            raise ValueError(
                f"batch={self.batch} does not divide into {spelled} = {parts} parts: use a multiple of {parts}, such "
                f"as {-(-self.batch // parts) * parts}"
            )
        return self.batch // parts

    def as_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    # JSON has no infinity; in words it survives every parser.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _check_whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
