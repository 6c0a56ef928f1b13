"""What Slurm lets one user have at once, as its accounting says: what would leave a job waiting for ever."""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess

from course_pp.doctor.finding import Check, Finding
from course_pp.doctor.running import configured
from course_pp.launch.where import load_site

_ANSWER_LIMIT_S = 4.0
_RANKS, _JOBS, _MINUTES = 8, 2, 10
_ASSOCIATION = "DefaultQOS,QOS,MaxTRES,GrpTRES,MaxJobs,MaxWall"
_QUALITY = "Name,MaxTRES,MaxTRESPU,GrpTRES,MaxJobsPU,MaxWall"


def limits() -> list[Finding]:
    """Say which limits of user, QOS and partition hold, and which of them the course would meet."""
    name = "Slurm limits"
    if not all(map(shutil.which, ("sinfo", "sacctmgr", "scontrol"))) or not configured():
        return []
    try:
        ours = _said("sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", f"format={_ASSOCIATION}")
        qualities = _said("sacctmgr", "-nP", "show", "qos", f"format={_QUALITY}")
        partition = _partition(_said("scontrol", "-o", "show", "partition"))
    except (OSError, KeyError, subprocess.SubprocessError):
        return [Finding(name, True, "not known: the accounting of Slurm does not answer")]
    rows = _rows(ours, qualities, partition)
    cpus = min((n for _, tres, _, _ in rows for n in _cpus(tres)), default=None)
    jobs = min((int(most) for _, _, most, _ in rows if most), default=None)
    minutes = min((_minutes(wall) for *_, wall in rows if wall), default=None)
    told = [f"{cpus} CPUs at once"] * (cpus is not None) + [f"{jobs} job{'s' * (jobs != 1)} at once"] * (
        jobs is not None
    )
    told += [f"{minutes:.0f} minutes a job"] if minutes is not None else []
    said = f"{' and '.join(dict.fromkeys(row[0] for row in rows)) or 'no QOS'}: {', '.join(told) or 'none'}"
    ask = "ask for a higher limit, or set COURSE_PP_WHERE=local, which runs everything on this machine"
    if cpus is not None and cpus < _RANKS:
        breaks = "notebooks 02 to 04 and 08, whose job of 8 ranks waits for ever"
        return [Finding(name, False, f"{said}; {_RANKS} CPUs needed", breaks, ask)]
    if jobs is not None and jobs < _JOBS:
        breaks = "%torchrun cells after an on_ranks in all notebooks, which wait until its job ends"
        return [Finding(name, False, f"{said}; {_JOBS} jobs needed", breaks, ask)]
    if minutes is not None and minutes < _MINUTES:
        remedy = f"set time_limit in site.toml to at most {minutes:.0f} minutes"
        return [Finding(name, False, f"{said}; {_MINUTES} minutes needed", "on_ranks in all notebooks", remedy)]
    return [Finding(name, True, said)]


def _said(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_LIMIT_S, check=True)
    return done.stdout.splitlines()


def _partition(lines: list[str]) -> dict[str, str]:
    """Return the fields of the partition that jobs go to; none if it is not there, which another line says."""
    site = load_site()
    wanted = site.cpu_partition or site.partition
    for line in lines:
        fields = dict(re.findall(r"(\w+)=(\S+)", line))
        if fields.get("PartitionName") == wanted or (not wanted and fields.get("Default") == "YES"):
            return fields
    return {}


def _rows(ours: list[str], qualities: list[str], partition: dict[str, str]) -> list[tuple[str, str, str, str]]:
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


def _cpus(resources: str) -> list[int]:
    return [int(n) for n in re.findall(r"\bcpu=(\d+)", resources)]


def _minutes(wall: str) -> float:
    """Of Slurm's ``days-hours:minutes:seconds``."""
    days, _, rest = wall.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return 1440 * int(days or 0) + 60 * hours + minutes + seconds / 60


CHECKS = (Check("Slurm limits", limits, "runs on the cluster"),)
