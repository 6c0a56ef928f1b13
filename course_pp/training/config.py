"""What a training run is, checked when it is written down."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

from course_pp.arguments import checked
from course_pp.schedule import Schedule, Versions, find
from course_pp.schedule.ledger import VERSIONS
from course_pp.training.orders import is_file, read_order
from course_pp.training.setting import SettingError, check_number, check_whole, nearest

__all__ = ["ENGINES", "LR_SCHEDULES", "OPTIMIZERS", "Engine", "LrSchedule", "OnNan", "Precision", "TrainConfig"]

Engine = Literal["parallel", "runtime"]
ENGINES: tuple[Engine, ...] = ("parallel", "runtime")
LrSchedule = Literal["cosine", "linear", "wsd", "constant"]
LR_SCHEDULES: tuple[LrSchedule, ...] = ("cosine", "linear", "wsd", "constant")
Precision = Literal["auto", "fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("auto", "fp32", "bf16", "fp16")
OnNan = Literal["refuse", "skip"]
OPTIMIZERS: tuple[str, ...] = (
    "AdamW",
    "Adam",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "ASGD",
    "SGD",
)
"""Those of ``torch.optim`` that treat each number alone, so that a rank needs nothing but its own part of the model.

Not among them: Rprop, which FSDP2's sharded parameters refuse."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train, the same on every rank. The layout of the ranks is not part of it: that is the mesh.

    Raises:
        SettingError: a value that no run can have; the message names the value, the rule and the remedy.
    """

    steps: int = 200
    """Optimizer steps of the whole run."""
    epochs: int | None = None
    """Passes over the training data, in place of `steps`; `Trainer` turns them into steps."""
    batch: int = 32
    """Sequences that an optimizer step learns from, over all ranks."""
    microbatches: int = 8
    """Microbatches of a pipeline step."""
    accumulation: int = 1
    """Pipeline steps whose gradients make one optimizer step; it changes memory and speed, not the result."""
    engine: Engine = "parallel"
    """`"parallel"` runs `course_pp.parallel`, `"runtime"` the pipeline of `course_pp.runtime`."""
    schedule: str = "1f1b"
    """A name of the catalogue, or a CSV file with an order of your own, as `course_pp.schedule.to_torch_csv` writes
    it."""
    versions: Versions | None = None
    """With schedule `"pipedream"`, which weights a microbatch uses: `"stash"`, `"vertical"`, `"2bw"` or `"none"`, see
    `course_pp.schedule.ledger`. Each microbatch is then an update of its own, all of a step at one learning rate. The
    pipeline drains at the end of the step: more `microbatches` drain it less often."""
    group: int | None = None
    """Microbatches whose gradients make one update, with versions `"2bw"`; None is as many as pipeline ranks."""
    precision: Precision = "auto"
    """What the stages compute in and send: `"fp32"` is what their parameters are in, `"auto"` what the stages that
    `Trainer` gets compute in; `train.py` takes `"bf16"` on GPUs and `"fp32"` on the CPU, where half precision is slow.
    Parameters, their gradients and the optimizer's state stay in float32; `"fp16"` scales the loss."""
    loss_scale: float = 2.0**16
    """The first scale of `"fp16"`, a power of two; see `course_pp.training.precision`."""
    on_nan: OnNan = "refuse"
    """What becomes of a step whose gradient is infinite or not a number: it ends the run, or is skipped."""
    lr: float = 3e-3
    """Peak learning rate, reached after the warm-up."""
    lr_schedule: LrSchedule = "cosine"
    """How it falls after the warm-up: see `course_pp.training.optim.lr_factor`."""
    min_lr: float = 0.1
    """Learning rate at the end, as a share of the peak."""
    warmup_steps: int | None = None
    """Steps until the learning rate is at its peak; None: see `warmup`."""
    decay_steps: int | None = None
    """Last steps, in which `lr_schedule="wsd"` falls; None: a fifth of the run."""
    optimizer: str = "AdamW"
    """A class of `torch.optim`, one of `OPTIMIZERS`."""
    betas: tuple[float, float] | None = None
    """Of the Adam family; None is the optimizer's own."""
    eps: float | None = None
    """Of most optimizers; None is the optimizer's own."""
    optimizer_options: dict[str, float | bool] = field(default_factory=dict)
    """Whatever else the optimizer takes, by name, such as `dict(momentum=0.9)`."""
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
    step_timeout: float | None = None
    """Seconds that a rank waits for the others once the first step is done, which also compiles and connects; None
    leaves the time limit of the process group."""
    gc_every: int | None = None
    """Steps between garbage collections, on all ranks at once; None leaves it to Python, which collects on each rank at
    another moment, for which the others wait."""
    workers: int = 0
    """Processes on each rank that read batches before they are needed; 0 reads each when it is."""
    seed: int = 42
    """Of the order of the data. Weights are drawn from `init_distributed`'s seed."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "microbatches", "accumulation", "eval_batches", "log_every"):
            check_whole(name, getattr(self, name), 1)
        for name in ("profile", "seed", "workers"):
            check_whole(name, getattr(self, name), 0)
        for name, least in (("warmup_steps", 0), ("decay_steps", 1), ("eval_every", 1), ("epochs", 1), ("gc_every", 1)):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        for name in ("lr", "min_lr", "weight_decay", "clip_norm"):
            check_number(name, getattr(self, name))
        self._check_optimizer()
        self._check_numbers()
        self._check_rules()
        self._check_versions()

    def _refuse_unless(self, allowed: bool, sentence: str, *names: str) -> None:
        if not allowed:
            raise SettingError(sentence, {name: getattr(self, name) for name in names})

    def _check_optimizer(self) -> None:
        """Refuse an unknown optimizer or course of the learning rate; the optimizer checks its own options later."""
        refuse_unless = self._refuse_unless
        near = nearest(self.optimizer, OPTIMIZERS)
        known = f"{{optimizer}} must be one of {', '.join(OPTIMIZERS)}: did you mean {near!r}?"
        refuse_unless(_is_one_of(self.optimizer, OPTIMIZERS), known, "optimizer")
        options = self.optimizer_options
        are_options = isinstance(options, Mapping) and all(
            isinstance(name, str) and isinstance(value, bool | int | float) for name, value in options.items()
        )
        refuse_unless(are_options, "{optimizer_options} must give numbers or booleans by name", "optimizer_options")
        if self.betas is not None:
            is_pair = isinstance(self.betas, tuple | list) and len(self.betas) == 2
            are_betas = is_pair and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas)
            refuse_unless(are_betas, "{betas} must be two numbers from 0 to below 1, such as (0.9, 0.95)", "betas")
            object.__setattr__(self, "betas", tuple(self.betas))  # JSON and TOML know lists only
        if self.eps is not None:
            check_number("eps", self.eps)
            refuse_unless(0 <= self.eps < math.inf, "{eps} must be 0 or more and finite, such as 1e-8", "eps")
        is_known = _is_one_of(self.lr_schedule, LR_SCHEDULES)
        refuse_unless(is_known, f"{{lr_schedule}} must be one of {', '.join(LR_SCHEDULES)}", "lr_schedule")
        is_used = self.decay_steps is None or self.lr_schedule == "wsd"
        refuse_unless(
            is_used, "{decay_steps} belongs to lr_schedule='wsd', not to {lr_schedule}", "decay_steps", "lr_schedule"
        )
        only_one = self.epochs is None or self.steps == _DEFAULT_STEPS
        refuse_unless(only_one, "{epochs} and {steps} both say how long to train: leave one out", "epochs", "steps")

    def _check_numbers(self) -> None:
        """Refuse an unknown number format or `on_nan`, an impossible loss scale, and an impossible time limit."""
        refuse_unless = self._refuse_unless
        refuse_unless(
            _is_one_of(self.precision, PRECISIONS), f"{{precision}} must be one of {', '.join(PRECISIONS)}", "precision"
        )
        refuse_unless(_is_one_of(self.on_nan, ("refuse", "skip")), "{on_nan} must be refuse or skip", "on_nan")
        check_number("loss_scale", self.loss_scale)
        is_scale = 1 <= self.loss_scale <= 2**24 and math.frexp(self.loss_scale)[0] == 0.5
        refuse_unless(is_scale, "{loss_scale} must be a power of two from 1 to 2**24, such as 65536", "loss_scale")
        if self.step_timeout is not None:
            check_number("step_timeout", self.step_timeout)
            is_limit = 0 < self.step_timeout < 365 * 24 * 3600
            refuse_unless(is_limit, "{step_timeout} must be a number of seconds above 0", "step_timeout")

    def _check_rules(self) -> None:
        refuse_unless = self._refuse_unless
        refuse_unless(
            _is_one_of(self.engine, ENGINES), f"{{engine}} must be one of {', '.join(map(repr, ENGINES))}", "engine"
        )
        self._check_schedule()
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
        if self.epochs is None:
            self._check_course()
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

    def _check_schedule(self) -> None:
        """Refuse an unknown schedule, and a file whose order cannot be a step of this run."""
        is_name = isinstance(self.schedule, str) and self.schedule != ""
        self._refuse_unless(is_name, "{schedule} must be the name of a schedule, such as '1f1b'", "schedule")
        try:
            order = self.order if is_file(self.schedule) else find(self.schedule)
        except ValueError as problem:
            said = str(problem).replace("{", "{{").replace("}", "}}")
            more = "" if is_file(self.schedule) else ", or a file that ends in .csv"
            raise SettingError(f"{{schedule}}: {said}{more}", {"schedule": self.schedule}) from None
        if isinstance(order, Schedule):
            self._refuse_unless(
                order.n_microbatches == self.microbatches,
                f"{{schedule}} is an order of {order.n_microbatches} microbatches, and {{microbatches}}: make them "
                "equal",
                *("schedule", "microbatches"),
            )

    @cached_property
    def order(self) -> Schedule | None:
        """The order of your own, read once; None where `schedule` is a name."""
        return read_order(self.schedule) if is_file(self.schedule) else None

    def _check_versions(self) -> None:
        """Refuse settings that stages with updates of their own cannot use, and settings that only these can use."""
        refuse_unless = self._refuse_unless
        updates, choice = self.order is None and find(self.schedule).updates, ", ".join(VERSIONS)
        if self.versions is None:
            why = f"its stages update their own weights. Choose one of {choice}, or a schedule that flushes"
            refuse_unless(not updates, f"{{schedule}} with {{versions}}: {why}", "schedule", "versions")
        else:
            refuse_unless(_is_one_of(self.versions, VERSIONS), f"{{versions}} must be one of {choice}", "versions")
            why = "it flushes, so there is one version of the weights. Leave versions out, or take 'pipedream'"
            refuse_unless(updates, f"{{versions}} with {{schedule}}: {why}", "versions", "schedule")
            for name, works, why in (
                ("engine", self.engine == "runtime", "torch has no such schedule: take 'runtime'"),
                ("clip_norm", self.clip_norm == math.inf, "no stage knows the norm of the whole model's gradient: inf"),
                ("precision", self.precision != "fp16", "no stage sees that another's gradient overflows: take 'bf16'"),
                ("accumulation", self.accumulation == 1, "each microbatch is an update. Take 1, or 2bw and a group"),
                ("on_nan", self.on_nan == "refuse", "by then other updates of the step were done: take 'refuse'"),
            ):
                refuse_unless(works, f"{{{name}}} with {{versions}}: {why}", name, "versions")
        if self.group is not None:
            check_whole("group", self.group, 1)
            refuse_unless(
                self.versions == "2bw", "{group} belongs to versions '2bw', not to {versions}", "group", "versions"
            )
            fills = self.microbatches % self.group == 0
            refuse_unless(fills, "{group} must divide {microbatches}", "group", "microbatches")

    def _check_course(self) -> None:
        """Refuse a warm-up and a decay that are longer than the run."""
        if self.warmup > self.steps:
            raise SettingError(
                "{warmup_steps} must be at most {steps}: shorten the warm-up",
                {"warmup_steps": self.warmup, "steps": self.steps},
            )
        if self.decay_steps is not None and self.warmup + self.decay_steps > self.steps:
            raise SettingError(
                f"{{decay_steps}} after a warm-up of {self.warmup} steps must be at most {self.steps - self.warmup}, "
                "as {steps} shows: shorten one of them",
                {"decay_steps": self.decay_steps, "steps": self.steps},
            )

    @checked
    def on_rows(self, n_rows: int) -> "TrainConfig":
        """Return this run on `n_rows` training sequences: `epochs` are turned into steps.

        Raises:
            SettingError: if what depends on the number of steps does not fit them.
        """
        if self.epochs is None:
            return self
        return replace(self, steps=max(1, self.epochs * (n_rows // self.batch)), epochs=None)

    @property
    def decay(self) -> int:
        """Steps in which `"wsd"` falls, resolved: by default a fifth of the run (Hägele et al. 2024, section 3.2)."""
        return max(1, self.steps // 5) if self.decay_steps is None else self.decay_steps

    @property
    def warmup(self) -> int:
        """Steps of the warm-up, resolved: by default a tenth of the run, at most 100."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    @checked
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
        """Return all fields, as JSON can hold them."""
        return {name: _plain(value) for name, value in asdict(self).items()}


_DEFAULT_STEPS = next(field.default for field in fields(TrainConfig) if field.name == "steps")


def _is_one_of(value: object, names: Collection[str]) -> bool:
    """Return whether ``value`` is one of the names; an array cannot even be compared with them."""
    return isinstance(value, str) and value in names


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    # JSON has no infinity; in words it survives every parser.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
