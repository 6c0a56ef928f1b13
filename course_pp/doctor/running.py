"""What a run shows: two ranks on this machine, and a job of two tasks where there is a Slurm cluster.

Ranks start in a process of their own, which has a time limit: where they cannot meet, nobody waits for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from course_pp.doctor.finding import Check, Finding
from course_pp.launch.where import Needs, Site, decide, load_site

_RANKS_LIMIT_S = 16.5
_ANSWER_LIMIT_S = 4.0
_JOB_LIMIT_S = 10.0
_SLOW_CALL_S = 2.0
_LARGE = 2**24  # bytes
_ALL = "all notebooks"
_REMEDY = (
    "mend what is wrong above; if nothing is, the machine is too busy or its disk too slow: try again when it is quiet"
)
_PROBE = """
import json, sys, time
from course_pp.launch import on_ranks

def talk(rank, n_bytes):
    import time
    import torch
    import torch.distributed as dist

    def round_trips(tensor, times):
        begun = time.monotonic()
        for _ in range(times):
            if rank == 0:
                dist.send(tensor, 1); dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0); dist.send(tensor, 0)
        return (time.monotonic() - begun) / times / 2

    small, large = torch.zeros(1), torch.zeros(n_bytes, dtype=torch.uint8)
    round_trips(small, 10)
    latency = round_trips(small, 50)
    round_trips(large, 1)
    return latency, n_bytes / round_trips(large, 3)

begun = time.monotonic()
on_ranks(2, talk, 1, where="local", timeout_s=10)
first = time.monotonic() - begun
begun = time.monotonic()
(latency, bandwidth), _ = on_ranks(2, talk, int(sys.argv[1]), where="local", timeout_s=10)
print(json.dumps([first, time.monotonic() - begun, latency, bandwidth]))
"""


def ranks() -> list[Finding]:
    """Start two ranks twice and time them and their messages."""
    name = "two ranks"
    if find_spec("torch") is None or find_spec("cloudpickle") is None:
        return [Finding(name, False, "not tried: torch or cloudpickle is missing", _ALL, "see the line of the package")]
    package = str(Path(__file__).resolve().parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    child = subprocess.Popen(
        [sys.executable, "-c", _PROBE, str(_LARGE)],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=_RANKS_LIMIT_S)
    except subprocess.TimeoutExpired:
        # The process that forks the ranks ends, and they with it, when its caller is gone.
        child.kill()
        child.communicate()
        says = f"they have not met after {_RANKS_LIMIT_S:.0f} s"
        return [Finding(name, False, says, _ALL, _REMEDY)]
    if child.returncode:
        last = (err.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        return [Finding(name, False, f"they fail ({last})", _ALL, _REMEDY)]
    first, later, latency, bandwidth = json.loads(out.splitlines()[-1])
    return [_calls(first, later), _messages(latency, bandwidth)]


def _calls(first: float, later: float) -> Finding:
    says = f"on_ranks(2, ...) took {first:.1f} s the first time, {later:.1f} s the second"
    if later > _SLOW_CALL_S:
        breaks = f"no cell, but every on_ranks and check of {_ALL} takes as long"
        return Finding("two ranks", False, says, breaks, "close what else runs here; put .venv on a local disk")
    return Finding("two ranks", True, says)


def _messages(latency: float, bandwidth: float) -> Finding:
    return Finding("messages", True, f"{latency * 1e6:.0f} µs for 4 bytes, {bandwidth / 1e9:.1f} GB/s for 16 MiB")


def slurm() -> list[Finding]:
    """Say whether a cluster answers, what its partition allows, and whether a job of two tasks runs and sees us."""
    name, breaks = "Slurm", f"%torchrun and on_ranks on the cluster in {_ALL}"
    if not shutil.which("srun"):
        return [Finding(name, True, "none; ranks run on this machine")]
    try:
        site = load_site()
    except (OSError, ValueError) as error:
        return [Finding(name, False, f"its settings cannot be read ({error})", breaks, "correct site.toml")]
    answer = _sinfo(site)
    if isinstance(answer, Finding):
        return [answer]
    findings = [answer[0]]
    if answer[0].ok:
        findings.append(_job(site))
    return findings


def _sinfo(site: Site) -> list[Finding] | Finding:
    """Return the partition's finding; without a cluster the finding is about Slurm."""
    name, breaks = "Slurm", f"%torchrun and on_ranks on the cluster in {_ALL}"
    remedy = "ask whoever runs the cluster; until then COURSE_PP_WHERE=local runs everything on this machine"
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return Finding(name, False, "srun is on PATH, sinfo is not", breaks, "load the whole of Slurm's module")
    try:
        done = subprocess.run(
            [sinfo, "--noheader", "--format=%P|%a|%l|%D|%T|%c"],
            capture_output=True, text=True, timeout=_ANSWER_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"the cluster does not answer within {_ANSWER_LIMIT_S:.0f} s", breaks, remedy)
    if done.returncode:
        if not configured():
            return Finding(name, True, "srun is installed, no cluster is configured; ranks run on this machine")
        last = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("sinfo: ").removeprefix("error: ")
        return Finding(name, False, f"the cluster is down ({last})", breaks, remedy)
    rows = [row.split("|") for row in done.stdout.splitlines() if row.count("|") == 5]
    wanted = site.partition
    ours = [row for row in rows if (row[0].rstrip("*") == wanted if wanted else row[0].endswith("*"))]
    if not ours:
        known = ", ".join(sorted({row[0].rstrip("*") for row in rows})) or "none"
        says = f"no partition {wanted!r}" if wanted else "no default partition"
        return [Finding("partition", False, f"{says}; there are {known}", breaks, "set partition in site.toml")]
    partition, _, limit, *_ = ours[0]
    usable = sum(
        int(row[3]) for row in ours if row[1] == "up" and row[4].rstrip("*$~#") in ("idle", "mixed", "allocated")
    )
    says = f"{partition.rstrip('*')}: {usable} nodes usable, {ours[0][5]} cores each, at most {limit}"
    if not usable:
        return [Finding("partition", False, says, breaks, "wait for its nodes, or set another partition in site.toml")]
    return [Finding("partition", True, says)]


