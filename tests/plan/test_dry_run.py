"""One rank of sixteen thousand, built alone, holds what the formulas say."""

import subprocess
import sys
from pathlib import Path

import pytest

from course_pp.base.ranks import MEETING_BYTES
from course_pp.model import build_stage_module
from course_pp.parallel import DistributedConfig, predict_collectives
from course_pp.plan import Layout, ModelConfig, model_named
from course_pp.plan.memory import memory_of_rank
from course_pp.plan.run import Work
from tests.plan.dry_run import dry_run

ROOT = Path(__file__).parents[2]
LARGE = model_named("llama3-405b")
SMALL = ModelConfig(64, 9, 16, 61, n_kv_heads=8, ffn_dim=48, tie_embeddings=True, qkv_bias=True)
SPARSE = ModelConfig(
    *(64, 9, 16, 61),
    n_kv_heads=8,
    qk_norm=True,
    n_experts=8,
    expert_dim=32,
    moe_every=2,
    n_shared_experts=1,
)


CASES = [
    (LARGE, Layout(16, 8, 16, 8, "interleaved_1f1b", 2), 16_383),
    (SMALL, Layout(4, 2, 3, schedule="zb_v", ac="full"), 5),
    (SMALL, Layout(dp_shard=5, precision="bfloat16"), 4),
    (SPARSE, Layout(2, 2, 4, 2, ep=2), 13),
]


def differences(cases):
    """For each case what differs between the rank that is built and the formulas."""
    found = []
    for model, layout, rank in cases:
        held = dry_run(model, layout, rank).bytes_by_kind
        predicted = memory_of_rank(Work(model, layout, seq_len=1), 16, rank, None)
        found.append(
            {kind: (n, predicted[kind]) for kind, n in held.items() if n != predicted[kind]}
        )
    return found


@pytest.mark.slow
def test_a_rank_built_alone_holds_what_the_formulas_say():
    assert differences(CASES[1:]) == [{}] * len(CASES[1:])


@pytest.mark.long
def test_one_rank_of_sixteen_thousand_holds_what_the_formulas_say():
    # In a process of its own, whose memory is its own.
    program = "from tests.plan.test_dry_run import CASES, differences; print(differences(CASES))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == str([{}] * len(CASES))


SEQ_LEN = 16
N_MICROBATCHES = 4
STEPS = [
    Layout(2, 2, 2, microbatch_size=2),
    Layout(2, 1, 2, 2, schedule="zb_v"),
    Layout(2, 1, 2, schedule="interleaved_1f1b", n_chunks=2, reshard=True),
    Layout(4, schedule="zb_h1", precision="float32"),
    Layout(2, 2, ac="full", schedule="gpipe", precision="float32"),
    Layout(dp_shard=4, microbatch_size=4),
    Layout(5, dp_shard=2),  # fewer microbatches than torch's class takes
]
UNTIED = ModelConfig(64, 5, 4, 128)


def n_microbatches_of(layout: Layout) -> int:
    # what is predicted without a pipeline is one forward and backward
    return N_MICROBATCHES if layout.pp > 1 else 1


def one_of_each_stage(layout: Layout) -> list[int]:
    """A rank of each pipeline rank, by turns the first and the last of its group."""
    n = layout.n_ranks // layout.pp
    return [n * rank + (n - 1) * (rank % 2) for rank in range(layout.pp)]


def mesh_of(layout: Layout) -> DistributedConfig:
    return DistributedConfig(
        pp=layout.pp,
        tp=layout.tp,
        dp_shard=layout.dp_shard,
        dp_replicate=layout.dp_replicate,
        backend="gloo",
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("layout", STEPS, ids=str)
@pytest.mark.slow
def test_a_rank_alone_enters_as_many_collectives_of_each_kind_as_is_predicted(
    layout: Layout,
) -> None:
    microbatch = {"batch_size": layout.microbatch_size, "n_microbatches": n_microbatches_of(layout)}
    how = {
        "schedule": layout.schedule,
        "reshard_after_forward": layout.reshard,
        "ac": layout.ac,
        "clip": False,
    }
    predicted = predict_collectives(UNTIED, mesh_of(layout), seq_len=SEQ_LEN, **microbatch, **how)
    global_batch = n_microbatches_of(layout) * layout.microbatch_size * layout.n_data
    for rank in one_of_each_stage(layout):
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for each in dry_run(UNTIED, layout, rank, global_batch, SEQ_LEN).entered:
            number, n_bytes = found.get(each[:2], (0, 0))
            found[each[:2]] = number + 1, n_bytes + each.n_bytes
        expected = {
            key: (tally.number, tally.n_bytes) for key, tally in predicted[rank].tallies.items()
        }
        # where gradients are reduced, the count and the loss are among them
        shared = ("dp_replicate", "all_reduce")
        if shared in found and shared in expected:
            number, n_bytes = expected[shared]
            extra = number - found[shared][0]
            expected[shared] = number - extra, n_bytes - 8 * extra
        assert found == {
            key: tally for key, tally in expected.items() if tally[1] > MEETING_BYTES * tally[0]
        }


@pytest.mark.slow
def test_one_data_parallel_rank_computes_and_sends_in_half_precision_as_a_plan_counts() -> None:
    model = ModelConfig(64, 2, 4, 128)
    sent = {}
    for precision in ("mixed", "float32"):
        layout = Layout(2, 2, schedule="gpipe", precision=precision)
        entered = dry_run(model, layout, 0, global_batch=2, seq_len=SEQ_LEN).entered
        sent[precision] = {
            (each.collective, each.n_bytes // (SEQ_LEN * model.dim)) for each in entered
        }
    # Forward sums what a product gave, backward the gradient of what it had not cast yet.
    assert sent["mixed"] == {("send", 2), ("recv", 2), ("all_reduce", 2), ("all_reduce", 4)}
    assert sent["float32"] == {("send", 4), ("recv", 4), ("all_reduce", 4)}


@pytest.mark.parametrize(("precision", "reduced"), [("bfloat16", 4), ("float64", 8)])
def test_gradients_are_reduced_in_the_precision_that_a_plan_counts(
    precision: str, reduced: int
) -> None:
    tiny = ModelConfig(8, 1, 1, 12)
    alone = dry_run(tiny, Layout(dp_shard=2, precision=precision), 0, global_batch=2, seq_len=4)
    n_bytes = sum(each.n_bytes for each in alone.entered if each.collective == "reduce_scatter")
    n_parameters = sum(p.numel() for p in build_stage_module(tiny, 0, 1).parameters())
    assert n_bytes == reduced * n_parameters
