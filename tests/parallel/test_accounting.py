"""Formulas predict the messages and the gathered bytes of a real step on every layout."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, Replicate, Shard

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig
from course_pp.model.experts import Experts
from course_pp.parallel import (
    CollectiveCounter,
    CollectiveCounts,
    DistributedConfig,
    Tally,
    VocabParallelCrossEntropy,
    clip_grad_norm_,
    count_collectives,
    default_mp_policy,
    get_dp_rank,
    init_distributed,
    measure_unsharded_bytes,
    predict_collectives,
    predict_unsharded_bytes,
    wire_factor,
)
from tests.equality import sharded_adamw
from tests.parallel.layouts import (
    PLAIN,
    SELECTIVE,
    SEQ_LEN,
    TIED,
    Case,
    Variant,
    build_modules,
    build_pipeline,
    cases_with_experts,
    data_of,
    grid,
    jobs_of,
    model_config,
)


def step_of(case, mesh, modules, inputs, target, kwargs, loss_fn, mp_policy):
    """Return a whole training step on one batch, as a function without arguments."""
    dtype = torch.float64 if mp_policy is None else mp_policy.param_dtype
    optimizer = sharded_adamw(modules)
    runner = (
        build_pipeline(case, modules, mesh, len(inputs), loss_fn, dtype) if case.pp > 1 else None
    )

    def step():
        optimizer.zero_grad()
        if runner is not None:
            runner.step(inputs, target=target, **kwargs)
        else:
            loss_fn(modules[0](inputs, **kwargs), target).backward()
        clip_grad_norm_(modules, 1.0, device_mesh=mesh)
        optimizer.step()

    return step


def run_jobs(case, jobs, watch, mp_policy=None, **tp_options):
    """Return the results of ``watch(step, modules, mesh)`` for the second step of each job."""
    mesh = init_distributed(case.distributed, seed=0)

    def mine(rows):
        return rows.chunk(case.n_data)[get_dp_rank(mesh)]

    for variant, config, data, kwargs in jobs:
        modules = build_modules(case, config, mesh, variant.ac, mp_policy, **tp_options)
        kwargs = {
            name: mine(value) if torch.is_tensor(value) else value for name, value in kwargs.items()
        }
        loss_fn = VocabParallelCrossEntropy() if tp_options else CrossEntropy()
        step = step_of(
            case, mesh, modules, mine(data[0][0]), mine(data[0][1]), kwargs, loss_fn, mp_policy
        )
        step()
        yield watch(step, modules, mesh)


def count_on_rank(rank, case, jobs, *options, **tp_options):
    """Return the collectives of the second step, for each job."""
    return list(
        run_jobs(
            case,
            jobs,
            lambda step, modules, mesh: count_collectives(step, mesh),
            *options,
            **tp_options,
        )
    )


def predict(case, variant, config, **options):
    """Return the prediction for a case of the table, in float64."""
    return predict_collectives(
        config,
        case.distributed,
        batch_size=1,
        seq_len=SEQ_LEN,
        n_microbatches=case.n_microbatches,
        schedule=case.schedule,
        reshard_after_forward=case.reshard,
        ac=variant.ac,
        **{"dtype": torch.float64} | options,
    )


def assert_counted(ranks, predicted):
    """Assert that each rank began the collectives that were predicted for it."""
    for rank, (counted, expected) in enumerate(zip(ranks, predicted, strict=True)):
        assert counted == expected, f"rank {rank} counted\n{counted}\npredicted\n{expected}"


SAMPLE = {
    Case(tp=2): SELECTIVE,
    Case(dp_shard=2, tp=2, reshard=True): PLAIN,
    Case(dp_replicate=2, dp_shard=2, reshard=False): TIED,
    Case(pp=2, schedule="1f1b", dp_shard=2, reshard=True): TIED,
    Case(pp=2, schedule="gpipe", dp_shard=2, reshard=False): PLAIN,
    Case(pp=2, schedule="zb_v", dp_replicate=2): PLAIN,
}
LONG = {Case(pp=2, schedule="zb_v", tp=2): TIED}
BEYOND = {  # the table of layouts
    Case(dp_shard=4, reshard=2): TIED,
    Case(pp=2, schedule="dualpipe_v", dp_shard=2, reshard=True): PLAIN,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "variants"), [*grid(SAMPLE, long=LONG), *grid({}, [*BEYOND], long=BEYOND)]
)
def test_predicted_collectives_are_counted_on_every_rank(case, variants):
    jobs = jobs_of(case, variants)
    ranks = on_ranks(case.n_ranks, count_on_rank, case, jobs, timeout_s=110)
    for (variant, config, _, _), counts in zip(jobs, zip(*ranks, strict=True), strict=True):
        assert_counted(counts, predict(case, variant, config))


def test_a_divisor_that_is_given_saves_a_question_to_the_data_ranks():
    case = Case(pp=2, schedule="1f1b", dp_shard=2)
    [(variant, config, data, _)] = jobs_of(case, [PLAIN])
    ranks = on_ranks(
        case.n_ranks,
        count_on_rank,
        case,
        [(variant, config, data, {"divisor": 100.0})],
        timeout_s=60,
    )
    told = predict(case, variant, config, divisor=100.0)
    assert_counted([counts for [counts] in ranks], told)
    asked = predict(case, variant, config)
    saved = [a.total().number - b.total().number for a, b in zip(asked, told, strict=True)]
    assert saved == [0, 0, 1, 1]  # where the last stage is


CHANGED = [
    (Case(tp=2), {"vocab_size": 72}, {"gather_logits": False}, ()),
    # tp does not divide the vocabulary
    (Case(pp=2, schedule="1f1b", tp=2), {"vocab_size": 61}, {}, pytest.mark.long),
    (
        Case(pp=2, schedule="1f1b", dp_shard=2),
        {"vocab_size": 72},
        {"mp_policy": default_mp_policy()},
        pytest.mark.long,
    ),
    (Case(tp=2), {"qk_norm": True, "head_width": 6}, {}, ()),
    (Case(pp=2, schedule="1f1b", tp=2), {"qk_norm": True}, {}, pytest.mark.long),
]


@pytest.mark.parametrize(
    ("case", "sizes", "options"),
    [pytest.param(*changed, marks=marks) for *changed, marks in CHANGED],
)
def test_vocabularies_losses_precisions_and_norms_are_predicted_too(case, sizes, options):
    config = replace(model_config(case, tied=False), **sizes)
    jobs = [(PLAIN, config, *data_of(config, case.batch, padded=False))]
    ranks = on_ranks(case.n_ranks, partial(count_on_rank, **options), case, jobs, timeout_s=60)
    assert_counted([counts[0] for counts in ranks], predict(case, PLAIN, config, **options))


# Every kind of exchange: alone and beside copies, with losses attached to stages or not,
# recomputed, in half precision.
WITH_EXPERTS = [
    (Case(dp_shard=2, ep=2), "none", {}),
    (Case(dp_shard=2, ep=2, reshard=False), "full", {"capacity_factor": 0.5}),
    (Case(dp_shard=2, ep=2), "none", {"mp_policy": default_mp_policy()}),
    (Case(dp_shard=4, ep=2), "none", {}),
    (Case(dp_replicate=2, dp_shard=2, ep=2), "none", {}),
    (Case(dp_shard=2, tp=2, ep=2), "full", {"qk_norm": True}),
    (Case(tp=2), "none", {}),
    (Case(pp=2, schedule="1f1b", dp_shard=2, ep=2), "none", {}),
    (Case(pp=2, schedule="1f1b", dp_shard=2, ep=2), "full", {"balance": "none"}),
    (
        Case(pp=2, schedule="interleaved_1f1b", dp_shard=2, ep=2, reshard=True),
        "none",
        {"z_coef": 0.1},
    ),
    (Case(pp=2, schedule="zb_v", dp_shard=2, ep=2), "none", {}),
    (Case(pp=2, schedule="zb_v", dp_shard=2, ep=2), "none", {"balance": "bias"}),
]
WITH_EXPERTS_LONG = [
    (Case(pp=2, schedule="dualpipe_v", dp_shard=2, ep=2), "none", {}),
    (Case(pp=2, schedule="zb_v", dp_shard=2, ep=2), "full", {}),
    (Case(pp=2, schedule="zb_v", dp_shard=2, ep=2), "full", {"balance": "none"}),
    (Case(pp=2, schedule="1f1b", dp_shard=2, tp=2, ep=2), "none", {"qk_norm": True}),
    (Case(pp=2, schedule="1f1b", dp_shard=4, ep=2, reshard=True), "none", {}),
    (Case(dp_replicate=2, dp_shard=4, ep=2), "none", {}),
    (Case(dp_shard=6, ep=2), "none", {}),  # unequal shards
]


def jobs_with_experts(case, ac, changes):
    """Return the job of :func:`jobs_of` with experts in every second layer, and FSDP2's options."""
    policy = {name: value for name, value in changes.items() if name == "mp_policy"}
    sizes = {"n_experts": 8, "expert_dim": 16, "moe_every": 2, "n_shared_experts": 1}
    sizes |= {name: value for name, value in changes.items() if name != "mp_policy"}
    config = replace(model_config(case, tied=False), **sizes)
    return [(Variant(False, False, ac), config, *data_of(config, case.batch, False))], policy


