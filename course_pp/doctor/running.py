"""What a run shows: two ranks here; and of a Slurm cluster its limits, and a job of two tasks.

Ranks start in a process of their own, which has a time limit: where they cannot meet, nobody waits
for long.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from course_pp.doctor.finding import Check, Finding
from course_pp.launch.where import Needs, Site, decide, load_site, site_file

_RANKS_LIMIT_S = 16.5
_ANSWER_LIMIT_S = 4.0
_JOB_LIMIT_S = 10.0
_SLOW_CALL_S = 2.0
# What the course needs of Slurm at once: cores, jobs, and minutes a job.
_RANKS, _JOBS, _MINUTES = 8, 2, 10
_ASSOCIATION = "DefaultQOS,QOS,MaxTRES,GrpTRES,MaxJobs,MaxWall"
_QUALITY = "Name,MaxTRES,MaxTRESPU,GrpTRES,MaxJobsPU,MaxWall"
_LARGE = 2**24  # bytes
_ALL = "all notebooks"
_ON_THE_CLUSTER = f"%torchrun and on_ranks on the cluster in {_ALL}"
_REMEDY = (
    "mend what is wrong above; if nothing is, the machine is too busy or its disk too slow: try"
    " again when it is quiet"
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
    name = "two ranks"
    if find_spec("torch") is None or find_spec("cloudpickle") is None:
        return [
            Finding(
                name,
                False,
                "not tried: torch or cloudpickle is missing",
                _ALL,
                "see the line of the package",
            )
        ]
    package = str(Path(__file__).resolve().parents[2])
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH")))),
    }
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
    says = f"on_ranks(2, ...) took {first:.1f} s the first time, {later:.1f} s the second"
    calls = Finding(name, True, says)
    if later > _SLOW_CALL_S:
        breaks = f"no cell, but every on_ranks and check of {_ALL} takes as long"
        calls = Finding(
            name, False, says, breaks, "close what else runs here; put .venv on a local disk"
        )
    says = f"{latency * 1e6:.0f} µs for 4 bytes, {bandwidth / 1e9:.1f} GB/s for 16 MiB"
    return [calls, Finding("messages", True, says)]


def slurm() -> list[Finding]:
    """Say which settings hold, whether a cluster answers, what its partition allows, and whether two tasks see us."""
    if not shutil.which("srun"):
        return [Finding("Slurm", True, "none; ranks run on this machine")]
    try:
        site, file = load_site(), site_file()
    except (OSError, ValueError) as error:
        return [
            Finding("site.toml", False, f"cannot be read ({error})", _ON_THE_CLUSTER, "correct it")
        ]
    settings = Finding(
        "site.toml", True, _from_home(file) if file else "none; the cluster's own defaults hold"
    )
    found = _sinfo(site)
    return [settings, found, *([_job(site)] if found.ok and found.name == "partition" else [])]


def _from_home(file: Path) -> str:
    with contextlib.suppress(RuntimeError, ValueError):  # a user without a home, a file elsewhere
        return f"~/{file.absolute().relative_to(Path.home())}"
    return str(file)


def _sinfo(site: Site) -> Finding:
    name, breaks = "Slurm", _ON_THE_CLUSTER
    remedy = (
        "ask whoever runs the cluster; until then COURSE_PP_WHERE=local runs everything on this"
        " machine"
    )
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return Finding(
            name, False, "srun is on PATH, sinfo is not", breaks, "load the whole of Slurm's module"
        )
    try:
        done = subprocess.run(
            [sinfo, "--noheader", "--format=%P|%a|%l|%D|%T|%c"],
            capture_output=True, text=True, timeout=_ANSWER_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Finding(
            name,
            False,
            f"the cluster does not answer within {_ANSWER_LIMIT_S:.0f} s",
            breaks,
            remedy,
        )
    if done.returncode:
        if not configured():
            return Finding(
                name, True, "srun is installed, no cluster is configured; ranks run on this machine"
            )
        last = (
            (done.stderr.strip().splitlines() or [""])[-1]
            .removeprefix("sinfo: ")
            .removeprefix("error: ")
        )
        return Finding(name, False, f"the cluster is down ({last})", breaks, remedy)
    rows = [row.split("|") for row in done.stdout.splitlines() if row.count("|") == 5]
    wanted = site.partition
    ours = [
        row for row in rows if (row[0].rstrip("*") == wanted if wanted else row[0].endswith("*"))
    ]
    if not ours:
        known = ", ".join(sorted({row[0].rstrip("*") for row in rows})) or "none"
        says = f"no partition {wanted!r}" if wanted else "no default partition"
        return Finding(
            "partition", False, f"{says}; there are {known}", breaks, "set partition in site.toml"
        )
    partition, _, limit, *_ = ours[0]
    states = ("idle", "mixed", "allocated")
    usable = sum(int(row[3]) for row in ours if row[1] == "up" and row[4].rstrip("*$~#") in states)
    says = (
        f"{partition.rstrip('*')}: {usable} nodes usable, {ours[0][5]} cores each, at most {limit}"
    )
    if not usable:
        return Finding(
            "partition",
            False,
            says,
            breaks,
            "wait for its nodes, or set another partition in site.toml",
        )
    return Finding("partition", True, says)


def configured() -> bool:
    """Return whether somebody has set up a cluster for this machine, beyond installing its tools."""
    return bool(os.environ.get("SLURM_CONF")) or any(
        Path(file).exists()
        for file in ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf")
    )


def _job(site: Site) -> Finding:
    """Run two tasks, each of which looks for files that were written here: beside the course, and where calls go."""
    name, breaks = "Slurm job", _ON_THE_CLUSTER
    place = decide(Needs(1, 2, _JOB_LIMIT_S, gpus=False), "slurm")
    token = f".course_pp_doctor_{secrets.token_hex(4)}"
    files = [Path(folder).expanduser() / token for folder in (os.getcwd(), site.folder)]
    task = 'for file; do test -e "$file" && echo "seen" || echo "unseen $file"; done'
    command = [
        *place.srun,
        "-n",
        "2",
        f"--immediate={int(_ANSWER_LIMIT_S)}",
        "-D",
        "/",
        "sh",
        "-c",
        task,
        "sh",
    ]
    remedy = f"try it by hand: {' '.join([*place.srun, '-n', '2', 'hostname'])}"
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        done = subprocess.run(
            [*command, *map(str, files)],
            capture_output=True,
            text=True,
            timeout=_JOB_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(
            name, False, f"two tasks have not run within {_JOB_LIMIT_S:.0f} s", breaks, remedy
        )
    except (OSError, RuntimeError) as error:
        return Finding(
            name,
            False,
            f"no file for the nodes can be made ({error})",
            breaks,
            "set folder in site.toml",
        )
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding(name, False, f"two tasks do not run ({last})", breaks, remedy)
    unseen = [
        line.removeprefix("unseen ")
        for line in done.stdout.splitlines()
        if line.startswith("unseen ")
    ]
    if unseen:
        says = f"it runs, but its node does not see {Path(unseen[0]).parent}"
        remedy = "put the course, and folder of site.toml, on a file system that all nodes share"
        return Finding(name, False, says, breaks, remedy)
    seen = " and ".join(str(file.parent) for file in files)
    return Finding(
        name, True, f"{done.stdout.count('seen') // len(files)} tasks ran and saw {seen}"
    )


def limits() -> list[Finding]:
    """Say which limits of user, QOS and partition hold, and which of them the course would meet."""
    name = "Slurm limits"
    if not all(map(shutil.which, ("sinfo", "sacctmgr", "scontrol"))) or not configured():
        return []
    try:
        ours = _said(
            "sacctmgr",
            "-nP",
            "show",
            "assoc",
            f"user={getpass.getuser()}",
            f"format={_ASSOCIATION}",
        )
        qualities = _said("sacctmgr", "-nP", "show", "qos", f"format={_QUALITY}")
        partition = _fields_of_partition(_said("scontrol", "-o", "show", "partition"))
    except (OSError, KeyError, subprocess.SubprocessError):
        return [Finding(name, True, "not known: the accounting of Slurm does not answer")]
    rows = _rows(ours, qualities, partition)
    cpus = min(
        (int(n) for _, tres, _, _ in rows for n in re.findall(r"\bcpu=(\d+)", tres)), default=None
    )
    jobs = min((int(most) for _, _, most, _ in rows if most), default=None)
    minutes = min((_minutes(wall) for *_, wall in rows if wall), default=None)
    told = [f"{cpus} CPUs at once"] if cpus is not None else []
    told += [f"{jobs} job{'s' * (jobs != 1)} at once"] if jobs is not None else []
    told += [f"{minutes:.0f} minutes a job"] if minutes is not None else []
    said = (
        f"{' and '.join(dict.fromkeys(row[0] for row in rows)) or 'no QOS'}:"
        f" {', '.join(told) or 'none'}"
    )
    ask = (
        "ask for a higher limit, or set COURSE_PP_WHERE=local, which runs everything on this"
        " machine"
    )
    if cpus is not None and cpus < _RANKS:
        breaks = "notebooks 02 to 04 and 08, whose job of 8 ranks waits for ever"
        return [Finding(name, False, f"{said}; {_RANKS} CPUs needed", breaks, ask)]
    if jobs is not None and jobs < _JOBS:
        breaks = "%torchrun cells after an on_ranks in all notebooks, which wait until its job ends"
        return [Finding(name, False, f"{said}; {_JOBS} jobs needed", breaks, ask)]
    if minutes is not None and minutes < _MINUTES:
        remedy = f"set time_limit in site.toml to at most {minutes:.0f} minutes"
        return [
            Finding(
                name,
                False,
                f"{said}; {_MINUTES} minutes needed",
                "on_ranks in all notebooks",
                remedy,
            )
        ]
    return [Finding(name, True, said)]


def _said(*command: str) -> list[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_ANSWER_LIMIT_S, check=True
    )
    return done.stdout.splitlines()


def _fields_of_partition(lines: list[str]) -> dict[str, str]:
    """Return the fields of the partition that jobs go to; none if it is not there, which another line says."""
    site = load_site()
    wanted = site.cpu_partition or site.partition
    for line in lines:
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        if fields.get("PartitionName") == wanted or (not wanted and fields.get("Default") == "YES"):
            return fields
    return {}


def _rows(
    ours: list[str], qualities: list[str], partition: dict[str, str]
) -> list[tuple[str, str, str, str]]:
    """Of each that limits a job without further words: name, resources, jobs at once, time."""
    rows, used = [], set()
    for line in ours:
        default, allowed, most, group, jobs, wall = (line.split("|") + [""] * 6)[:6]
        rows.append(("your account", f"{most},{group}", jobs, wall))
        names = allowed.split(",")
        used.add(default or (names[0] if len(names) == 1 else "normal"))
    if partition.get("QoS", "N/A") != "N/A":
        used.add(partition["QoS"])
    for line in qualities:
        name, most, user, group, jobs, wall = (line.split("|") + [""] * 6)[:6]
        if name in used:
            rows.append((f"QOS {name}", f"{most},{user},{group}", jobs, wall))
    return rows


def _minutes(wall: str) -> float:
    """Of Slurm's ``days-hours:minutes:seconds``."""
    days, _, rest = wall.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return 1440 * int(days or 0) + 60 * hours + minutes + seconds / 60


CHECKS = (
    Check("Slurm limits", limits, "runs on the cluster"),
    Check("Slurm", slurm, "runs on the cluster"),
    Check("two ranks", ranks, _ALL),
)
