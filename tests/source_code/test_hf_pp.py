"""The Hugging Face scripts cut their models right, on any number of ranks."""

import re
from pathlib import Path

import pytest

from course_pp.launch import run_torchrun
from source_code.hf_pp.families import FAMILIES
from tests.processes import no_process_left
from tests.source_code.scripts import labelled_lines, run_script

SCRIPT = "source_code/hf_pp/llama_by_hand.py"
GPT2 = ["source_code/hf_pp/pippy_gpt2.py", "--layers=3", "--width=64"]
RANKS_IMPORT = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2")]
EQUAL = re.compile(
    r"equal to one process: 3 losses to (\S+), all 66 gradients of the last step to (\S+)"
    r" \(float64\)"
)


@pytest.fixture(autouse=True)
def in_the_repository_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.full
def test_torchrun_trains_a_llama_cut_by_hand():
    with no_process_left():
        lines = run_torchrun(["--nproc-per-node=2", SCRIPT], timeout_s=110, where="local")
    assert EQUAL.search("\n".join(lines))


@pytest.mark.parametrize(
    ("n_ranks", "schedule"),
    [
        (3, "1f1b"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((1, "1f1b"), (2, "gpipe"))),
    ],
)
def test_a_llama_cut_by_hand_trains_as_in_one_process(n_ranks, schedule):
    text = "\n".join(labelled_lines(n_ranks, [SCRIPT, f"--schedule={schedule}"]))
    assert f"{schedule} on {n_ranks} ranks: losses [5." in text
    equal = EQUAL.search(text)
    assert equal is not None, text
    assert max(map(float, equal.groups())) <= 1e-10


def test_more_ranks_than_layers_are_refused_in_one_message():
    ranks = run_script(2, [SCRIPT, "--layers=1"])
    assert [rank.code for rank in ranks] == [2] * 2
    printed = "".join(rank.out + rank.err for rank in ranks)
    assert printed.count("error: ") == 1
    assert "2 stages need at least 2 layers, and this model has n_layers=1" in printed


@pytest.mark.long
@pytest.mark.parametrize(
    ("head", "schedule", "options"),
    [
        ("lm", "zb_v", ["--batches=2"]),
        pytest.param("classification", "1f1b", ["--decoders", "2", "1"], marks=pytest.mark.full),
        pytest.param("classification", "gpipe", ["--by=parameters"], marks=pytest.mark.full),
        pytest.param(
            "classification", "interleaved_1f1b", ["--forward-only"], marks=pytest.mark.full
        ),
        pytest.param("lm", "1f1b", ["--forward-only", "--by=memory"], marks=pytest.mark.full),
    ],
)
def test_gpt2_cut_automatically_equals_the_model_in_one_piece(head, schedule, options):
    text = "\n".join(
        labelled_lines(2, [*GPT2, f"--head={head}", f"--schedule={schedule}", *options])
    )
    assert all(f"[rank {rank}] Rank {rank} completes" in text for rank in range(2))
    held = [int(number) for _, number in sorted(re.findall(r"Rank (\d) .* (\d+) decoders", text))]
    assert sum(held) == 3
    assert held == [2, 1] or "--decoders" not in options
    found = re.search(r"compared with the model in one piece: .* differs most, by (\S+)", text)
    assert found is not None, text
    assert float(found[1]) <= 1e-5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--microbatches=3"], "--batch 4 does not divide into --microbatches 3"),
        (
            ["--decoders", "3", "0"],
            (
                "--decoders 3 0 must be 2 numbers, one a stage, of 1 or more, that add up to"
                " --layers 3"
            ),
        ),
    ],
)
def test_what_gpt2_cannot_be_cut_into_is_refused_in_one_message(options, words):
    ranks = run_script(2, [*GPT2, *options])
    assert [rank.code for rank in ranks] == [2] * 2
    printed = "".join(rank.out + rank.err for rank in ranks)
    assert printed.count("error: ") == 1
    assert words in printed


@pytest.mark.parametrize(
    ("name", "n_ranks", "schedule"),
    [
        ("U-Net", 3, "zb_h1"),
        *(pytest.param(name, 2, "1f1b", marks=pytest.mark.full) for name in FAMILIES),
        pytest.param("T5", 2, "dualpipe_v", marks=pytest.mark.full),
        pytest.param("T5", 2, "interleaved_1f1b", marks=pytest.mark.full),
    ],
)
def test_any_model_equals_one_process(name, n_ranks, schedule):
    lines = labelled_lines(
        n_ranks, ["source_code/hf_pp/any_model.py", name, f"--schedule={schedule}"]
    )
    equal = [line for line in lines if "and gradients equal to one process" in line]
    assert len(equal) == len([line for line in lines if re.search(r"\] stage \d+: ", line)])
    assert any("nothing stops a cut" in line for line in lines)
