"""The one place that decides where ranks run: on this machine, inside a Slurm job, or in a job of their own."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from course_pp.launch.site import Site, load_site

_ANSWER_LIMIT_S = 5.0
CHOICES = ("local", "slurm", None)
# Left over between a run's own time limit, which says who waits for whom, and the job's, which does not.
_SLACK_S = 60
# For the calls that follow the first one in the same job.
_CALLS_S = 600
# Beside a call's own limit, in a job: to start Python and torch from files that come over the network, and to end.
_START_AND_END_S = 120.0


@dataclass(frozen=True)
class Needs:
    """What a run needs.

    Attributes:
        nodes: number of nodes.
        ranks: on each of them, None if the launcher finds out by itself.
        seconds: the run's own time limit.
        calls: whether the job is kept for more of the kind.
        gpus: whether ranks compute on GPUs where there are some.
    """

    nodes: int
    ranks: int | None
    seconds: float
    calls: bool = False
    gpus: bool = True

    @classmethod
    def of_call(cls, n: int, timeout_s: float, backend: str | None) -> Needs:
        """Return what a call of ``on_ranks`` needs. Ranks that meet over gloo leave the GPUs to others."""
        return cls(1, n, timeout_s + _START_AND_END_S, calls=True, gpus=backend != "gloo")


@dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        said: the decision as a sentence.
        srun: what goes before the command of each node; empty on this machine.
        job: id of the surrounding job, if ranks run inside one.
        site: settings of the cluster.
        fallen_back: whether ranks run on this machine although srun is there and the caller did not ask for it.
    """

    said: str
    srun: tuple[str, ...] = ()
    job: str | None = None
    site: Site = field(default_factory=Site)
    fallen_back: bool = False

    @property
    def local(self) -> bool:
        return not self.srun


@dataclass(frozen=True)
class Nodes:
    """What a partition's nodes have at most."""

    cpus: int
    gpus: int


def decide(
    needs: Needs,
    where: str | None = None,
    environ: Mapping[str, str] | None = None,
    kept: Callable[[Needs, Site, str | None], Place | None] = lambda needs, site, job: None,
) -> Place:
    """Decide for a Slurm job we are in, else for a job of our own if a cluster answers, else for this machine.

    Args:
        needs: those of the run.
        where: ``"local"`` or ``"slurm"`` leave no choice; None takes ``$COURSE_PP_WHERE`` or decides.
        kept: returns the place of a waiting job that will do, given the request, the cluster's settings and the
            surrounding job.

    Raises:
        ValueError: ``where`` is neither, or the surrounding job has too few nodes.
        RuntimeError: ``where="slurm"`` and there is no cluster, or there is one that does not answer in time.
    """
    environ = os.environ if environ is None else environ
    where = where or environ.get("COURSE_PP_WHERE") or None
    if where not in CHOICES:
        raise ValueError(f"where is {where!r}; it must be 'local', 'slurm' or None, which decides by itself.")
    if where == "local":
        return Place(_on_this_machine(needs, environ))
    if not shutil.which("srun", path=environ.get("PATH")):
        if where == "slurm":
            raise RuntimeError("where is 'slurm', but there is no srun on PATH. Load Slurm's module, or leave it out.")
        return Place(_on_this_machine(needs, environ))
    site, job = load_site(environ), environ.get("SLURM_JOB_ID")
    if waiting := kept(needs, site, job):
        return waiting
    if job is not None:
        return _inside(needs, site, job, environ)
    nodes = _nodes(_partition(needs, site), environ)
    if nodes is None:
        if where == "slurm":
            raise RuntimeError("where is 'slurm', but no cluster answers: `sinfo` fails. Ask whoever runs it.")
        return Place(f"{_on_this_machine(needs, environ)} No cluster answers behind srun.", fallen_back=True)
    return _submitted(needs, site, nodes)


def certainly_here() -> bool:
    """Return whether the next `on_ranks` runs on this machine, as far as can be said without asking a cluster."""
    return os.environ.get("COURSE_PP_WHERE") == "local" or on_a_node() or not shutil.which("srun")


def on_a_node() -> bool:
    """Return whether this is a node of a Slurm job. A step would only start the same ranks here, seconds later."""
    return "SLURMD_NODENAME" in os.environ


