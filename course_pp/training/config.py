"""What a training run is, checked when it is written down: its settings, and an order of your own
in a file.

Each setting carries what it must be in its annotation. What settings must be to one another stands
in the methods.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from course_pp.schedule import Schedule, Versions, check, find, from_torch_csv


class SettingError(ValueError):
    """A setting that no run can have; the sentence has a field for its name, so a command line can name its flag."""

    def __init__(self, sentence: str, **settings: Any) -> None:
        self.sentence, self.settings = sentence, settings
        super().__init__(self.spelled(lambda name, value: f"{name}={value!r}"))

    def spelled(self, spell: Callable[[str, Any], str]) -> str:
        """Return the sentence with each setting as ``spell(name, value)`` has it."""
        return self.sentence.format(
            **{name: spell(name, value) for name, value in self.settings.items()}
        )

    def __reduce__(self) -> tuple[Callable[[], "SettingError"], tuple[()]]:
        return partial(SettingError, self.sentence, **self.settings), ()


@dataclass(frozen=True)
class Rule:
    """What a setting must be, for its annotation: a test, and the words that follow its name where it fails."""

    holds: Callable[[Any], bool]
    words: str


def whole(least: int) -> Rule:
    return Rule(
        lambda value: type(value) is int and value >= least,
        f"must be a whole number of at least {least}",
    )


Count = Annotated[int, whole(1)]
CountOrNone = Annotated[int, whole(0)]
Positive = Annotated[
    float, Rule(lambda value: 0 < value < math.inf, "must be a number above 0, and finite")
]
NotNegative = Annotated[
    float, Rule(lambda value: 0 <= value < math.inf, "must be a number of 0 or more, and finite")
]

Engine = Literal["parallel", "runtime"]
LrSchedule = Literal["cosine", "linear", "wsd", "constant"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
OnNan = Literal["refuse", "skip"]
Optimizer = Literal[
    "AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "SGD"
]  # fmt: skip
"""Those of ``torch.optim`` that treat each number alone, and take FSDP2's sharded parameters."""

_SCALE = Rule(
    lambda value: 1 <= value <= 2**24 and math.frexp(value)[0] == 0.5,
    "must be a power of two from 1 to 2**24, such as 65536",
)
_SHARE = Rule(
    lambda value: 0 <= value <= 1,
    "must lie between 0 and 1: it is a share of the peak, such as 0.1",
)
_FOLDER = Rule(bool, "must be a folder to write into, or None to write none")
_NORM = Rule(
    lambda value: value > 0, "must be a number above 0: use inf to measure without clipping"
)
_SECONDS = Rule(lambda value: 0 < value < 365 * 24 * 3600, "must be a number of seconds above 0")


