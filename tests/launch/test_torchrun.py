"""`run_torchrun` and ``%torchrun``: the command that is built, and how a run ends."""

import contextlib
import gc
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from course_pp.launch import LaunchError, RanksHung, run_torchrun, torchrun
from course_pp.launch.process import Command
from course_pp.launch.torchrun import build, script_index, split_magic
from course_pp.launch.where import Place, Site
from tests.launch.conftest import pretend

pytestmark = pytest.mark.timeout(90)

# What a notebook inherits that was started as a rank, by a cluster or with srun.
OF_ANOTHER_RUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "203.0.113.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "another",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

HEAD = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group()
rank = dist.get_rank()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script, seen from its notebooks, without Slurm."""
    (tmp_path / "source_code").mkdir()
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "source_code" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path / "notebooks")
    for name in ("SLURM_JOB_ID", "PET_STANDALONE", "PET_LOCAL_ADDR", "PET_TEE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def fake_srun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``srun`` on PATH that prints its request and runs it, and a cluster that answers."""
    monkeypatch.delenv("COURSE_PP_WHERE")
    srun = folder / "bin" / "srun"
    srun.parent.mkdir()
    pretend(srun, 'echo "[rank 0] srun $1 $2 $3 $4 $5 $6 $7 $8"\nshift 8\nexec "$@"')
    (srun.parent / "sinfo").symlink_to("/bin/true")
    (srun.parent / "squeue").symlink_to("/bin/true")
    (folder / "site.toml").write_text(f'folder = "{folder / "shared"}"')
    monkeypatch.setenv("COURSE_PP_SITE", str(folder / "site.toml"))
    monkeypatch.setenv("PATH", str(srun.parent), prepend=os.pathsep)
    return srun


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("train.py --pp 2", "train.py"),
        ("--nproc-per-node 2 train.py", "train.py"),
        ("--nproc_per_node=2 --standalone train.py", "train.py"),
        ("--no_python --nnodes 1 -r 3 python x.py", "python"),
        ("-m package.module", "package.module"),
        ("--nproc-per-node 2", None),
    ],
)
def test_the_script_is_the_first_word_that_belongs_to_no_option(
    line: str, script: str | None
) -> None:
    args = shlex.split(line)
    at = script_index(args)
    assert (None if at is None else args[at]) == script


def test_a_path_from_the_root_works_in_a_notebook_and_is_shown_as_it_is_run(folder: Path) -> None:
    command = build(["--nproc-per-node=2", "source_code/train.py", "--out", "here"], "local")
    assert command.shown == "torchrun --nproc-per-node=2 ../source_code/train.py --out here"
    assert command.argv[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert command.argv[3:] == tuple(shlex.split(command.shown)[1:])


def test_a_missing_script_is_named(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no script 'source_code/trian\.py'"):
        build(["source_code/trian.py"], "local")
    with pytest.raises(ValueError, match="no script in `torchrun --nproc-per-node=2`"):
        build(["--nproc-per-node=2"], "local")


@pytest.mark.parametrize(
    ("options", "free_port"),
    [
        ("", True),
        ("--nnodes 1:1", True),
        ("--nnodes=2", False),
        ("--rdzv-endpoint=localhost:1234", False),
        ("--master_port 1234", False),
    ],
)
def test_one_node_takes_a_free_port_unless_the_user_chose_a_rendezvous(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: str, free_port: bool
) -> None:
    command = build([*shlex.split(options), "source_code/train.py"], "local")
    assert ("PET_STANDALONE" in command.environ) == free_port
    assert command.environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[rank ${rank}] "
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("PET_TEE", "1")
    command = build(["source_code/train.py"], "local")
    assert not {"OMP_NUM_THREADS", "PET_TEE"} & set(command.environ), "what the user has set stays"


def test_next_to_slurm_the_launcher_runs_under_srun_unless_told_otherwise(
    fake_srun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--nproc-per-node=2", "source_code/train.py"]
    assert (
        build(args).shown
        == "srun -N 1 -n 1 -c 2 -t 6 torchrun --nproc-per-node=2 ../source_code/train.py"
    )
    two, met = "srun -N 2 -n 2 -K1 -c 2 -t 6", build(["--nnodes=2", *args]).shown
    assert met.startswith(f"{two} bash -c ")
    assert "exec torchrun --node-rank=$SLURM_NODEID" in met
    assert build(["--nnodes=2", "--rdzv-endpoint=n1:1", *args]).shown.startswith(f"{two} torchrun")
    assert build(args, "local").shown.startswith("torchrun")

    # Tools without a cluster behind them are not used, unless inside a job.
    (fake_srun.parent / "sinfo").unlink()
    (fake_srun.parent / "sinfo").symlink_to("/bin/false")
    assert build(args).place.local
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not build(args).place.local


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--nproc-per-node 2 x.py --timeout 3",
            (["--nproc-per-node", "2", "x.py", "--timeout", "3"], 300.0, False),
        ),
        ("--timeout 20 --local --standalone x.py", (["--standalone", "x.py"], 20.0, True)),
        (
            "--nproc-per-node 2 --local --timeout=5 x.py 'a b'",
            (["--nproc-per-node", "2", "x.py", "a b"], 5.0, True),
        ),
    ],
)
def test_the_magic_takes_its_own_options_before_the_script(
    line: str, expected: tuple[Any, ...]
) -> None:
    assert split_magic(line) == expected


