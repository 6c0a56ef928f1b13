"""`run_torchrun` and `on_ranks` on a cluster: the place of the ranks, their output, their end."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from course_pp.launch import LaunchError, RankDied, RanksHung, RankTraceback, on_ranks, run_torchrun
from tests.processes import no_process_left
from tests.slurm.cluster import Cluster
from tests.slurm.running import sleeping, wait_until

SAYS_WHERE = """
import os
e = os.environ
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES")
# In one piece, or the lines of several ranks run together.
os.write(1, (" ".join(e[name] for name in names) + "\\n").encode())
"""
HANGS = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], "started-" + os.environ["RANK"]).touch()
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def site(on_the_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one script and one file of site settings, seen from its own folder."""
    file = tmp_path / "site.toml"
    file.write_text(f'partition = "gpu"\nfolder = "{tmp_path / "shared"}"\n')
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return file


@contextlib.contextmanager
def whole_cluster_taken(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """An allocation of every core, without a process anywhere; what is yielded ends it."""
    subprocess.run(
        ["salloc", "--quiet", "--no-shell", "-N", "2", "-n", "2", "-c", "8"], check=True, timeout=60
    )
    [job] = cluster.jobs()

    def free() -> None:
        subprocess.run(["scancel", job.id], check=True)

    try:
        yield free
    finally:
        free()


def script(text: str, name: str = "script.py") -> str:
    Path(name).write_text(textwrap.dedent(text))
    return name


@pytest.mark.parametrize(
    ("options", "srun", "says"),
    [
        (
            ["--nproc-per-node=2"],
            "srun -p gpu -N 1 -n 1 -c 2 --gres=gpu:2 -t 3 torchrun ",
            ["n1", "n1"],
        ),
        (["--nnodes=2"], "srun -p gpu -N 2 -n 2 -K1 -c 1 --gres=gpu:1 -t 3 bash -c ", ["n1", "n2"]),
    ],
    ids=["one node", "two nodes"],
)
def test_on_a_login_node_a_job_of_its_own_runs_the_command_that_is_shown(
    cluster: Cluster,
    capfd: pytest.CaptureFixture[str],
    options: list[str],
    srun: str,
    says: list[str],
) -> None:
    lines = run_torchrun([*options, script(SAYS_WHERE)], timeout_s=120)
    gpus = "0,1" if len(options) == 1 and "nproc" in options[0] else "0"
    local = [0, 1] if says == ["n1", "n1"] else [0, 0]
    expected = [f"{r} {local[r]} 2 {says[r]} {gpus}" for r in range(2)]
    assert sorted(lines) == [f"[rank {r}] {text}" for r, text in enumerate(expected)]

    said, _, shown = capfd.readouterr().out.partition("\n$ ")
    assert said.startswith(f"Ranks run in a Slurm job of their own: {len(set(says))} node")
    shown = shown.partition("\n[rank")[0]
    assert shown.startswith(srun)
    assert cluster.wait_until_empty(20) == []  # or the next job gets other GPUs
    by_hand = subprocess.run(shown, shell=True, check=True, capture_output=True, text=True)
    assert sorted(by_hand.stdout.split("\n")[:-1]) == expected


def test_inside_a_job_ranks_take_no_second_one_and_see_its_gpus(site: Path) -> None:
    notebook = f"""
        import os
        from course_pp.launch import on_ranks, run_torchrun

        def where(rank):
            return os.environ["SLURM_JOB_ID"], os.environ["CUDA_VISIBLE_DEVICES"]

        print("on_ranks", on_ranks(2, where))
        run_torchrun(["--nproc-per-node=2", {script(SAYS_WHERE)!r}], timeout_s=100)
        print("job", os.environ["SLURM_JOB_ID"])
    """
    done = subprocess.run(
        [
            "srun",
            "-N",
            "1",
            "-n",
            "1",
            "-c",
            "2",
            "--gres=gpu:3",
            sys.executable,
            script(notebook, "notebook.py"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    job = re.findall(r"^job (\d+)$", done.stdout, re.M)[0]
    assert f"on_ranks [('{job}', '0,1,2'), ('{job}', '0,1,2')]" in done.stdout
    assert (
        f"Ranks run inside Slurm job {job}, on 1 node.\n$ srun --overlap -N 1 -n 1 -c 2 torchrun"
        in done.stdout
    )
    assert "[rank 1] 1 1 2 n1 0,1,2" in done.stdout


def test_on_a_login_node_ranks_use_the_nodes_that_salloc_holds(cluster: Cluster) -> None:
    notebook = f"""
        from course_pp.launch import run_torchrun
        run_torchrun(["--nnodes=2", {script(SAYS_WHERE)!r}], timeout_s=100)
        run_torchrun([{script(SAYS_WHERE)!r}], timeout_s=100)
    """
    salloc = ["salloc", "--quiet", "-N", "2", "--gpus=4", "--gpus-per-node=2"]
    done = subprocess.run(
        [*salloc, sys.executable, script(notebook, "notebook.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said, shown, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"Ranks run inside Slurm job \d+, on 2 nodes.", said)
    assert shown.startswith("$ srun --overlap -N 2 -n 2 -K1 -c 1 bash -c ")
    assert sorted(line for line in lines if line.startswith("[rank")) == [
        "[rank 0] 0 0 1 n1 0,1",
        "[rank 0] 0 0 2 n1 0,1",
        "[rank 1] 1 0 2 n2 0,1",
    ]


def test_the_sites_account_set_up_and_container_reach_the_ranks(
    cluster: Cluster, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write_text(
        site.read_text()
        + """account = "physics"
setup = ["module() { export LOADED=$2; }", "module load cuda"]
container = "env INSIDE=yes"
options = ["--comment=course"]
"""
    )
    accounts = r"scontrol show job $SLURM_JOB_ID | grep -oE '(Account|Comment)=\S+'"

    def seen(rank: int) -> tuple[str, str]:
        return os.environ["LOADED"], os.environ["INSIDE"]

    assert on_ranks(2, seen) == [("cuda", "yes")] * 2
    prints = f"""
        import os
        os.write(1, (os.environ["LOADED"] + " " + os.environ["INSIDE"] + "\\n").encode())
        os.system({accounts!r})
    """
    run_torchrun([script(prints)])
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "[rank 0] cuda yes", "[rank 0] Account=physics", "[rank 0] Comment=course"
    ]  # fmt: skip


def test_while_it_waits_it_shows_its_place_in_the_queue_once(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with whole_cluster_taken(cluster) as free:
        behind = subprocess.Popen(
            ["srun", "-N", "2", "-n", "2", "-c", "8", "true"], stderr=subprocess.DEVNULL
        )
        wait_until(lambda: len(cluster.jobs()) == 2, "the second job is queued", 60)
        threading.Timer(5, free).start()
        assert run_torchrun([script("print('ran')")], timeout_s=120) == ("[rank 0] ran",)
        behind.wait()
    waits = [line for line in capsys.readouterr().out.splitlines() if " waits in " in line]
    assert re.match(
        r"job \d+ waits in partition gpu: place 2 of 2 \((Priority|Resources).*\); interrupt",
        waits[0],
    )
    assert len(waits) == len(set(waits))


def test_the_rank_that_failed_is_named_with_its_exit_code_and_last_lines() -> None:
    failing = """
        import os, sys
        if os.environ["RANK"] == "3":
            print("about to divide", file=sys.stderr)
            1 / 0
        import time; time.sleep(1000)
    """
    with pytest.raises(LaunchError) as failure:
        run_torchrun(["--nnodes=2", "--nproc-per-node=2", script(failing)], timeout_s=120)
    assert str(failure.value).startswith(
        "rank 3 failed with exit code 1: ZeroDivisionError: division by zero."
    )
    assert "about to divide" in str(failure.value)


def test_at_the_time_limit_it_says_who_waits_for_whom_across_nodes() -> None:
    swap = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.recv(torch.zeros(1), src=1 - dist.get_rank())
    """
    with pytest.raises(RanksHung, match="Rank 0 waits for rank 1 and rank 1 for rank 0"):
        # a busy machine takes 20 s to import torch four times
        run_torchrun(["--nnodes=2", script(swap)], timeout_s=60)


def test_a_request_that_cannot_be_met_is_refused_in_slurms_words() -> None:
    with pytest.raises(
        LaunchError, match="Slurm refused the request: Node count specification invalid"
    ):
        run_torchrun(["--nnodes=3", script(SAYS_WHERE)])


@pytest.mark.parametrize("started", [False, True], ids=["queued", "running"])
def test_a_job_that_somebody_cancels_is_said_to_be_cancelled(
    cluster: Cluster, tmp_path: Path, started: bool
) -> None:
    def cancel() -> None:
        wait_until(lambda: bool(ours(cluster)), "our job is there", 60)
        wait_until(lambda: (tmp_path / "started-0").exists() or not started, "the rank runs", 60)
        subprocess.run(["scancel", *ours(cluster)], check=True)

    with contextlib.nullcontext() if started else whole_cluster_taken(cluster):
        threading.Thread(target=cancel).start()
        with pytest.raises(LaunchError, match=r"Slurm job \d+ was cancelled from outside"):
            run_torchrun([script(HANGS), str(tmp_path)], timeout_s=100)


# Slurm finds out after a while: that goes by once for all who are to hear of it.
def test_a_lost_node_is_named_to_srun_torchrun_and_on_ranks(
    cluster: Cluster, tmp_path: Path
) -> None:
    def hang(rank: int) -> None:
        (tmp_path / "started-on_ranks").touch()
        time.sleep(1000)

    with sleeping("srun -N 2 --ntasks-per-node=1") as srun, ThreadPoolExecutor() as calls:
        torchrun = calls.submit(run_torchrun, [script(HANGS), str(tmp_path)], timeout_s=140)
        ranks = calls.submit(on_ranks, 1, hang, timeout_s=140)
        started = [tmp_path / "started-0", tmp_path / "started-on_ranks"]
        wait_until(lambda: all(rank.exists() for rank in started), "the ranks run", 60)
        cluster.stop_node("n1")
        try:
            for call in (torchrun, ranks):
                assert re.match(r"Slurm job \d+ lost a node", str(call.exception()))
            said = srun.communicate(timeout=60)[1]
        finally:
            cluster.start_node("n1")
        assert srun.returncode != 0
    assert "Node failure on n1" in said


def test_slurms_own_time_limit_is_named_to_srun_and_torchrun(
    cluster: Cluster, tmp_path: Path
) -> None:
    with sleeping("srun -n 2 --time=1") as srun, ThreadPoolExecutor() as calls:
        torchrun = calls.submit(run_torchrun, [script(HANGS), str(tmp_path)], timeout_s=100)
        wait_until(lambda: (tmp_path / "started-0").exists(), "the rank runs", 60)
        for job in cluster.jobs():
            # Limits are whole minutes; this does not make the test wait for one.
            subprocess.run(
                ["scontrol", "update", f"JobId={job.id}", "EndTime=now+1seconds"], check=True
            )
        assert re.match(r"Slurm job \d+ reached its time limit in Slurm", str(torchrun.exception()))
        said = srun.communicate(timeout=60)[1]
        assert srun.returncode != 0
    assert "DUE TO TIME LIMIT" in said


@pytest.mark.parametrize("started", [False, True], ids=["queued", "running"])
@pytest.mark.parametrize("call", ["torchrun", "on_ranks"])
def test_when_the_kernel_is_interrupted_and_when_it_is_killed_the_job_goes(
    cluster: Cluster, tmp_path: Path, call: str, started: bool
) -> None:
    Path("hangs.py").write_text(HANGS)
    cells = {
        "torchrun": f"%load_ext course_pp.launch\n%torchrun --nproc-per-node=2 hangs.py {tmp_path}"
    }
    cells["on_ranks"] = f"""
import time
from pathlib import Path
from course_pp.launch import on_ranks

def hang(rank):
    Path({str(tmp_path)!r}, f"started-{{rank}}").touch()
    time.sleep(1000)

on_ranks(2, hang)
"""

    def wait_for_the_job() -> None:
        if not started:
            wait_until(
                lambda: [job.state for job in cluster.jobs()].count("PENDING") == 1,
                "our job waits",
                60,
            )
            return
        for rank in (tmp_path / "started-0", tmp_path / "started-1"):
            wait_until(rank.exists, "both ranks run", 60)
            rank.unlink()

    with contextlib.ExitStack() as stack:
        if not started:
            stack.enter_context(whole_cluster_taken(cluster))
        # Beside the jobs, which the cluster's fixture looks for: neither srun nor its guard.
        stack.enter_context(no_process_left(within_s=60))
        manager, client = start_new_kernel()
        try:
            cell = client.execute(cells[call])
            wait_for_the_job()
            manager.interrupt_kernel()
            assert answer(client, cell)["ename"] == "KeyboardInterrupt"
            wait_until(lambda: not ours(cluster), "our job is gone", 60)
            client.execute(cells[call])
            wait_for_the_job()
            manager.shutdown_kernel(now=True)
            wait_until(lambda: not ours(cluster), "our job is gone", 60)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def ours(cluster: Cluster) -> list[str]:
    """The ids of our own jobs in the queue."""
    return [job.id for job in cluster.jobs() if job.name.startswith("course_pp")]


def answer(client: BlockingKernelClient, cell: str) -> dict[str, str]:
    """How a cell that was sent to the kernel has ended."""
    while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != cell:
        pass
    content: dict[str, str] = reply["content"]
    return content


class Odd(Exception):
    """Known to the test only."""


def test_on_ranks_sends_a_closure_to_a_node_and_brings_back_what_the_ranks_return(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch
    import torch.distributed as dist

    weights = torch.arange(3.0)

    def summed(rank: int, factor: float) -> tuple[str, torch.Tensor]:
        x = weights * factor * rank
        dist.all_reduce(x)
        print("here")
        return os.environ["SLURMD_NODENAME"], x

    results = on_ranks(2, summed, 5.0)
    assert [node for node, _ in results] == ["n1", "n1"]
    assert all(torch.equal(x, 5 * weights) for _, x in results)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Ranks run in a Slurm job of their own: 1 node, CPU only."
    assert out[1].startswith(
        "$ srun -p gpu -N 1 -n 1 -c 2 -t 14 python -m course_pp.launch.remote "
    )
    assert sorted(out[2:]) == ["[rank 0] here", "[rank 1] here"]


def test_the_next_calls_run_in_the_same_job_and_see_what_has_changed_here(
    cluster: Cluster,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def seen(rank: int) -> tuple[str, str | None, str]:
        return os.environ["SLURM_JOB_ID"], os.environ.get("CHANGES"), os.getcwd()

    [(job, unset, here)] = on_ranks(1, seen)
    monkeypatch.setenv("CHANGES", "set")
    (site.parent / "below").mkdir()
    monkeypatch.chdir(site.parent / "below")
    assert on_ranks(1, seen) == [(job, "set", f"{here}/below")]
    with pytest.raises(ZeroDivisionError):
        on_ranks(1, lambda rank: 1 / 0)
    monkeypatch.delenv("CHANGES")
    assert on_ranks(1, seen) == [(job, unset, f"{here}/below")]
    assert (
        capsys.readouterr().out.count(f"Ranks run in Slurm job {job}, kept since the last call.\n")
        == 3
    )

    [(larger, _, _), _] = on_ranks(2, seen)
    assert larger != job
    assert [found.id for found in cluster.jobs() if found.state == "RUNNING"] == [larger]


def test_ranks_that_may_use_gpus_get_them_in_a_job_that_serves_the_others_too() -> None:
    def seen(rank: int) -> tuple[str, str | None]:
        return os.environ["SLURM_JOB_ID"], os.environ.get("CUDA_VISIBLE_DEVICES")

    [(without, none)] = on_ranks(1, seen)
    [(job, shown)] = on_ranks(1, seen, backend=None)
    assert (none, shown) == (None, "0")
    assert on_ranks(1, seen) == [(job, "0")]
    assert job != without


def test_a_job_that_is_kept_ends_when_no_call_comes(cluster: Cluster, site: Path) -> None:
    site.write_text(site.read_text() + "keep_s = 1\n")
    on_ranks(1, print)
    wait_until(lambda: not cluster.jobs(), "the queue is empty", 60)
    assert on_ranks(1, lambda rank: "again") == ["again"]


def test_torchrun_lets_the_kept_job_go_before_it_asks_for_its_own() -> None:
    [kept] = on_ranks(1, lambda rank: os.environ["SLURM_JOB_ID"])
    prints = (
        "import os, subprocess; subprocess.run(['squeue', '--noheader', '--states=PD,R',"
        " '--format=job %i'])"
    )
    [line] = run_torchrun([script(prints)])
    assert re.fullmatch(r"\[rank 0\] job \d+", line)
    assert line != f"[rank 0] job {kept}"


def test_on_ranks_raises_here_what_a_rank_raised_there() -> None:
    def odd(rank: int) -> None:
        if rank == 1:
            raise Odd("seven")
        time.sleep(1000)

    with pytest.raises(Odd, match="seven") as failure:
        on_ranks(2, odd)
    assert isinstance(failure.value.__cause__, RankTraceback)
    assert 'raise Odd("seven")' in str(failure.value.__cause__)
    assert failure.value.__notes__ == ["Raised first on rank 1 of 2."]


@pytest.mark.parametrize("ends", ["dies", "hangs"])
def test_on_ranks_says_how_ranks_ended_that_did_not_return(ends: str) -> None:
    def run(rank: int) -> None:
        if ends == "dies":
            os._exit(3)
        time.sleep(1000)

    expected, words = (
        (RankDied, "exit code 3")
        if ends == "dies"
        else (RanksHung, "2 ranks still running after 1 s")
    )
    with pytest.raises(expected, match=words):
        on_ranks(2, run, timeout_s=1)