@dataclass(frozen=True)
class TrainConfig:
    """How to train, the same on every rank. The layout of the ranks is not part of it: that is the mesh."""

    steps: Count = 200
    """Optimizer steps of the whole run."""
    epochs: Count | None = None
    """Passes over the training data, in place of `steps`; `Trainer` turns them into steps."""
    batch: Count = 32
    """Sequences that an optimizer step learns from, over all ranks."""
    microbatches: Count = 8
    """Microbatches of a pipeline step."""
    accumulation: Count = 1
    """Pipeline steps whose gradients make one optimizer step; it changes memory and speed, not the result."""
    engine: Engine = "parallel"
    """`"parallel"` runs `course_pp.parallel`, `"runtime"` the pipeline of `course_pp.runtime`."""
    schedule: str = "1f1b"
    """A name of the catalogue, or a CSV file with an order of your own, as
    `course_pp.schedule.to_torch_csv` writes it.
    """
    versions: Versions | None = None
    """With schedule `"pipedream"`, which weights a microbatch uses: see
    `course_pp.schedule.ledger`. Each is then an update of its own, all of a step at one learning
    rate. The pipeline drains at the end of the step.
    """
    group: Count | None = None
    """Microbatches whose gradients make one update, with versions `"2bw"`; None is as many as pipeline ranks."""
    precision: Precision = "auto"
    """What the stages compute in and send; parameters, gradients and the optimizer's state stay in
    float32. `"fp8"` is bfloat16 with linear layers that multiply in eight bits (`apply_float8`).
    `"auto"` is what `Trainer`'s stages compute in; `train.py` takes `"bf16"` on GPUs and `"fp32"`
    on the CPU.
    """
    loss_scale: Annotated[float, _SCALE] = 2.0**16
    """The first scale of `"fp16"`, a power of two; see `course_pp.parallel.MeshGradScaler`."""
    on_nan: OnNan = "refuse"
    """What becomes of a step whose gradient is infinite or not a number: it ends the run, or is skipped."""
    lr: Positive = 3e-3
    """Peak learning rate, reached after the warm-up."""
    lr_schedule: LrSchedule = "cosine"
    """How it falls then: see `course_pp.training.optim.lr_factor`."""
    min_lr: Annotated[float, _SHARE] = 0.1
    """Learning rate at the end, as a share of the peak."""
    warmup_steps: CountOrNone | None = None
    """Steps until the learning rate is at its peak; None: see `warmup`."""
    decay_steps: Count | None = None
    """Last steps, in which `lr_schedule="wsd"` falls; None: a fifth of the run."""
    optimizer: Optimizer = "AdamW"
    """A class of `torch.optim`."""
    betas: tuple[float, float] | None = None
    """Of the Adam family; None is the optimizer's own."""
    eps: NotNegative | None = None
    """Of most optimizers; None is the optimizer's own."""
    optimizer_options: dict[str, float | bool] = field(default_factory=dict)
    """Whatever else the optimizer takes, by name, such as `dict(momentum=0.9)`."""
    weight_decay: NotNegative = 0.01
    """Of matrices; norms, biases and embeddings do not decay."""
    clip_norm: Annotated[float, _NORM] = 1.0
    """Largest norm of the whole model's gradient; `math.inf` only measures it."""
    eval_every: Count | None = None
    """Steps between evaluations; None evaluates at the end only."""
    eval_batches: Count = 8
    """Validation batches of an evaluation, each of `batch` sequences."""
    log_every: Count = 10
    """Steps between lines of the log."""
    log_folder: Annotated[str, _FOLDER] | None = None
    """Where one rank writes `metrics.jsonl` and TensorBoard's files; None writes none."""
    profile: CountOrNone = 0
    """Steps to trace on every rank into `log_folder`; 0 traces none."""
    peak_flops: Positive | None = None
    """FLOPs a second that one device can do, from its data sheet; None measures it with a matrix product."""
    step_timeout: Annotated[float, _SECONDS] | None = None
    """Seconds that a rank waits for the others once the first step is done, which also compiles and
    connects; None leaves the time limit of the process group.
    """
    gc_every: Count | None = None
    """Steps between garbage collections, on all ranks at once; None leaves it to Python: the others wait for each."""
    workers: CountOrNone = 0
    """Processes on each rank that read batches before they are needed; 0 reads each when it is."""
    seed: CountOrNone = 42
    """Of the order of the data. Weights are drawn from `init_distributed`'s seed."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(TrainConfig, include_extras=True).items():
            check_setting(name, getattr(self, name), hint)
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(self.betas))  # JSON and TOML know lists only
        self._check_course()
        self._check_schedule()
        self._check_versions()
        self.rows_of_a_microbatch(1)

    def _refuse_unless(self, allowed: bool, sentence: str) -> None:
        if not allowed:
            names = [name for _, name, *_ in Formatter().parse(sentence) if name]
            raise SettingError(sentence, **{name: getattr(self, name) for name in names})

    def _check_course(self) -> None:
        """Refuse two lengths of the run, and what is longer than the run."""
        refuse_unless, steps, warmup, decay = (
            self._refuse_unless,
            self.steps,
            self.warmup,
            self.decay_steps,
        )
        only_one = self.epochs is None or steps == TrainConfig.steps
        refuse_unless(only_one, "{epochs} and {steps} both say how long to train: leave one out")
        falls = decay is None or self.lr_schedule == "wsd"
        refuse_unless(falls, "{decay_steps} belongs to lr_schedule='wsd', not to {lr_schedule}")
        if self.profile:
            there = self.log_folder is not None
            refuse_unless(there, "{profile} writes a trace, but {log_folder}: give a folder")
            fits = self.profile + 2 <= steps
            refuse_unless(
                fits,
                "{profile} steps are traced after 2 that warm up, but {steps}: train more, or trace"
                " fewer",
            )
        if self.epochs is None:
            fits = warmup + (decay or 0) <= steps
            refuse_unless(
                fits, "{warmup_steps} and {decay_steps} are more than {steps}: shorten one of them"
            )

    def _check_schedule(self) -> None:
        """Refuse an unknown schedule, and a file whose order cannot be a step of this run."""
        try:
            order = self.order if is_file(self.schedule) else find(self.schedule)
        except ValueError as problem:
            said = str(problem).replace("{", "{{").replace("}", "}}")
            more = "" if is_file(self.schedule) else ", or a file that ends in .csv"
            raise SettingError(f"{{schedule}}: {said}{more}", schedule=self.schedule) from None
        if isinstance(order, Schedule):
            has = f"is an order of {order.n_microbatches} microbatches"
            fits = order.n_microbatches == self.microbatches
            self._refuse_unless(fits, f"{{schedule}} {has}, and {{microbatches}}: make them equal")

    @cached_property
    def order(self) -> Schedule | None:
        """The order of your own, read once; None where `schedule` is a name."""
        return read_order(self.schedule) if is_file(self.schedule) else None

    def _check_versions(self) -> None:
        """Refuse settings that stages with updates of their own cannot use, and settings that only these can use."""
        refuse_unless = self._refuse_unless
        updates, choice = (
            self.order is None and find(self.schedule).updates,
            ", ".join(get_args(Versions)),
        )
        if self.versions is None:
            why = (
                f"its stages update their own weights. Choose one of {choice}, or a schedule that"
                " flushes"
            )
            refuse_unless(not updates, f"{{schedule}} with {{versions}}: {why}")
        else:
            why = (
                "it flushes, so there is one version of the weights. Leave versions out, or take"
                " 'pipedream'"
            )
            refuse_unless(updates, f"{{versions}} with {{schedule}}: {why}")
            for name, works, why in (
                ("engine", self.engine == "runtime", "torch has no such schedule: take 'runtime'"),
                (
                    "clip_norm",
                    self.clip_norm == math.inf,
                    "no stage knows the norm of the whole model's gradient: inf",
                ),
                (
                    "precision",
                    self.precision != "fp16",
                    "no stage sees that another's gradient overflows: take 'bf16'",
                ),
                (
                    "accumulation",
                    self.accumulation == 1,
                    "each microbatch is an update. Take 1, or 2bw and a group",
                ),
                (
                    "on_nan",
                    self.on_nan == "refuse",
                    "by then other updates of the step were done: take 'refuse'",
                ),
            ):
                refuse_unless(works, f"{{{name}}} with {{versions}}: {why}")
        if self.group is not None:
            refuse_unless(
                self.versions == "2bw", "{group} belongs to versions '2bw', not to {versions}"
            )
            refuse_unless(self.microbatches % self.group == 0, "{group} must divide {microbatches}")

    def on_rows(self, n_rows: int) -> "TrainConfig":
        """Return this run on `n_rows` training sequences: `epochs` are turned into steps."""
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

    def rows_of_a_microbatch(self, n_data: int) -> int:
        """Sequences in a microbatch where `n_data` data-parallel ranks share the batch; refuse a remainder."""
        factors = {
            "accumulation": self.accumulation,
            "microbatches": self.microbatches,
            "data-parallel ranks": n_data,
        }
        parts = math.prod(factors.values())
        if self.batch % parts:
            spelled = " × ".join(f"{size} {name}" for name, size in factors.items() if size > 1)
            more = f"use a multiple, such as {-(-self.batch // parts) * parts}"
            raise SettingError(
                f"{{batch}} does not divide into {spelled} = {parts} parts: {more}",
                batch=self.batch,
            )
        return self.batch // parts

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, as JSON can hold them: tuples as lists, and infinity in words."""
        found = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        return {name: str(value) if value == math.inf else value for name, value in found.items()}