def test_a_limit_that_is_no_number_of_seconds_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="--timeout 'soon' is not a number of seconds"):
        split_magic("--timeout soon x.py")
    for timeout_s in (0, float("nan"), 1e10):
        with pytest.raises(ValueError, match=r"timeout_s is .*at most 1000000"):
            run_torchrun(["source_code/train.py"], timeout_s=timeout_s, where="local")


def test_lines_are_labelled_and_nothing_is_added_to_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os; os.environ['OWN_SITE'] = 'kept'")
    monkeypatch.setenv("PYTHONPATH", str(site))
    (folder / "s.py").write_text(
        "import os, sys; print('a\\nb', os.environ['OWN_SITE']); print('c', file=sys.stderr)"
    )
    lines = run_torchrun(["--nproc-per-node=2", "../s.py"], timeout_s=60, where="local")
    out, err = capsys.readouterr()
    said, shown, *rest = out.splitlines()
    assert said.startswith("Ranks run on this machine")
    assert shown == "$ torchrun --nproc-per-node=2 ../s.py"
    assert sorted(lines) == sorted([*rest, *err.splitlines()])
    assert sorted(lines) == [
        f"[rank {rank}] {text}" for rank in range(2) for text in ("a", "b kept", "c")
    ]


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        (
            "raise ValueError('width 3.')",
            "rank 1 failed with exit code 1: ValueError: width 3. Its last lines:",
        ),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "rank 1 failed with SIGKILL",
            marks=pytest.mark.long,
        ),
    ],
    ids=["raise", "kill"],
)
def test_the_rank_that_failed_first_is_named(folder: Path, failing: str, words: str) -> None:
    (folder / "s.py").write_text(
        f"{HEAD}if rank == 1:\n    {failing}\ndist.recv(torch.zeros(1), src=1)\n"
    )
    with pytest.raises(LaunchError) as failure:
        run_torchrun(["--nproc-per-node=2", str(folder / "s.py")], timeout_s=60, where="local")
    assert words in str(failure.value)


@pytest.mark.long
def test_a_temporary_folder_with_a_name_that_fits_no_socket_or_path_is_no_obstacle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "source_code" / "train.py").write_text("import os; print(os.environ['PET_LOG_DIR'])")
    monkeypatch.delenv("PET_LOG_DIR", raising=False)
    awkward = folder / ("a:" + "long" * 30)  # two entries of a path, too long for a socket
    awkward.mkdir()
    monkeypatch.setenv("TMPDIR", str(awkward))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (line,) = run_torchrun(["source_code/train.py"], timeout_s=60, where="local")
    used = Path(line.removeprefix("[rank 0] ")).parent
    assert used.name.startswith("course_pp_")
    assert not used.exists()
    assert not list(awkward.glob("course_pp_*"))


