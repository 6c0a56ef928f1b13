"""Who am I among the ranks, which cores and which GPU are mine, and the process groups as one named mesh.

    ranks    torchrun's variables, else Slurm's, else a single process
    mesh     ``pp`` outermost, then ``dp_replicate``, ``dp_shard``, ``tp``
    experts  the same ranks, with ``dp_shard`` cut into ``efsdp`` × ``ep``: neighbours share the experts out

The outermost dimension has the largest stride between neighbours, so with ranks numbered node by node the
tensor-parallel ranks, which talk most, are the closest, and the pipeline stages, which talk least, the farthest.
"""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_pp.base.arguments import checked, refuse_bad_timeout
from course_pp.base.ranks import Ranks
from course_pp.parallel._torch import set_timeout

Backend = Literal["gloo", "nccl"]

_PORTS = range(15_000, 30_000)  # below Linux's ephemeral ports (32768 and up), so nothing else is handed one
_SCONTROL_LIMIT_S = 20
_LEFT_TO_THE_LAUNCHER_S = 5.0
_INTERRUPTED = 128 + signal.SIGINT  # as a shell counts
_TOPOLOGY = Path("/sys/devices/system/cpu")
# Which process has been bound to its cores: a second call finds only its part, and must not divide it again.
_DONE = "COURSE_PP_PINNED_PID"
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
_OF_EXPERTS = "_course_pp_experts"  # under which a mesh keeps the one of experts: torch's has no place for another
# What others call the same dimensions: a mesh with these would pass for one without any, and nothing would be cut.
# Those of experts lie within dp_shard.
_MISNAMED = frozenset(
    (
        *("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "batch", "pipe", "pipeline", "stage", "tensor"),
        *("model", "ep", "efsdp", "expert"),
    )
)


def get_world_info() -> tuple[int, int, int]:
    """Return ``(rank, local_rank, world_size)``; ``(0, 0, 1)`` outside any launcher.

    torchrun's RANK, LOCAL_RANK and WORLD_SIZE come first. Without them the SLURM_PROCID, SLURM_LOCALID and
    SLURM_NTASKS of ``srun`` are read and exported under torchrun's names, with MASTER_ADDR and MASTER_PORT
    derived from the job, so that ``init_method="env://"`` works under bare ``srun`` too.

    A batch script that runs Python without ``srun`` has Slurm's variables too, and would wait for tasks that were never
    started: start it with ``srun``, also for one task.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return _read("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "SLURM_PROCID" in os.environ:
        rank, local_rank, world_size = _read("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world_size))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(_slurm_local_world_size(world_size)))
        os.environ.setdefault("MASTER_ADDR", _slurm_master_address())
        # A port that every task of the step computes alike, and two steps of one job do not share.
        job, step = (int(re.sub(r"\D", "", os.environ.get(k, "")) or 0) for k in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        os.environ.setdefault("MASTER_PORT", str(_PORTS[(7919 * job + step) % len(_PORTS)]))
        return rank, local_rank, world_size
    return 0, 0, 1


def _read(*names: str) -> tuple[int, int, int]:
    values = []
    for name in names:
        text = os.environ.get(name)
        if text is None or not text.isdigit():
            raise ValueError(
                f"environment variable {name} is {text!r}, but {', '.join(names)} must all be whole numbers: "
                "start the ranks with torchrun or srun, or unset all three to run as one process"
            )
        values.append(int(text))
    rank, local_rank, world_size = values
    if rank >= world_size:
        raise ValueError(f"{names[0]}={rank} must be below {names[2]}={world_size}: unset or correct them")
    return rank, local_rank, world_size


def _slurm_local_world_size(world_size: int) -> int:
    """From a description such as ``"2(x3),1"``: three nodes with two tasks, then one with one."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or str(world_size)
    per_node = []
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        per_node += [int(tasks)] * int(repeat or 1)
    node = int(os.environ.get("SLURM_NODEID", 0))
    return per_node[node] if node < len(per_node) else world_size


def _slurm_master_address() -> str:
    """The first node's name if it is a host's, else the address at which Slurm itself reaches it (virtual nodes)."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    n_nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if n_nodes == "1" or not nodes:
        return "127.0.0.1"
    node = first_host(nodes)
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        pass
    try:
        asked = ["scontrol", "show", "node", node]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=_SCONTROL_LIMIT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    match = re.search(r"\bNodeAddr=(\S+)", answer)
    if match is None:
        raise ValueError(
            f"Slurm node {node!r} is no host's name and scontrol knows no address: set MASTER_ADDR yourself"
        )
    return match[1]


def first_host(nodelist: str) -> str:
    """First host of a Slurm node list: ``"gpu[03-05,9],cpu1"`` gives ``"gpu03"``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if match is None:
        raise ValueError(f"Slurm node list {nodelist!r} names no host: set MASTER_ADDR yourself")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match[0])


