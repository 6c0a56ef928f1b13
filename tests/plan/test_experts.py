"""Experts on paper: what they weigh, what their exchanges cost, and what a hot one does."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from course_pp.__main__ import main
from course_pp.parallel import DistributedConfig, predict_collectives
from course_pp.plan import Layout, ModelConfig, cluster_of, model_named, plan, predict
from course_pp.plan.run import Constants, Run
from course_pp.plan.timing import data_parallel_times, model_flops, stage_time

MIXTRAL = model_named("mixtral-8x7b")
SIXTEEN = cluster_of("2x8xH100")
SEQ_LEN = 1024


def predicted(layout, model=MIXTRAL, cluster=SIXTEEN, batch=64):
    return predict(model, layout, cluster, batch, SEQ_LEN)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral-8x7b", 46.7, 12.9), ("qwen3-235b-a22b", 235, 22), ("deepseek-v3", 671, 37)],
)
def test_models_have_the_published_sizes_and_compute_with_the_active_part(name, total, active):
    model = model_named(name)
    assert model.n_parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model.n_active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    # Six a token and parameter; looking up a token multiplies nothing, and attention is counted
    # beside it.
    attention = 12 * model.n_layers * model.q_dim * SEQ_LEN
    each = model_flops(model, 1, SEQ_LEN) / SEQ_LEN - attention
    assert each == pytest.approx(
        6 * (model.n_active_parameters - model.n_embedding_parameters), rel=1e-3
    )


def exchange(layout, cluster=SIXTEEN):
    """The seconds that one microbatch's exchanges take in one layer."""
    stage = replace(layout.stages_of_all(MIXTRAL)[0], has_experts=(True,))
    return stage_time(Run(MIXTRAL, layout, SEQ_LEN, cluster), stage).exchange


def test_each_layer_exchanges_twice_forward_and_twice_backward_inside_and_between_nodes():
    cluster, speed = replace(SIXTEEN, latency=0.0), Constants().link_efficiency
    # bytes of what one exchange carries, some of it to the rank itself
    pairs = 2 * SEQ_LEN * MIXTRAL.dim * 2
    inside = pairs / (cluster.intra_bandwidth * speed)
    between = pairs / (cluster.inter_bandwidth * speed)
    assert exchange(Layout(dp_shard=16)) == 0
    assert exchange(Layout(dp_shard=16, ep=8), cluster) == pytest.approx(4 * 7 / 8 * inside)
    # Four ranks of eight are in the node of each, where a tensor-parallel group takes two GPUs.
    assert exchange(Layout(dp_shard=8, tp=2, ep=8), cluster) == pytest.approx(4 * 4 / 8 * between)
    whole_again = exchange(Layout(dp_shard=16, ep=8, ac="full"), cluster)
    assert whole_again == pytest.approx(6 * 7 / 8 * inside)
    # Forward tells first how many rows will come.
    slow = replace(cluster, latency=1.0)
    assert exchange(Layout(dp_shard=16, ep=8), slow) == pytest.approx(5, rel=1e-2)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=16, ep=8, ac="full"), Layout(4, 1, 4, ep=2), Layout(2, 2, 4, ep=4)]
)
def test_parts_add_up_and_more_of_a_resource_never_hurts(layout):
    found = predicted(layout)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert min(found.parts.values()) >= -1e-12
    assert found.parts["expert exchange"] > 0
    assert all(left <= 1 + 1e-9 for left in found.gains().values())


def test_a_slow_network_is_what_bounds_experts_on_other_nodes():
    far = Layout(tp=8, dp_shard=2, ep=2)
    assert (
        predicted(far, cluster=replace(SIXTEEN, inter_bandwidth=1e9)).bound_by == "expert exchange"
    )