def count_exchanges(rank, cases):
    """Return the collectives of the second step of each case, and the rows of experts.

    The rows are those of each layer's microbatches, by expert.
    """
    found = []
    for case, *rest in cases:
        jobs, policy = jobs_with_experts(case, *rest)
        rows = {}

        def watch(step, modules, mesh, rows=rows):
            for module in modules:
                for name, part in module.named_modules():
                    if isinstance(part, Experts):
                        part.register_forward_pre_hook(partial(note, rows.setdefault(name, [])))
            return count_collectives(step, mesh), get_dp_rank(mesh)

        found += [(*each, rows) for each in run_jobs(case, jobs, watch, **policy)]
    return found


def note(rows, module, args):
    if torch._C._current_graph_task_id() < 0:  # not computed again
        rows.append(args[1])


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(WITH_EXPERTS, id="sample"),
        pytest.param(WITH_EXPERTS_LONG, id="more", marks=pytest.mark.long),
    ],
)
def test_exchanges_of_experts_are_predicted_from_their_rows(cases, subtests):
    assert_exchanges(cases, subtests)


@pytest.mark.long
@pytest.mark.parametrize("case", cases_with_experts(), ids=str)
def test_exchanges_of_experts_are_predicted_on_every_layout(case, subtests):
    assert_exchanges([(case, "none", {"n_experts": 24})], subtests)


