"""Training under any layout of ranks, and the same training in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from course_pp.model import (
    CrossEntropy,
    ModelConfig,
    PipelineStageModule,
    Transformer,
    build_stage_module,
)
from course_pp.parallel import (
    DistributedConfig,
    PipelineSchedule,
    apply_ac,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    get_dp_mesh,
    get_dp_rank,
    get_pp_rank,
    get_stage_indices,
    has_dp_mesh,
    init_distributed,
)
from tests.equality import (
    GRADIENT_TOLERANCE,
    Trained,
    assert_equals_one_process,
    batches,
    sharded_adamw,
    train,
)

FACTORS = (1, 2, 3, 4, 8)
SEQ_LEN = 24  # what every tp here divides
STEPS = 2
MAX_NORM = 0.5

Data = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One layout of ranks and what runs on it."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    schedule: str = "none"
    reshard: bool | int | str = "auto"
    ep: int = 1

    @property
    def n_ranks(self) -> int:
        return self.pp * self.n_data * self.tp

    @property
    def n_data(self) -> int:
        """Ranks with data of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def n_microbatches(self) -> int:
        return {1: 1, 2: 4, 3: 6, 4: 4, 8: 8}[self.pp]

    @property
    def batch(self) -> int:
        """Sequences in the global batch: one a microbatch."""
        return self.n_data * self.n_microbatches

    @property
    def distributed(self) -> DistributedConfig:
        return DistributedConfig(self.pp, self.dp_replicate, self.dp_shard, self.tp, self.ep)

    def __str__(self) -> str:
        sizes = {
            "pp": self.pp,
            "replicate": self.dp_replicate,
            "shard": self.dp_shard,
            "tp": self.tp,
            "ep": self.ep,
        }
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        parts += [self.schedule] if self.pp > 1 else []
        return "-".join([*parts, *([f"reshard={self.reshard}"] if self.dp_shard > 1 else [])])


@dataclass(frozen=True)
class Variant:
    """A variant of the model and its data that every layout must get right."""

    tied: bool
    padded: bool
    ac: str

    def __str__(self) -> str:
        return f"{'tied' if self.tied else 'untied'}-{'padded' if self.padded else 'whole'}-ac={self.ac}"


PLAIN = Variant(tied=False, padded=False, ac="none")
TIED = Variant(tied=True, padded=True, ac="full")
SELECTIVE = Variant(tied=False, padded=True, ac="selective")


def variants_of(case: Case) -> tuple[Variant, ...]:
    """Return the variants that run under ``case``.

    Without a pipeline there is one more: masks that pass through sequence-parallel, untied blocks.
    """
    return (PLAIN, TIED) if case.pp > 1 else (PLAIN, TIED, SELECTIVE)


def grid(
    sample: Mapping[Case, Variant],
    in_full: Sequence[Case] = (),
    long: Mapping[Case, Variant] | None = None,
) -> list[Any]:
    """Return the values of ``("case", "variants")``.

    By default these are a sample of cases with one variant each. In full they are all cases with
    all variants. Without ``in_full`` the cases are those of the table of layouts. Cases in ``long``
    belong to the sample and take long.
    """
    cases = in_full or all_cases()
    long = long or {}
    assert set(cases) >= {*sample, *long}
    whole = [
        pytest.param(case, variants_of(case), id=str(case), marks=pytest.mark.full)
        for case in cases
    ]
    sampled = [
        pytest.param(case, (variant,), id=f"{case}-{variant}") for case, variant in sample.items()
    ]
    sampled += [
        pytest.param(case, (variant,), id=f"{case}-{variant}", marks=pytest.mark.long)
        for case, variant in long.items()
    ]
    return sampled + whole


@dataclass
class Run:
    """The result of a training run.

    It has the clipped gradients of the first step, and the norms and evaluations of all steps.
    """

    trained: Trained
    norms: list[float]
    evaluated: list[float]


def all_cases() -> list[Case]:
    """Return every layout of at most 8 ranks, with all schedules and reshard policies it allows."""
    cases = []
    for pp, dp_replicate, dp_shard, tp in product(FACTORS, repeat=4):
        if not 1 < prod((pp, dp_replicate, dp_shard, tp)) <= 8:
            continue
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_v") if pp > 1 else ("none",):
            for reshard in (True, False) if dp_shard > 1 else ("auto",):
                cases.append(Case(pp, dp_replicate, dp_shard, tp, schedule, reshard))
    return cases