def test_experts_are_shared_by_the_ranks_of_ep_and_the_rest_by_all():
    spread, grouped = (predicted(Layout(pp=2, dp_shard=8, ep=ep)).peak_memory[0] for ep in (1, 8))
    # Eight experts on eight ranks: as many a rank either way, but only gathered where ep leaves
    # them in shards.
    assert spread["parameters"] == pytest.approx(grouped["parameters"], rel=1e-3)
    experts = 16 * 8 * MIXTRAL.n_expert_parameters * 2
    assert spread["gathered"] - grouped["gathered"] == pytest.approx(experts * 7 / 8, rel=1e-3)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("ac", ["none", "full"])
def test_a_plan_waits_for_as_many_bytes_as_the_stack_sends(pp, ac):
    node, mesh = (
        replace(cluster_of("1x16xH100"), latency=0.0),
        {"pp": pp, "dp_shard": 4, "tp": 2, "ep": 4},
    )
    layout = Layout(**mesh, ac=ac)
    forwards = 1 + (ac == "full")
    # Norms see parts of the sequence without a pipeline; a sum is two halves.
    halves = {"all_gather": 1, "reduce_scatter": 1} if pp == 1 else {"all_reduce": 2}
    sent = []
    waited = []
    for n_layers in (2, 4):  # what is sent at the ends is the same, and drops out
        model = ModelConfig(
            64, n_layers, 4, 96, n_experts=8, moe_every=2, max_seq_len=32, balance="none"
        )
        step = {"batch_size": 1, "seq_len": 32, "n_microbatches": pp, "ac": ac, "clip": False}
        counted = predict_collectives(model, DistributedConfig(**mesh), **step)
        exchanged = [rank[("dp_shard", "all_to_all")] for rank in counted]
        of_counts = sum(
            each.number * forwards / (3 * forwards + 2) * model.n_experts * 8 for each in exchanged
        )
        rows = sum(each.n_bytes for each in exchanged) - of_counts
        summed = sum(
            n * rank[("tp", kind)].n_bytes for rank in counted for kind, n in halves.items()
        )
        sent.append((3 / 4 * rows, 1 / 2 * summed))
        times = [
            stage_time(Run(model, layout, 32, node), stage) for stage in layout.stages_of_all(model)
        ]
        # ranks of a stage, microbatches
        a_second = node.intra_bandwidth * Constants().link_efficiency * 8 * pp
        exchange = a_second * sum(t.exchange for t in times)
        tensor = a_second * sum(t.tensor for t in times)
        waited.append([exchange, tensor])
    # torch recomputes all but a layer's last sum, which a plan counts
    for i in range(2 if ac == "none" else 1):
        assert waited[1][i] - waited[0][i] == pytest.approx(sent[1][i] - sent[0][i])


def test_only_ranks_with_the_same_experts_gather_and_reduce_them():
    cluster = replace(SIXTEEN, latency=0.0)
    found = []
    for ep in (1, 4, 8):
        layout = Layout(pp=2, dp_shard=8, ep=ep)
        run = Run(MIXTRAL, layout, SEQ_LEN, cluster)
        found.append(data_parallel_times(run, layout.stages(MIXTRAL, 0)))
    spread, grouped, alone = found
    # Two bytes an element gathered, four reduced; of the experts of 16 layers a share that few
    # ranks have.
    experts = (
        16
        * 8
        * MIXTRAL.n_expert_parameters
        / (cluster.intra_bandwidth * Constants().link_efficiency)
    )
    for i, n_bytes in enumerate((2, 4)):
        assert spread[i] - alone[i] == pytest.approx(7 / 8 * n_bytes * experts)
        assert grouped[i] - alone[i] == pytest.approx(1 / 2 * n_bytes * experts / 4)
    # Without ep they are cut by experts: of 16 ranks 8 have none, and what is gathered is as large
    # as if all had one.
    run = Run(MIXTRAL, Layout(dp_shard=16), SEQ_LEN, cluster)
    as_many = replace(run, model=replace(MIXTRAL, n_experts=16))
    wider, all_have_one = (
        data_parallel_times(each, Layout().stages(each.model, 0))[0] for each in (run, as_many)
    )
    assert wider == pytest.approx(all_have_one, rel=1e-4)


