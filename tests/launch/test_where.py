"""Where ranks run, decided in one place, beside a Slurm that only pretends."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from course_pp.launch import LaunchError, where
from course_pp.launch.guard import SESSIONS
from course_pp.launch.process import of_no_rank
from course_pp.launch.slurm import Job
from course_pp.launch.torchrun import build
from course_pp.launch.where import Needs, Place, Site, decide
from tests.launch.conftest import pretend

TWO = Needs(nodes=1, ranks=2, seconds=100)
# The first line of a squeue that has a job of session 7, which is number 9, and one of the same
# name of another.
SENT = (
    f'[ "$*" != "{" ".join(SESSIONS[1:])} --states=all" ] || {{ echo odd; echo; echo "8 77"; echo'
    ' "9 7"; exit; }'
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for pretended tools, all that is on PATH, and no settings but those in site.toml."""
    (tmp_path / "bin").mkdir()
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COURSE_PP_WHERE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("COURSE_PP_SITE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "site.toml").touch()
    return tmp_path / "bin"


@pytest.fixture
def cluster(tools: Path) -> Path:
    """Two partitions; the default one has nodes of 8 cores and 4 GPUs of a kind with a name."""
    pretend(tools / "srun", "exit 1")
    pretend(tools / "sinfo", "echo 'cpu|64|(null)'; echo 'gpu*|8|gpu:a100:4(S:0-1)'")
    return tools


def srun(needs: Needs, site: str = "") -> str:
    Path(os.environ["COURSE_PP_SITE"]).write_text(site)
    return " ".join(decide(needs).srun)


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        ("", "Ranks run on this machine, on the CPU."),
        ("0", "Ranks run on this machine, on the CPU: it has 1 GPU for 2 ranks."),
        ("0,1,2", "Ranks run on this machine, which has 3 GPUs."),
    ],
)
def test_where_local_says_whether_there_are_gpus_enough(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, visible: str, said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    place = decide(TWO, "local")
    assert place.local
    assert place.said == said


@pytest.mark.parametrize(
    ("needs", "site", "expected"),
    [
        (TWO, "", "srun -N 1 -n 1 -c 2 --gres=gpu:2 -t 3"),
        (Needs(1, 6, 100), "", "srun -N 1 -n 1 -c 6 --gres=gpu:4 -t 3"),
        (Needs(1, 99, 100), "", "srun -N 1 -n 1 -c 8 --gres=gpu:4 -t 3"),
        (Needs(2, 4, 100), "", "srun -N 2 -n 2 -K1 -c 4 --gres=gpu:4 -t 3"),
        (Needs(1, None, 100), "", "srun -N 1 -n 1 -c 4 --gres=gpu:4 -t 3"),
        (TWO, 'partition = "cpu"', "srun -p cpu -N 1 -n 1 -c 2 -t 3"),
        (Needs.of_call(2, 60, "gloo"), "", "srun -N 1 -n 1 -c 2 -t 14"),
        (
            Needs.of_call(2, 60, "gloo"),
            'partition = "x"\ncpu_partition = "cpu"',
            "srun -p cpu -N 1 -n 1 -c 2 -t 14",
        ),
        (Needs.of_call(2, 60, "nccl"), "keep_s = 0", "srun -N 1 -n 1 -c 2 --gres=gpu:2 -t 4"),
        (
            TWO,
            'account = "a"\ntime_limit = "1:00:00"',
            "srun -A a -N 1 -n 1 -c 2 --gres=gpu:2 -t 1:00:00",
        ),
        (TWO, 'gres = "--gpus-per-node={n}"', "srun -N 1 -n 1 -c 2 --gpus-per-node=2 -t 3"),
        (TWO, 'gres = ""\ncpus_per_rank = 3', "srun -N 1 -n 1 -c 6 -t 3"),
        (
            TWO,
            'gpus_per_node = 1\noptions = ["--mem=1G"]',
            "srun -N 1 -n 1 -c 2 --gres=gpu:1 -t 3 --mem=1G",
        ),
    ],
)
def test_a_job_asks_for_what_the_run_needs_and_the_site_calls_it(
    cluster: Path, needs: Needs, site: str, expected: str
) -> None:
    assert srun(needs, site) == expected


def test_inside_a_job_its_cores_are_not_exceeded_and_its_nodes_are_counted(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("JOB_ID", "7"), ("JOB_NUM_NODES", "2"), ("JOB_CPUS_PER_NODE", "3(x2)")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert srun(Needs(2, 4, 100)) == "srun --overlap -N 2 -n 2 -K1 -c 3"
    assert (
        decide(Needs(2, 4, 100)).said
        == "Ranks run inside Slurm job 7, on 2 nodes, where 4 ranks share 3 cores."
    )
    assert decide(TWO).said == "Ranks run inside Slurm job 7, on 1 node."
    with pytest.raises(
        ValueError, match="--nnodes=3, but Slurm job 7, in which this runs, holds 2 nodes"
    ):
        decide(Needs(3, 4, 100))


def test_a_choice_is_kept_to_or_refused(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PP_WHERE", "local")
    assert decide(TWO).local
    assert not decide(TWO, "slurm").local
    with pytest.raises(ValueError, match="where='gpu'"):
        decide(TWO, "gpu")
    pretend(cluster / "sinfo", "exit 1")
    with pytest.raises(RuntimeError, match="no cluster answers"):
        decide(TWO, "slurm")
    monkeypatch.delenv("COURSE_PP_WHERE")
    assert decide(TWO).said.endswith("No cluster answers behind srun.")
    (cluster / "srun").unlink()
    with pytest.raises(RuntimeError, match="srun"):
        decide(TWO, "slurm")


def test_set_up_lines_and_container_come_before_torchrun_and_are_shown(
    cluster: Path, tmp_path: Path
) -> None:
    site = (
        'setup = ["module load cuda"]\ncontainer = "apptainer exec x.sif"\npython = "/opt/python"'
    )
    Path(os.environ["COURSE_PP_SITE"]).write_text(site)
    (tmp_path / "x.py").touch()
    command = build([str(tmp_path / "x.py"), "--flag"])
    strict = 'set -e; trap "echo set-up failed: \\$BASH_COMMAND >&2" ERR'
    script = strict + '\n{{\nmodule load cuda\n}} </dev/null\nexec apptainer exec x.sif {} "$@"'
    assert command.argv[-5:-2] == (
        "-c",
        script.format("/opt/python -m torch.distributed.run"),
        "bash",
    )
    assert f"bash -c '{script.format('torchrun')}' bash" in command.shown
    assert command.argv[-2:] == (str(tmp_path / "x.py"), "--flag")


def test_a_controller_that_stalls_is_no_reason_to_run_on_the_login_node(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, "_ANSWER_LIMIT_S", 0.2)
    pretend(cluster / "sinfo", "exec /bin/sleep 30")
    for choice in (None, "slurm"):
        with pytest.raises(
            RuntimeError, match=r'the cluster does not answer.*where="local", %torchrun --local'
        ):
            decide(TWO, choice)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("source no/such/activate", "no/such/activate: No such file or directory"),
        ("false", "set-up failed: false"),
        ("test -d no-such\ntrue", "set-up failed: test -d no-such"),
    ],
)
def test_a_set_up_line_that_fails_ends_the_task_and_is_named(line: str, said: str) -> None:
    done = with_set_up(line, "export SET=up")
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_set_up_lines_may_be_any_bash_and_leave_standard_input_to_the_program() -> None:
    lines = (
        "# modules",
        "[ -f no-such ] && source no-such",
        "cat >/dev/null",
        "if true; then",
        "export SET=up",
        "fi",
    )
    assert with_set_up(*lines).stdout == "for the program up\n"


def with_set_up(*lines: str) -> subprocess.CompletedProcess[str]:
    srun, *command = Place("", ("srun",), site=Site(setup=lines)).command(
        ["sh", "-c", 'cat; echo " $SET"'], []
    )
    assert srun == "srun"
    return subprocess.run(command, input="for the program", capture_output=True, text=True)


def test_threads_are_as_many_as_the_cores_that_a_rank_is_given(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(os.environ["COURSE_PP_SITE"]).write_text("cpus_per_rank = 3")
    (tmp_path / "x.py").touch()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for choice, threads in (("slurm", "3"), ("local", "1")):
        assert build([str(tmp_path / "x.py")], choice).environ["OMP_NUM_THREADS"] == threads


def test_a_run_inside_a_job_inherits_nothing_that_srun_takes_for_options() -> None:
    asked = {
        f"SLURM_{name}": "1"
        for name in (
            *(
                "GPUS_PER_TASK",
                "NTASKS_PER_GPU",
                "GPU_BIND",
                "DISTRIBUTION",
                "THREADS_PER_CORE",
                "HINT",
                "EXACT",
            ),
            *("EXPORT_ENV", "CPUS_PER_TASK", "STEP_GPUS"),
        )
    }
    assert of_no_rank({**asked, "SLURM_JOB_ID": "7"}) == {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("reason", "curable"),
    [
        *[
            (reason, False)
            for reason in ("PartitionTimeLimit", "InvalidAccount", "QOSMaxGRESPerJob")
        ],
        *[(reason, True) for reason in ("Priority", "QOSMaxJobsPerUserLimit", "AssocMaxJobsLimit")],
    ],
)
def test_a_job_that_can_never_run_is_given_up_at_the_second_look(
    tools: Path, monkeypatch: pytest.MonkeyPatch, reason: str, curable: bool
) -> None:
    for name in ("_FIRST_LOOK_S", "_LOOK_S"):
        monkeypatch.setattr(f"course_pp.launch.slurm.{name}", 0)
    pretend(tools / "squeue", f"{SENT}; echo 'PD|gpu|{reason}'")
    job = Job(7, os.environ)
    assert reason in str(job.queue_line())
    if curable:
        assert job.queue_line() is None
        return
    with pytest.raises(LaunchError, match=f"Slurm cannot run this: partition gpu .{reason}"):
        job.queue_line()


def test_the_queue_is_looked_at_ever_more_rarely(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("course_pp.launch.slurm.time.monotonic", lambda: now)
    pretend(tools / "squeue", f"{SENT}; echo look >> {tools / 'looks'}; echo 'PD|gpu|Priority'")
    job = Job(7, os.environ)
    for _ in range(600):
        now += 1
        job.queue_line()
    # Each look asks twice: for the job, and for its place. Who holds the cores is asked sinfo
    # first, which is not here.
    assert 2 * 600 / 30 < len((tools / "looks").read_text().splitlines()) < 2 * (600 / 30 + 8)


def test_the_place_in_the_queue_is_told_when_it_changes(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", "somebody-else")
    monkeypatch.setattr("course_pp.launch.slurm._LOOK_S", 0)
    monkeypatch.setattr("course_pp.launch.slurm._FIRST_LOOK_S", 0)
    answers = 'case "$*" in *--jobs=9*) cat mine;; *) cat all;; esac'
    pretend(tools / "squeue", f"{SENT}; PATH=/usr/bin:/bin; cd {tools}; {answers}")
    (tools / "mine").write_text("PD|gpu|Priority\n")
    (tools / "all").write_text("7\n8\n9\n")
    job = Job(7, os.environ)
    place = "job 9 waits in partition gpu: place"
    how = "; interrupt the cell to cancel it"
    assert job.queue_line() == f"{place} 3 of 3 (Priority: jobs of higher priority come first){how}"
    assert job.queue_line() is None
    (tools / "all").write_text("9\n10\n")
    (tools / "mine").write_text("PD|gpu|Licenses\n")
    assert job.queue_line() == f"{place} 1 of 2 (Licenses)"
    (tools / "mine").write_text("odd\n")
    assert job.queue_line() is None
    (tools / "mine").write_text("CF|gpu|None\n")
    assert job.queue_line() == "job 9: its nodes are starting"
    assert not job.started, "the time that they take to boot is not the run's"
    (tools / "mine").write_text("R|gpu|None\n")
    assert job.queue_line() is None
    assert job.started


ANNA = "1|70001|anna|8|n1|train\n2|70001|anna|2|n2|train\n"
OURS = f"3|{os.getuid()}|me|4|n2|course_pp\n4|{os.getuid()}|me|1|n2|other\n"


@pytest.mark.parametrize(
    ("jobs", "cores", "held"),
    [
        (ANNA, "10/6/0/16", "10 of 16 cores are taken: 10 by 2 jobs of anna on n1, n2."),
        (
            ANNA + OURS,
            "15/1/0/16",
            (
                "15 of 16 cores are taken: 5 by 2 jobs of yours on n2; 10 by 2 jobs of anna on n1,"
                " n2. Restarting a notebook's kernel ends its job, as does `scancel 3`."
            ),
        ),
        (
            "",
            "8/0/8/16",
            (
                "8 of 16 cores are taken, 8 out of service: "
                "8 by jobs of other partitions, or that this cluster does not show you."
            ),
        ),
        (
            "".join(f"{i}|{70000 + i}|user{i}|{10 - i}|n{i}|x\n" for i in range(5)),
            "40/0/0/40",
            (
                "40 of 40 cores are taken: 10 by 1 job of user0 on n0; 9 by 1 job of user1 on n1; "
                "8 by 1 job of user2 on n2; 13 by 2 more users."
            ),
        ),
        ("", "", None),
        ("1|70001|anna|8\n", "10/6/0/16", None),
        (ANNA + "1|70001|anna|many|n1|x\n", "10/6/0/16", None),
        (ANNA, "10/6", None),
    ],
    ids=[
        "of one other",
        "ours too",
        "hidden",
        "of many",
        "no answer",
        "a short line",
        "no number",
        "no cores",
    ],
)
def test_who_holds_the_cores_is_told_to_those_who_wait_for_a_while(
    tools: Path, monkeypatch: pytest.MonkeyPatch, jobs: str, cores: str, held: str | None
) -> None:
    now = 0.0
    monkeypatch.setattr("course_pp.launch.slurm.time.monotonic", lambda: now)
    answers = (
        'case "$*" in *--states=R*) cat held;; *--jobs=9*) echo "PD|gpu|Resources";; *) echo 9;;'
        " esac"
    )
    pretend(tools / "squeue", f"{SENT}; PATH=/usr/bin:/bin; cd {tools}; {answers}")
    pretend(tools / "sinfo", f"echo {cores}" if cores else "exit 1")
    (tools / "held").write_text(jobs)
    job = Job(7, os.environ)
    told = []
    for now in (1.0, 3.0, 10.0, 100.0, 200.0):
        told.append(job.queue_line())
        if now == 100.0:
            (tools / "held").write_text("1|70001|ben|16|n1|train\n")
            pretend(tools / "sinfo", "echo 16/0/0/16")
    assert held not in str(told[0]).splitlines(), "most jobs begin at once"
    assert told[1:4] == [held, None, None]
    assert told[4] == "16 of 16 cores are taken: 16 by 1 job of ben on n1."


@pytest.mark.parametrize(
    ("said", "state", "words"),
    [
        (
            "srun: error: Unable to allocate resources: Invalid account",
            "",
            "Slurm refused the request: Invalid account",
        ),
        (
            "*** STEP 9.0 ON n1 CANCELLED AT now DUE TO TIME LIMIT ***",
            "",
            "Slurm job 9 reached its time limit",
        ),
        ("*** STEP 9.0 ON n1 CANCELLED AT now ***", "", "Slurm job 9 was cancelled from outside"),
        (
            "*** STEP 9.0 ON n1 CANCELLED AT now ***",
            "FAILED",
            "Slurm job 9 was cancelled from outside",
        ),
        ("srun: error: Node failure on n1", "", "Slurm job 9 lost a node"),
        ("srun: error: n1: task 0: Killed", "OUT_OF_MEMORY", "Slurm job 9 used more memory"),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0.",
            "",
            "Slurm job 9 used more memory",
        ),
        (
            "srun: unrecognized option '--x'\nTry \"srun --help\" for more information",
            "",
            "srun refused to start: srun -A x. .*options are set in site.toml",
        ),
        ("srun: error: n1: task 0: Exited with exit code 1", "FAILED", None),
        (
            (
                "srun: error: n2: task 1: Exited with exit code 3\n*** STEP 9.0 ON n1 CANCELLED AT"
                " now ***"
            ),
            "FAILED",
            None,
        ),
        (
            (
                "srun: error: n2: task 1: Exited with exit code 3\n*** STEP 9.0 ON n1 CANCELLED AT"
                " now ***"
            ),
            "",
            None,
        ),
        ("srun: job 9 has been allocated resources", "FAILED", None),
    ],
)
def test_what_slurm_ended_is_told_in_one_sentence(
    tools: Path, said: str, state: str, words: str | None
) -> None:
    pretend(tools / "scontrol", f"echo '   JobState={state} Reason=None'")
    pretend(tools / "squeue", SENT)
    verdict = Job(7, os.environ).verdict(said.splitlines(), "srun -A x", a_rank_failed=False)
    assert (verdict is None) == (words is None)
    assert words is None or re.search(words, str(verdict), re.S)
