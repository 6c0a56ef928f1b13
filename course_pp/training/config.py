"""The settings of a training run, checked when they are made, and a user's own order in a file.

The annotation of a setting holds the constraint on its value. The methods of :class:`TrainConfig`
check settings against each other.
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
    """A setting that no run can have.

    Its name is a field of the sentence, so that a command line can put its flag there.

    Attributes:
        sentence: a format string with ``{name}`` where a setting is to be spelled.
        settings: the settings in it, by name.
    """

    def __init__(self, sentence: str, **settings: Any) -> None:
        self.sentence = sentence
        self.settings = settings
        super().__init__(self.spelled(lambda name, value: f"{name}={value!r}"))

    def spelled(self, spell: Callable[[str, Any], str]) -> str:
        """Return the sentence with ``spell(name, value)`` in place of each setting."""
        spelled = {name: spell(name, value) for name, value in self.settings.items()}
        return self.sentence.format(**spelled)

    # Ranks send errors to each other, and pickle would rebuild an exception from its message alone.
    def __reduce__(self) -> tuple[Callable[[], "SettingError"], tuple[()]]:
        return partial(SettingError, self.sentence, **self.settings), ()


@dataclass(frozen=True)
class Constraint:
    """A test of one setting's value, for its annotation, and the words that refuse the value."""

    holds: Callable[[Any], bool]
    words: str


def whole(least: int) -> Constraint:
    # Not isinstance: True is an int, but no count.
    return Constraint(
        lambda value: type(value) is int and value >= least,
        f"must be a whole number of at least {least}",
    )


Count = Annotated[int, whole(1)]
CountOrNone = Annotated[int, whole(0)]
Positive = Annotated[
    float, Constraint(lambda value: 0 < value < math.inf, "must be a number above 0, and finite")
]
NotNegative = Annotated[
    float,
    Constraint(lambda value: 0 <= value < math.inf, "must be a number of 0 or more, and finite"),
]

Engine = Literal["parallel", "runtime"]
LrSchedule = Literal["cosine", "linear", "wsd", "constant"]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
OnNan = Literal["refuse", "skip"]
Optimizer = Literal[
    "AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "ASGD", "SGD"
]  # fmt: skip
"""Classes of ``torch.optim`` that treat each number alone and take FSDP2's sharded parameters."""

_SCALE = Constraint(
    lambda value: 1 <= value <= 2**24 and math.frexp(value)[0] == 0.5,
    "must be a power of two from 1 to 2**24, such as 65536",
)
_SHARE = Constraint(
    lambda value: 0 <= value <= 1,
    "must lie between 0 and 1: it is a share of the peak, such as 0.1",
)
_FOLDER = Constraint(bool, "must be a folder to write into, or None to write none")
_NORM = Constraint(
    lambda value: value > 0, "must be a number above 0: use inf to measure without clipping"
)
_SECONDS = Constraint(
    lambda value: 0 < value < 365 * 24 * 3600, "must be a number of seconds above 0"
)


