"""The scripts run as a learner types them, and refuse what cannot work with one message."""

import re
import shlex
import socket
import subprocess
import sys
from functools import cache
from math import prod
from pathlib import Path

import pytest

from course_pp.launch import LaunchError, run_torchrun
from tests.processes import no_process_left
from tests.source_code.scripts import TRAIN_IMPORTS, labelled_lines, run_script
from tests.training.small import foreign_tokenizer

ROOT = Path(__file__).parents[2]
SCRIPT, TRAIN = "source_code/pipeline_test.py", "source_code/train.py"
RANKS_IMPORT = TRAIN_IMPORTS
TINY = [
    "--steps=3",
    "--dim=32",
    "--layers=2",
    "--seq-len=32",
    "--global-batch-size=8",
    "--microbatches=4",
]


@pytest.fixture(autouse=True)
def in_the_repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def losses_of(lines):
    """Every ``losses: [...]`` printed, as (rank, text)."""
    found = (re.fullmatch(r"\[rank (\d+)\] losses: (\[.*\])", line) for line in lines)
    return [(int(match[1]), match[2]) for match in found if match]


LOSSES = "[6.9105, 6.9306, 6.9415, 6.9331]"


@pytest.mark.full
def test_torchrun_runs_pipeline_test():
    with no_process_left():
        lines = run_torchrun(
            ["--nnodes=1", "--nproc-per-node=2", SCRIPT], timeout_s=90, where="local"
        )
    assert losses_of(lines) == [(1, LOSSES)]


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.long), 3])
def test_pipeline_test_prints_the_same_losses_from_the_last_of_any_number_of_ranks(n_ranks):
    assert losses_of(labelled_lines(n_ranks, [SCRIPT])) == [(n_ranks - 1, LOSSES)]


@pytest.mark.full
def test_plain_torchrun_runs_pipeline_test_on_one_rank_from_its_own_folder(monkeypatch):
    monkeypatch.chdir(ROOT / "source_code")
    [(rank, _)] = losses_of(run_torchrun(["pipeline_test.py"], timeout_s=90, where="local"))
    assert rank == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "last", "precision"),
    [("1f1b", 1, "fp16"), ("zb_v", 0, "bf16"), ("interleaved_1f1b", 1, "fp8")],
)
def test_train_reports_from_the_last_stage_only(schedule, last, precision):
    layers = "--layers=2" if schedule == "1f1b" else "--layers=4"
    run = [
        TRAIN,
        "--pp=2",
        f"--schedule={schedule}",
        *TINY,
        layers,
        f"--precision={precision}",
        "--sample=2",
    ]
    lines = labelled_lines(2, run)
    text = "\n".join(lines)
    assert re.search(
        rf"\[rank {last}\] validation loss [\d.]+ nats a token; unigram entropy [\d.]+", text
    )
    assert re.search(rf"\[rank {last}\] [\d,]+ tokens a second", text)
    said = {int(rank) for rank in re.findall(r"\[rank (\d)\] (?!.*W\d{4})", text)}
    assert said == {last}, "only the last stage's rank reports and shows progress"


@pytest.mark.long
def test_training_falls_below_what_a_model_without_context_could_reach():
    small = ["--steps=60", "--dim=64", "--layers=2", "--seq-len=64", "--global-batch-size=16"]
    lines = labelled_lines(2, [TRAIN, "--pp=2", *small])
    match = re.search(
        r"validation loss ([\d.]+) nats a token; unigram entropy ([\d.]+)", "\n".join(lines)
    )
    assert match is not None
    assert float(match[1]) < float(match[2]) - 0.2


@pytest.mark.long
def test_training_shares_experts_out_and_tells_their_load():
    layout = ["--pp=2", "--dp-shard=2", "--ep=2", "--experts=4", "--balance=bias"]
    text = "\n".join(labelled_lines(4, [TRAIN, *TINY, "--layers=2", *layout, "--log-every=1"]))
    assert re.search(
        r"step 1/\d+  loss [\d.]+  busiest expert \(layers\.[01]\) [\d.]+ × the mean", text
    )