def cases_with_experts() -> list[Case]:
    """Return every layout of at most 8 ranks in which experts are shared out, with 1F1B."""
    return [
        Case(pp, dp_replicate, dp_shard, tp, "1f1b" if pp > 1 else "none", ep=ep)
        for pp, dp_replicate, dp_shard, tp, ep in product((*FACTORS, 6), repeat=5)
        if pp * dp_replicate * dp_shard * tp <= 8 and ep > 1 and dp_shard % ep == 0
    ]


def model_config(case: Case, tied: bool) -> ModelConfig:
    """Return the sizes of the smallest model that the layout can cut.

    It has heads for ``tp``, and layers for two stages a rank and one layer more.
    """
    sizes = (
        {"n_heads": 6, "n_kv_heads": 3, "dim": 36}
        if case.tp == 3
        else {"n_heads": 16, "n_kv_heads": 8, "dim": 64}
    )
    return ModelConfig(
        **sizes,
        n_layers=2 * case.pp + 1,
        ffn_dim=48,
        vocab_size=61 if tied else 72,
        max_seq_len=SEQ_LEN,
        tie_embeddings=tied,
    )


@cache
def data_of(config: ModelConfig, batch: int, padded: bool) -> tuple[Data, dict[str, Tensor]]:
    """Return two batches, and the keyword arguments of a batch.

    Padded rows count different numbers of tokens.
    """
    data = batches(config, batch, SEQ_LEN, STEPS)
    if not padded:
        return data, {}
    lengths = torch.arange(batch) * 7 % SEQ_LEN + 1
    mask = torch.arange(SEQ_LEN) >= SEQ_LEN - lengths[:, None]
    data = [(inputs, target.masked_fill(~mask, -100)) for inputs, target in data]
    return data, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@cache
def reference(config: ModelConfig, batch: int, padded: bool) -> Run:
    """Train the whole model with clipping in float64, in one process."""
    data, kwargs = data_of(config, batch, padded)
    torch.manual_seed(0)
    model = Transformer(config).double()
    loss_fn, norms = CrossEntropy(), []

    def loss_of(i: int) -> Tensor:
        return loss_fn(model(data[i][0], **kwargs), data[i][1])

    def step(i: int) -> float:
        loss = loss_of(i)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        return loss.item()

    before = loss_of(0).item()
    trained = train([model], STEPS, step)
    return Run(trained, norms, [before, loss_of(0).item()])


def build_modules(
    case: Case,
    config: ModelConfig,
    mesh: DeviceMesh | None,
    ac: str = "none",
    mp_policy: MixedPrecisionPolicy | None = None,
    **tp_options: bool,
) -> list[PipelineStageModule]:
    """Return this rank's modules in float64, after all transformations in order."""
    indices = get_stage_indices(case.schedule, get_pp_rank(mesh), case.pp) if case.pp > 1 else [0]
    modules = [build_stage_module(config, i, case.pp * len(indices)).double() for i in indices]
    for module in modules:
        apply_tensor_parallel(module, mesh, **tp_options)
        if config.n_experts:
            apply_expert_parallel(module, mesh)
        apply_ac(module, ac)
        apply_fsdp2(module, mesh, mp_policy, case.reshard)
    return modules


