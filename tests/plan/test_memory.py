"""Memory on paper is memory on ranks: every kind, on every rank."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, PipelineStageModule
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_expert_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    compute_in,
    get_dp_rank,
    init_distributed,
    measure_unsharded_bytes,
)
from course_pp.parallel.watching import GatheredWatcher
from course_pp.plan import Layout
from course_pp.plan.memory import kept_by_stage, memory_of_rank
from course_pp.plan.run import Work
from tests.equality import adamw
from tests.parallel.layouts import (
    PLAIN,
    SEQ_LEN,
    TIED,
    Case,
    build_modules,
    build_pipeline,
    grid,
    jobs_of,
)


def n_bytes(tensors):
    n = 0
    for t in tensors:
        if isinstance(t, torch.Tensor):
            local = t.to_local() if isinstance(t, DTensor) else t
            n += local.numel() * local.element_size()
    return n


class GradientWatcher(GatheredWatcher):
    """Looks after every operation how much larger whole gradients are than their shards."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        parameters = [
            p for group in self._groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")
        ]
        whole = ((n_bytes(whole_gradients(p)), p) for p in parameters)
        more = sum(held - n_bytes([p.sharded_param]) for held, p in whole if held)
        self.peak = max(self.peak, more)
        return result


def whole_gradients(parameter):
    """Return FSDP2's whole gradients of a parameter; torch 2.15 has two names for one."""
    accumulated = parameter.unsharded_accumulated_grad
    newest = parameter._unsharded_param.grad
    return [accumulated] if accumulated is newest else [accumulated, newest]


def held_on_rank(rank, case, jobs):
    """Bytes by kind after three steps, and the peaks within a step, for each job."""
    mesh = init_distributed(case.distributed, seed=0)
    return [held_after_steps(case, mesh, *job) for job in jobs]


def held_after_steps(case, mesh, variant, config, data, kwargs, n_microbatches=None):
    """The same for one job: by a plain loop, or with several microbatches by a schedule."""
    modules = build_modules(case, config, mesh, variant.ac)
    optimizer, loss_fn = adamw(modules), CrossEntropy()
    inputs, target, *more = (
        each.chunk(case.n_data)[get_dp_rank(mesh)] for each in (*data[0], *kwargs.values())
    )
    given = dict(zip(kwargs, more, strict=True))
    runner = build_pipeline(case, modules, mesh, len(inputs), loss_fn) if case.pp > 1 else None
    if n_microbatches is not None:
        stage = build_pipeline_stage(
            modules[0], mesh, "cpu", len(inputs) // n_microbatches, SEQ_LEN, torch.float64
        )
        runner = build_pipeline_schedule(stage, n_microbatches, loss_fn, "1f1b")

    def step():
        optimizer.zero_grad()
        if runner is not None:
            runner.step(inputs, target=target, **given)
        else:
            loss_fn(modules[0](inputs, **given), target).backward()
        optimizer.step()

    step()
    gathered = measure_unsharded_bytes(step, modules)
    with GradientWatcher(modules) as watcher:
        step()
    parameters = [p for m in modules for p in m.parameters()]
    slots = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": n_bytes(parameters),
        "gradients": n_bytes(p.grad for p in parameters),
        "optimizer": n_bytes(slots),
        "gathered": gathered,
        "unreduced": watcher.peak if runner is not None else 0,
    }


ALONE = Case(dp_shard=2, reshard=True), Case(dp_shard=2, reshard=False)
SEVERAL = 2


def held_without_pipeline(rank, case, config):
    """The same of a step of several microbatches without a pipeline."""
    mesh = init_distributed(case.distributed, seed=0)
    ids = torch.zeros(case.n_data * SEVERAL, SEQ_LEN, dtype=torch.int64)
    return held_after_steps(case, mesh, PLAIN, config, [(ids, ids)], {}, n_microbatches=SEVERAL)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_without_a_pipeline_several_microbatches_keep_weights_and_gradients_whole(case):
    config = ModelConfig(16, 3, 2, 20, max_seq_len=SEQ_LEN)
    measured = on_ranks(case.n_ranks, held_without_pipeline, case, config, timeout_s=110)
    layout = Layout(dp_shard=case.dp_shard, reshard=case.reshard, precision="float64")
    for rank, held in enumerate(measured):
        predicted = memory_of_rank(Work(config, layout, SEQ_LEN), SEVERAL, rank, None)
        assert {kind: predicted[kind] for kind in held} == held, f"rank {rank}"
        assert held["unreduced"] == held["gradients"] > 0


SPARSE = ModelConfig(
    16, 5, 2, 20, max_seq_len=SEQ_LEN, n_experts=4, expert_dim=8, moe_every=2, n_shared_experts=1
)