def test_strangers_at_the_watchdogs_port_are_dropped(folder: Path) -> None:
    place = Place("", ("srun",), site=Site(folder=str(folder / "shared")))
    sleeps = Command(("sleep", "1000"), "sleep 1000", {}, place)
    with torchrun._Launched(sleeps) as run, contextlib.ExitStack() as opened:
        ours = f'{{"rank": 3, "pid": 1, "mark": "{run._mark}"}}\n'
        first_words = [
            ours,
            ours.replace("mark", "Mark"),
            '{"mark": "é"}\n',
            "[]\n",
            "[" * 4000 + "\n",
            "x" * 5000,
            "",
        ]
        peers = [
            opened.enter_context(socket.create_connection(run._listener.getsockname()))
            for _ in first_words
        ]
        for peer, words in zip(peers, first_words, strict=True):
            peer.sendall(words.encode())
        limit = time.monotonic() + 20
        silent = peers[-1].getsockname()
        while [peer.connection.getpeername() for peer in run._peers] != [
            peers[0].getsockname(),
            silent,
        ]:
            assert time.monotonic() < limit, "who says anything else is dropped at once"
            run.poll(0.05)
        assert [peer.rank for peer in run._peers] == [3, None], "who says nothing is not heard"
        assert [peer.recv(1) for peer in peers[1:-1]] == [b""] * len(peers[1:-1])


def test_a_launcher_that_cannot_be_started_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "no-python"))
    gc.collect()  # what tests before this one may have left to it
    before, descriptors = set(folder.iterdir()), psutil.Process().num_fds()
    with pytest.raises(FileNotFoundError, match="no-python"):
        run_torchrun(["source_code/train.py"], where="local")
    assert set(folder.iterdir()) == before
    assert psutil.Process().num_fds() <= descriptors


@pytest.mark.long
def test_wrong_arguments_are_reported_in_torchruns_words(folder: Path) -> None:
    with pytest.raises(LaunchError, match=r"exit code 2 and named no rank[^\n]*\n.*error"):
        run_torchrun(["--no-such-option=1", "source_code/train.py"], timeout_s=60, where="local")


@pytest.mark.long
def test_at_the_time_limit_it_says_who_waits_for_whom_also_if_the_caller_is_a_rank_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OF_ANOTHER_RUN.items():
        monkeypatch.setenv(name, value)
    (folder / "s.py").write_text(HEAD + "dist.recv(torch.zeros(1), src=1 - rank)\n")
    with pytest.raises(RanksHung, match="Rank 0 waits for rank 1 and rank 1 for rank 0") as hung:
        run_torchrun(["--nproc-per-node=2", str(folder / "s.py")], timeout_s=15, where="local")
    assert [wait.where for wait in hung.value.waits] == [
        "s.py line 6: dist.recv(torch.zeros(1), src=1 - rank)"
    ] * 2


@pytest.mark.ranks
@pytest.mark.long
def test_a_notebook_starts_ranks_both_ways_and_its_cells_fail_when_ranks_do(folder: Path) -> None:
    (folder / "source_code" / "train.py").write_text("print('trained')")
    cells = [
        "%load_ext course_pp.launch\nfrom course_pp.launch import on_ranks",
        (
            "def swap(rank):\n    import torch, torch.distributed as dist\n"
            "    dist.recv(torch.zeros(1), src=1 - rank)\non_ranks(2, swap, timeout_s=0.5)"
        ),
        "on_ranks(2, lambda rank: rank)",
        "%torchrun --local --timeout 60 source_code/train.py",
        "on_ranks(2, lambda rank: 1 / 0)",
        "x = 1\n%torchrun --local --timeout 60 --no-such-option=1 source_code/train.py",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(
        notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": os.getcwd()}}
    )
    client.execute()
    _, hung, ranks, run, failed, refused = [cell.outputs for cell in notebook.cells]
    assert "cell line 3: dist.recv(torch.zeros(1), src=1 - rank)" in hung[-1]["evalue"]
    line, sentence = hung[-1]["traceback"]
    assert line == "----> 4 on_ranks(2, swap, timeout_s=0.5)"
    assert sentence == f"RanksHung: {hung[-1]['evalue']}", "and no frame of ours"
    assert ranks[-1]["data"]["text/plain"] == "[0, 1]"
    assert "".join(o["text"] for o in run).endswith(
        "\n$ torchrun ../source_code/train.py\n[rank 0] trained\n"
    )
    assert failed[-1]["ename"] == "ZeroDivisionError"
    line, sentence = refused[-1]["traceback"]
    assert line.startswith("----> 2 ")
    assert "torchrun" in line
    assert sentence.startswith("LaunchError: torchrun ended with exit code 2")
    assert "Cell, line 1" in "\n".join(failed[-1]["traceback"])


def test_importing_the_launcher_imports_no_torch() -> None:
    code = "import sys, course_pp.launch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