def configured() -> bool:
    """Return whether somebody has set up a cluster for this machine, beyond installing its tools."""
    return bool(os.environ.get("SLURM_CONF")) or any(
        Path(file).exists() for file in ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf")
    )


def _job(site: Site) -> Finding:
    """Run two tasks, each of which looks for files that were written here: beside the course, and where calls go."""
    name, breaks = "Slurm job", f"%torchrun and on_ranks on the cluster in {_ALL}"
    place = decide(Needs(1, 2, _JOB_LIMIT_S, gpus=False), "slurm")
    token = f".course_pp_doctor_{secrets.token_hex(4)}"
    files = [Path(folder).expanduser() / token for folder in (os.getcwd(), site.folder)]
    task = 'for file; do test -e "$file" && echo "seen" || echo "unseen $file"; done'
    command = [*place.srun, "-n", "2", f"--immediate={int(_ANSWER_LIMIT_S)}", "-D", "/", "sh", "-c", task, "sh"]
    remedy = f"try it by hand: {' '.join([*place.srun, '-n', '2', 'hostname'])}"
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        done = subprocess.run(
            [*command, *map(str, files)], capture_output=True, text=True, timeout=_JOB_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, False, f"two tasks have not run within {_JOB_LIMIT_S:.0f} s", breaks, remedy)
    except (OSError, RuntimeError) as error:
        return Finding(name, False, f"no file for the nodes can be made ({error})", breaks, "set folder in site.toml")
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding(name, False, f"two tasks do not run ({last})", breaks, remedy)
    unseen = [line.removeprefix("unseen ") for line in done.stdout.splitlines() if line.startswith("unseen ")]
    if unseen:
        says = f"it runs, but its node does not see {Path(unseen[0]).parent}"
        remedy = "put the course, and folder of site.toml, on a file system that all nodes share"
        return Finding(name, False, says, breaks, remedy)
    seen = " and ".join(str(file.parent) for file in files)
    return Finding(name, True, f"{done.stdout.count('seen') // len(files)} tasks ran and saw {seen}")


CHECKS = (
    Check("Slurm", slurm, "runs on the cluster"),
    Check("two ranks", ranks, _ALL),
)