def assert_exchanges(cases, subtests):
    """Assert that every rank exchanged in the second step as predicted."""
    for n_ranks in sorted({case.n_ranks for case, *_ in cases}):
        here = [each for each in cases if each[0].n_ranks == n_ranks]
        ranks = on_ranks(n_ranks, count_exchanges, here, timeout_s=110)
        for (case, ac, changes), found in zip(here, zip(*ranks, strict=True), strict=True):
            with subtests.test(f"{case} {ac} {changes}"):
                [(variant, config, *_)], policy = jobs_with_experts(case, ac, changes)
                layers = [
                    f"layers.{i}.mlp.experts"
                    for i in range(config.n_layers)
                    if config.has_experts(i)
                ]
                rows = {
                    (rank, name): torch.stack(each)
                    for _, rank, by_name in found
                    for name, each in by_name.items()
                }
                routed = torch.stack(
                    [torch.stack([rows[rank, n] for n in layers]) for rank in range(case.n_data)]
                )
                expected = predict(case, variant, config, routed=routed, **policy)
                assert_counted([counts for counts, *_ in found], expected)


def test_without_rows_exchanges_are_those_of_a_perfect_balance():
    case = Case(pp=2, schedule="1f1b", dp_shard=4, ep=2)
    [(variant, config, *_)], _ = jobs_with_experts(case, "none", {})
    rows = torch.full((4, 2, case.n_microbatches, 8), SEQ_LEN * config.top_k // 8)
    assert predict(case, variant, config, routed=rows) == predict(case, variant, config)


MEMORY_CASES = {
    Case(dp_shard=2, reshard=True): PLAIN,
    Case(dp_shard=2, reshard=False): TIED,
    Case(dp_shard=4, reshard=2): PLAIN,
    Case(dp_replicate=2, dp_shard=2, reshard=True): TIED,
    Case(dp_shard=2, tp=2, reshard=True): PLAIN,
    Case(pp=2, schedule="1f1b", dp_shard=2, reshard=True): TIED,
    Case(pp=2, schedule="zb_v", dp_shard=2, reshard=True): PLAIN,
}


def measure_on_rank(rank, case, jobs, mp_policy=None):
    """Return the most bytes of gathered parameters in the second step, for each job."""
    return list(
        run_jobs(
            case,
            jobs,
            lambda step, modules, mesh: measure_unsharded_bytes(step, modules),
            mp_policy,
        )
    )


def assert_measured(case, variants, mp_policy=None):
    """Assert that each rank gathered the bytes that were predicted for it."""
    jobs = jobs_of(case, variants)
    ranks = on_ranks(case.n_ranks, measure_on_rank, case, jobs, mp_policy, timeout_s=110)
    options = {
        "reshard_after_forward": case.reshard,
        "dtype": torch.float64,
        "mp_policy": mp_policy,
    }
    for (_, config, _, _), measured in zip(jobs, zip(*ranks, strict=True), strict=True):
        assert measured == predict_unsharded_bytes(
            config, case.distributed, schedule=case.schedule, **options
        )


@pytest.mark.sample(3)
@pytest.mark.parametrize(("case", "variants"), grid(MEMORY_CASES, [*MEMORY_CASES]))
def test_predicted_memory_of_gathered_parameters_is_measured(case, variants):
    assert_measured(case, variants)


def test_memory_of_gathered_parameters_in_half_precision_is_predicted():
    assert_measured(Case(dp_shard=2, reshard=True), [PLAIN], default_mp_policy())


def each_collective(rank):
    """Count one collective of every kind, in the mesh's groups and outside, with its bytes."""
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2), seed=0)
    pair, alone, crossing = (
        mesh.get_group("dp_shard"),
        dist.new_group([rank], use_local_synchronization=True),
        None,
    )
    for ranks in ([0, 3], [1, 2]):
        group = dist.new_group(ranks)
        crossing = group if rank in ranks else crossing
    four, eight = torch.ones(4), torch.ones(8)

    def communicate():
        dist.all_reduce(four)
        dist.all_reduce(four, group=alone)
        dist.all_reduce(four, group=crossing)
        dist.broadcast(four, group=pair, group_src=0)
        dist.all_gather_into_tensor(eight, four, group=pair)
        dist.all_gather([torch.empty(4), torch.empty(4)], four, group=pair)
        dist.reduce_scatter_tensor(four, eight, group=pair)
        dist.all_to_all_single(torch.empty(4), four, group=pair)
        functional.all_reduce(four, "sum", pair)
        peer = {"group": pair, "group_peer": 1 - dist.get_rank(pair)}
        ops = [dist.P2POp(dist.isend, four, **peer), dist.P2POp(dist.irecv, torch.empty(4), **peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        x = DTensor.from_local(torch.ones(4, requires_grad=True), mesh["pp"], [Shard(0)])
        x.redistribute(placements=[Replicate()]).to_local().sum().backward()

    with CollectiveCounter() as without_mesh:
        communicate()
    return count_collectives(communicate, mesh), without_mesh.counts


def test_every_kind_of_collective_is_counted_with_the_bytes_of_its_whole():
    expected = {
        ("world", "all_reduce"): Tally(1, 16),
        ("other", "all_reduce"): Tally(1, 16),
        ("dp_shard", "broadcast"): Tally(1, 16),
        ("dp_shard", "all_gather"): Tally(2, 64),
        ("dp_shard", "reduce_scatter"): Tally(1, 32),
        ("dp_shard", "all_to_all"): Tally(1, 16),
        ("dp_shard", "all_reduce"): Tally(1, 16),
        ("dp_shard", "send"): Tally(1, 16),
        ("dp_shard", "recv"): Tally(1, 16),
        ("pp", "all_gather"): Tally(1, 32),
    }
    for counts, without_mesh in on_ranks(4, each_collective, timeout_s=60):
        assert counts == CollectiveCounts(expected), str(counts)
        assert without_mesh.total() == counts.total()
        assert {dimension for dimension, _ in without_mesh.tallies} == {"world", "other"}


def test_counts_add_up_repeat_and_print_as_a_table():
    gathers = CollectiveCounts.of("dp_shard", "all_gather", 3, 1000)
    counts = (
        gathers * 2
        + CollectiveCounts.of("tp", "all_reduce", 1, 8)
        + CollectiveCounts.of("pp", "send", 0, 8)
    )
    assert counts["dp_shard", "all_gather"] == Tally(6, 6000)
    assert counts["pp", "send"] == Tally()
    assert counts.total("tp") == Tally(1, 8)
    assert counts.total(collective="all_gather") == Tally(6, 6000)
    assert counts.total() == Tally(7, 6008)
    assert str(counts).splitlines() == [
        "dimension  collective  number  bytes",
        "dp_shard   all_gather       6  6,000",
        "tp         all_reduce       1      8",
    ]
    assert counts != gathers


def sent_by_first_rank(layout, dimension, **options):
    """Return the bytes that rank 0 sends over one dimension."""
    sizes = {
        "config": SMALL,
        "batch_size": 2,
        "seq_len": 8,
        "mp_policy": default_mp_policy(torch.float32),
    }
    sizes |= {"clip": False}
    counts = predict_collectives(layout=layout, **sizes | options)[0]
    n_ranks = getattr(layout, dimension)
    return sum(
        wire_factor(collective, n_ranks) * tally.n_bytes
        for (where, collective), tally in counts.tallies.items()
        if where == dimension
    )


def test_freeing_parameters_after_forward_costs_half_as_much_again():
    # ZeRO, section 7: 2 and 3 times the parameters; 1/2 of it stays here
    model_bytes = 4 * SMALL.n_parameters
    layout = DistributedConfig(dp_shard=2)
    assert (
        sent_by_first_rank(layout, "dp_shard", reshard_after_forward=False) == 2 * model_bytes / 2
    )
    assert sent_by_first_rank(layout, "dp_shard", reshard_after_forward=True) == 3 * model_bytes / 2


def test_ranks_of_a_broadcast_send_different_amounts():
    assert wire_factor("send", 2) == 1
    assert wire_factor("recv", 2) == 0
    with pytest.raises(ValueError, match="broadcast"):
        wire_factor("broadcast", 2)


def test_counting_without_a_process_group_is_refused():
    with pytest.raises(RuntimeError, match="init_distributed"):
        count_collectives(lambda: None)


SMALL = ModelConfig(
    dim=48, n_layers=4, n_heads=6, vocab_size=60, n_kv_heads=2, ffn_dim=48, max_seq_len=64
)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (DistributedConfig(), {}, "dp_shard=-1"),
        (DistributedConfig(dp_shard=1, tp=4), {}, r"tp=4 must divide n_heads=6.*use tp=2"),
        (
            DistributedConfig(dp_shard=1, tp=2),
            {"seq_len": 7},
            "seq_len=7 must be a multiple of tp=2.*pad it to 8",
        ),
        (
            DistributedConfig(dp_shard=4),
            {"reshard_after_forward": 3},
            "must divide dp_shard=4.*say 2",
        ),
        (
            DistributedConfig(dp_shard=4, tp=2),
            {"reshard_after_forward": 2},
            "=2 with tp=2.*say True, False",
        ),
        (
            DistributedConfig(dp_shard=1, tp=2),
            {"gather_logits": False, "vocab": 61},
            "gather_logits=False needs.*61",
        ),
        (DistributedConfig(dp_shard=1), {"n_microbatches": 4}, "needs a pipeline, but pp=1"),
        (
            DistributedConfig(dp_shard=2, ep=2),
            {"routed": torch.ones(2, 4, 8)},
            r"shape \(2, 4, 8\): give .* \(2, 0, 1, 0\)",
        ),
        (
            DistributedConfig(dp_shard=1, pp=8),
            {"n_microbatches": 8},
            "8 stages need at least 8 layers",
        ),
        (
            DistributedConfig(dp_shard=1, pp=2),
            {"n_microbatches": 4, "schedule": "fast"},
            "unknown schedule 'fast'",
        ),
        (
            DistributedConfig(dp_shard=1, pp=2, tp=2),
            {"n_microbatches": 4, "schedule": "dualpipe_v", "ac": "full"},
            "no formula here",
        ),
    ],
)
def test_an_impossible_layout_is_refused(layout, options, message):
    config = replace(SMALL, vocab_size=options.pop("vocab", 60))
    with pytest.raises(ValueError, match=message):
        predict_collectives(config, layout, **{"batch_size": 1, "seq_len": 8} | options)