def check_setting(name: str, value: object, hint: Any) -> None:
    """Refuse what the annotation rules out: a choice that is none, or what breaks its rule."""
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if value is None and len(kinds) > 1:
        return
    rules = list(getattr(kinds[0], "__metadata__", ()))
    if get_origin(kinds[0]) is Literal:
        choices = get_args(kinds[0])
        rules = [Rule(lambda value: value in choices, must_be_one_of(value, choices))]
    for rule in rules:
        if not rule.holds(value):
            raise SettingError(f"{{{name}}} {rule.words}", **{name: value})


def must_be_one_of(value: object, choices: Iterable[str]) -> str:
    """Return the words for a value that is none of the choices, with the one that is spelled like it."""
    by_folded = {each.casefold(): each for each in choices}
    near = get_close_matches(str(value).casefold(), by_folded, 1)
    return f"must be one of {', '.join(choices)}" + (
        f": did you mean {by_folded[near[0]]!r}?" if near else ""
    )


ORDER_FILE = "schedule.csv"
"""The name of the file that keeps an order of your own beside a checkpoint."""

_HOW = (
    "give a CSV file with a row a rank, as course_pp.schedule.to_torch_csv and a board's to_csv()"
    " write it"
)


def is_file(schedule: str) -> bool:
    """Return whether ``schedule`` names a file with an order of your own, and no schedule of the catalogue."""
    return schedule.casefold().endswith(".csv")