LAYOUTS = [
    "",
    "--pp=2 --engine=runtime",
    "--pp=2 --dp-shard=-1 --reshard=true --schedule=interleaved_1f1b",
    "--pp=2 --tp=2",
    "--tp=2",
    "--dp-shard=2 --reshard=true --ac=full",
    "--dp-replicate=2 --dp-shard=2 --ac=selective",
]


@cache
def printed_by_layout(layout):
    """Return all lines of training on the ranks that the layout needs, but for its speed."""
    factors = [int(size) for size in re.findall(r"--(?:pp|tp|dp-\w+)=(\d)", layout)]
    n_ranks = prod(factors) * (2 if "=-1" in layout else 1)
    fixed = [*TINY, "--layers=4", "--global-batch-size=16", "--sample=12", "--prompt=def "]
    lines = labelled_lines(n_ranks, [TRAIN, *fixed, *layout.split()])
    said = [
        re.fullmatch(r"\[rank (\d+)\] (.*(?:parameters|validation|sample).*)", line)
        for line in lines
    ]
    assert len({match[1] for match in said if match}) == 1, "one rank reports"
    return [match[2] for match in said if match]


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS[1],
        pytest.param(LAYOUTS[2], marks=pytest.mark.long),
        *(pytest.param(layout, marks=pytest.mark.full) for layout in LAYOUTS[3:]),
    ],
)
def test_training_prints_the_same_losses_and_the_same_sample_under_every_layout(layout):
    assert printed_by_layout(layout) == printed_by_layout(LAYOUTS[0])
    assert len(printed_by_layout(layout)) == 4


@pytest.mark.long
def test_the_line_for_several_machines_without_slurm_trains_as_one_process_does():
    [line] = re.findall(
        r"^torchrun --nnodes=2 .*", (ROOT / "docs" / "cluster.md").read_text(), re.M
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    line = (
        line.replace("HOST", "127.0.0.1")
        .replace("29500", port)
        .replace("-node=4", "-node=1")
        .replace("--tp 4", "")
    )
    commands = [shlex.split(line.replace("-rank=0", f"-rank={node}")) for node in range(2)]
    with no_process_left():
        machines = [
            subprocess.Popen(
                [Path(sys.executable).parent / program, *rest, *TINY],
                stdout=subprocess.PIPE,
                text=True,
            )
            for program, *rest in commands
        ]
        try:
            said = "".join(machine.communicate(timeout=100)[0] for machine in machines)
        finally:
            for machine in machines:
                machine.terminate()
    assert [machine.returncode for machine in machines] == [0, 0]
    alone = "\n".join(labelled_lines(1, [TRAIN, *TINY]))
    [found], [expected] = (
        re.findall(r"validation loss ([\d.]+) nats", text) for text in (said, alone)
    )
    assert found == expected


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="threads are listed in Linux's /proc"
)
@pytest.mark.parametrize(
    ("n_ranks", "layout"),
    [
        pytest.param(2, ["--pp=2"], marks=pytest.mark.long),
        pytest.param(4, ["--pp=2", "--tp=2"], marks=pytest.mark.full),
    ],
)
def test_no_thread_of_a_process_group_is_left_to_the_end_of_the_interpreter(
    tmp_path, n_ranks, layout
):
    script = tmp_path / "threads.py"
    script.write_text(
        "import atexit, runpy\nfrom pathlib import Path\n"
        "def tell():\n"
        "    print('threads', {path.read_text().strip() for path in"
        " Path('/proc/self/task').glob('*/comm')},\n"
        "          flush=True)\n"
        "atexit.register(tell)\n"  # the first registered is the last called
        "train = runpy.run_path('source_code/train.py', run_name='train')\n"
        "train['main']()\ntrain['pp'].destroy_distributed()\n"
    )
    command = [f"--nproc-per-node={n_ranks}", str(script), *layout, "--sample=2", *TINY]
    lines = run_torchrun(command, timeout_s=100, where="local")
    threads = [line for line in lines if "threads {" in line]
    assert len(threads) == n_ranks
    assert not any("gloo" in line for line in threads)


