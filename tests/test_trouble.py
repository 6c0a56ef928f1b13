"""Every message in docs/trouble.md is real: a test provokes it, or finds it in the code."""

import contextlib
import errno
import inspect
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jupyter_server.serverapp import ServerApp

from course_pp.doctor import machine
from course_pp.exercises import check
from course_pp.exercises.progress import Store
from course_pp.launch import crew, on_ranks, where
from course_pp.launch.slurm import Job
from course_pp.launch.torchrun import build
from course_pp.launch.where import Needs, decide, load_site
from course_pp.notebook import emulate, real_steps
from course_pp.notebook.command import update
from course_pp.schedule import build as build_schedule
from tests.documents import PAGES, ROOT
from tests.launch.conftest import pretend
from tests.notebook.test_working_copy import write

ROWS = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| ", PAGES["docs/trouble.md"], re.M))
Provoke = Callable[[Path, pytest.MonkeyPatch], str]
PROVOKED: dict[str, Provoke] = {}


def when(symptom: str) -> Callable[[Provoke], Provoke]:
    def keep(provoke: Provoke) -> Provoke:
        PROVOKED[symptom] = provoke
        return provoke

    return keep


def test_every_row_is_provoked():
    assert set(ROWS) == set(PROVOKED)


@pytest.mark.ranks
@pytest.mark.parametrize("symptom", ROWS)
def test_what_the_page_says_is_what_is_printed(symptom, tmp_path, monkeypatch):
    for name in ("COURSE_PP_WHERE", *(name for name in os.environ if name.startswith("SLURM"))):
        monkeypatch.delenv(name, raising=False)
    printed = " ".join(PROVOKED[symptom](tmp_path, monkeypatch).split())
    for sentence in re.findall(r"`([^`]+)`", ROWS[symptom]):
        assert re.search(".+?".join(map(re.escape, sentence.split("…"))), printed), printed


def raised(fn, *args, **kwargs):
    try:
        value = fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    pytest.fail(f"nothing is raised, but {value!r} returned")


@when("A name is unknown")
def _(folder, monkeypatch):
    return raised(exec, "bubble(4, 8)", {})


@when("The first cell fails: wrong kernel")
def _(folder, monkeypatch):
    first_line = [sys.executable, "-I", "-S", "-c", "from course_pp import show"]
    return subprocess.run(first_line, capture_output=True, text=True).stderr


@when("`check` says pending, though it is solved")
def _(folder, monkeypatch):
    def bubble(p, m):
        raise NotImplementedError

    return check(bubble).text


def both_receive(rank):
    dist.recv(torch.empty(1), src=1 - rank)


@when("A cell does not end: ranks wait for each other")
def _(folder, monkeypatch):
    return raised(on_ranks, 2, both_receive, timeout_s=0.5, where="local")


def never_ends(rank):
    while True:
        pass


@when("A cell reaches its time limit")
def _(folder, monkeypatch):
    return raised(on_ranks, 1, never_ends, timeout_s=0.5, where="local")


@when("The first `on_ranks` takes too long")
def _(folder, monkeypatch):
    monkeypatch.setattr(crew, "_START_LIMIT_S", 0.0)
    return raised(on_ranks, 1, int, where="local")


def killed(rank):
    os.kill(os.getpid(), signal.SIGKILL)


@when("A rank is killed: out of memory")
def _(folder, monkeypatch):
    return raised(on_ranks, 1, killed, where="local") + ended_by_slurm(
        folder, monkeypatch, "OUT_OF_MEMORY"
    )


def tools(folder, monkeypatch, **programs):
    """Make these programs of Slurm, a few lines of sh each, all that is on PATH."""
    for name, shell in programs.items():
        pretend(folder / name, shell)
    monkeypatch.setenv("PATH", str(folder))


def ended_by_slurm(folder, monkeypatch, state):
    tools(folder, monkeypatch, scontrol=f"echo JobState={state}")
    return str(job().verdict([], "srun", a_rank_failed=False))


def job():
    found = Job(1, os.environ)
    found.number = "9"
    return found