def read_order(path: str) -> Schedule:
    """Read the order in a file of :func:`course_pp.schedule.to_torch_csv`.

    The rows give the placement: each stage is on the ranks in whose rows it is.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read ({error}): {_HOW}") from None
    # An editor or a spreadsheet may have left blank lines at the end, which are no ranks.
    order = from_torch_csv(content.rstrip(" \t\r\n,;"), name=Path(path).stem)
    kinds = {part.kind for part in order.parts}
    if "U" in kinds:
        raise ValueError(
            "its stages update their weights within the step (U), as 'pipedream' does: leave U out"
        )
    if kinds == {"F"}:
        raise ValueError(
            "it has forwards alone, and a run trains: add the backwards (B, or I and W)"
        )
    if problems := check(order):
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise ValueError(f"its order cannot run: {problems[0]}{more}")
    idle = next((rank for rank, row in enumerate(order.actions) if not row), None)
    if idle is not None:
        raise ValueError(
            f"it gives rank {idle} nothing to do, as row {idle + 1} is blank: give every rank a"
            " stage"
        )
    return order


def write_order(order: Schedule) -> str:
    """Return the text from which :func:`read_order` reads ``order``; unlike torch's format, also with replicas."""
    return "".join(",".join(map(str, row)) + "\n" for row in order.actions)


def what_changed(
    saved: Mapping[str, Any], checkpoint: Path, schedule: str, order: Schedule | None
) -> str | None:
    """Return a warning if a run goes on in another order than its checkpoint's; None if it is the
    same.

    A step gives the same result in both, so it is no error. But leaving a flag out must not lose an
    order unnoticed.

    Args:
        saved: the configuration in the checkpoint's state; one without a schedule says nothing.
        order: that of this run's ``schedule``, if it is a file.
    """
    before, kept = saved.get("schedule"), checkpoint / ORDER_FILE
    if before is None:
        return None
    flags = f"--schedule {before}"
    if not is_file(before):
        alike = order is None and _known(before) == _known(schedule)
    else:
        there = kept.read_text(encoding="utf-8") if kept.is_file() else None
        alike = order is not None and there == write_order(order)
        flags = (
            f"--schedule {before if there is None else kept} --microbatches"
            f" {saved.get('microbatches')}"
        )
    if alike:
        return None
    same = "a step gives the same, in other time and memory"
    return (
        f"schedule {schedule!r} now, {before!r} before: {same}. To keep to the one before: {flags}"
    )


def _known(name: str) -> str:
    """Return the catalogue's own name; or ``name`` as it is, if it comes from another version of the course."""
    with suppress(ValueError):
        return find(name).name
    return name