def build_pipeline(
    case: Case,
    modules: Sequence[PipelineStageModule],
    mesh: DeviceMesh | None,
    batch: int,
    loss_fn: CrossEntropy,
    dtype: torch.dtype = torch.float64,
) -> PipelineSchedule:
    """Return the pipeline of this rank's modules, for ``batch`` sequences on each data rank."""
    stages = [
        build_pipeline_stage(m, mesh, "cpu", batch // case.n_microbatches, SEQ_LEN, dtype)
        for m in modules
    ]
    schedule = case.schedule if case.pp > 1 else "gpipe"
    return build_pipeline_schedule(
        stages if len(stages) > 1 else stages[0], case.n_microbatches, loss_fn, schedule
    )


class WholeModel:
    """A step without a pipeline, as a user would write it."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None, loss_fn: CrossEntropy) -> None:
        self.model, self.loss_fn = model, loss_fn
        dp = get_dp_mesh(mesh) if has_dp_mesh(mesh) else None
        self.groups = [] if dp is None else [dp.get_group(name) for name in dp.mesh_dim_names]

    def _average(self, value: Tensor) -> Tensor:
        for group in self.groups:
            dist.all_reduce(value, group=group)
            value /= dist.get_world_size(group)
        return value

    def step(self, inputs: Tensor, target: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the mean loss over the tokens of all ranks.

        Gradients are computed if they are enabled.
        """
        total = self.loss_fn.total(self.model(inputs, **kwargs), target)
        loss = total / self._average(self.loss_fn.count(target).double())
        if torch.is_grad_enabled():
            loss.backward()
        return self._average(loss.detach().clone())

    def eval(self, inputs: Tensor, target: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the mean loss without gradients."""
        with torch.no_grad():
            return self.step(inputs, target, **kwargs)


def train_on_rank(
    rank: int,
    case: Case,
    variant: Variant,
    config: ModelConfig,
    data: Data,
    kwargs: dict[str, Tensor],
    loss_fn: CrossEntropy | None = None,
    **tp_options: bool,
) -> Run:
    """Take two clipped AdamW steps on this rank's part of the data."""
    mesh = init_distributed(case.distributed, seed=0)
    loss_fn = loss_fn or CrossEntropy()

    def mine(rows: Tensor) -> Tensor:
        return rows.chunk(case.n_data)[get_dp_rank(mesh)]

    data = [(mine(inputs), mine(target)) for inputs, target in data]
    kwargs = {name: mine(value) for name, value in kwargs.items()}
    modules = build_modules(case, config, mesh, variant.ac, **tp_options)
    runner: PipelineSchedule | WholeModel = WholeModel(modules[0], mesh, loss_fn)
    if case.pp > 1:
        runner = build_pipeline(case, modules, mesh, len(data[0][0]), loss_fn)
    # Before any evaluation: with reshard=False that leaves whole parameters in place of the
    # optimizer's shards.
    optimizer, norms = sharded_adamw(modules), []

    def evaluated() -> float:
        return runner.eval(data[0][0], target=data[0][1], **kwargs).item()

    def step(i: int) -> float:
        loss = runner.step(data[i][0], target=data[i][1], **kwargs).item()
        norms.append(clip_grad_norm_(modules, MAX_NORM, device_mesh=mesh).item())
        return loss

    before = evaluated()
    trained = train(modules, STEPS, step, optimizer)
    return Run(trained, norms, [before, evaluated()])


Job = tuple[Variant, ModelConfig, Data, dict[str, Tensor]]


def jobs_of(case: Case, variants: Sequence[Variant]) -> list[Job]:
    """Return the jobs under ``case``: a model and data for each variant."""
    configs = [(variant, model_config(case, variant.tied)) for variant in variants]
    return [
        (variant, config, *data_of(config, case.batch, variant.padded))
        for variant, config in configs
    ]


def train_variants_on_rank(rank: int, case: Case, jobs: Sequence[Job]) -> list[Run]:
    """Run every job on one set of ranks, because to start ranks costs more than the training."""
    return [train_on_rank(rank, case, *job) for job in jobs]


def assert_runs_equal(runs: Sequence[Run], expected: Run, config: ModelConfig) -> None:
    """Assert that a run equals another: losses, evaluations, norms, gradients and parameters.

    Losses, evaluations and norms are compared on every rank. Clipped gradients and trained
    parameters are compared for all ranks together.
    """
    for run in runs:
        assert run.norms == runs[0].norms, "the norm differs between ranks"
        assert run.evaluated == runs[0].evaluated, "the evaluated loss differs between ranks"
        assert run.norms == pytest.approx(expected.norms, rel=GRADIENT_TOLERANCE, abs=0)
        assert run.evaluated == pytest.approx(expected.evaluated, rel=GRADIENT_TOLERANCE, abs=0)
    assert_equals_one_process([run.trained for run in runs], expected.trained, config)
