"""A run on paper: what adds up, what is refused, and that more of a resource never hurts."""

import re
import runpy
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from statistics import median

import pytest

from course_pp.__main__ import main
from course_pp.parallel import DistributedConfig, predict_collectives
from course_pp.parallel.schedules import order_of
from course_pp.plan import (
    Constants,
    Layout,
    cluster_of,
    explain,
    gpu_named,
    model_named,
    plan,
    predict,
)
from course_pp.plan.calibration import MEGATRON
from course_pp.plan.layout import torch_receives_ahead
from course_pp.plan.memory import kept_by_stage, memory_of_rank
from course_pp.plan.prediction import causes, reason
from course_pp.plan.run import Run, Work
from course_pp.plan.timing import data_parallel_times, model_flops, stage_time, transfers

NODE = cluster_of("2x8xA100")
GPT = model_named("gpt-1.7b")
LAYOUTS = [
    Layout(dp_shard=16, microbatch_size=2),
    Layout(dp_replicate=16, ac="full"),
    Layout(tp=8, dp_shard=2, ac="selective"),
    Layout(pp=4, tp=2, dp_shard=2),
    Layout(pp=2, tp=8, schedule="interleaved_1f1b", n_chunks=3),
    Layout(pp=4, tp=4, schedule="zb_v"),
    Layout(pp=2, tp=2, dp_shard=2, dp_replicate=2, reshard=True),
    Layout(pp=8, tp=2, schedule="dualpipe_v"),
]


def predicted(layout, cluster=NODE, batch=64):
    return predict(GPT, layout, cluster, batch, 2048)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_add_up_no_product_beats_the_peak_and_more_of_a_resource_never_hurts(layout):
    found = predicted(layout)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert min(found.parts.values()) >= -1e-12
    assert 0 < found.mfu < 1
    assert all(left <= 1 + 1e-9 for left in found.gains().values())


def test_operations_are_those_of_the_megatron_paper():
    # Its equation 3 counts a recomputed forward: 96 B s l h² (1 + s / 6h + V / 16lh), of which 3/4
    # are useful; the head is not recomputed, which it leaves out.
    model = model_named("gpt-145b")
    batch = 2304
    s = 2048
    h = model.dim
    n = model.n_layers
    v = model.vocab_size
    layers = 72 * batch * s * n * h * h * (1 + s / (6 * h))
    assert model_flops(model, batch, s) == pytest.approx(layers + 6 * batch * s * v * h)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-1t", 1008),
        ("llama3-405b", 405),
        ("bloom-176b", 176),
        ("gpt2", 0.124),
        ("article", 0.1794),
    ],
)
def test_presets_have_the_published_sizes(name, billions):
    model = model_named(name)
    # BLOOM's and GPT's heads are their embeddings; here the sizes of both ends are counted on their
    # stages.
    tied = model.n_embedding_parameters if name in ("gpt-1t", "bloom-176b") else 0
    assert (model.n_parameters - tied) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_larger_batch_dilutes_the_bubble():
    layout = Layout(pp=8, dp_shard=2)
    small, large = (predicted(layout, batch=batch) for batch in (16, 256))
    assert (small.bound_by, large.bound_by) == ("bubble", "compute")
    assert large.mfu > small.mfu


def test_the_plan_is_sorted_and_fits():
    found = plan(GPT, NODE, 64, 2048)
    assert [each.step_s for each in found] == sorted(each.step_s for each in found)
    assert all(each.fits for each in found)
    assert "faster" in explain(found[0], found[-1])
    assert "faster" not in explain(found[0], found[0])


@pytest.mark.parametrize(("batch", "n_experts"), [(1, 0), (2, 0), (4, 0), (12, 0), (4, 6)])
def test_whatever_is_planned_the_stack_takes(batch, n_experts):
    model = replace(
        model_named("gpt2"), n_layers=4, vocab_size=50_256, n_experts=n_experts, moe_every=2
    )
    found = plan(model, cluster_of("1x4xA100"), batch, 1024, n_best=1000)
    assert any(each.layout.pp == 4 for each in found)
    assert {each.layout.ep for each in found} == ({1, 2} if n_experts else {1})
    for each in found:
        m = each.layout.n_microbatches(batch)
        predict_collectives(
            model,
            DistributedConfig(
                *(
                    getattr(each.layout, name)
                    for name in ("pp", "dp_replicate", "dp_shard", "tp", "ep")
                )
            ),
            batch_size=each.layout.microbatch_size,
            seq_len=1024,
            n_microbatches=m if each.layout.pp > 1 else 1,
            # of chunks there may be any number
            schedule="1f1b" if each.layout.n_chunks else each.layout.schedule,
            ac=each.layout.ac,
        )
        if each.layout.pp > 1:
            order_of(each.layout.schedule, m, each.layout.n_stages, each.layout.pp)
    # Of few microbatches 1F1B makes no more than GPipe.
    assert ({"gpipe"} if batch < 4 else {"1f1b"}) & {
        each.layout.schedule for each in found if each.layout.pp == 4
    }