def test_padded_documents_of_given_files_train_with_their_mask(tmp_path):
    for i in range(120):
        (tmp_path / f"{i}.txt").write_text(f"document {i} has its own length. " * (i % 7 + 1))
    (tmp_path / "tokenizer.json").write_text(foreign_tokenizer("[BOT]").to_str())
    documents = [
        "--padded",
        "--tie-embeddings",
        f"--text={tmp_path}",
        f"--tokenizer={tmp_path}/tokenizer.json",
    ]
    lines = labelled_lines(1, [TRAIN, *TINY, *documents, "--sample=3"])
    assert any("validation loss" in line for line in lines)
    assert any("sample: " in line for line in lines)


@pytest.mark.long
def test_first_run_equals_one_process_and_writes_its_picture():
    picture = ROOT / "runs" / "first_run.svg"
    picture.unlink(missing_ok=True)
    text = "\n".join(labelled_lines(2, ["source_code/first_run.py"]))
    assert len(re.findall(r"step +\d+ +loss", text)) == 10
    assert "equal to one process" in text
    assert "nothing done" not in text
    assert "<svg" in picture.read_text()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--layers=1", "--schedule=zb_v"], ["2 stages", "n_layers=1"]),
        (["--global-batch-size=9"], ["--global-batch-size 9", "4 microbatches", "such as 12"]),
        (["--schedule=2f2b"], ["unknown schedule '2f2b'", "gpipe"]),
        (["--pp=3"], ["pp = 3", "world size is 1", "start 3 ranks"]),
        (["--text", "no/such.txt"], ["no/such.txt"]),
        (["--checkpoint-dir="], ["--checkpoint-dir '' names no directory"]),
        (["--text=README.md", "--dataset=x"], ["only one"]),
        (["--lr=-1"], ["--lr", "above 0"]),
        (["--pp=1", "--tp=2", "--dp-shard=3"], ["dp_shard × tp = 3 × 2 = 6", "world size is 1"]),
        (["--reshard=sometimes"], ["--reshard sometimes", "auto, true, false or a number"]),
        (["--reshard=4"], ["reshard_after_forward=4", "dp_shard=1"]),
        (
            ["--precision=half"],
            ['"half" for --precision. Choose from: "auto", "fp32", "bf16", "fp16"'],
        ),
        (["--save-every=5"], ["--save-every needs --checkpoint-dir"]),
        (["--checkpoint-dir=runs/none", "--keep-every=5"], ["--keep-every 5 needs keep_last"]),
        (["--sample=5", "--share-gpus"], ["--sample 5 with --share-gpus", "Leave --sample out"]),
        (
            ["--checkpoint-dir=README.md"],
            ["README.md cannot hold checkpoints", "choose another directory"],
        ),
        (
            ["--checkpoint-dir=runs/none", "--resume=always"],
            ["--resume 'always' must be auto, never, or the path"],
        ),
    ],
    ids=" ".join,
)
def test_train_refuses_with_one_message_that_names_value_and_remedy(arguments, named):
    [ended] = run_script(1, [TRAIN, *TINY, *arguments])
    assert ended.code == 2, ended.err
    message = ended.err.strip().splitlines()
    assert len(message) == 1, ended.err
    assert message[0].startswith("train.py: error: ")
    for words in named:
        assert words in message[0]


@pytest.mark.parametrize(
    ("script", "named"),
    [
        ([SCRIPT, "--layers=2"], "3 stages need at least 3 layers"),
        ([TRAIN, "--tp=3", *TINY], "tp=3 must divide n_heads=4"),
        (
            [TRAIN, "--dp-shard=3", *TINY],
            "--global-batch-size 8 does not divide into 4 microbatches × 3 data",
        ),
    ],
    ids=["layers", "heads", "rows"],
)
def test_a_refusal_on_several_ranks_is_said_once(script, named):
    ranks = run_script(3, script)
    assert [rank.code for rank in ranks] == [2] * 3
    said = "".join(rank.out + rank.err for rank in ranks)
    assert said.count("error: ") == 1
    assert named in said


@pytest.mark.long
def test_a_refusal_under_torchrun_is_said_once_and_leaves_no_process(capfd):
    with no_process_left(), pytest.raises(LaunchError, match="exit code 2"):
        run_torchrun(["--nproc-per-node=2", TRAIN, "--pp=3", *TINY], timeout_s=100, where="local")
    said = "".join(capfd.readouterr())
    assert said.count("error: ") == 1
    assert "start 3 ranks" in said
