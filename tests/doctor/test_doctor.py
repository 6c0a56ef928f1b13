"""What is broken on purpose is named in one line; what is whole is left alone."""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

from course_pp.__main__ import main
from course_pp.doctor import Check, Finding, machine, packages, run_checks, running
from tests.launch.conftest import pretend as program
from tests.processes import no_process_left

ROOT = Path(__file__).parents[2]
# Namespaces of one's own, to break the system for one process only: root has them, others mostly
# not.
ISOLATED = (
    subprocess.run(["sh", "-c", "unshare -m -n -u true"], capture_output=True).returncode == 0
)
isolated = pytest.mark.skipif(not ISOLATED, reason="this user may not make namespaces (unshare)")
TMPFS = "mount -t tmpfs"
NO_DEVICES = """
d=$(mktemp -d); mount -t tmpfs none $d
for f in null zero urandom random; do touch $d/$f; mount --bind /dev/$f $d/$f; done
mount --rbind $d /dev
"""


def asked(call: str, before: str = "", flags: tuple[str, ...] = (), **environ: str) -> str:
    """What the findings of a call look like in a fresh process, after lines of bash."""
    program = f"from course_pp.doctor import machine, packages, running\nfound = {call}\n"
    program += "for f in found if isinstance(found, list) else [found]: print(f)"
    line = f"set -e; {before}\nexec {sys.executable} -c '{program}'"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(
        [*flags, "bash", "-c", line], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("flag", "before", "call", "says", "breaks"),
    [
        ("-m", NO_DEVICES, "machine.shared_memory()", "there is no /dev/shm", "NCCL"),
        ("-m", f"{TMPFS} -o ro none /dev/shm", "machine.shared_memory()", "Read-only", "NCCL"),
        ("-m", f"{TMPFS} -o size=32m none /dev/shm", "machine.shared_memory()", "only 32 ", "NCCL"),
        ("-m", f"{TMPFS} -o size=64k none $TMPDIR", "machine.disk()", "No space", "every on_ranks"),
        ("-m", f"{TMPFS} -o size=9m none $TMPDIR; cd $TMPDIR", "machine.disk()", "only 9 ", "09"),
        ("-n", "true", "machine.ports()", "Network is unreachable", "all notebooks"),
        # A queue of one byte drops every packet, as a firewall does.
        (
            "-n",
            "PATH=$PATH:/usr/sbin; ip link set lo up; tc qdisc add dev lo root bfifo limit 1",
            "machine.ports()",
            "messages to 127.0.0.1 are dropped",
            "all notebooks",
        ),
        ("-u", "hostname nowhere-here", "machine.host_name()", "'nowhere-here' has", "%torchrun"),
    ],
    ids=[
        "no-shm", "read-only-shm", "small-shm", "full-disk", "nearly-full-disk", "no-loopback",
        "dropped", "name",
    ],
)  # fmt: skip
@isolated
def test_a_broken_system_is_named_in_one_line(
    flag: str, before: str, call: str, says: str, breaks: str, tmp_path: Path
) -> None:
    # A folder of the test's own: what is mounted on /tmp hides a clone that lies there.
    said = asked(call, before, ("unshare", flag), TMPDIR=str(tmp_path))
    wrong = [line for line in said.splitlines() if "WRONG" in line]
    assert says in wrong[0]
    assert breaks in " ".join(wrong)
    assert all("Mend it: " in line for line in wrong)
    assert len(wrong) == (2 if "cd $TMPDIR" in before else 1)


def test_limits_below_what_the_course_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_left", lambda: 2**30)
    assert str(machine.memory()).startswith(
        "WRONG memory: 1.0 GiB free, 3 GiB needed. What fails: notebooks 02"
    )
    said = asked("machine.open_files()", "ulimit -n 64")
    assert said.startswith(
        "WRONG open files: a process may open 64, 256 needed. What fails: JupyterLab, and notebooks"
    )
    monkeypatch.setattr(machine.os, "getuid", lambda: 54321)
    for most, ok in ((10, False), (10**6, True)):
        monkeypatch.setattr(machine.resource, "getrlimit", lambda which, most=most: (most, most))
        assert machine.processes().ok == ok


@isolated
def test_without_proc_each_line_of_the_machine_is_still_there() -> None:
    before = "mount -t tmpfs none /proc"
    said = asked("sum((c.findings() for c in machine.CHECKS), [])", before, ("unshare", "-m"))
    assert len(said.splitlines()) == len(machine.CHECKS) + 1
    assert "could not be checked" not in said


def fake_torch(folder: Path, version: str, after: str = "") -> str:
    (folder / "torch" / "distributed").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(
        f"__version__ = {version!r}\nclass version: cuda = None\nclass cuda:\n    device_count ="
        f" lambda: 0\n{after}"
    )
    (folder / "torch" / "distributed" / "__init__.py").write_text(
        "is_available = is_gloo_available = lambda: True\nis_nccl_available = lambda: False"
    )
    return os.pathsep.join([str(folder), str(ROOT)])


