"""Decides where ranks run: on this machine, inside a Slurm job, or in a job of their own.

The names that a cluster gives to its partitions, accounts, GPUs and modules stand in one file,
site.toml, never in a notebook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from course_pp.base.arguments import checked

_FILE = "site.toml"
_ROOT_MARKS = (".git", "pyproject.toml")
_ABOVE_THE_PACKAGE = Path(__file__).resolve().parents[2]
_ANSWER_LIMIT_S = 5.0
# The run's own time limit must come first: its message says which rank waits for which.
_SLACK_S = 60
# Time for the calls that follow the first one in the same job.
_CALLS_S = 600
# A job also needs time to load Python and torch over the network, and to end.
_START_AND_END_S = 120.0


@checked
@dataclass(frozen=True)
class Site:
    """The settings with which jobs are submitted here. The defaults work on most clusters.

    Attributes:
        partition, account: Slurm's names for both; empty takes the cluster's own default.
        cpu_partition: the partition for jobs without GPUs, such as those of ``on_ranks`` over gloo;
            empty takes ``partition``.
        time_limit: the limit of a job, as Slurm writes it (``"00:10:00"``). Empty asks for little
            more than the run's own limit, and for ten minutes of further calls of ``on_ranks``.
        gres: the request for GPUs. ``"gpu:{n}"`` becomes ``--gres=gpu:2``. A text that begins with
            a dash, such as ``"--gpus-per-node={n}"``, is passed as it is. Empty asks for none.
        gpus_per_node: the most GPUs to ask for on a node; None asks the cluster.
        cpus_per_rank: cores to ask for, a rank.
        setup: lines of bash that a task runs first, for example ``module load cuda``. If one fails,
            the task ends.
        container: words before the command, for example ``apptainer exec --nv course.sif``.
        python: the interpreter on the nodes; empty is the one that runs here.
        options: more options of srun, but no job name.
        folder: a folder that all nodes see; ``~`` and variables such as ``$USER`` stand for each
            person's own.
        keep_s: seconds for which the job of ``on_ranks`` waits for the next call, unless other jobs
            of the course wait for its cores; 0 takes a new job for each call.
    """

    partition: str = ""
    cpu_partition: str = ""
    account: str = ""
    time_limit: str = ""
    gres: str = "gpu:{n}"
    gpus_per_node: int | None = None
    cpus_per_rank: int = 1
    setup: tuple[str, ...] = ()
    container: str = ""
    python: str = ""
    options: tuple[str, ...] = ()
    folder: str = "~/.cache/course_pp"
    keep_s: int = 300


def load_site() -> Site:
    """Read the settings of this cluster; return the defaults if there is no file."""
    file = site_file()
    return _read(file) if file else Site()


def site_file() -> Path | None:
    """Return the file that `load_site` reads, the nearest to the person; None if there is none.

    The first of these that exists: ``$COURSE_PP_SITE``; site.toml here or in a folder above, up to
    the root of the repository; ``~/.config/course_pp/site.toml``; site.toml in the root of the
    clone that holds this package, for all who share the clone.
    """
    if named := os.environ.get("COURSE_PP_SITE"):
        if not Path(named).is_file():
            raise FileNotFoundError(
                f"COURSE_PP_SITE is {named!r}, which is no file. Correct it, or unset it."
            )
        return Path(named)
    here = Path.cwd()
    places = []
    for folder in (here, *here.parents):
        places.append(folder / _FILE)
        if _is_a_repository(folder):
            break
    else:
        # Outside any repository, a file of the same name further up is somebody else's.
        places = places[:1]
    with contextlib.suppress(RuntimeError):  # a user without a home
        places.append(Path.home() / ".config" / "course_pp" / _FILE)
    if _is_a_repository(_ABOVE_THE_PACKAGE):  # a clone, not the folder of installed packages
        places.append(_ABOVE_THE_PACKAGE / _FILE)
    return next((file for file in places if file.is_file()), None)


def _is_a_repository(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in _ROOT_MARKS)


def _read(file: Path) -> Site:
    try:
        values: dict[str, Any] = tomllib.loads(file.read_text())
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error.strerror}. Its owner can `chmod a+r` it, or"
            " COURSE_PP_SITE name another."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not TOML: {error}.") from None

    known = [field.name for field in dataclasses.fields(Site)]
    for key in values.keys() - known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
        raise ValueError(f"{file} sets {key!r}, which is no setting; {remedy}")
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    try:
        site = Site(**values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None

    # Jobs of the course find each other by name, to give way to one that waits.
    for option in site.options:
        if option.startswith(("-J", "--job-")):
            raise ValueError(
                f"{file}: options name the job by {option!r}; leave that out: jobs of the course"
                " know each other by name."
            )
    # A pattern that gives the same text for 1 and for 2 GPUs does not use {n}.
    try:
        counts = not site.gres or site.gres.format(n=1) != site.gres.format(n=2)
    except (KeyError, IndexError, ValueError):
        counts = False
    if not counts:
        raise ValueError(
            f"{file}: gres is {site.gres!r}; the number of GPUs goes where {{n}} stands:"
            ' "gpu:{n}" or "--gpus-per-node={n}". To ask for none, leave it empty.'
        )
    return replace(
        site, python=os.path.expanduser(site.python), folder=os.path.expandvars(site.folder)
    )


@dataclass(frozen=True)
class Needs:
    """The request of a run."""

    nodes: int
    ranks: int | None  # on each node; None if the launcher finds out by itself
    seconds: float  # the run's own time limit
    calls: bool = False  # whether the job is kept for further calls
    gpus: bool = True  # whether ranks compute on GPUs where there are some

    @classmethod
    def of_call(cls, n: int, timeout_s: float, backend: str | None) -> Needs:
        """Return the request of a call of ``on_ranks``.

        Ranks that meet over gloo leave the GPUs to others.
        """
        return cls(1, n, seconds=timeout_s + _START_AND_END_S, calls=True, gpus=backend != "gloo")


@dataclass(frozen=True)
class Place:
    """The place where ranks run.

    Attributes:
        said: the decision as a sentence.
        srun: words before the command of each node; empty on this machine.
        job: the number of the surrounding job, if ranks run inside one.
        site: the settings of the cluster.
        fallen_back: whether ranks run on this machine although there is an srun, and the caller
            did not ask for that.
    """

    said: str
    srun: tuple[str, ...] = ()
    job: str | None = None
    site: Site = field(default_factory=Site)
    fallen_back: bool = False

    @property
    def local(self) -> bool:
        return not self.srun

    def command(
        self, program: Sequence[str], args: Sequence[str], meets: bool = False
    ) -> list[str]:
        """Return ``program args`` behind srun, in its container, after its set-up lines.

        ``meets`` adds the options by which the torchruns of several nodes find each other. Nodes
        take the numbers that Slurm gave them.
        """
        if self.local:
            return [*program, *args]
        program = [*shlex.split(self.site.container), *program]
        if not self.site.setup and not meets:
            return [*self.srun, *program, *args]
        lines = []
        if self.site.setup:
            # Many set-up lines fail without a word, so the trap names the line. Standard input
            # belongs to the program: a set-up line must not read it.
            strict = r'set -e; trap "echo set-up failed: \$BASH_COMMAND >&2" ERR'
            lines += [strict, "{", *self.site.setup, "} </dev/null"]
        options = ""
        if meets:
            meeting = Path(__file__).with_name("meet.sh").read_text().splitlines()
            lines += [line for line in meeting if not line.startswith("#")]
            options = " --node-rank=$SLURM_NODEID --master-addr=$head --master-port=$port"
        lines.append(f'exec {shlex.join(program)}{options} "$@"')
        return [*self.srun, "bash", "-c", "\n".join(lines), "bash", *args]


def decide(
    needs: Needs,
    where: str | None = None,
    kept: Callable[[Needs, Site, str | None], Place | None] = lambda needs, site, job: None,
) -> Place:
    """Decide where a run takes place.

    A Slurm job that surrounds this process comes first, then a job of our own if a cluster answers,
    then this machine.

    Args:
        where: ``"local"`` or ``"slurm"``, which leave no choice; None takes ``$COURSE_PP_WHERE``
            or decides.
        kept: a function of the request, the cluster's settings and the surrounding job. It returns
            the place of a job that already waits for such a run, or None.
    """
    where = where or os.environ.get("COURSE_PP_WHERE") or None
    if where not in ("local", "slurm", None):
        raise ValueError(
            f"where={where!r}: give 'local' or 'slurm', or None to let course_pp decide."
        )
    if where == "local":
        return Place(_on_this_machine(needs))
    if not shutil.which("srun"):
        if where == "slurm":
            raise RuntimeError(
                "where='slurm', but there is no srun on PATH. Load Slurm's module, or leave"
                " where= out."
            )
        return Place(_on_this_machine(needs))
    site = load_site()
    job = os.environ.get("SLURM_JOB_ID")
    if waiting := kept(needs, site, job):
        return waiting
    if job is not None:
        return _inside(needs, site, job)
    nodes = _nodes(_partition(needs, site))
    if nodes is None:
        if where == "slurm":
            raise RuntimeError(
                "where='slurm', but no cluster answers: `sinfo` fails. Ask the cluster's"
                " administrators."
            )
        return Place(f"{_on_this_machine(needs)} No cluster answers behind srun.", fallen_back=True)
    return _submitted(needs, site, *nodes)


def certainly_here() -> bool:
    """Return whether the next `on_ranks` runs on this machine; False if only a cluster knows."""
    return os.environ.get("COURSE_PP_WHERE") == "local" or on_a_node() or not shutil.which("srun")


def on_a_node() -> bool:
    """Return whether this is a node of a Slurm job.

    There a step of Slurm would only start the same ranks on the same node, seconds later.
    """
    return "SLURMD_NODENAME" in os.environ


def _on_this_machine(needs: Needs) -> str:
    gpus = _gpus_here() if needs.gpus else 0
    if gpus == 0:
        return "Ranks run on this machine, on the CPU."
    if needs.ranks is not None and needs.ranks > gpus:
        return (
            f"Ranks run on this machine, on the CPU: it has {_count(gpus, 'GPU')} for"
            f" {_count(needs.ranks, 'rank')}."
        )
    return f"Ranks run on this machine, which has {_count(gpus, 'GPU')}."


def _inside(needs: Needs, site: Site, job: str) -> Place:
    held = (
        _leading_number(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES"))
        or needs.nodes
    )
    if needs.nodes > held:
        raise ValueError(
            f"--nnodes={needs.nodes}, but Slurm job {job}, in which this runs, holds"
            f" {_count(held, 'node')}. Take fewer, or start a job with more."
        )
    # Slurm refuses a step that asks for more cores than the job holds on a node.
    cores = _leading_number(os.environ.get("SLURM_JOB_CPUS_PER_NODE")) or sys.maxsize
    ranks = needs.ranks or 1
    cpus = min(ranks * site.cpus_per_rank, cores)
    said = f"Ranks run inside Slurm job {job}, on {_count(needs.nodes, 'node')}"
    if cores < ranks:
        said += f", where {_count(ranks, 'rank')} share {_count(cores, 'core')}"
    # Without --overlap the step would wait for the cores that the notebook's own step holds.
    srun = ("srun", "--overlap", *_tasks(needs), "-c", str(cpus), *site.options)
    return Place(f"{said}.", srun, job=job, site=site)


def _submitted(needs: Needs, site: Site, most_cpus: int, most_gpus: int) -> Place:
    most = most_gpus if site.gpus_per_node is None else site.gpus_per_node
    gpus = min(needs.ranks or most, most) if site.gres and needs.gpus else 0
    cpus = min((needs.ranks or max(1, gpus)) * site.cpus_per_rank, most_cpus)
    seconds = needs.seconds + _SLACK_S
    if needs.calls and site.keep_s:
        seconds += _CALLS_S

    srun = ["srun"]
    if partition := _partition(needs, site):
        srun += ["-p", partition]
    if site.account:
        srun += ["-A", site.account]
    srun += [*_tasks(needs), "-c", str(cpus)]
    if gpus:
        gres = site.gres.format(n=gpus)
        srun.append(gres if gres.startswith("-") else f"--gres={gres}")
    srun += ["-t", site.time_limit or str(math.ceil(seconds / 60)), *site.options]

    said = f"Ranks run in a Slurm job of their own: {_count(needs.nodes, 'node')}, "
    said += _count(gpus, "GPU") if gpus else "CPU only"
    if gpus and needs.nodes > 1:
        said += " on each"
    if gpus and needs.ranks is not None and needs.ranks > gpus:
        said += f" for {_count(needs.ranks, 'rank')}"
    return Place(f"{said}.", tuple(srun), site=site)


def _partition(needs: Needs, site: Site) -> str:
    return site.partition if needs.gpus else site.cpu_partition or site.partition


def _tasks(needs: Needs) -> tuple[str, ...]:
    """Return the options that ask for one task a node."""
    tasks = ("-N", str(needs.nodes), "-n", str(needs.nodes))
    # -K1 ends all tasks when one fails: the others would wait for it for ever.
    return (*tasks, "-K1") if needs.nodes > 1 else tasks


def _nodes(partition: str) -> tuple[int, int] | None:
    """Return the most cores and the most GPUs of a node of the partition; None without a cluster.

    An empty ``partition`` stands for the default one. RuntimeError if the cluster does not answer:
    its controller may only be slow, and a login node is no place for ranks.
    """
    if not shutil.which("sinfo"):
        return None
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%P|%c|%G"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"the cluster does not answer: `sinfo` took more than {_ANSWER_LIMIT_S:g} s. Call again"
            ' later, or run on this machine: where="local", %torchrun --local, or'
            " COURSE_PP_WHERE=local."
        ) from None
    if answer.returncode:
        return None
    rows = [row.split("|", 2) for row in answer.stdout.splitlines() if row.count("|") >= 2]
    if partition:
        ours = [row for row in rows if row[0].rstrip("*") == partition]
    else:
        ours = [row for row in rows if row[0].endswith("*")]  # sinfo marks the default one so
    cpus, gpus = [], []
    for _, cores, gres in ours or rows:
        cpus.append(_leading_number(cores) or 1)
        gpus.append(sum(map(int, re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))))
    return max(cpus, default=sys.maxsize), max(gpus, default=0)


def _gpus_here() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(1 for device in visible.split(",") if device.strip() not in ("", "-1"))
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _leading_number(text: str | None) -> int | None:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
