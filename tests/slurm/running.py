"""What the tests here do with Slurm: run a command line, submit a script, watch a job."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = (
    "--steps=4 --log-every=1 --dim=16 --heads=2 --layers=2 --seq-len=16 --global-batch-size=8"
    " --microbatches=4 --text README.md --tokenizer-size=300"
)
ENDLESS = TINY.replace("--steps=4", "--steps=1000000")
_LIMIT_S = 240  # for a slow machine that runs other tests beside


def run(command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A command line as one types it in ``folder``."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )


def clone_into(folder: Path) -> Path:
    """Make ``folder`` look like a clone of the repository to a job, and keep the job's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("README.md", "source_code"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def losses(printed: str) -> list[str]:
    """The lines of train.py that name a loss."""
    return [line for line in printed.splitlines() if "loss" in line]


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = _LIMIT_S) -> None:
    """Fails if the condition does not hold within the limit."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, f"waited {limit_s} s until {what}"
        time.sleep(0.05)


def training(launcher: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run ``srun … python source_code/train.py …`` for ever; hand over after the first step."""
    return _running(f"{launcher} {ENDLESS}", "step 1/")


def sleeping(srun: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Tasks that do nothing; given over once the first has started."""
    return _running(f"{srun} bash -c 'echo started; sleep 1000'", "started")


@contextmanager
def _running(command: str, begun: str) -> Iterator[subprocess.Popen[str]]:
    """A command that has printed ``begun``; ended with the block."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert any(begun in line for line in process.stdout), process.stderr.read()  # type: ignore[union-attr]
            yield process
        finally:
            process.kill()


@dataclass(frozen=True)
class Batch:
    """A job that was submitted with sbatch."""

    id: str
    folder: Path

    @property
    def state(self) -> str:
        """``"COMPLETED"``, ``"FAILED"``, …"""
        return self._shown(r"JobState=(\S+)")

    @property
    def restarts(self) -> int:
        """How often it was requeued and started again."""
        return int(self._shown(r"Restarts=(\d+)"))

    @property
    def output(self) -> str:
        """What it has written so far."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"*-{self.id}*.out")))

    def wait(self) -> str:
        """Wait for its end; returns the state."""
        wait_until(
            lambda: self.state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"),
            f"job {self.id} ends",
        )
        return self.state

    def _shown(self, pattern: str) -> str:
        shown = run(f"scontrol show job {self.id}")
        match = re.search(pattern, shown.stdout)
        assert match, shown
        return match[1]


def submit(script: str, folder: Path, arguments: str, options: str = "") -> Batch:
    """``sbatch OPTIONS source_code/slurm/SCRIPT ARGUMENTS`` in ``folder``."""
    done = run(f"sbatch --parsable {options} source_code/slurm/{script} {arguments}", folder)
    assert done.returncode == 0, done.stderr
    return Batch(done.stdout.strip(), folder)


def run_by_hand(
    script: str, folder: Path, programs: dict[str, str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """A batch script of source_code/slurm under bash alone.

    Args:
        folder: a clone.
        programs: what stands in for Slurm's programs, by name; lines of sh.
        variables: what Slurm would have set.
    """
    stand_ins = folder / "bin"
    stand_ins.mkdir(exist_ok=True)
    for name, lines in programs.items():
        (stand_ins / name).write_text(f"#!/bin/sh\n{lines}\n")
        (stand_ins / name).chmod(0o755)
    return subprocess.run(
        ["bash", f"source_code/slurm/{script}"],
        cwd=folder,
        env={"PATH": f"{stand_ins}:{os.environ['PATH']}", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )


def process_of_rank(rank: int, processes: dict[int, str]) -> int:
    """The process that runs train.py as ``rank``, of those given by id with what they run."""
    wanted = [[b"RANK=%d" % rank], [b"SLURM_PROCID=%d" % rank]]
    for pid, command in processes.items():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            # Under torchrun every rank is of the same task.
            own = [
                v for name in (b"RANK=", b"SLURM_PROCID=") for v in variables if v.startswith(name)
            ]
            if re.match(r"\S*python\S* (-u )?source_code/train.py", command) and own[:1] in wanted:
                return pid
    raise LookupError(f"no process of rank {rank} among {processes}")