@pytest.mark.parametrize(
    ("version", "after", "says"),
    [
        ("2.9.0+cu130", "", "WRONG torch: 2.9.0+cu130 is too old"),
        ("2.13.0", "", "ok    torch: 2.13.0 for the CPU"),
        (
            "2.13.0",
            "raise OSError('libcudart.so.13')",
            "WRONG torch: cannot be imported (OSError: libcudart.so.13)",
        ),
    ],
)
def test_another_torch_is_named_with_the_notebooks_it_breaks(
    version: str, after: str, says: str, tmp_path: Path
) -> None:
    said = asked("packages.torch()", PYTHONPATH=fake_torch(tmp_path, version, after)).splitlines()
    assert said[0].startswith(says)
    assert ("What fails: " in said[0]) == ("WRONG" in said[0])


@pytest.mark.parametrize(
    ("version", "tried"), [("2.15.0", True), ("2.16.0a0+git1", False), ("3.0.0", False)]
)
def test_a_torch_that_the_course_was_never_tried_with_is_named_and_not_refused(
    version: str, tried: bool, tmp_path: Path
) -> None:
    line = asked("packages.torch()", PYTHONPATH=fake_torch(tmp_path, version)).splitlines()[0]
    assert line.startswith(f"ok    torch: {version} ")
    assert ("never" in line) == (not tried)


def test_the_torch_and_python_that_it_asks_for_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    low = packages.OLDEST_TORCH
    wanted = f"torch>={low[0]}.{low[1]}"
    assert wanted in project["dependencies"]
    assert wanted in packages.INSTALL_TORCH
    assert project["requires-python"] == f">={machine.OLDEST_PYTHON[0]}.{machine.OLDEST_PYTHON[1]}"
    assert not machine.python((3, 10, 4)).ok


def test_without_any_package_each_missing_one_is_a_line_and_none_a_traceback() -> None:
    """No site-packages at all: no torch, no Jupyter, no cloudpickle."""
    program = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from course_pp.__main__ import main;"
        " sys.exit(main())"
    )
    command = [sys.executable, "-S", "-c", program, str(ROOT), "doctor", "--short"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HOME")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    for what in (
        "torch: not installed",
        "package cloudpickle: not installed",
        "widgets: ipywidgets is not installed",
    ):
        assert sum(what in line for line in lines) == 1
    assert "two ranks: not tried" in done.stdout
    assert all("What fails: " in line and "Mend it: " in line for line in lines[:-1])
    assert lines[-1].endswith("lines are wrong.")


GPU = {
    "version": "2.13.0",
    "seconds": 1.0,
    "cuda": "13.0",
    "distributed": True,
    "gloo": True,
    "nccl": True,
    "gpus": [["H200", 2**36, 2**37], ["H200", 2**37, 2**37]],
    "apart": [],
    "nccl_version": "2.28.9",
}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            {},
            [
                "ok    GPUs: 2: H200 (64 of 128 GiB free)",
                "ok    NCCL: 2.28.9",
                "ok    peer access: every GPU",
            ],
        ),
        (
            {"apart": [[0, 1], [1, 0]]},
            ["ok    GPUs: 2", "ok    NCCL", "ok    peer access: no direct access from"],
        ),
        (
            {"nccl": False, "nccl_version": None},
            ["ok    GPUs", "WRONG NCCL: torch has none", "ok    peer"],
        ),
        (
            {"gpu_error": "RuntimeError: driver"},
            ["WRONG GPUs: cannot be used (RuntimeError: driver)"],
        ),
    ],
)
def test_gpus_their_library_and_who_reaches_whom_are_told_apart(
    change: dict[str, object], lines: list[str]
) -> None:
    """No GPU is needed: this is what torch says of two."""
    found = [str(finding) for finding in packages._gpus({**GPU, **change})]
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))


@pytest.mark.parametrize("how", ["gone", "disabled", "old"])
def test_widgets_need_the_extension_in_the_page(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / packages._MANAGER
    folder.mkdir(parents=True)
    if how != "gone":
        (folder / "package.json").write_text(
            json.dumps({"version": "3.1.0" if how == "old" else "5.0.1"})
        )
    (tmp_path / "labconfig").mkdir()
    disabled = {packages._MANAGER: how == "disabled"}
    (tmp_path / "labconfig" / "page_config.json").write_text(
        json.dumps({"disabledExtensions": disabled})
    )
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *names: [str(tmp_path)])
    monkeypatch.setattr("jupyter_core.paths.jupyter_config_path", lambda: [str(tmp_path)])
    finding = packages.widgets()
    assert {"gone": "is not", "disabled": "is disabled", "old": "do not fit"}[how] in finding.says
    assert "explore()" in finding.breaks


