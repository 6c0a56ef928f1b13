"""Checks that run something: two ranks on this machine, and a job of two tasks on a Slurm cluster.

The two ranks start from a process of its own with a time limit, so nobody waits for long if they
cannot meet.
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

from course_pp.doctor.finding import Check, Finding, right, wrong
from course_pp.launch.where import Needs, Site, decide, load_site, site_file

_RANKS_LIMIT_S = 16.5
_ANSWER_LIMIT_S = 4.0
_JOB_LIMIT_S = 10.0
_SLOW_CALL_S = 2.0
# The course needs that many cores and jobs of Slurm at once, and that many minutes a job.
_RANKS = 8
_JOBS = 2
_MINUTES = 10
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
                dist.send(tensor, 1)
                dist.recv(tensor, 1)
            else:
                dist.recv(tensor, 0)
                dist.send(tensor, 0)
        return (time.monotonic() - begun) / times / 2

    small = torch.zeros(1)
    large = torch.zeros(n_bytes, dtype=torch.uint8)
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
        says = "not tried: torch or cloudpickle is missing"
        return [wrong(name, says, breaks=_ALL, remedy="see the line of the package")]

    # The probe may start in a folder from which Python does not find this package.
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [sys.executable, "-c", _PROBE, str(_LARGE)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = child.communicate(timeout=_RANKS_LIMIT_S)
    except subprocess.TimeoutExpired:
        # The process that forks the ranks ends when its caller is gone, and the ranks with it.
        child.kill()
        child.communicate()
        says = f"they have not met after {_RANKS_LIMIT_S:.0f} s"
        return [wrong(name, says, breaks=_ALL, remedy=_REMEDY)]
    if child.returncode:
        last = _last_line(err, otherwise=f"exit status {child.returncode}")
        return [wrong(name, f"they fail ({last})", breaks=_ALL, remedy=_REMEDY)]
    first, later, latency, bandwidth = json.loads(out.splitlines()[-1])
    says = f"{latency * 1e6:.0f} µs for 4 bytes, {bandwidth / 1e9:.1f} GB/s for 16 MiB"
    return [_calls(name, first, later=later), right("messages", says)]


def _calls(name: str, first: float, later: float) -> Finding:
    """Judge the seconds that the first and a later call of ``on_ranks`` took."""
    says = f"on_ranks(2, ...) took {first:.1f} s the first time, {later:.1f} s the second"
    if later <= _SLOW_CALL_S:
        return right(name, says)
    # There is nothing to mend if other programs hold the cores: it passes when they end.
    if busy := _busy():
        return right(name, f"slow: the machine is busy ({busy}); {says}")
    breaks = f"no cell, but every on_ranks and check of {_ALL} takes as long"
    remedy = "close what else runs here; put .venv on a local disk"
    return wrong(name, says, breaks=breaks, remedy=remedy)


def _busy() -> str:
    """Return the load in words if more threads want to run than the machine has cores; else ""."""
    cores = os.cpu_count() or 1
    try:
        # The mean of the last minute, to which the few seconds of the doctor itself add little.
        load, _, _ = os.getloadavg()
    except OSError:  # the system does not tell its load
        return ""
    return f"load {load:.1f} on {cores} cores" if load > cores else ""


def slurm() -> list[Finding]:
    """Say which settings hold, whether a cluster answers, and whether two tasks see our files."""
    if not shutil.which("srun"):
        return [right("Slurm", "none; ranks run on this machine")]
    try:
        site = load_site()
        file = site_file()
    except (OSError, ValueError) as error:
        says = f"cannot be read ({error})"
        return [wrong("site.toml", says, breaks=_ON_THE_CLUSTER, remedy="correct it")]
    says = _from_home(file) if file else "none; the cluster's own defaults hold"
    found = [right("site.toml", says), _sinfo(site)]
    # A job would only wait where no partition can take it.
    if found[-1].ok and found[-1].name == "partition":
        found.append(_job(site))
    return found


def _from_home(file: Path) -> str:
    with contextlib.suppress(RuntimeError, ValueError):  # a user without a home, a file elsewhere
        return f"~/{file.absolute().relative_to(Path.home())}"
    return str(file)


def _sinfo(site: Site) -> Finding:
    name = "Slurm"
    breaks = _ON_THE_CLUSTER
    remedy = (
        "ask whoever runs the cluster; until then COURSE_PP_WHERE=local runs everything on this"
        " machine"
    )
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        says = "srun is on PATH, sinfo is not"
        return wrong(name, says, breaks=breaks, remedy="load the whole of Slurm's module")
    try:
        done = subprocess.run(
            [sinfo, "--noheader", "--format=%P|%a|%l|%D|%T|%c"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        says = f"the cluster does not answer within {_ANSWER_LIMIT_S:.0f} s"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    if done.returncode:
        if not configured():
            says = "srun is installed, no cluster is configured; ranks run on this machine"
            return right(name, says)
        last = _last_line(done.stderr).removeprefix("sinfo: ").removeprefix("error: ")
        return wrong(name, f"the cluster is down ({last})", breaks=breaks, remedy=remedy)

    # A partition has a row for each state of its nodes. A star marks the default partition.
    rows = [row.split("|") for row in done.stdout.splitlines() if row.count("|") == 5]
    if site.partition:
        ours = [row for row in rows if row[0].rstrip("*") == site.partition]
    else:
        ours = [row for row in rows if row[0].endswith("*")]
    if not ours:
        known = ", ".join(sorted({row[0].rstrip("*") for row in rows})) or "none"
        says = f"no partition {site.partition!r}" if site.partition else "no default partition"
        says += f"; there are {known}"
        return wrong("partition", says, breaks=breaks, remedy="set partition in site.toml")
    usable = 0
    for _, available, _, nodes, state, _ in ours:
        # sinfo adds a mark to the state of a node that sleeps or does not answer.
        if available == "up" and state.rstrip("*$~#") in ("idle", "mixed", "allocated"):
            usable += int(nodes)
    partition, _, limit, _, _, cores = ours[0]
    says = f"{partition.rstrip('*')}: {usable} nodes usable, {cores} cores each, at most {limit}"
    if not usable:
        remedy = "wait for its nodes, or set another partition in site.toml"
        return wrong("partition", says, breaks=breaks, remedy=remedy)
    return right("partition", says)


def _last_line(text: str, otherwise: str = "") -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else otherwise


def configured() -> bool:
    """Return whether this machine has settings of a cluster, and not only its tools."""
    files = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf")
    return bool(os.environ.get("SLURM_CONF")) or any(Path(file).exists() for file in files)


def _job(site: Site) -> Finding:
    """Run two tasks that look for two files of ours: one lies here, one in the site's folder."""
    name = "Slurm job"
    breaks = _ON_THE_CLUSTER
    place = decide(Needs(1, 2, _JOB_LIMIT_S, gpus=False), "slurm")
    token = f".course_pp_doctor_{secrets.token_hex(4)}"
    files = [Path(folder).expanduser() / token for folder in (os.getcwd(), site.folder)]
    task = 'for file; do test -e "$file" && echo "seen" || echo "unseen $file"; done'
    options = ("-n", "2", f"--immediate={int(_ANSWER_LIMIT_S)}", "-D", "/")
    command = [*place.srun, *options, "sh", "-c", task, "sh", *map(str, files)]
    remedy = f"try it by hand: {' '.join([*place.srun, '-n', '2', 'hostname'])}"
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        done = subprocess.run(command, capture_output=True, text=True, timeout=_JOB_LIMIT_S)
    except subprocess.TimeoutExpired:
        says = f"two tasks have not run within {_JOB_LIMIT_S:.0f} s"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    except (OSError, RuntimeError) as error:
        says = f"no file for the nodes can be made ({error})"
        return wrong(name, says, breaks=breaks, remedy="set folder in site.toml")
    finally:
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
    if done.returncode:
        last = _last_line(done.stderr, otherwise=f"exit status {done.returncode}")
        return wrong(name, f"two tasks do not run ({last})", breaks=breaks, remedy=remedy)
    for line in done.stdout.splitlines():
        if line.startswith("unseen "):
            folder = Path(line.removeprefix("unseen ")).parent
            says = f"it runs, but its node does not see {folder}"
            remedy = "put the course, and folder of site.toml, on a file system that all nodes see"
            return wrong(name, says, breaks=breaks, remedy=remedy)
    seen = " and ".join(str(file.parent) for file in files)
    return right(name, f"{done.stdout.count('seen') // len(files)} tasks ran and saw {seen}")


