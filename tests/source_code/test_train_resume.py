"""train.py, interrupted and started again, ends with the bits of an undisturbed run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from course_pp.training.checkpoint import Difference, diff, export_hf, find_latest, verify
from course_pp.training.logs import METRICS
from course_pp.training.preemption import EXIT_CODE
from tests.processes import no_process_left
from tests.source_code.scripts import TRAIN_IMPORTS, labelled_lines

ROOT = Path(__file__).parents[2]
STEPS = 40
RANKS_IMPORT = TRAIN_IMPORTS
LAST = f"step_{STEPS:08d}"
RUN = [
    *(
        "source_code/train.py",
        f"--steps={STEPS}",
        "--dim=32",
        "--layers=4",
        "--seq-len=32",
        "--global-batch-size=8",
    ),
    *("--microbatches=4", "--log-every=1", "--save-every=10", "--eval-every=15"),
]


@pytest.fixture(autouse=True)
def in_the_repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def command(folder: Path, *more: str) -> list[str]:
    """A run that keeps everything in ``folder``."""
    return [*RUN, f"--checkpoint-dir={folder}", f"--log-folder={folder}/logs", *more]


def complete(folder: Path, *more: str, n_ranks: int = 2) -> None:
    """Run to the last step."""
    labelled_lines(n_ranks, command(folder, *more))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two pipeline ranks that nobody interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        complete(folder)
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        complete(folder, "--steps=2")
    return folder


def losses(folder: Path) -> list[tuple[str, int, float]]:
    """Training and validation losses of every step, in full precision."""
    records = [json.loads(line) for line in (folder / "logs" / METRICS).read_text().splitlines()]
    return [(r["event"], r["step"], r["loss"]) for r in records if "loss" in r]


def differences(one: Path, other: Path) -> list[Difference]:
    """Of two final checkpoints, but for where their runs wrote the log."""
    return [
        found for found in diff(one / LAST, other / LAST) if found.key != "extra.config.log_folder"
    ]


@contextmanager
def started(
    commands: Sequence[tuple[list[str], dict[str, str]]], errors: Path
) -> Iterator[list[subprocess.Popen]]:
    """Processes with (command, environment); they are killed in the end if they are still there."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    base |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        log = stack.enter_context(errors.open("w"))
        processes = []
        for argv, environ in commands:
            process = subprocess.Popen(argv, env=base | environ, stdout=log, stderr=log)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield processes


def under_torchrun(arguments: list[str], *options: str) -> list[tuple[list[str], dict[str, str]]]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    return [([*launcher, "--nproc-per-node=2", *options, *arguments], {})]


def ranks_alone(arguments: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Two ranks as ``srun`` would start them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **here} for rank in range(2)]
    return [([sys.executable, *arguments], rank) for rank in ranks]


def wait_for_steps(folder: Path, n: int, processes: Sequence[subprocess.Popen]) -> None:
    limit = time.monotonic() + 60
    log = folder / "logs" / METRICS
    while not log.exists() or log.read_text().count('"train"') < n:
        assert time.monotonic() < limit, "the run does not come to its first steps"
        assert all(process.poll() is None for process in processes), (
            "the run ended before it was interrupted"
        )
        time.sleep(0.005)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["async", pytest.param("sync", marks=pytest.mark.full)])
@pytest.mark.long
def test_after_sigterm_to_torchrun_the_same_command_ends_with_the_same_bits(
    uninterrupted: Path, tmp_path: Path, how: str
) -> None:
    options = ["--async-save"] if how == "async" else []
    folder, errors = tmp_path / "run", tmp_path / "errors"
    with (
        no_process_left(),
        started(under_torchrun(command(folder, *options)), errors) as [torchrun],
    ):
        wait_for_steps(folder, 11, [torchrun])
        torchrun.send_signal(signal.SIGTERM)
        assert torchrun.wait(40) == 1, "torchrun does not hand an exit code on"
    assert f"train.py: SIGTERM: saved in {folder} after step" in errors.read_text()
    interrupted = find_latest(folder)
    assert interrupted is not None
    assert interrupted.name < LAST
    complete(folder, *options)
    assert differences(folder, uninterrupted) == []
    assert losses(folder) == losses(uninterrupted)
    assert not any(verify(path) for path in folder.glob("step_*"))


@pytest.mark.long
def test_ranks_without_a_launcher_end_with_the_code_to_requeue_on_when_one_hears_sigusr1(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder, errors = tmp_path / "run", tmp_path / "errors"
    with no_process_left(), started(ranks_alone(command(folder)), errors) as ranks:
        wait_for_steps(folder, 5, ranks)
        ranks[1].send_signal(signal.SIGUSR1)
        for _ in range(20):  # while it saves, and while it leaves
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert [rank.wait(40) for rank in ranks] == [EXIT_CODE] * 2, errors.read_text()
    complete(folder)
    assert differences(folder, uninterrupted) == []


@pytest.mark.full
def test_torchrun_passes_sigusr1_on_when_told_to(tmp_path: Path) -> None:
    folder, errors = tmp_path / "run", tmp_path / "errors"
    handled = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    with no_process_left(), started(under_torchrun(command(folder), handled), errors) as [torchrun]:
        wait_for_steps(folder, 3, [torchrun])
        torchrun.send_signal(signal.SIGUSR1)
        assert torchrun.wait(40) == 1
    assert f"train.py: SIGUSR1: saved in {folder} after step" in errors.read_text()


@pytest.mark.long
def test_without_a_directory_a_signal_ends_the_run_as_it_ends_any_program(tmp_path: Path) -> None:
    arguments = [*RUN[:-2], "--log-every=1", f"--log-folder={tmp_path}/logs"]
    with started([([sys.executable, *arguments, "--pp=1"], {})], tmp_path / "errors") as [alone]:
        wait_for_steps(tmp_path, 1, [alone])
        alone.send_signal(signal.SIGTERM)
        assert alone.wait(20) == -signal.SIGTERM


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["--tp=2 --pp=1", "--pp=2 --dp-shard=2 --schedule=interleaved_1f1b"]
)
def test_another_layout_goes_on_from_a_checkpoint_with_the_same_losses(
    uninterrupted: Path, tmp_path: Path, layout: str
) -> None:
    n_ranks = 4 if "dp-shard" in layout else 2
    source = uninterrupted / "step_00000030"
    complete(
        tmp_path,
        *layout.split(),
        "--microbatches=2",
        f"--resume={source}",
        "--keep-last=1",
        n_ranks=n_ranks,
    )
    expected = [entry for entry in losses(uninterrupted) if entry[1] > 30]
    for (event, step, loss), found in zip(expected, losses(tmp_path), strict=True):
        assert found == (event, step, pytest.approx(loss, rel=1e-5))
    assert [path.name for path in tmp_path.glob("step_*")] == [LAST]


def test_a_run_that_has_ended_says_that_nothing_is_left(ended: Path, tmp_path: Path) -> None:
    lines = labelled_lines(2, command(tmp_path, "--steps=2", f"--resume={ended / 'step_00000002'}"))
    assert "[rank 1] no step was left to train" in lines


def test_the_last_checkpoint_holds_what_an_export_needs(ended: Path, tmp_path: Path) -> None:
    exported = export_hf(ended, tmp_path / "hf")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in exported.iterdir()
    }