def test_the_closed_form_of_memory_is_near_the_simulated_one_of_gpipe_with_few_microbatches():
    layout = Layout(pp=8, tp=2, schedule="gpipe")
    found = predicted(layout, batch=4)
    for rank in (0, 7):
        at = rank * 2
        bound = memory_of_rank(Work(GPT, layout, 2048), 4, at, None)["activations"]
        assert bound == pytest.approx(found.memory(at)["activations"])


@pytest.mark.sample(5)
@pytest.mark.parametrize("run", MEGATRON, ids=lambda run: run.name)
@pytest.mark.slow
def test_of_published_models_the_best_layout_fits_and_is_as_fast_as_the_published_one(run):
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "plan_published.py"))
    published, best = script["planned"](run)
    assert best.fits
    assert best.step_s <= published.step_s
    told = script["why"](published, best)
    # One sentence, made of the two layouts and what is saved most of.
    if best.layout != published.layout:
        assert f"{best.layout} instead of {published.layout}" in told
        assert f"less, mainly {causes(best, published)[0][0]:.3g} s of " in told
        assert re.search(r"\.\s", told) is None


@pytest.mark.slow
def test_all_planned_layouts_have_in_common_what_is_asked():
    like = Layout(pp=2, schedule="zb_v", flash=False, overlap=False, precision="megatron")
    for each in plan(GPT, NODE, 64, 2048, n_best=20, like=like):
        assert (each.layout.flash, each.layout.overlap, each.layout.precision) == (
            False,
            False,
            "megatron",
        )
    assert (
        plan(GPT, NODE, 64, 2048, n_best=1, precision="float32", like=like)[0].layout.precision
        == "float32"
    )


def test_torch_has_a_receive_buffer_for_every_message_of_a_step():
    layout = Layout(pp=8, tp=2)
    one, more = (
        predicted(layout.with_(receives_ahead=each), batch=16).memory(2)["buffers"]
        for each in (False, True)
    )
    assert more - one == 15 * (2 * 2048 * GPT.dim * 2)  # messages: an activation and a gradient