def queued(folder, monkeypatch, reason):
    answers = f'*%r) echo "PD|gpu|{reason}";; *%j) echo "8|7|ada|16|n1|train";; *) echo 8; echo 9;;'
    tools(folder, monkeypatch, squeue=f'case "$*" in {answers} esac', sinfo="echo 16/0/0/16")
    for name in ("_FIRST_LOOK_S", "_LOOK_S", "_HELD_FIRST_S"):
        monkeypatch.setattr(f"course_pp.launch.slurm.{name}", 0)
    return job()


@when("`%torchrun` or `on_ranks` waits in a queue")
def _(folder, monkeypatch):
    return str(queued(folder, monkeypatch, "Resources").queue_line())


@when("The job was cancelled")
def _(folder, monkeypatch):
    return ended_by_slurm(folder, monkeypatch, "CANCELLED")


@when("The job's time is over")
def _(folder, monkeypatch):
    return ended_by_slurm(folder, monkeypatch, "TIMEOUT")


@when("Slurm is down or slow")
def _(folder, monkeypatch):
    tools(folder, monkeypatch, srun="exit 1", sinfo="exit 1")
    down = decide(Needs(1, 2, 60.0)).said
    pretend(folder / "sinfo", "exec /bin/sleep 30")
    monkeypatch.setattr(where, "_ANSWER_LIMIT_S", 0.2)
    return down + raised(decide, Needs(1, 2, 60.0))


@when("`site.toml` is wrong")
def _(folder, monkeypatch):
    (folder / "site.toml").write_text('partion = "gpu"')
    monkeypatch.setenv("COURSE_PP_SITE", str(folder / "site.toml"))
    waiting = queued(folder, monkeypatch, "PartitionTimeLimit")
    pretend(folder / "scontrol", "exit 1")
    said = ["srun: error: Unable to allocate resources: Invalid account"]
    refused = job().verdict(said, "srun -A x", a_rank_failed=False)
    waiting.queue_line()
    return f"{raised(load_site)} {refused} {raised(waiting.queue_line)}"


@when("JupyterLab has another port")
@when("No page opens")
def _(folder, monkeypatch):
    return inspect.getsource(ServerApp)


@when("The kernel dies")
def _(folder, monkeypatch):
    [page] = (Path(sys.prefix) / "share" / "jupyter" / "lab" / "static").glob("jlab_core.*.js")
    return page.read_text(encoding="utf-8")


@when("Figures are titled *simulated*")
def _(folder, monkeypatch):
    monkeypatch.setattr(real_steps, "_FIRST_UNIT_S", 1e-6)
    monkeypatch.setattr(real_steps, "_LONGEST_RUN_S", 1e-3)
    monkeypatch.setenv("COURSE_PP_WHERE", "local")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        emulate(build_schedule("gpipe", 2, 2))
    return printed.getvalue()


@when("A notebook outside the working copy")
def _(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return raised(build, ["source_code/train.py"], "local")


@when("An old working copy after an update")
def _(folder, monkeypatch):
    course, mine = folder / "notebooks", folder / "my_course"
    course.mkdir()
    write(course, "00_first.ipynb", "guess = ...")
    update(course, mine)
    write(course, "00_first.ipynb", "better_guess = ...")
    return str(update(course, mine))


@when("Progress is not saved")
def _(folder, monkeypatch):
    (folder / "full").touch()
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(folder / "full" / "progress.json"))
    return Store().record_attempt("bubble", correct=True)


@when("Disk or quota is full")
def _(folder, monkeypatch):
    def write(folder):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(machine, "_write", write)
    return str(machine.disk()[0])


@when("A firewall or a VPN blocks this machine's own ports")
def _(folder, monkeypatch):
    def dropped(*args):
        raise TimeoutError

    monkeypatch.setattr(machine.socket, "create_connection", dropped)
    return str(machine.ports())


@when("Python is too old")
def _(folder, monkeypatch):
    old = "import sys; sys.version_info = (3, 10, 0); exec(sys.argv[1])"
    pretend(folder / "python3.10", f"exec {sys.executable} -c '{old}' \"$2\"")
    for needed in ("pyproject.toml", "constraints.txt"):
        (folder / needed).touch()
    make = ["make", "-f", str(ROOT / "Makefile"), "-C", str(folder), "setup", "PYTHON=./python3.10"]
    return subprocess.run(make, capture_output=True, text=True).stderr