def _on_this_machine(needs: Needs, environ: Mapping[str, str]) -> str:
    gpus = _gpus_here(environ) if needs.gpus else 0
    if gpus == 0:
        return "Ranks run on this machine, on the CPU."
    if needs.ranks is not None and needs.ranks > gpus:
        return f"Ranks run on this machine, on the CPU: it has {_count(gpus, 'GPU')} for {_count(needs.ranks, 'rank')}."
    return f"Ranks run on this machine, which has {_count(gpus, 'GPU')}."


def _inside(needs: Needs, site: Site, job: str, environ: Mapping[str, str]) -> Place:
    held = _leading_number(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")) or needs.nodes
    if needs.nodes > held:
        raise ValueError(
            f"--nnodes={needs.nodes}, but Slurm job {job}, in which this runs, holds {_count(held, 'node')}. "
            "Take fewer, or start a job with more."
        )
    # A step that asks for more cores than the job holds on a node is refused.
    cores = _leading_number(environ.get("SLURM_JOB_CPUS_PER_NODE")) or sys.maxsize
    ranks = needs.ranks or 1
    cpus = min(ranks * site.cpus_per_rank, cores)
    few = f", where {_count(ranks, 'rank')} share {_count(cores, 'core')}" if cores < ranks else ""
    # Without --overlap the step would wait for what the step of the notebook holds.
    srun = ("srun", "--overlap", *_tasks(needs), "-c", str(cpus), *site.options)
    return Place(f"Ranks run inside Slurm job {job}, on {_count(needs.nodes, 'node')}{few}.", srun, job, site)


def _submitted(needs: Needs, site: Site, nodes: Nodes) -> Place:
    most = nodes.gpus if site.gpus_per_node is None else site.gpus_per_node
    gpus = min(needs.ranks or most, most) if site.gres and needs.gpus else 0
    cpus = min((needs.ranks or max(1, gpus)) * site.cpus_per_rank, nodes.cpus)
    srun = ["srun"]
    partition = _partition(needs, site)
    srun += ["-p", partition] if partition else []
    srun += ["-A", site.account] if site.account else []
    srun += [*_tasks(needs), "-c", str(cpus)]
    if gpus:
        gres = site.gres.format(n=gpus)
        srun.append(gres if gres.startswith("-") else f"--gres={gres}")
    seconds = needs.seconds + _SLACK_S + (_CALLS_S if needs.calls and site.keep_s else 0)
    srun += ["-t", site.time_limit or str(math.ceil(seconds / 60)), *site.options]
    each = f", {_count(gpus, 'GPU')}{' on each' if needs.nodes > 1 else ''}"
    if needs.ranks is not None and needs.ranks > gpus:
        each += f" for {_count(needs.ranks, 'rank')}"
    what = f"{_count(needs.nodes, 'node')}{each if gpus else ', CPU only'}"
    return Place(f"Ranks run in a Slurm job of their own: {what}.", tuple(srun), None, site)


def _partition(needs: Needs, site: Site) -> str:
    return site.partition if needs.gpus else site.cpu_partition or site.partition


def _tasks(needs: Needs) -> tuple[str, ...]:
    """Ask for one task a node; where one fails, those of other nodes would wait for it for ever."""
    return ("-N", str(needs.nodes), "-n", str(needs.nodes), *(("-K1",) if needs.nodes > 1 else ()))


def _nodes(partition: str, environ: Mapping[str, str]) -> Nodes | None:
    """Return what the partition has, ours or the default one; None if there is no cluster behind the tools, only they.

    Raises RuntimeError if there is one that does not answer: a controller may be slow, and a login node is no place
    for ranks.
    """
    sinfo = shutil.which("sinfo", path=environ.get("PATH"))
    if sinfo is None:
        return None
    try:
        answer = subprocess.run(
            [sinfo, "--noheader", "--format=%P|%c|%G"],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_ANSWER_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the cluster does not answer: `sinfo` took more than {_ANSWER_LIMIT_S:g} s. Call again later, or run on "
            'this machine: where="local", %torchrun --local, or COURSE_PP_WHERE=local.'
        ) from None
    if answer.returncode:
        return None
    rows = [row.split("|", 2) for row in answer.stdout.splitlines() if row.count("|") >= 2]
    ours = [row for row in rows if (row[0].rstrip("*") == partition if partition else row[0].endswith("*"))] or rows
    return Nodes(
        cpus=max((_leading_number(row[1]) or 1 for row in ours), default=sys.maxsize),
        gpus=max((sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", row[2]))) for row in ours), default=0),
    )


def _gpus_here(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(1 for device in visible.split(",") if device.strip() not in ("", "-1"))
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _leading_number(text: str | None) -> int | None:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
