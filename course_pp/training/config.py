"""What a training run is, checked when it is written down."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from course_pp.training.setting import SettingError, check_number, check_whole

__all__ = ["ENGINES", "Engine", "TrainConfig"]

Engine = Literal["parallel", "runtime"]
ENGINES: tuple[Engine, ...] = ("parallel", "runtime")


@dataclass(frozen=True)
class TrainConfig:
    """How to train, the same on every rank. The layout of the ranks is not part of it: that is the mesh.

    Raises:
        SettingError: a value that no run can have; the message names the value, the rule and the remedy.
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
    """Of matrices; norms, biases and embeddings do not decay."""
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
            check_whole(name, getattr(self, name), 1)
        for name in ("profile", "seed"):
            check_whole(name, getattr(self, name), 0)
        for name, least in (("warmup_steps", 0), ("eval_every", 1)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        for name in ("lr", "min_lr", "weight_decay", "clip_norm"):
            check_number(name, getattr(self, name))
        self._check_rules()

    def _check_rules(self) -> None:
        def refuse_unless(allowed: bool, sentence: str, *names: str) -> None:
            if not allowed:
                raise SettingError(sentence, {name: getattr(self, name) for name in names})

        refuse_unless(self.engine in ENGINES, f"{{engine}} must be one of {', '.join(map(repr, ENGINES))}", "engine")
        is_name = isinstance(self.schedule, str) and self.schedule != ""
        refuse_unless(is_name, "{schedule} must be the name of a schedule, such as '1f1b'", "schedule")
        is_folder = self.log_folder is None or (isinstance(self.log_folder, str) and self.log_folder != "")
        refuse_unless(is_folder, "{log_folder} must be a folder to write into, or None to write none", "log_folder")
        refuse_unless(0 < self.lr < math.inf, "{lr} must be above 0 and finite, such as 3e-3", "lr")
        is_share = 0 <= self.min_lr <= 1
        refuse_unless(is_share, "{min_lr} must lie between 0 and 1: it is a share of the peak, such as 0.1", "min_lr")
        decays = 0 <= self.weight_decay < math.inf
        refuse_unless(decays, "{weight_decay} must be 0 or more and finite, such as 0.01", "weight_decay")
        refuse_unless(
            self.clip_norm > 0, "{clip_norm} must be above 0: use inf to measure without clipping", "clip_norm"
        )
        if self.warmup > self.steps:
            raise SettingError(
                "{warmup_steps} must be at most {steps}: shorten the warm-up",
                {"warmup_steps": self.warmup, "steps": self.steps},
            )
        if self.peak_flops is not None:
            check_number("peak_flops", self.peak_flops)
            is_peak = 0 < self.peak_flops < math.inf
            refuse_unless(is_peak, "{peak_flops} must be above 0: leave it out to have it measured", "peak_flops")
        nowhere = self.profile > 0 and self.log_folder is None
        refuse_unless(not nowhere, "{profile} writes a trace, but {log_folder}: give a folder", "profile", "log_folder")
        refuse_unless(
            not self.profile or self.profile + 2 <= self.steps,
            f"{{profile}} steps are traced after 2 that warm up, but {{steps}}: train at least {self.profile + 2} "
            "steps, or trace fewer",
            *("profile", "steps"),
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
            raise SettingError(
                f"{{batch}} does not divide into {spelled} = {parts} parts: use a multiple of {parts}, such as "
                f"{-(-self.batch // parts) * parts}",
                {"batch": self.batch},
            )
        return self.batch // parts

    def as_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def _plain(value: Any) -> Any:
    # JSON has no infinity; in words it survives every parser.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