@pytest.mark.parametrize(
    "case",
    [
        Case(dp_shard=4, ep=2, reshard=True),
        pytest.param(Case(dp_shard=2, ep=2, reshard=False), marks=pytest.mark.long),
        pytest.param(Case(dp_shard=2, reshard=True), marks=pytest.mark.long),
        pytest.param(Case(pp=2, schedule="1f1b", dp_shard=2, ep=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_experts_are_held_and_gathered_as_the_formulas_say(case):
    ids = torch.zeros(case.batch, SEQ_LEN, dtype=torch.int64)
    jobs = [(PLAIN, SPARSE, [(ids, ids)], {})]
    measured = on_ranks(case.n_ranks, held_on_rank, case, jobs, timeout_s=110)
    layout = Layout(
        case.pp, dp_shard=case.dp_shard, ep=case.ep, reshard=case.reshard, precision="float64"
    )
    for rank, [held] in enumerate(measured):
        predicted = memory_of_rank(
            Work(SPARSE, layout, SEQ_LEN), case.n_microbatches, rank, [0.0] * case.pp
        )
        assert {kind: predicted[kind] for kind in held} == held, f"rank {rank}"


SAMPLE = {Case(pp=2, schedule="zb_v", dp_shard=2, reshard=False): PLAIN}
LONG = {Case(dp_shard=3, reshard=True): TIED, Case(pp=2, schedule="1f1b", tp=2): TIED}


@pytest.mark.parametrize(("case", "variants"), grid(SAMPLE, long=LONG))
def test_what_every_rank_holds_is_what_the_formulas_say(case, variants):
    jobs = jobs_of(case, variants)
    ranks = on_ranks(case.n_ranks, held_on_rank, case, jobs, timeout_s=110)
    for (variant, config, _, _), measured in zip(jobs, zip(*ranks, strict=True), strict=True):
        layout = Layout(
            case.pp,
            case.tp,
            case.dp_shard,
            case.dp_replicate,
            case.schedule if case.pp > 1 else "1f1b",
            reshard=case.reshard,
            ac=variant.ac,
            precision="float64",
        )
        for rank, held in enumerate(measured):
            predicted = memory_of_rank(
                Work(config, layout, SEQ_LEN), case.n_microbatches, rank, [0.0] * case.pp
            )
            assert {kind: predicted[kind] for kind in held} == held, f"rank {rank}"


def kept_by_forward(module: nn.Module, inputs: torch.Tensor, target: torch.Tensor | None) -> int:
    """Bytes of storages that autograd keeps, without parameters and buffers, and of the output."""
    own = set()
    for t in (*module.parameters(), *module.buffers()):
        local = t.to_local() if isinstance(t, DTensor) else t
        own.add(local.untyped_storage().data_ptr())
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(inputs)
        keep(output)
        if target is not None:
            CrossEntropy()(output, target)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


KINDS = {
    "gated": {},
    "plain": {"gated_ffn": False},
    # The first layer of each stage without experts, the second with some.
    "experts": {
        "n_experts": 8,
        "top_k": 3,
        "expert_dim": 48,
        "moe_every": 2,
        "qk_norm": True,
        "head_width": 24,
    },
    "shared": {
        "n_experts": 4,
        "n_shared_experts": 2,
        "router": "sigmoid",
        "z_coef": 0.1,
        "balance": "bias",
    },
}


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "mixed",
        *(pytest.param(d, marks=pytest.mark.long) for d in ("bfloat16", "float64")),
    ],
)
@pytest.mark.parametrize("ac", ["none", "selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_keeps_is_what_autograd_saves(dtype, ac, kind):
    config = ModelConfig(64, 6, 4, 100, n_kv_heads=2, ffn_dim=160, max_seq_len=32, **KINDS[kind])
    layout = Layout(pp=3, microbatch_size=2, ac=ac, precision=dtype, fused_norms=False)
    batch = 2
    s = 32
    for stage in layout.stages_of_all(config):
        module = PipelineStageModule(config, stage.index, 3, (2 * stage.index, 2 * stage.index + 2))
        # On one data-parallel rank mixed precision is not FSDP2's.
        computed = torch.bfloat16 if dtype == "mixed" else getattr(torch, dtype)
        module = module.to(torch.float32 if dtype == "mixed" else computed)
        apply_ac(module, ac)
        compute_in(module, computed)
        inputs = (
            torch.randint(100, (batch, s))
            if stage.is_first
            else torch.randn(batch, s, 64).to(computed)
        )
        inputs.requires_grad_(not stage.is_first)
        target = torch.randint(100, (batch, s)) if stage.is_last else None
        assert kept_by_stage(Work(config, layout, s), stage) == pytest.approx(
            kept_by_forward(module, inputs, target), rel=0.03
        )


def kept_with_shared_experts(rank, config, dtypes):
    mesh = init_distributed(DistributedConfig(dp_shard=2, ep=2), seed=0)
    kept = {}
    for dtype in dtypes:
        module = PipelineStageModule(config, 0, 1, (0, config.n_layers)).to(getattr(torch, dtype))
        apply_expert_parallel(module, mesh)
        ids = torch.randint(100, (2, 32))
        kept[dtype] = kept_by_forward(module, ids, ids)
    return kept


def test_a_rank_keeps_what_other_ranks_send_its_experts():
    # Every token goes to all experts, so that both ranks get as many.
    config = ModelConfig(64, 2, 4, 100, max_seq_len=32, n_experts=4, top_k=4, expert_dim=96)
    for held in on_ranks(
        2, kept_with_shared_experts, config, ("float32", "bfloat16"), timeout_s=110
    ):
        for dtype, n_bytes in held.items():
            layout = Layout(dp_shard=2, ep=2, microbatch_size=2, precision=dtype, fused_norms=False)
            [stage] = layout.stages_of_all(config)
            assert kept_by_stage(Work(config, layout, 32), stage) == pytest.approx(
                n_bytes, rel=0.03
            )