def limits() -> list[Finding]:
    """Say which limits of user, QOS and partition hold, and which are too low for the course."""
    name = "Slurm limits"
    if not all(map(shutil.which, ("sinfo", "sacctmgr", "scontrol"))) or not configured():
        return []
    try:
        user = f"user={getpass.getuser()}"
        ours = _said("sacctmgr", "-nP", "show", "assoc", user, f"format={_ASSOCIATION}")
        qualities = _said("sacctmgr", "-nP", "show", "qos", f"format={_QUALITY}")
        partition = _fields_of_partition(_said("scontrol", "-o", "show", "partition"))
    except (OSError, KeyError, subprocess.SubprocessError):
        return [right(name, "not known: the accounting of Slurm does not answer")]

    # Several limits hold at once, so the lowest one counts.
    rows = _rows(ours, qualities, partition=partition)
    resources = " ".join(tres for _, tres, _, _ in rows)
    cpus = min(map(int, re.findall(r"\bcpu=(\d+)", resources)), default=None)
    jobs = min((int(most) for _, _, most, _ in rows if most), default=None)
    minutes = min((_minutes(wall) for *_, wall in rows if wall), default=None)
    told = []
    if cpus is not None:
        told.append(f"{cpus} CPUs at once")
    if jobs is not None:
        told.append(f"{jobs} {'job' if jobs == 1 else 'jobs'} at once")
    if minutes is not None:
        told.append(f"{minutes:.0f} minutes a job")
    names = " and ".join(dict.fromkeys(row[0] for row in rows)) or "no QOS"
    said = f"{names}: {', '.join(told) or 'none'}"
    ask = (
        "ask for a higher limit, or set COURSE_PP_WHERE=local, which runs everything on this"
        " machine"
    )
    if cpus is not None and cpus < _RANKS:
        breaks = "notebooks 02 to 04 and 08, whose job of 8 ranks waits for ever"
        return [wrong(name, f"{said}; {_RANKS} CPUs needed", breaks=breaks, remedy=ask)]
    if jobs is not None and jobs < _JOBS:
        breaks = "%torchrun cells after an on_ranks in all notebooks, which wait until its job ends"
        return [wrong(name, f"{said}; {_JOBS} jobs needed", breaks=breaks, remedy=ask)]
    if minutes is not None and minutes < _MINUTES:
        says = f"{said}; {_MINUTES} minutes needed"
        remedy = f"set time_limit in site.toml to at most {minutes:.0f} minutes"
        return [wrong(name, says, breaks="on_ranks in all notebooks", remedy=remedy)]
    return [right(name, said)]