def is_rank_zero() -> bool:
    """Return True on global rank 0, by the process group if there is one, else by the launcher's variables."""
    return (dist.get_rank() if dist.is_initialized() else get_world_info()[0]) == 0


@contextmanager
def refusals_said_once(program: str) -> Iterator[None]:
    """End a script on a ``ValueError`` with exit code 2 and one message, not one traceback a rank.

    An interrupt (Ctrl-C, SIGINT) ends it with exit code 130 and one line of rank 0.

    Rank 0 prints the message. The others wait five seconds, in which the launcher ends them. If they are still there,
    the problem was theirs alone, and they print it.
    """
    try:
        yield
    except ValueError as error:
        rank = get_world_info()[0]
        if rank > 0:
            time.sleep(_LEFT_TO_THE_LAUNCHER_S)
        where = f" (rank {rank})" if rank > 0 else ""
        print(f"{program}: error{where}: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        if get_world_info()[0] == 0:
            print(f"{program}: interrupted", file=sys.stderr, flush=True)
        sys.exit(_INTERRUPTED)


# Which cores and how many threads a rank uses, so that the ranks of one node do not fight over them.


@dataclass(frozen=True)
class CoreShare:
    """The cores a rank may run on, whether `share_cores` bound it to them, and the threads torch uses."""

    cores: tuple[int, ...]
    pinned: bool
    threads: int


def share_cores() -> CoreShare:
    """Bind this rank to its part of the node's usable cores, and give it a thread for each; call it before any work.

    Nothing is bound where a node has fewer cores than ranks, where Slurm has bound each task to cores of its own (its
    task/affinity plugin does), and on systems other than Linux. A rank alone on its node keeps the threads it has.
    OMP_NUM_THREADS wins where it is set; torchrun sets it to 1 for more than one rank. Safe to call repeatedly.
    """
    _, local_rank, world_size = get_world_info()
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    usable, done = _usable_cores(), os.environ.get(_DONE) == str(os.getpid())
    bound = _bound_by_slurm(os.environ, len(usable), n_local)
    cores = usable if done or bound else cores_of(usable, local_rank, n_local, _places_of_cores(usable))
    if len(cores) < len(usable) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
        os.environ[_DONE], done = str(os.getpid()), True
    if n_local > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = len(cores) if done or bound else max(1, len(cores) // n_local)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return CoreShare(tuple(cores), done, torch.get_num_threads())


def cores_of(
    usable: Sequence[int], local_rank: int, n_local: int, places: Mapping[int, tuple[int, int]]
) -> tuple[int, ...]:
    """Return a local rank's part of the usable cores: adjacent ones, as many for each rank; all if there are too few.

    Args:
        places: (package, core) of a core by its number, where it is known. Numbers with the same place are hardware
            threads of one core (often i and i + N/2), which stay together unless there are more ranks than cores.
    """

    def place(core: int) -> tuple[int, int]:
        return places.get(core, (0, core))

    ordered = sorted(usable, key=lambda core: (place(core), core))
    whole = [tuple(threads) for _, threads in groupby(ordered, key=place)]
    units = whole if len(whole) >= n_local else [(core,) for core in ordered]
    each = len(units) // n_local
    mine = units[local_rank * each : (local_rank + 1) * each] if each else units
    return tuple(sorted(core for unit in mine for core in unit))


def _usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _places_of_cores(usable: Sequence[int], folder: Path = _TOPOLOGY) -> dict[int, tuple[int, int]]:
    """(package, core) of each usable core; empty where the system does not say it of all."""
    try:
        return {
            core: (
                int((folder / f"cpu{core}/topology/physical_package_id").read_text()),
                int((folder / f"cpu{core}/topology/core_id").read_text()),
            )
            for core in usable
        }
    except (OSError, ValueError):
        return {}


def _bound_by_slurm(environ: Mapping[str, str], n_usable: int, n_local: int) -> bool:
    """Return whether this rank is a task that srun has bound to no more cores than its part of the node's.

    SLURM_CPU_BIND_TYPE alone does not tell: it repeats the request, even if no plugin has carried it out.
    """
    kind = environ.get("SLURM_CPU_BIND_TYPE", "none").rstrip(":")
    on_node = int(environ.get("SLURM_CPUS_ON_NODE", os.cpu_count() or 1))
    return _is_task_of_srun(environ) and kind not in ("", "none") and n_usable <= max(1, on_node // n_local)


def _is_task_of_srun(environ: Mapping[str, str]) -> bool:
    """Return whether this rank is a task of bare ``srun``; under torchrun, the task is all ranks of the node."""
    return "SLURM_PROCID" in environ and not any(name.startswith("TORCHELASTIC_") for name in environ)


@checked
def get_device(backend: Backend | None = None, *, share: bool = False) -> torch.device:
    """Return this rank's device: a GPU of its own if every rank of this host has one, else the CPU, with a warning.

    Args:
        backend: as in :class:`DistributedConfig`; ``"gloo"`` means the CPU, and ``"nccl"`` refuses it.
        share: with fewer GPUs than ranks, neighbouring ranks get one GPU together. `course_pp.runtime` can run them.
    """
    n_gpus, n_ranks, rank = _visible_gpus()
    counted = f"{n_gpus} GPUs for {n_ranks} ranks"
    if backend == "nccl" and n_gpus < n_ranks:
        raise ValueError(
            f"backend='nccl' needs a GPU a rank, but this host has {counted}: start fewer ranks, or use backend='gloo'"
        )
    if backend == "gloo" or not n_gpus:
        return torch.device("cpu")
    if n_gpus >= n_ranks:
        return torch.device("cuda", rank)
    if share:
        return torch.device("cuda", rank * n_gpus // n_ranks)
    warnings.warn(
        f"this host has {counted}: computing on the CPU. Start a rank a GPU, let the runtime's ranks share them "
        "(share_gpus=True), or say backend='gloo' if that is what you want",
        stacklevel=3,
    )
    return torch.device("cpu")


def _visible_gpus() -> tuple[int, int, int]:
    """How many GPUs this rank sees, how many ranks see these same ones, and this rank's number among them."""
    _, local_rank, world_size = get_world_info()
    n, n_local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if n and _has_gpus_of_its_own(os.environ, n, n_local):
        return n, 1, 0
    return n, n_local, local_rank


def _has_gpus_of_its_own(environ: Mapping[str, str], n_visible: int, n_local: int) -> bool:
    """Return whether this rank's ``n_visible`` GPUs are hidden from the other ``n_local - 1`` ranks of its node.

    No variable holds what srun was asked for (``--gpus-per-task``, ``--ntasks-per-gpu=1``, ``--gpu-bind=single:1``), so
    it is inferred from the GPUs that the tasks have got; if Slurm does not count the node's, from what the batch script
    was asked for.
    """
    if not _is_task_of_srun(environ):
        return False
    dealt_out = n_visible * n_local <= int(environ.get("SLURM_GPUS_ON_NODE", 0))
    asked = (
        "SLURM_GPUS_PER_TASK" in environ
        or "1" in (environ.get("SLURM_NTASKS_PER_GPU"), environ.get("SLURM_NTASKS_PER_TRES"))
        or re.search(r"\b(single:1$|per_task:|map_gpu:)", environ.get("SLURM_GPU_BIND", "")) is not None
    )
    return dealt_out or (n_visible < n_local and asked)


@checked
@dataclass(frozen=True)
class DistributedConfig:
    """How many ways each kind of parallelism cuts the run.

    Attributes:
        pp: pipeline-parallel ranks.
        dp_replicate: copies of the sharded model (HSDP); 1 for none.
        dp_shard: ranks a parameter is sharded over (FSDP2); -1 takes what the other factors leave.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks, neighbours among the ``dp_shard`` ones: each has data of its own, and a part of the
            experts; it divides ``dp_shard``.
        backend: ``"gloo"`` or ``"nccl"``; None takes NCCL where every local rank has a GPU, else gloo.
        timeout_s: seconds a collective may wait for its peers.
        share_gpus: where a host has fewer GPUs than ranks, several ranks compute on one, and what they send goes
            through host memory (gloo). Only `course_pp.runtime` can do that. Build the stages on
            ``get_device(share=True)``, too.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    ep: int = 1
    backend: Backend | None = None
    timeout_s: float = 300
    share_gpus: bool = False

    def __post_init__(self) -> None:
        for name in (*_DIMENSIONS, "ep"):
            size = getattr(self, name)
            if size < 1 and not (name == "dp_shard" and size == -1):
                or_left = ", or -1 for what the other factors leave" if name == "dp_shard" else ""
                raise ValueError(f"{name}={size!r} must be a whole number of at least 1{or_left}")
        if self.share_gpus and self.backend is not None:
            raise ValueError(
                f"share_gpus=True with backend={self.backend!r}: NCCL has no two ranks on one GPU, and 'gloo' means "
                "the CPU. Leave backend at None"
            )
        refuse_bad_timeout("DistributedConfig", self.timeout_s)
        if self.dp_shard != -1:
            self._check_ep(self.dp_shard)

    def _check_ep(self, dp_shard: int) -> None:
        if dp_shard % self.ep:
            works = [k for k in range(1, dp_shard + 1) if dp_shard % k == 0]
            raise ValueError(
                f"ep={self.ep} must divide dp_shard={dp_shard}, whose ranks share the experts out: use ep="
                f"{' or '.join(map(str, works))}, or change dp_shard"
            )

    def sizes(self, world_size: int) -> dict[str, int]:
        """Return the sizes of all four dimensions, outermost first, with -1 resolved; refuse another ``world_size``."""
        sizes = {name: getattr(self, name) for name in _DIMENSIONS}
        if self.dp_shard == -1:
            others = {name: size for name, size in sizes.items() if name != "dp_shard"}
            if world_size % prod(others.values()):
                raise ValueError(
                    f"{_spelled(others)} does not divide the world size {world_size}: "
                    f"start a multiple of {prod(others.values())} ranks, or change a factor"
                )
            sizes["dp_shard"] = world_size // prod(others.values())
            self._check_ep(sizes["dp_shard"])
        n_ranks = prod(sizes.values())
        if n_ranks != world_size:
            raise ValueError(
                f"{_spelled(sizes)}, but the world size is {world_size}: start {n_ranks} ranks "
                f"(torchrun --nproc-per-node={n_ranks}), or change a factor"
            )
        return sizes


def _spelled(sizes: dict[str, int]) -> str:
    """Return ``pp × tp = 2 × 2 = 4``, without the factors that are 1."""
    factors = {name: size for name, size in sizes.items() if size != 1} or {"pp": sizes["pp"]}
    terms = [" × ".join(factors), " × ".join(map(str, factors.values()))]
    if len(factors) > 1:
        terms.append(str(prod(factors.values())))
    return " = ".join(terms)


@checked
def init_distributed(config: DistributedConfig, seed: int = 42) -> DeviceMesh | None:
    """Join the process group, seed every rank alike, share the node's cores out, and build the mesh.

    A group that exists already (as inside ``on_ranks``) is used as it is, and so are the cores. Dimensions of size 1
    are left out of the mesh; ``dp_shard`` stays when ``dp_replicate > 1``, because ``fully_shard`` takes the last
    dimension as the one to shard over. Rank 0 warns if the ``tp`` ranks of a group are not all on one node.

    Seeded alike, ranks make equal weights and draw equal batches. In a step of a pipeline, each stage and data rank
    draws random numbers of its own all the same (:mod:`course_pp.step.random_streams`).

    Returns:
        The mesh, or None for one process (which still gets a group of its own, so that collectives work).
    """
    world_size = dist.get_world_size() if dist.is_initialized() else get_world_info()[2]
    sizes = config.sizes(world_size)
    torch.manual_seed(seed)
    random.seed(seed)  # data loading and others' code draw from Python's and NumPy's generators
    np.random.seed(seed % 2**32)
    device = get_device(config.backend, share=config.share_gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        share_cores()
        # Both backends at once: control messages then stay on the CPU and never wait for the GPU.
        n_gpus, n_ranks, _ = _visible_gpus()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and n_gpus >= n_ranks else "gloo"
        store = dist.HashStore() if world_size == 1 else None
        rendezvous = {"store": store, "rank": 0, "world_size": 1} if store else {"init_method": "env://"}
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s), **rendezvous)
    kept = {name: n for name, n in sizes.items() if n > 1 or (name == "dp_shard" and config.dp_replicate > 1)}
    if not kept:
        return None
    mesh = mesh_of(device.type, kept, config.ep)
    for group in _groups_of(mesh):
        set_timeout(group, timedelta(seconds=config.timeout_s))
    if config.tp > 1:
        _warn_if_tp_leaves_a_node(config.tp)
    return mesh


def mesh_of(kind: str, sizes: Mapping[str, int], ep: int) -> DeviceMesh:
    """Return a mesh with these dimensions on devices of a kind; it keeps the one of experts, if ``ep`` is above 1."""
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if ep > 1:
        parts: dict[str, int] = {}
        for name, n in sizes.items():
            parts |= {"efsdp": n // ep, "ep": ep} if name == "dp_shard" else {name: n}
        setattr(mesh, _OF_EXPERTS, init_device_mesh(kind, tuple(parts.values()), mesh_dim_names=tuple(parts)))
    return mesh


def _warn_if_tp_leaves_a_node(tp: int) -> None:
    """A collective, as no rank knows alone how tasks were placed."""
    # Virtual nodes share one host, and a number that was inherited from a batch script is 0 everywhere: so both.
    nodes = Ranks().gather(f"{os.environ.get('SLURM_NODEID', '')}@{socket.gethostname()}")
    groups = (range(first, first + tp) for first in range(0, len(nodes), tp))
    torn = next((group for group in groups if len({nodes[rank] for rank in group}) > 1), None)
    if torn is not None and dist.get_rank() == 0:
        warnings.warn(
            f"tp={tp} crosses nodes: ranks {torn[0]} to {torn[-1]} share each layer but not a node, so every layer "
            f"waits for the network. Start a multiple of {tp} ranks on every node, numbered node by node "
            "(srun --distribution=block), or lower tp and raise pp, whose messages are few",
            stacklevel=4,
        )


def limit_waiting(device_mesh: DeviceMesh | None, timeout_s: float) -> None:
    """Limit how long a rank waits for the others from now on: on the default group, and on every group of the mesh."""
    for group in (dist.group.WORLD, *_groups_of(device_mesh)):
        if group is not None:
            set_timeout(group, timedelta(seconds=timeout_s))


def _groups_of(device_mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return this rank's group along each dimension, those of experts too."""
    meshes = (mesh for mesh in (device_mesh, mesh_of_experts(device_mesh)) if mesh is not None)
    return [mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names or ()]


def destroy_distributed() -> None:
    """Leave the process group; a no-op without one, so it is safe to call repeatedly."""
    if dist.is_initialized():
        dist.destroy_process_group()
    lone_group.cache_clear()  # its groups' threads would run until the interpreter is taken down around them


@lru_cache(maxsize=1)
def lone_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank alone within ``world``; one serves all stages of a model without a pipeline."""
    group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group  # and not torch's mark of a rank outside the group


def _dimension(device_mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """Return one dimension of the mesh, None if it is not there. Other kinds of dimensions are ignored."""
    names = () if device_mesh is None else device_mesh.mesh_dim_names or (None,)
    if None in names or not _MISNAMED.isdisjoint(names) or ("dp_replicate" in names and "dp_shard" not in names):
        raise ValueError(
            f"mesh dimensions {names} must be named {', '.join(_DIMENSIONS)}, and dp_replicate needs a dp_shard beside "
            "it, of size 1 if nothing is sharded: use init_distributed, or name them so in init_device_mesh. Others, "
            "such as cp, may stand beside these; ep lies within dp_shard, DistributedConfig(ep=…)"
        )
    return device_mesh[name] if device_mesh is not None and name in names else None


def size_of(device_mesh: DeviceMesh | None, name: str) -> int:
    """Return the ranks along one dimension; 1 where the mesh does not have it."""
    dimension = _dimension(device_mesh, name)
    return 1 if dimension is None else dimension.size()


def get_pp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the 1-D pipeline mesh this rank is part of; None without pipeline parallelism."""
    return _dimension(device_mesh, "pp")


def get_pp_rank(device_mesh: DeviceMesh | None) -> int:
    """Return this rank's coordinate along ``pp``; 0 without pipeline parallelism."""
    pp_mesh = get_pp_mesh(device_mesh)
    return 0 if pp_mesh is None else pp_mesh.get_local_rank()


def get_pp_size(device_mesh: DeviceMesh | None) -> int:
    """Return the number of pipeline ranks; 1 without pipeline parallelism."""
    return size_of(device_mesh, "pp")


def get_tp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the 1-D tensor-parallel mesh this rank is part of; None without tensor parallelism."""
    return _dimension(device_mesh, "tp")


def has_dp_mesh(device_mesh: DeviceMesh | None) -> bool:
    """Return True if there is a data-parallel dimension."""
    return _dimension(device_mesh, "dp_shard") is not None


def get_dp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the 1-D ``dp_shard`` mesh, or the 2-D ``(dp_replicate, dp_shard)`` mesh; refuse a mesh without either."""
    if device_mesh is None or not has_dp_mesh(device_mesh):
        names = () if device_mesh is None else device_mesh.mesh_dim_names
        raise ValueError(
            f"device_mesh with dimensions {names} has no data-parallel one: set dp_shard or dp_replicate above 1, "
            "or ask has_dp_mesh first"
        )
    replicated = "dp_replicate" in (device_mesh.mesh_dim_names or ())
    return device_mesh["dp_replicate", "dp_shard"] if replicated else device_mesh["dp_shard"]


def get_ep_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the 1-D expert-parallel mesh this rank is part of; None without expert parallelism."""
    mesh = mesh_of_experts(device_mesh)
    return None if mesh is None else mesh["ep"]


def get_efsdp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same experts: ``efsdp``, or ``(dp_replicate, efsdp)``."""
    mesh = mesh_of_experts(device_mesh)
    assert mesh is not None  # only called where there are experts
    return mesh["dp_replicate", "efsdp"] if "dp_replicate" in (mesh.mesh_dim_names or ()) else mesh["efsdp"]


def mesh_of_experts(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of the same ranks that has ``efsdp`` and ``ep`` in place of ``dp_shard``; None without ``ep``."""
    _dimension(device_mesh, "dp_shard")  # refuses a mesh whose dimensions have other names
    mesh: DeviceMesh | None = getattr(device_mesh, _OF_EXPERTS, None)
    return mesh


def get_dp_size(device_mesh: DeviceMesh | None) -> int:
    """Return the number of ranks with data of their own, ``dp_replicate × dp_shard``; 1 without data parallelism."""
    return get_dp_mesh(device_mesh).size() if has_dp_mesh(device_mesh) else 1


def get_dp_rank(device_mesh: DeviceMesh | None) -> int:
    """Return which part of the global batch is this rank's, ``dp_replicate`` outermost; 0 without data parallelism."""
    if not has_dp_mesh(device_mesh):
        return 0
    mesh = get_dp_mesh(device_mesh)
    index = 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
        index = index * size + coordinate
    return index