def test_a_hot_expert_slows_its_rank_unless_all_ranks_have_it():
    even, hot = Layout(dp_shard=16, ep=8), Layout(dp_shard=16, ep=8, imbalance=2.0)
    assert even.expert_load(MIXTRAL) == 1
    assert hot.expert_load(MIXTRAL) == 2
    # Of two experts a rank one is hot, and the other seven of the model share the remaining six
    # loads.
    assert hot.with_(ep=4).expert_load(MIXTRAL) == pytest.approx((2 + 6 / 7) / 2)
    assert hot.with_(ep=1).expert_load(MIXTRAL) == pytest.approx(1)
    assert hot.expert_load(replace(MIXTRAL, capacity_factor=1.25)) == 1.25
    a, b = (predicted(layout, cluster=replace(SIXTEEN, latency=0.0)) for layout in (even, hot))
    assert b.parts["expert exchange"] == pytest.approx(2 * a.parts["expert exchange"])
    assert b.parts["compute"] > 1.5 * a.parts["compute"]
    assert b.memory(0)["activations"] > 1.5 * a.memory(0)["activations"]
    assert predicted(hot.with_(ep=1)).step_s == pytest.approx(predicted(even.with_(ep=1)).step_s)


def test_a_stage_with_more_experts_takes_longer():
    model = replace(MIXTRAL, n_dense_layers=16, ffn_dim=1024, expert_dim=14_336)
    first, second = predicted(Layout(pp=2, dp_shard=8, ep=8), model).timeline.busy
    assert second > 2 * first


def test_the_search_takes_experts_to_ranks_of_a_node_and_keeps_to_a_given_ep():
    cluster = cluster_of("8x8xH100")
    found = plan(MIXTRAL, cluster, 256, 4096, n_best=5)
    assert all(each.fits for each in found)
    assert found[0].layout.ep > 1
    assert {each.layout.ep for each in plan(MIXTRAL, cluster, 256, 4096, n_best=5, ep=2)} == {2}


def test_the_command_names_total_and_active_parameters(capsys):
    asked = "plan --model mixtral-8x7b --cluster 8x8xH100 --batch 64 --seq-len 4096 --ep 8 --rows 2"
    assert main(asked.split()) == 0
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first == "mixtral-8x7b: 46.7 billion parameters, 12.9 billion active"
    assert header.startswith("layout")
    assert all("ep=8" in row for row in rows[:2])


@pytest.mark.slow
def test_published_steps_are_predicted_to_a_factor_of_two_and_links_decide_about_deepseek_s():
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "plan_experts.py"))
    found = {
        source: each.predicted().step_s / each.seconds for source, each in script["runs"]().items()
    }
    *others, deepseek = found.values()
    assert all(0.7 < ratio < 1 for ratio in others)
    assert 1 < deepseek < 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Layout(dp_shard=16, ep=3), "ep=3 must divide dp_shard=16.*ep=2"),
        (lambda: predicted(Layout(dp_shard=16, ep=16)), "ep=16 must divide n_experts=8.*ep=8"),
        (lambda: predicted(Layout(dp_shard=16, ep=2), model_named("gpt2")), "ep=2 .*n_experts=0"),
        (lambda: Layout(imbalance=0.5), "imbalance=0.5.*at least 1"),
        (lambda: predicted(Layout(dp_shard=16, ep=8, imbalance=5.0)), "imbalance=5.0.*= 4"),
        (
            lambda: predicted(Layout(dp_shard=12, ep=4), cluster=cluster_of("3x4xH100"), batch=12),
            "3 ranks.*dim=4096",
        ),
        (lambda: plan(MIXTRAL, SIXTEEN, 64, SEQ_LEN, ep=3), "ep=3 must divide n_experts=8.*ep=2"),
        (lambda: plan(model_named("gpt2"), SIXTEEN, 64, SEQ_LEN, ep=2), "ep=2 .*n_experts=0"),
        (lambda: plan(MIXTRAL, SIXTEEN, 12, SEQ_LEN, ep=8), "ep=8.*global_batch=12"),
    ],
)
def test_what_cannot_share_experts_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()