def _said(*command: str) -> list[str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_ANSWER_LIMIT_S, check=True
    )
    return done.stdout.splitlines()


def _fields_of_partition(lines: list[str]) -> dict[str, str]:
    """Return the fields of the partition that jobs go to; none if there is no such partition.

    Another line of the doctor says so then.
    """
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
    """Return (name, resources, jobs at once, time) of each limit that holds for a plain job."""
    rows = []
    used = set()
    for line in ours:
        default, allowed, most, group, jobs, wall = (line.split("|") + [""] * 6)[:6]
        rows.append(("your account", f"{most},{group}", jobs, wall))
        # Without a default, Slurm takes the only allowed QOS, or else the one called normal.
        names = allowed.split(",")
        only = names[0] if len(names) == 1 else "normal"
        used.add(default or only)
    if partition.get("QoS", "N/A") != "N/A":
        used.add(partition["QoS"])
    for line in qualities:
        name, most, user, group, jobs, wall = (line.split("|") + [""] * 6)[:6]
        if name in used:
            rows.append((f"QOS {name}", f"{most},{user},{group}", jobs, wall))
    return rows


def _minutes(wall: str) -> float:
    """Return the minutes of a time that Slurm writes as ``days-hours:minutes:seconds``."""
    days, _, rest = wall.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return 1440 * int(days or 0) + 60 * hours + minutes + seconds / 60


CHECKS = (
    Check("Slurm limits", limits, "runs on the cluster"),
    Check("Slurm", slurm, "runs on the cluster"),
    Check("two ranks", ranks, _ALL),
)