@pytest.mark.parametrize(
    ("installed", "ahead"),
    [("2.13.0+cpu", True), ("2.14.1", True), ("2.15.0", False), (None, False)],
)
def test_receive_buffers_are_by_default_those_of_the_torch_that_is_installed(
    installed: str | None, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr("course_pp.plan.layout.version", version)
    torch_receives_ahead.cache_clear()
    try:
        assert Layout(pp=8).receives_ahead is ahead
    finally:
        torch_receives_ahead.cache_clear()


def test_freed_parameters_are_gathered_for_every_backward():
    layout = Layout(pp=2, dp_shard=8)
    m = 8
    kept, freed = (
        predicted(layout.with_(reshard=each), batch=8 * m).parts["data"] for each in (False, True)
    )
    gathered = data_parallel_times(Run(GPT, layout, 2048, NODE), layout.stages(GPT, 0))[0]
    # All beside work, of which a tenth is not hidden.
    assert freed - kept == pytest.approx(0.1 * gathered * m)


def test_two_predictions_are_compared_without_their_rounding_errors():
    layout = Layout(pp=4, tp=2, dp_shard=2)
    first = predicted(layout)
    by_rank = []
    for parts in first.parts_by_rank:
        by_rank.append({part: n + 1e-16 for part, n in parts.items()})
    shaken = replace(first, step_s=first.step_s * (1 + 1e-15), parts_by_rank=tuple(by_rank))
    told = explain(first, shaken)
    assert "e-" not in told
    assert told.endswith("Both take the same time.")
    assert all(line.split()[-1] in ("+0", "+0.0%") for line in told.splitlines()[1:-1])
    second = predicted(layout.with_(ac="full"))
    little = tuple({**parts, "recompute": 1e-17} for parts in first.parts_by_rank)
    assert "e-" not in explain(replace(first, parts_by_rank=little), second)


def test_what_was_asked_is_named_where_it_differs():
    layout = Layout(pp=4, tp=2, dp_shard=2)
    first, second = predicted(layout), predicted(layout, cluster_of("2x8xH100"))
    assert "2x8xA100" in explain(first, second)
    assert "cluster 2x8xH100, not 2x8xA100" in explain(first, second).splitlines()[-1]
    assert "inter_bandwidth  2.5e+10  5e+10" in re.sub(" {3,}", "  ", explain(first, second))
    assert "latency" not in explain(first, second)
    assert "cluster" not in explain(first, predicted(layout.with_(ac="full")))
    assert "model gpt-1.7b, not gpt-3.6b" in reason(
        first, predict(model_named("gpt-3.6b"), layout, NODE, 64, 2048)
    )
    assert "global_batch 64, not 128" in reason(first, predicted(layout, batch=128))
    with pytest.raises(ValueError, match="quicker"):
        reason(predicted(layout, batch=128), first)


def test_a_sequence_that_norms_cannot_share_is_planned_without_sharing_it():
    found = plan(GPT, cluster_of("1x8xA100"), 8, 2046, n_best=1000)
    assert found
    assert not any(each.layout.splits_sequence(GPT) and 2046 % each.layout.tp for each in found)


def test_a_ring_between_nodes_uses_the_adapters_of_all_its_ranks_there():
    inside = NODE.intra_bandwidth
    between = NODE.inter_bandwidth
    assert NODE.bandwidth(8) == inside
    # All eight ranks of each node, every second, one.
    assert [NODE.bandwidth(16, apart) for apart in (1, 2, 8)] == [8 * between, 4 * between, between]
    assert replace(NODE, inter_bandwidth=inside).bandwidth(16) == inside


def test_recomputing_attention_repeats_its_projections():
    layout = Layout(tp=8, dp_shard=2)
    none, some, every = (predicted(layout.with_(ac=ac)) for ac in ("none", "selective", "full"))
    assert none.parts["recompute"] == 0 < some.parts["recompute"] < every.parts["recompute"]
    # Three of a layer's 12 · dim² parameters, and attention, of which the mask leaves half: as much
    # as s · dim of them.
    share = (3 * GPT.dim + 2048) / (12 * GPT.dim + 2048)
    assert some.parts["recompute"] / every.parts["recompute"] == pytest.approx(share, rel=0.15)


def test_gradients_are_whole_in_a_pipeline_until_the_last_microbatch():
    alone, shared = Layout(pp=2, tp=8), Layout(pp=2, tp=4, dp_shard=2)
    assert predicted(alone).peak_memory[0]["unreduced"] == 0
    kinds = predicted(shared).peak_memory[0]
    # Reduced in float32, as parameters are kept: two shards make the whole.
    assert kinds["unreduced"] + kinds["gradients"] == pytest.approx(
        2 * kinds["parameters"], rel=1e-3
    )
    # Without a pipeline, too, unless the step is one forward and one backward.
    several, one = (
        predicted(Layout(tp=4, dp_shard=4), batch=n).peak_memory[0]["unreduced"] for n in (8, 4)
    )
    assert several > 0 == one


def test_a_pipeline_waits_for_reductions_after_the_last_backward_of_a_stage():
    layout = Layout(pp=2, tp=2, dp_replicate=4)
    waits, beside, alone = (
        predicted(layout.with_(**changes)).parts["data"]
        for changes in ({}, {"reduces": "backward"}, {"overlap": False})
    )
    reduced = data_parallel_times(Run(GPT, layout, 2048, NODE), layout.stages(GPT, 0))[1]
    # The first rank ends last, with its only stage's last backward: nothing is left to hide behind.
    assert (waits, alone) == pytest.approx((reduced, reduced))
    assert beside == pytest.approx(0.1 * reduced)


def test_an_earlier_stage_of_a_rank_is_reduced_where_the_rank_waits_anyway():
    layout = Layout(pp=2, dp_replicate=8, schedule="interleaved_1f1b", n_chunks=2)
    found = predicted(layout, batch=16)
    run = Run(GPT, layout, 2048, NODE)
    each = {stage.index: data_parallel_times(run, [stage])[1] for stage in layout.stages(GPT, 0)}
    ends = {span.action.stage: span.end for span in found.timeline.by_rank[0]}
    # Stage 2 is reduced once its last backward has ended: the rank has nothing to do until stage 1
    # has sent a gradient.
    idle = [
        gap.end - gap.start
        for gap in found.timeline.idle_gaps
        if gap.rank == 0 and gap.start >= ends[2]
    ]
    hidden = sum(each.values()) - found.parts["data"]
    assert 0 < hidden <= sum(idle) + 1e-12
    assert found.parts["data"] >= each[0]


def test_pipeline_neighbours_on_another_node_are_reached_over_the_links_between_nodes():
    # Blocks of 4 GPUs on nodes of 8: the middle boundary of three leaves its node. Blocks of 6:
    # those of rank 1 are on both nodes, and so are rank 0's and rank 1's, whose slowest pair
    # counts.
    four = transfers(Run(GPT, Layout(4, 2, 2), 2048, NODE))
    assert four[0] == four[2] < four[1]
    assert transfers(Run(GPT, Layout(8, 2), 2048, NODE)) == (*four[:1] * 3, four[1], *four[:1] * 3)
    apart = cluster_of("3x8xA100")
    assert transfers(Run(GPT, Layout(4, 2, 3), 2048, apart)) == (four[1],) * 3
    message = 2048 * GPT.dim * 2
    assert four[1] == pytest.approx(NODE.latency + message / (0.8 * NODE.inter_bandwidth))
    # Chunks: from the last rank back to the first; V: from the last rank to itself.
    chunks = Layout(4, 2, 2, schedule="interleaved_1f1b", n_chunks=2)
    looped = transfers(Run(GPT, chunks, 2048, NODE))
    assert looped == (*four, four[1], *four)
    assert transfers(Run(GPT, Layout(4, 2, 2, schedule="zb_v"), 2048, NODE)) == (
        *four,
        0.0,
        *four[::-1],
    )
    assert predicted(Layout(4, 2, 2)).costs.latency == four


def test_collectives_take_a_message_after_another():
    slow = replace(NODE, latency=1.0)
    layout = Layout(dp_shard=4, dp_replicate=4)
    stages = layout.stages(GPT, 0)
    n_groups = GPT.n_layers + 1
    of_slow, of_node = (
        data_parallel_times(Run(GPT, layout, 2048, each), stages) for each in (slow, NODE)
    )
    gathered, reduced = (a - b for a, b in zip(of_slow, of_node, strict=True))
    assert gathered == pytest.approx(3 * n_groups, rel=1e-4)
    assert reduced == pytest.approx((3 + 2 * 3) * n_groups, rel=1e-4)
    times = [
        stage_time(Run(GPT, Layout(tp=8, dp_shard=2), 2048, each), stages[0])
        for each in (slow, NODE)
    ]
    # Two sums forward and two backward, of two halves each.
    assert times[0].tensor - times[1].tensor == pytest.approx(8 * 7 * GPT.n_layers, rel=1e-4)


def test_products_that_cast_their_weights_take_time_and_memory_for_it():
    alone, shared = Layout(pp=8, tp=2), Layout(pp=4, tp=2, dp_shard=2)
    assert [each.casts_weights for each in (alone, shared, alone.with_(precision="bfloat16"))] == [
        True,
        False,
        False,
    ]
    stage = alone.stages_of_all(GPT)[1]
    runs = [Run(GPT, alone.with_(precision=each), 2048, NODE) for each in ("mixed", "bfloat16")]
    times = [stage_time(run, stage) for run in runs]
    matrices = stage.n_layers * GPT.n_layer_matrices / 2
    cast = matrices * (4 + 2) / NODE.gpu.memory_bandwidth
    summed = (times[0].tensor - times[1].tensor) / 2
    assert times[0].forward - times[1].forward == pytest.approx(cast)
    assert times[0].weight_grad - times[1].weight_grad == pytest.approx(cast)
    # backward's sums over tensor-parallel ranks are of gradients that nobody has cast
    assert summed > 0
    copies = [kept_by_stage(run, stage) for run in runs]
    assert copies[0] - copies[1] > 2 * matrices


def test_wider_elements_are_slower_products():
    mixed, wide, wider = (
        predicted(Layout(dp_shard=16, precision=p)).parts["compute"]
        for p in ("mixed", "float32", "float64")
    )
    assert mixed < wide < wider
    measured = replace(gpu_named("A100"), peak_32=None)
    assert [measured.peak_of(size) for size in (2, 4, 8)] == [312e12, 312e12, 156e12]


def test_a_head_that_tensor_parallelism_cannot_cut_is_whole_on_every_rank():
    layout = Layout(tp=8)
    times = []
    for model in (replace(GPT, vocab_size=n) for n in (51_200, 51_201)):
        none = replace(layout.stages_of_all(model)[-1], has_experts=())
        times.append(stage_time(Run(model, layout, 2048, cluster_of("1x8xA100")), none).forward)
    assert times[1] / times[0] == pytest.approx(8, rel=1e-3)


@pytest.mark.long
def test_the_constants_are_those_of_the_megatron_table_and_predict_its_rows():
    calibration = runpy.run_path(
        str(Path(__file__).parents[2] / "benchmarks" / "plan_calibration.py")
    )
    fit, linear = calibration["fitted"](calibration["TABLE"], Constants())
    assert (fit.matmul_efficiency, fit.memory_passes) == pytest.approx(
        (Constants().matmul_efficiency, Constants().memory_passes), rel=2e-3
    )
    model, naive = calibration["left_out"](fit, linear)
    model = [abs(each) for each in model]
    naive = [abs(each) for each in naive]
    assert median(model) <= 0.03 < median(naive)
    assert max(model) <= 0.08 < max(naive)


def test_the_table_is_printed(capsys):
    *lines, of_memory = told_by_command(capsys, "gpt-18b", "5x1xA100", 5, 2048).splitlines()
    assert len(lines) == 6
    assert "receive buffer" in of_memory


def with_and_without_pipeline(model, cluster, batch, seq_len):
    found = plan(model_named(model), cluster_of(cluster), batch, seq_len, n_best=1000)
    return found[0], next(each for each in found if each.layout.pp > 1)


def test_a_rank_with_the_head_makes_the_others_wait_and_is_no_bubble():
    best, piped = with_and_without_pipeline("gpt2", "1x2xH100", 64, 1024)
    [(seconds, words)] = causes(best, piped)
    busy, less = [float(each) for each in piped.timeline.busy], piped.step_s - best.step_s
    assert seconds == pytest.approx(max(busy) - sum(busy) / 2)
    assert seconds == pytest.approx(less, rel=0.25)
    assert (
        words
        == f"uneven stages (pipeline rank 1, with the head, is busy for {busy[1]:.3g} s, rank 0 for"
        f" {busy[0]:.3g} s, a rank on average for {sum(busy) / 2:.3g} s)"
    )


def layers_to_share(n_layers):
    return predict(
        replace(GPT, n_layers=n_layers, vocab_size=8), Layout(pp=2, tp=8), NODE, 64, 2048
    )


def test_more_layers_on_a_rank_are_named():
    found = causes(layers_to_share(4), layers_to_share(5))
    assert any("with 3 layers to 2, is busy" in words for _, words in found)


SHARDS = Layout(dp_shard=16)


@pytest.mark.parametrize(
    ("quicker", "slower", "cause"),
    [
        (predicted(SHARDS, batch=16), predicted(Layout(pp=8, dp_shard=2), batch=16), "bubble"),
        (predicted(SHARDS), predicted(SHARDS.with_(ac="full")), "recompute"),
        (predicted(SHARDS), predicted(SHARDS.with_(reshard=True, overlap=False)), "data"),
        (predicted(SHARDS), predicted(Layout(tp=8, dp_shard=2)), "tensor"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_causes_are_named_until_they_are_most_of_the_difference(quicker, slower, cause):
    found, less = causes(quicker, slower), slower.step_s - quicker.step_s
    assert found[0][1] == cause
    assert sum(seconds for seconds, _ in found) == pytest.approx(less, abs=less / 4)
    if slower.layout.pp == 1:
        assert found[0][0] == pytest.approx(slower.parts[cause] - quicker.parts[cause])
    else:  # the busiest rank waits as well, for messages too
        busiest = max(float(each) for each in slower.timeline.busy)
        assert 0 < slower.step_s - busiest - found[0][0] < 0.1 * slower.step_s
    saved = [seconds for seconds, _ in found if seconds > 0]
    assert saved == sorted(saved, reverse=True)


def told_by_command(capsys, model, cluster, batch, seq_len, *more):
    command = f"plan --model {model} --cluster {cluster} --batch {batch} --seq-len {seq_len}"
    assert main([*command.split(), *more]) == 0
    return capsys.readouterr().out


def test_a_last_line_says_what_is_against_a_pipeline_and_what_would_change_that(capsys):
    last = told_by_command(capsys, "gpt2", "2x1xA100", 8, 1024).splitlines()[-1]
    best, piped = with_and_without_pipeline("gpt2", "2x1xA100", 8, 1024)
    assert f"{best.layout} instead of {piped.layout}: {piped.step_s - best.step_s:.3g} of " in last
    for seconds, words in causes(best, piped):
        assert f"{abs(seconds):.3g} s {'more ' * (seconds < 0)}of {words.split('data')[0]}" in last
    assert last.endswith(
        "A pipeline would be fastest with 2 times the nodes or with 1/2 of the bandwidth between"
        " nodes."
    )
    slower = replace(cluster_of("2x1xA100"), inter_bandwidth=12.5e9)
    for cluster in (cluster_of("4x1xA100"), slower):
        assert plan(model_named("gpt2"), cluster, 8, 1024)[0].layout.pp > 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            ("gpt-39b", "11x1xA100", 11, 2048),
            ["none fits", "GB of the 73.6", "GB less, mainly", "of optimizer", "2 times the nodes"],
        ),
        (
            ("gpt2", "29x1xA100", 58, 1024),
            ["from 2 to n_layers=12 divides n_gpus=29", "2 times the nodes"],
        ),
        (
            ("mixtral-8x7b", "1x8xH200", 64, 2048, "--ep=8"),
            ["divide global_batch=64, in groups of ep=8."],
        ),
        (
            ("article", "1x4xlaptop", 16, 512),
            ["mainly", "uneven stages", "Nor would", "16 times the nodes", "1/16"],
        ),
    ],
)
def test_a_last_line_says_why_a_pipeline_is_impossible_or_never_the_best(capsys, asked, words):
    last = told_by_command(capsys, *asked).splitlines()[-1]
    assert re.search(".*".join(map(re.escape, words)), last), last


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: predicted(Layout(pp=4, tp=2)), ["= 8 ranks", "= 16 GPUs"]),
        (lambda: predicted(Layout(tp=16)), ["tp=16", "24", "tp=12"]),
        (lambda: predicted(Layout(dp_shard=16), batch=10), ["global_batch=10", "16"]),
        (lambda: predict(model_named("gpt2"), Layout(pp=16), NODE, 64, 1024), ["16 stages", "12"]),
        (lambda: model_named("llama3-40b"), ["llama3-405b"]),
        (lambda: gpu_named("A10"), ["A100"]),
        (lambda: cluster_of("8 H100"), ["2048x8xH100"]),
        (lambda: Layout(precision="fp8"), ["fp8", "float"]),
        (lambda: Layout(schedule="pipedream"), ["pipedream", "synchronous"]),
        (
            lambda: plan(model_named("gpt-39b"), cluster_of("1x8xA100"), 8, 2048),
            ["too many", "2 nodes of 8"],
        ),
        (
            lambda: plan(GPT, cluster_of("29x1xA100"), 8, 2048),
            ["24 stages", "29 data ranks", "multiple of 29"],
        ),
        (
            lambda: plan(replace(GPT, n_layers=1), cluster_of("1x8xA100"), 1, 2047),
            ["seq_len=2047", "needs tp=8", "pad it to 2048"],
        ),
        (
            # With one layer and tp=2 only more data ranks take more GPUs, and each wants a
            # sequence.
            lambda: plan(
                replace(model_named("gpt-1t"), n_layers=1), cluster_of("1x2xA100"), 1, 2048
            ),
            ["too many", "take 2 nodes of 2 and global_batch=2"],
        ),
        (
            lambda: plan(model_named("gpt-1t"), cluster_of("32x8xH100"), 1, 2048),
            ["too many", "take 43 nodes of 8"],
        ),
        (
            lambda: plan(replace(GPT, max_seq_len=10**7), cluster_of("1x1xA100"), 1, 10**7),
            ["no larger cluster helps", "shorten the sequences"],
        ),
        (
            lambda: predict(model_named("gpt2"), Layout(dp_shard=16), NODE, 64, 2048),
            ["seq_len=2048", "max_seq_len=1024"],
        ),
        (lambda: plan(model_named("gpt2"), NODE, 64, 2048), ["seq_len=2048", "max_seq_len=1024"]),
        (
            lambda: predict(GPT, Layout(tp=8, dp_shard=2), NODE, 64, 2046),
            ["seq_len=2046", "tp=8", "2048"],
        ),
        (lambda: Layout(2, schedule="dualpipe"), ["dualpipe", "two ranks", "dualpipe_v"]),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_remedy(wrong, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        wrong()
