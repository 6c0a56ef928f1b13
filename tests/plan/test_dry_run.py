"""One rank of sixteen thousand, built alone, holds what the formulas say."""

import subprocess
import sys
from pathlib import Path

import pytest

from course_pp.parallel import dry_run
from course_pp.plan import Layout, ModelConfig, model_named
from course_pp.plan.memory import memory_of_rank

ROOT = Path(__file__).parents[2]
LARGE = model_named("llama3-405b")
SMALL = ModelConfig(64, 9, 16, 61, n_kv_heads=8, ffn_dim=48, tie_embeddings=True, qkv_bias=True)


CASES = [
    (LARGE, Layout(16, 8, 16, 8, "interleaved_1f1b", 2), 16_383),
    (SMALL, Layout(4, 2, 3, schedule="zb_v", ac="full"), 5),
    (SMALL, Layout(dp_shard=5, precision="bfloat16"), 4),
]


def differences(cases):
    """For each case what differs between the rank that is built and the formulas."""
    found = []
    for model, layout, rank in cases:
        held, predicted = dry_run(model, layout, rank).bytes_by_kind, memory_of_rank(model, layout, 1, 16, rank, None)
        found.append({kind: (n, predicted[kind]) for kind, n in held.items() if n != predicted[kind]})
    return found


def test_a_rank_built_alone_holds_what_the_formulas_say():
    assert differences(CASES[1:]) == [{}] * len(CASES[1:])


@pytest.mark.long
def test_one_rank_of_sixteen_thousand_holds_what_the_formulas_say():
    # In a process of its own, whose memory is its own.
    program = "from tests.plan.test_dry_run import CASES, differences; print(differences(CASES))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == str([{}] * len(CASES))


@pytest.mark.parametrize(
    ("layout", "rank", "words"),
    [(Layout(2), 2, "give 0 to 1"), (Layout(2, precision="megatron"), 0, "not this stack's")],
)
def test_what_cannot_be_built_is_refused(layout, rank, words):
    with pytest.raises(ValueError, match=words):
        dry_run(SMALL, layout, rank)
