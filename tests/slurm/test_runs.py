"""What docs/cluster.md promises of a cluster runs on one, and trains as it does without."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.running import ROOT, TINY, losses, run, run_by_hand, submit

TORCHRUN_ON_TWO_NODES = (
    "bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID --nproc-per-node=2 "
    "--master-addr=127.0.0.1 --master-port=$((15000 + SLURM_JOB_ID % 15000)) {}'"
)


@pytest.fixture(scope="module")
def losses_without_slurm() -> list[str]:
    command = [sys.executable, "source_code/train.py", *TINY.split()]
    return losses(
        subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
        ).stdout
    )


def line_of_page(beginning: str) -> str:
    [line] = [
        line
        for line in (ROOT / "docs" / "cluster.md").read_text().splitlines()
        if line.startswith(beginning)
    ]
    return line


def test_the_srun_torchrun_line_runs_pipeline_test():
    line = line_of_page("srun -p gpu -N 1 --gres=gpu:2 torchrun --nnodes=1")
    assert line.endswith("--nproc-per-node=2 source_code/pipeline_test.py")
    done = run(line)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "losses: [6.9105, 6.9306, 6.9415, 6.9331]\n"


def test_bare_srun_starts_four_ranks_that_train_as_one_process_does(losses_without_slurm):
    line = line_of_page("srun -p gpu -N 1 -n 4 --gres=gpu:4 python source_code/train.py").partition(
        "#"
    )[0]
    done = run(f"{line} {TINY}")
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses_without_slurm


def test_bare_srun_on_two_nodes_trains_as_one_process_does(losses_without_slurm):
    done = run(
        "srun -N 2 --ntasks-per-node=2 --gres=gpu:2 python source_code/train.py --pp 2 --tp 2"
        f" {TINY}"
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == losses_without_slurm
    assert "crosses nodes" not in done.stderr


@pytest.mark.full  # training says so, too: TP that crosses nodes warns
@pytest.mark.parametrize(
    ("launcher", "tasks"),
    [(TORCHRUN_ON_TWO_NODES, 1), ("python {}", 2)],
    ids=["torchrun", "bare-srun"],
)
def test_the_pipeline_goes_across_the_nodes_and_tensor_parallelism_stays_inside_one(
    launcher, tasks
):
    done = run(f"srun -N 2 --ntasks-per-node={tasks} {launcher.format('tests/slurm/where.py 2 2')}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "n1: rank 0, pp 0, tp 0",
        "n1: rank 1, pp 0, tp 1",
        "n2: rank 2, pp 1, tp 0",
        "n2: rank 3, pp 1, tp 1",
    ]
    assert "crosses nodes" not in done.stderr


def test_tensor_parallelism_across_nodes_runs_and_warns_once():
    done = run("srun -N 2 --ntasks-per-node=1 python tests/slurm/where.py 1 2")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert (
        done.stderr.count("tp=2 crosses nodes: ranks 0 to 1")
        == done.stderr.count("crosses nodes")
        == 1
    )


def test_one_node_sbatch_trains_as_one_process_does(clone: Path, losses_without_slurm):
    job = submit("one_node.sbatch", clone, TINY)
    assert job.wait() == "COMPLETED", job.output
    assert losses(job.output) == losses_without_slurm


def test_several_nodes_sbatch_trains_as_one_process_does_whatever_sbatch_exports(
    clone: Path, losses_without_slurm
):
    job = submit("several_nodes.sbatch", clone, TINY, "--export=PATH,SLURM_CONF")
    assert job.wait() == "COMPLETED", job.output
    assert losses(job.output) == losses_without_slurm
    assert "crosses nodes" not in job.output


@pytest.mark.parametrize(
    ("tasks", "ending"),
    [
        ("0,1,3", {"pp=2", "dp-shard=2"}),
        pytest.param("0-3", {"pp=2", "dp-shard=2", "dp-replicate=2"}, marks=pytest.mark.full),
    ],
)
def test_layouts_sbatch_ends_in_one_table_that_owns_up_to_failures(
    cluster, clone: Path, tasks: str, ending: set[str]
):
    tiny = TINY.replace("--heads=2 --layers=2", "--heads=1 --layers=2")
    job = submit("layouts.sbatch", clone, tiny, f"--array={tasks}")
    cluster.wait_until_empty(240)
    head, _, *rows = (clone / f"table-{job.id}.out").read_text().splitlines()
    assert head == "| layout | validation loss | tokens a second |"
    found = [
        re.fullmatch(r"\| (\S+) \| (\d\.\d{3}|did not finish) \| ([\d,]*) ?\|", row) for row in rows
    ]
    assert [match and match[1] for match in found] == [
        "pp=2",
        "dp-shard=2",
        "dp-replicate=2",
        "tp=2",
    ]
    losses = {match[1]: match[2] for match in found if match and match[3]}
    assert losses.keys() == ending
    assert len(set(losses.values())) == 1, "every layout trains the same model"
    assert "tp=2 must divide n_heads=1" in job.output


NOT_STARTED = {"srun": "echo started"}
TWO_NODES = {
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_ID": "7",
}
ARRAY = {
    "SLURM_JOB_NAME": "layouts",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_ARRAY_JOB_ID": "7",
    "SLURM_ARRAY_TASK_ID": "0",
    "SLURM_ARRAY_TASK_MIN": "0",
}


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (ROOT / "source_code" / "slurm").glob("*.sbatch"))
)
def test_a_job_that_was_submitted_elsewhere_says_so_at_once(tmp_path: Path, script: str):
    done = run(f"bash {ROOT}/source_code/slurm/{script}", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{tmp_path} is not the root of the repository: call sbatch from there\n"


def test_the_table_shows_the_speed_of_whole_runs(tmp_path: Path):
    parts = [
        {"event": "train", "tokens": 100, "tokens_per_s": 10.0},
        {"event": "train", "tokens": 400, "tokens_per_s": 30.0},
    ]
    (tmp_path / "pp=2").mkdir()
    records = [*parts, {"event": "validation", "loss": 2.5}]
    (tmp_path / "pp=2" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    done = run(f"python source_code/slurm/table.py {tmp_path} pp=2")
    assert done.stdout.splitlines()[-1] == "| pp=2 | 2.500 | 20 |", "400 tokens in 20 seconds"


@pytest.mark.parametrize("script", ["one_node.sbatch", "several_nodes.sbatch"])
def test_a_job_without_gpus_is_refused_with_the_option_it_lacks(clone: Path, script: str):
    done = run_by_hand(script, clone, NOT_STARTED, {"SLURM_CPUS_PER_TASK": "2"})
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "this job has no GPUs to start ranks on: give sbatch --gres=gpu:N" in done.stderr


@pytest.mark.parametrize(
    "show_node",
    ["exit 1", "echo NodeName=n1 NodeHostName=n1"],
    ids=["no answer", "an answer without an address"],
)
def test_ranks_that_could_not_meet_are_not_started(clone: Path, show_node: str):
    scontrol = f'[ "$2" = hostnames ] && echo n1 && exit\n{show_node}'
    done = run_by_hand(
        "several_nodes.sbatch", clone, NOT_STARTED | {"scontrol": scontrol}, TWO_NODES
    )
    assert (done.returncode != 0, done.stdout) == (True, "")


@pytest.mark.parametrize(
    ("script", "cores", "gpus", "threads"),
    [
        ("one_node.sbatch", "16", "4", "4"),
        ("one_node.sbatch", "2", "4", "1"),
        ("several_nodes.sbatch", "8", "2", "4"),
        ("preempted.sbatch", "6", "2", "6"),
        ("layouts.sbatch", "6", "2", "6"),
    ],
)
def test_the_ranks_share_out_the_tasks_cores(
    clone: Path, script: str, cores: str, gpus: str, threads: str
):
    programs = {
        "srun": "echo threads $OMP_NUM_THREADS $*",
        "sbatch": "",
        "scontrol": "echo NodeAddr=127.0.0.1",
    }
    variables = TWO_NODES | ARRAY | {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": gpus}
    done = run_by_hand(script, clone, programs, variables | {"SLURM_CPUS_PER_TASK": cores})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"threads {threads} ")
    assert f"--cpus-per-task={cores} " in done.stdout


@pytest.mark.parametrize(
    "script", sorted(path.name for path in (ROOT / "source_code" / "slurm").glob("*.sbatch"))
)
@pytest.mark.parametrize(
    ("active", "taken"),
    [
        ({"CONDA_DEFAULT_ENV": "base"}, True),
        ({"CONDA_DEFAULT_ENV": "own"}, False),
        ({"VIRTUAL_ENV": "/own"}, False),
    ],
    ids=["base", "conda", "venv"],
)
def test_without_an_active_environment_a_job_takes_that_of_make_setup(
    clone: Path, script: str, active: dict[str, str], taken: bool
):
    for program in ("python", "torchrun"):
        (clone / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (clone / ".venv" / "bin" / program).touch(mode=0o755)
    programs = {
        "srun": "command -v python; command -v torchrun",
        "sbatch": "",
        "scontrol": "echo NodeAddr=127.0.0.1",
    }
    done = run_by_hand(
        script, clone, programs, TWO_NODES | ARRAY | {"SLURM_JOB_NUM_NODES": "2"} | active
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{clone}/.venv/bin/") == 2 * taken


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({"SLURM_JOB_ACCOUNT": "lab"}, "--account=lab "),
        ({}, ""),
        ({"SLURM_RESTART_COUNT": "1"}, None),
    ],
    ids=["account", "no account", "requeued"],
)
def test_a_layout_is_trained_though_the_table_is_refused_or_already_queued(
    clone: Path, variables, asked
):
    programs = {"srun": "echo trained", "sbatch": 'echo "$*" >> asked; exit 1'}
    done = run_by_hand("layouts.sbatch", clone, programs, ARRAY | variables)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    if asked is None:
        assert (done.stderr, (clone / "asked").exists()) == ("", False)
        return
    [options] = (clone / "asked").read_text().splitlines()
    assert f"--time=00:05:00 {asked}--job-name=table" in options
    by_hand = "python source_code/slurm/table.py runs/layouts-7 pp=2 dp-shard=2 dp-replicate=2 tp=2"
    assert done.stderr.endswith(f"make it with: {by_hand}\n")
