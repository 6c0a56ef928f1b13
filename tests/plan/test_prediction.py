"""A run on paper: what adds up, what is refused, and that more of a resource never hurts."""

import re
from dataclasses import replace

import pytest

from course_pp.__main__ import main
from course_pp.plan import (
    Cluster,
    Constants,
    Layout,
    cluster_of,
    explain,
    gpu_named,
    model_named,
    plan,
    predict,
)
from course_pp.plan.timing import model_flops

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
def test_parts_add_up_to_the_step(layout):
    found = predicted(layout)
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert min(found.parts.values()) >= -1e-12


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_more_of_a_resource_never_hurts(layout):
    assert all(left <= 1 + 1e-9 for left in predicted(layout).gains().values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_step_is_faster_than_its_products_at_the_peak(layout):
    found = predicted(layout)
    assert 0 < found.mfu <= found.hfu < 1


def test_operations_are_those_of_the_megatron_paper():
    # Its equation 3 counts a recomputed forward: 96 B s l h² (1 + s / 6h + V / 16lh), of which 3/4 are useful; the
    # head is not recomputed, which it leaves out.
    model, batch, s = model_named("gpt-145b"), 2304, 2048
    h, n, v = model.dim, model.n_layers, model.vocab_size
    layers = 72 * batch * s * n * h * h * (1 + s / (6 * h))
    assert model_flops(model, batch, s) == pytest.approx(layers + 6 * batch * s * v * h)


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt-1t", 1008), ("llama3-405b", 405), ("bloom-176b", 176), ("gpt2", 0.124)]
)
def test_presets_have_the_published_sizes(name, billions):
    model = model_named(name)
    # BLOOM's and GPT's heads are their embeddings; here the sizes of both ends are counted on their stages.
    tied = 0 if name.startswith("llama") or model.tie_embeddings else model.n_embedding_parameters
    assert (model.n_parameters - tied) / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_article_model_has_its_parameters():
    assert round(model_named("article").n_parameters / 1e6, 1) == 179.4


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


def test_the_table_is_printed(capsys):
    assert main(["plan", "--model", "gpt2", "--cluster", "1x8xA100", "--batch", "64", "--seq-len", "1024"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11


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
        (lambda: Cluster(1, 8, gpu_named("A100"), inter_bandwidth=0.0), ["inter_bandwidth=0.0"]),
        (lambda: replace(gpu_named("A100"), peak=0.0), ["peak=0.0"]),
        (lambda: Layout(precision="fp8"), ["fp8", "float"]),
        (lambda: Layout(schedule="pipedream"), ["pipedream", "synchronous"]),
        (lambda: Constants(matmul_efficiency=1.5), ["matmul_efficiency=1.5"]),
        (lambda: plan(model_named("llama3-405b"), NODE, 64, 8192), ["too many", "nodes of 8"]),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_remedy(wrong, words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        wrong()