def pretend(folder: Path, sinfo: str, srun: str = "exit 0") -> str:
    for name, shell in (("sinfo", sinfo), ("srun", srun)):
        program(folder / name, shell)
    return f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"


ROW = "echo 'gpu*|up|1-00:00:00|4|idle|8'"


@pytest.mark.parametrize(
    ("sinfo", "srun", "says"),
    [
        (
            "echo 'sinfo: error: Unable to contact slurm controller' >&2; exit 1",
            "",
            "the cluster is down (Unable to",
        ),
        ("exec sleep 60", "", "the cluster does not answer within 1 s"),
        ("echo 'cpu|up|1:00|4|idle|8'", "", "no default partition; there are cpu"),
        ("echo 'gpu*|up|1:00|4|down*|8'", "", "gpu: 0 nodes usable"),
        (
            ROW,
            "echo 'srun: error: Unable to allocate resources: Invalid account' >&2; exit 1",
            "two tasks do not run",
        ),
        (ROW, "echo unseen /course/file", "its node does not see /course"),
        (ROW, "echo seen; echo seen; echo seen; echo seen", "ok    Slurm job: 2 tasks ran and saw"),
    ],
    ids=["down", "silent", "no-partition", "no-node", "refused", "unseen", "right"],
)
def test_a_slurm_that_is_down_or_refuses_is_told_apart(
    sinfo: str, srun: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pretended one; tests/slurm asks a real one."""
    monkeypatch.setenv("PATH", pretend(tmp_path, sinfo, srun))
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("COURSE_PP_WHERE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    if "within 1 s" in says:
        monkeypatch.setattr(running, "_ANSWER_LIMIT_S", 1.0)
    found = [str(finding) for finding in running.slurm()]
    assert says in found[-1]
    assert sum("WRONG" in line for line in found) == (not says.startswith("ok"))


PARTITION = "PartitionName=gpu Default=YES QoS=N/A State=UP"


@pytest.mark.parametrize(
    ("account", "quality", "partition", "says"),
    [
        (
            "normal|normal||||",
            "normal|||||",
            PARTITION,
            "ok    Slurm limits: your account and QOS normal: none",
        ),
        (
            "normal|normal||||",
            "normal|cpu=64|cpu=16||4|1-00:00:00",
            PARTITION,
            ": 16 CPUs at once, 4 jobs at once, 14",
        ),
        (
            "|a,normal||||",
            "normal||cpu=4,node=1|||",
            PARTITION,
            "4 CPUs at once; 8 CPUs needed. What fails: notebook",
        ),
        (
            "|tiny||||",
            "normal|||||\ntiny||||1|",
            PARTITION,
            "QOS tiny: 1 job at once; 2 jobs needed. What fails: %tor",
        ),
        (
            "normal|normal||cpu=2|5|",
            "normal|||||",
            PARTITION,
            "your account and QOS normal: 2 CPUs at once, 5 jobs",
        ),
        (
            "|||||",
            "part|||||05:00",
            PARTITION.replace("N/A", "part"),
            "QOS part: 5 minutes a job; 10 minutes needed",
        ),
        ("exit", "", PARTITION, "ok    Slurm limits: not known"),
    ],
    ids=["none", "wide", "user", "jobs", "group", "partition", "no-accounting"],
)
def test_a_limit_that_would_leave_a_job_waiting_is_named(
    account: str,
    quality: str,
    partition: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = pretend(tmp_path, ROW)
    answers = f'case "$*" in *assoc*) echo "{account}";; *) printf "{quality}\n";; esac'
    texts = {
        "sacctmgr": "exit 1" if account == "exit" else answers,
        "scontrol": f"echo {partition}",
    }
    for name, text in texts.items():
        program(tmp_path / name, text)
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("HOME", str(tmp_path))
    [finding] = running.limits()
    assert says in str(finding)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert running.limits() == []


def test_tools_of_slurm_without_a_cluster_are_nothing_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", pretend(tmp_path, "exit 1"))
    monkeypatch.setattr(running, "configured", lambda: False)
    assert [finding.ok for finding in running.slurm()] == [True, True]


def groups(folder: Path, ours: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A pretended tree of control groups, and the file that says where in it this process is."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "ours").write_text(ours)
    return folder / "cgroup", folder / "ours"


def second(folder: str, most: object, used: int, copies: int = 0) -> dict[str, str]:
    return {
        f"{folder}memory.max": str(most),
        f"{folder}memory.current": str(used),
        f"{folder}memory.stat": f"anon 900\ninactive_file {copies}",
    }


def first(folder: str, most: object, used: int, copies: int = 0) -> dict[str, str]:
    return {
        f"memory/{folder}memory.limit_in_bytes": str(most),
        f"memory/{folder}memory.usage_in_bytes": str(used),
        f"memory/{folder}memory.stat": f"cache 1\ntotal_inactive_file {copies}",
    }


@pytest.mark.parametrize(
    ("ours", "files", "left"),
    [
        ("0::/", second("", 4000, 3900, 2000), 2100),
        ("0::/", second("", "max", 3900), None),
        ("0::/job/step", second("job/", 5000, 4000) | second("job/step/", "max", 1), 1000),
        ("0::/job/step", second("job/", 5000, 4000) | second("job/step/", 300, 100), 200),
        ("0::/of/the/host", second("", 800, 100), 700),
        (
            "4:memory:/slurm/uid_0/job_1",
            first("", 2**63 - 4096, 9) | first("slurm/uid_0/job_1/", 900, 500, 40),
            440,
        ),
        (
            "4:cpu:/\n3:memory:/slurm/job_1",
            first("slurm/", 700, 500) | first("slurm/job_1/", 900, 100),
            200,
        ),
        ("3:memory:/docker/0f", first("", 600, 100), 500),
        ("3:memory:/", first("", 2**63 - 4096, 100), None),
    ],
    ids=[
        "v2",
        "v2-none",
        "v2-above",
        "v2-nearest",
        "v2-host",
        "v1-job",
        "v1-above",
        "v1-container",
        "v1-none",
    ],
)
def test_the_nearest_limit_of_memory_counts_in_both_versions(
    ours: str, files: dict[str, str], left: int | None, tmp_path: Path
) -> None:
    assert machine.memory_left(*groups(tmp_path, ours, files)) == left


def test_a_group_above_limits_processes_too(tmp_path: Path) -> None:
    files = {
        "pids/job/pids.max": "50",
        "pids/job/pids.current": "20",
        "pids/job/step/pids.max": "max",
    }
    assert machine.processes_left(*groups(tmp_path, "3:pids:/job/step", files)) == 30
    assert machine.processes_left(tmp_path / "none", tmp_path / "nothing") is None


def test_a_clock_that_steps_is_told_from_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CLOCK_S", 0.1)
    times = namedtuple("times", "now")(iter([time.time(), time.time() + 5]))
    monkeypatch.setattr(machine.time, "time", lambda: next(times.now))
    assert "the time of day moved by" in machine.clock().says


def test_a_home_that_nobody_has_leaves_progress_unkept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COURSE_PP_PROGRESS", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nobody)
    finding = machine.home()
    assert "no home" in finding.says
    assert "COURSE_PP_PROGRESS" in finding.remedy


def test_a_check_that_raises_or_hangs_is_one_line_and_stops_no_other() -> None:
    def raises() -> Finding:
        raise PermissionError(13, "no\nway")

    def hangs() -> Finding:
        time.sleep(5)
        return Finding("never", True, "")

    def answers() -> Finding:
        return Finding("third", True, "well")

    checks = [
        Check("first", raises, "notebook 00"),
        Check("second", hangs),
        Check("third", answers),
    ]
    first, second, third = map(str, run_checks(checks, limit_s=0.5))
    assert first.startswith(
        "WRONG first: could not be checked (PermissionError: [Errno 13] no way). What fails: noteb"
    )
    assert second.startswith("WRONG second: no answer within ")
    assert third == "ok    third: well"


@pytest.mark.parametrize(
    ("later", "load", "ok", "note"),
    [(0.5, 9.0, True, False), (3.0, 9.0, True, True), (3.0, 1.0, False, False)],
    ids=["quick", "busy", "slow"],
)
def test_slow_ranks_are_wrong_unless_the_machine_is_busy(
    later: float, load: float, ok: bool, note: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(running.os, "getloadavg", lambda: (load, 0.0, 0.0))
    finding = running._calls("two ranks", first=4.0, later=later)
    assert finding.ok == ok
    assert ("busy" in finding.says) == note


def test_two_ranks_that_cannot_meet_are_given_up_and_none_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "_RANKS_LIMIT_S", 0.5)
    with no_process_left(60):  # the fork server first finishes what it imports
        [finding] = running.ranks()
    assert finding.says.startswith("they have not met")


@pytest.mark.long
@pytest.mark.ranks
def test_a_whole_run_says_the_same_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with no_process_left(60):
        assert main(["doctor", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    names = [entry["name"] for entry in found]
    for name in (
        "Python",
        "torch",
        "two ranks",
        "messages",
        "ports",
        "widgets",
        "Slurm",
        "clock",
        "GPUs",
    ):
        assert names.count(name) == 1
    assert set(found[0]) == {"name", "ok", "says", "breaks", "remedy"}
    assert str(Finding(**found[0])).startswith("ok    Python: ")