@dataclass(frozen=True)
class TrainConfig:
    """How to train, the same on every rank. The mesh, not this, says how the ranks are laid out."""

    steps: Count = 200
    """Optimizer steps of the whole run."""
    epochs: Count | None = None
    """Passes over the training data, in place of `steps`; `Trainer` turns them into steps."""
    batch: Count = 32
    """Sequences that an optimizer step learns from, over all ranks."""
    microbatches: Count = 8
    """Microbatches in a pipeline step."""
    accumulation: Count = 1
    """Pipeline steps whose gradients are summed for one optimizer step. More of them take less
    memory and more time; the result stays the same.
    """
    engine: Engine = "parallel"
    """`"parallel"` runs `course_pp.parallel`, `"runtime"` the pipeline of `course_pp.runtime`."""
    schedule: str = "1f1b"
    """A name of the catalogue, or a CSV file with an order of your own, as
    `course_pp.schedule.to_torch_csv` writes it.
    """
    versions: Versions | None = None
    """With schedule `"pipedream"`, the weights that a microbatch uses: see
    `course_pp.schedule.ledger`. Each microbatch is then an update of its own. All updates of a step
    have one learning rate, and the pipeline drains at the end of the step.
    """
    group: Count | None = None
    """Microbatches whose gradients make one update, with versions `"2bw"`; None takes as many as
    there are pipeline ranks.
    """
    precision: Precision = "auto"
    """The number format in which stages compute and send. Parameters, gradients and the optimizer's
    state stay in float32. `"fp8"` is bfloat16 with linear layers that multiply in eight bits
    (`apply_float8`). `"auto"` is the format of `Trainer`'s stages; `train.py` takes `"bf16"` on
    GPUs and `"fp32"` on the CPU.
    """
    loss_scale: Annotated[float, _SCALE] = 2.0**16
    """First loss scale of `"fp16"`, a power of two; see `course_pp.parallel.MeshGradScaler`."""
    on_nan: OnNan = "refuse"
    """`"refuse"` ends the run at a gradient that is infinite or not a number; `"skip"` goes on."""
    lr: Positive = 3e-3
    """Peak learning rate, reached after the warm-up."""
    lr_schedule: LrSchedule = "cosine"
    """Curve of the learning rate after the warm-up: see `course_pp.training.optim.lr_factor`."""
    min_lr: Annotated[float, _SHARE] = 0.1
    """Learning rate at the end, as a share of the peak."""
    warmup_steps: CountOrNone | None = None
    """Steps until the learning rate is at its peak; None: see `warmup`."""
    decay_steps: Count | None = None
    """Last steps, in which the rate of `lr_schedule="wsd"` falls; None takes a fifth of the run."""
    optimizer: Optimizer = "AdamW"
    """A class of `torch.optim`."""
    betas: tuple[float, float] | None = None
    """Decay rates of the averages in the Adam family; None takes the optimizer's default."""
    eps: NotNegative | None = None
    """Term in the denominator of most optimizers; None takes the optimizer's default."""
    optimizer_options: dict[str, float | bool] = field(default_factory=dict)
    """Other options of the optimizer, by name, such as `dict(momentum=0.9)`."""
    weight_decay: NotNegative = 0.01
    """Weight decay of matrices; norms, biases and embeddings do not decay."""
    clip_norm: Annotated[float, _NORM] = 1.0
    """Largest norm of the whole model's gradient; `math.inf` only measures it."""
    eval_every: Count | None = None
    """Steps between evaluations; None evaluates at the end only."""
    eval_batches: Count = 8
    """Validation batches of an evaluation, each of `batch` sequences."""
    log_every: Count = 10
    """Steps between lines of the log."""
    log_folder: Annotated[str, _FOLDER] | None = None
    """Folder where one rank writes `metrics.jsonl` and TensorBoard's files; None writes none."""
    profile: CountOrNone = 0
    """Steps to trace on every rank into `log_folder`; 0 traces none."""
    peak_flops: Positive | None = None
    """FLOPs a second of one device, from its data sheet; None measures a matrix product."""
    step_timeout: Annotated[float, _SECONDS] | None = None
    """Seconds that a rank waits for the others after the first step. The first step may take
    longer, because it also compiles and connects. None leaves the process group's time limit.
    """
    gc_every: Count | None = None
    """Steps between garbage collections, on all ranks at once. None lets Python collect on each
    rank when it likes, and the other ranks wait for each collection.
    """
    workers: CountOrNone = 0
    """Processes on each rank that read batches ahead; 0 reads a batch when it is needed."""
    seed: CountOrNone = 42
    """Seed of the data's order. The seed of the weights belongs to `init_distributed`."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(TrainConfig, include_extras=True).items():
            check_setting(name, getattr(self, name), hint)
        # JSON and TOML have only lists, and two equal runs must compare equal.
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(self.betas))
        self._check_course()
        self._check_schedule()
        self._check_versions()
        # The number of data ranks is not known yet, but 1 divides it.
        self.rows_of_a_microbatch(1)

    def _refuse_unless(self, allowed: bool, sentence: str) -> None:
        """Refuse the settings that ``sentence`` has fields for, unless they are allowed."""
        if not allowed:
            names = [name for _, name, *_ in Formatter().parse(sentence) if name]
            raise SettingError(sentence, **{name: getattr(self, name) for name in names})

    def _check_course(self) -> None:
        """Refuse two lengths of the run, and parts of it that are longer than the run."""
        self._refuse_unless(
            self.epochs is None or self.steps == TrainConfig.steps,
            "{epochs} and {steps} both say how long to train: leave one out",
        )
        self._refuse_unless(
            self.decay_steps is None or self.lr_schedule == "wsd",
            "{decay_steps} belongs to lr_schedule='wsd', not to {lr_schedule}",
        )
        if self.profile:
            self._refuse_unless(
                self.log_folder is not None,
                "{profile} writes a trace, but {log_folder}: give a folder",
            )
            self._refuse_unless(
                self.profile + 2 <= self.steps,
                "{profile} steps are traced after 2 that warm up, but {steps}: train more, or trace"
                " fewer",
            )
        # With epochs, the number of steps is not known before the data.
        if self.epochs is None:
            self._refuse_unless(
                self.warmup + (self.decay_steps or 0) <= self.steps,
                "{warmup_steps} and {decay_steps} are more than {steps}: shorten one of them",
            )

    def _check_schedule(self) -> None:
        """Refuse an unknown schedule, and a file whose order cannot be a step of this run."""
        try:
            order = self.order if is_file(self.schedule) else find(self.schedule)
        except ValueError as problem:
            # The sentence is a format string, and the problem may quote braces.
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
        """Refuse settings that cannot go together with stages that update their own weights."""
        updates = self.order is None and find(self.schedule).updates
        if self.versions is None:
            choice = ", ".join(get_args(Versions))
            self._refuse_unless(
                not updates,
                "{schedule} with {versions}: its stages update their own weights. Choose one of"
                f" {choice}, or a schedule that flushes",
            )
        else:
            self._refuse_unless(
                updates,
                "{versions} with {schedule}: it flushes, so there is one version of the weights."
                " Leave versions out, or take 'pipedream'",
            )
            self._refuse_unless(
                self.engine == "runtime",
                "{engine} with {versions}: torch has no such schedule: take 'runtime'",
            )
            self._refuse_unless(
                self.clip_norm == math.inf,
                "{clip_norm} with {versions}: no stage knows the norm of the whole model's"
                " gradient: inf",
            )
            self._refuse_unless(
                self.precision != "fp16",
                "{precision} with {versions}: no stage sees that another's gradient overflows: take"
                " 'bf16'",
            )
            self._refuse_unless(
                self.accumulation == 1,
                "{accumulation} with {versions}: each microbatch is an update. Take 1, or 2bw and a"
                " group",
            )
            self._refuse_unless(
                self.on_nan == "refuse",
                "{on_nan} with {versions}: by then other updates of the step were done: take"
                " 'refuse'",
            )
        if self.group is not None:
            self._refuse_unless(
                self.versions == "2bw", "{group} belongs to versions '2bw', not to {versions}"
            )
            self._refuse_unless(
                self.microbatches % self.group == 0, "{group} must divide {microbatches}"
            )

    def on_rows(self, n_rows: int) -> "TrainConfig":
        """Return this run on `n_rows` training sequences: `epochs` are turned into steps."""
        if self.epochs is None:
            return self
        return replace(self, steps=max(1, self.epochs * (n_rows // self.batch)), epochs=None)

    @property
    def decay(self) -> int:
        """Steps in which `"wsd"` falls: by default a fifth of the run.

        Hägele et al. 2024, section 3.2.
        """
        return max(1, self.steps // 5) if self.decay_steps is None else self.decay_steps

    @property
    def warmup(self) -> int:
        """Steps of the warm-up: by default a tenth of the run, at most 100."""
        return min(100, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    def rows_of_a_microbatch(self, n_data: int) -> int:
        """Return the sequences in a microbatch where `n_data` data-parallel ranks share the batch.

        Refuse a batch that does not divide.
        """
        factors = {
            "accumulation": self.accumulation,
            "microbatches": self.microbatches,
            "data-parallel ranks": n_data,
        }
        parts = math.prod(factors.values())
        if self.batch % parts:
            spelled = " × ".join(f"{size} {name}" for name, size in factors.items() if size > 1)
            multiple = -(-self.batch // parts) * parts
            raise SettingError(
                f"{{batch}} does not divide into {spelled} = {parts} parts: use a multiple, such as"
                f" {multiple}",
                batch=self.batch,
            )
        return self.batch // parts

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, as JSON can hold them: tuples as lists, and infinity in words."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, tuple):
                found[name] = list(value)
            # Python would write Infinity, which other parsers of JSON refuse.
            elif value == math.inf:
                found[name] = str(value)
        return found


def check_setting(name: str, value: object, hint: Any) -> None:
    """Refuse a value that its annotation rules out.

    Args:
        hint: the annotation: a Literal with the choices, or an Annotated with constraints; either
            may also allow None.
    """
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    if value is None and len(kinds) > 1:
        return
    constraints = list(getattr(kinds[0], "__metadata__", ()))
    if get_origin(kinds[0]) is Literal:
        choices = get_args(kinds[0])
        constraints = [Constraint(lambda value: value in choices, must_be_one_of(value, choices))]
    for constraint in constraints:
        if not constraint.holds(value):
            raise SettingError(f"{{{name}}} {constraint.words}", **{name: value})


def must_be_one_of(value: object, choices: Iterable[str]) -> str:
    """Return the words that refuse an unknown choice, with the choice most like it."""
    by_folded = {each.casefold(): each for each in choices}
    near = get_close_matches(str(value).casefold(), by_folded, 1)
    words = f"must be one of {', '.join(choices)}"
    if near:
        words += f": did you mean {by_folded[near[0]]!r}?"
    return words


ORDER_FILE = "schedule.csv"
"""The name of the file that keeps an order of your own beside a checkpoint."""

_HOW = (
    "give a CSV file with a row for each rank, as course_pp.schedule.to_torch_csv and a board's"
    " to_csv() write it"
)


def is_file(schedule: str) -> bool:
    """Return True if ``schedule`` names a file with an order, not a schedule of the catalogue."""
    return schedule.casefold().endswith(".csv")


def read_order(path: str) -> Schedule:
    """Read the order in a file of :func:`course_pp.schedule.to_torch_csv`.

    The rows give the placement: each stage is on the ranks in whose rows it is.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read ({error}): {_HOW}") from None
    # An editor or a spreadsheet may have left blank lines at the end. They are not idle ranks.
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
    """Return the text from which :func:`read_order` reads ``order``.

    Unlike torch's own writer, it also takes schedules with replicas.
    """
    return "".join(",".join(map(str, row)) + "\n" for row in order.actions)


def what_changed(
    saved: Mapping[str, Any], checkpoint: Path, schedule: str, order: Schedule | None
) -> str | None:
    """Return a warning if a run goes on in another order than its checkpoint's, or None.

    A step gives the same result in both orders, so it is no error. But a user who forgets the flag
    should notice that the order is another.

    Args:
        saved: the configuration in the checkpoint's state. Without a schedule in it there is no
            warning.
        checkpoint: the directory of the checkpoint.
        order: the order of this run's ``schedule``, if that is a file.
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
        file = before if there is None else kept
        flags = f"--schedule {file} --microbatches {saved.get('microbatches')}"
    if alike:
        return None
    return (
        f"schedule {schedule!r} now, {before!r} before: a step gives the same, in other time and"
        f" memory. To keep to the one before: {flags}"
    )


def _known(name: str) -> str:
    """Return the catalogue's own name for ``name``.

    A name of another version of the course may be unknown here; it is returned as it is.
    """
    with suppress(ValueError):
        return find(name).name
    return name
