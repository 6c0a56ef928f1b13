"""Process groups as one named mesh: ``pp`` outermost, then ``dp_replicate``, ``dp_shard``, ``tp``.

The outermost dimension has the largest stride between neighbours, so with ranks numbered node by node the
tensor-parallel ranks, which talk most, are the closest, and the pipeline stages, which talk least, the farthest.
"""

import atexit
import os
import random
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_pp.arguments import checked
from course_pp.collective import Ranks
from course_pp.parallel._torch import forget_meshes, set_timeout
from course_pp.parallel.core_binding import share_cores
from course_pp.parallel.world import get_node, get_world_info, has_gpus_of_its_own

__all__ = [
    "DistributedConfig",
    "destroy_distributed",
    "get_device",
    "get_dp_mesh",
    "get_dp_rank",
    "get_dp_size",
    "get_pp_mesh",
    "get_pp_rank",
    "get_pp_size",
    "get_tp_mesh",
    "has_dp_mesh",
    "init_distributed",
    "limit_waiting",
    "lone_group",
    "size_of",
]

_LONGEST_TIMEOUT_S = 365 * 24 * 3600
_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
# What others call the same dimensions: a mesh with these would pass for one without any, and nothing would be cut.
_MISNAMED = frozenset(
    ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "batch", "pipe", "pipeline", "stage", "tensor", "model")
)


@checked
@dataclass(frozen=True)
class DistributedConfig:
    """How many ways each kind of parallelism cuts the run.

    Attributes:
        pp: pipeline-parallel ranks.
        dp_replicate: copies of the sharded model (HSDP); 1 for none.
        dp_shard: ranks a parameter is sharded over (FSDP2); -1 takes what the other factors leave.
        tp: tensor-parallel ranks.
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
    backend: str | None = None
    timeout_s: float = 300
    share_gpus: bool = False

    def __post_init__(self) -> None:
        for name in _DIMENSIONS:
            size = getattr(self, name)
            if type(size) is not int or (size < 1 and not (name == "dp_shard" and size == -1)):
                or_left = ", or -1 for what the other factors leave" if name == "dp_shard" else ""
                raise ValueError(f"{name}={size!r} must be a whole number of at least 1{or_left}")
        _check_backend(self.backend)
        if self.share_gpus and self.backend is not None:
            raise ValueError(
                f"share_gpus=True with backend={self.backend!r}: NCCL has no two ranks on one GPU, and 'gloo' means "
                "the CPU. Leave backend at None"
            )
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < _LONGEST_TIMEOUT_S:
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a number of seconds above 0 and below a year")

    @checked
    def sizes(self, world_size: int) -> dict[str, int]:
        """Return the sizes of all four dimensions, outermost first, with -1 resolved.

        Raises:
            ValueError: if their product is not ``world_size``.
        """
        sizes = {name: getattr(self, name) for name in _DIMENSIONS}
        if self.dp_shard == -1:
            others = {name: size for name, size in sizes.items() if name != "dp_shard"}
            if world_size % prod(others.values()):
                raise ValueError(
                    f"{_spelled(others)} does not divide the world size {world_size}: "
                    f"start a multiple of {prod(others.values())} ranks, or change a factor"
                )
            sizes["dp_shard"] = world_size // prod(others.values())
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

    Returns:
        The mesh, or None for one process (which still gets a group of its own, so that collectives work).

    Raises:
        ValueError: if the factors do not multiply to the world size.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else get_world_info()[2]
    sizes = config.sizes(world_size)
    _seed(seed)
    device = get_device(config.backend, share=config.share_gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        share_cores()
        atexit.unregister(forget_meshes)
        atexit.register(forget_meshes)  # torch's caches are its own business until the process ends
        # Both backends at once: control messages then stay on the CPU and never wait for the GPU.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and _visible_gpus().enough else "gloo"
        store = dist.HashStore() if world_size == 1 else None
        rendezvous = {"store": store, "rank": 0, "world_size": 1} if store else {"init_method": "env://"}
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s), **rendezvous)
    kept = {name: n for name, n in sizes.items() if n > 1 or (name == "dp_shard" and config.dp_replicate > 1)}
    if not kept:
        return None
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    for name in kept:
        set_timeout(mesh.get_group(name), timedelta(seconds=config.timeout_s))
    if config.tp > 1:
        _warn_if_tp_leaves_a_node(config.tp)
    return mesh


def _seed(seed: int) -> None:
    """Seed torch's generators, Python's and NumPy's, which data loading and others' code draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _warn_if_tp_leaves_a_node(tp: int) -> None:
    """Warn if a ``tp`` group spans nodes; a collective, as no rank knows alone how tasks were placed."""
    nodes = Ranks().gather(get_node())
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
    names = () if device_mesh is None else device_mesh.mesh_dim_names or ()
    groups = [device_mesh.get_group(name) for name in names] if device_mesh is not None else []
    for group in (dist.group.WORLD, *groups):
        if group is not None:
            set_timeout(group, timedelta(seconds=timeout_s))


def destroy_distributed() -> None:
    """Leave the process group; a no-op without one, so it is safe to call repeatedly."""
    if dist.is_initialized():
        dist.destroy_process_group()
    lone_group.cache_clear()  # its groups' threads would run until the interpreter is taken down around them


@lru_cache(maxsize=1)
def lone_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank alone within ``world``; one serves all stages of a model without a pipeline."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _check_backend(backend: str | None) -> None:
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"backend={backend!r} must be 'gloo', 'nccl' or None (chosen by what is there)")


@checked
def get_device(backend: str | None = None, *, share: bool = False) -> torch.device:
    """Return this rank's device: a GPU of its own if every rank of this host has one, else the CPU, with a warning.

    If Slurm shows each task only its own GPUs, it is the first of these.

    Args:
        backend: as in :class:`DistributedConfig`; ``"gloo"`` means the CPU.
        share: with fewer GPUs than ranks, neighbouring ranks get one GPU together. `course_pp.runtime` can run them.

    Raises:
        ValueError: for another backend; if ``backend="nccl"`` and there are fewer GPUs than ranks on this host.
    """
    _check_backend(backend)
    gpus = _visible_gpus()
    counted = f"{gpus.n} GPUs for {gpus.n_ranks} ranks"
    if backend == "nccl" and not gpus.enough:
        raise ValueError(
            f"backend='nccl' needs a GPU a rank, but this host has {counted}: start fewer ranks, or use backend='gloo'"
        )
    if backend == "gloo" or not gpus.n:
        return torch.device("cpu")
    if gpus.enough:
        return torch.device("cuda", gpus.rank)
    if share:
        return torch.device("cuda", gpus.rank * gpus.n // gpus.n_ranks)
    warnings.warn(
        f"this host has {counted}: computing on the CPU. Start a rank a GPU, let the runtime's ranks share them "
        "(share_gpus=True), or say backend='gloo' if that is what you want",
        stacklevel=3,
    )
    return torch.device("cpu")


@dataclass(frozen=True)
class _Gpus:
    """The GPUs that this rank sees, and who shares them.

    Attributes:
        n: number of GPUs.
        n_ranks: how many ranks see these same GPUs.
        rank: this rank's number among them.
    """

    n: int
    n_ranks: int
    rank: int

    @property
    def enough(self) -> bool:
        """Whether each of these ranks can have a GPU of its own."""
        return self.n >= self.n_ranks


def _visible_gpus() -> _Gpus:
    _, local_rank, world_size = get_world_info()
    n, n_local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if n and has_gpus_of_its_own(os.environ, n, n_local):
        return _Gpus(n, 1, 0)
    return _Gpus(n, n_local, local_rank)


def _dimension(device_mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """Return one dimension of the mesh, None if it is not there. Other kinds of dimensions are ignored."""
    names = () if device_mesh is None else device_mesh.mesh_dim_names or (None,)
    if None in names or not _MISNAMED.isdisjoint(names) or ("dp_replicate" in names and "dp_shard" not in names):
        raise ValueError(
            f"mesh dimensions {names} must be named {', '.join(_DIMENSIONS)}, and dp_replicate needs a dp_shard beside "
            "it, of size 1 if nothing is sharded: use init_distributed, or name them so in init_device_mesh. Others, "
            "such as cp or ep, may stand beside these"
        )
    return device_mesh[name] if device_mesh is not None and name in names else None


def size_of(device_mesh: DeviceMesh | None, name: str) -> int:
    """Return the ranks along one dimension; 1 where the mesh does not have it."""
    dimension = _dimension(device_mesh, name)
    return 1 if dimension is None else dimension.size()


@checked
def get_pp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the 1-D pipeline mesh this rank is part of; None without pipeline parallelism."""
    return _dimension(device_mesh, "pp")


@checked
def get_pp_rank(device_mesh: DeviceMesh | None) -> int:
    """Return this rank's coordinate along ``pp``; 0 without pipeline parallelism."""
    pp_mesh = get_pp_mesh(device_mesh)
    return 0 if pp_mesh is None else pp_mesh.get_local_rank()


@checked
def get_pp_size(device_mesh: DeviceMesh | None) -> int:
    """Return the number of pipeline ranks; 1 without pipeline parallelism."""
    return size_of(device_mesh, "pp")


@checked
def get_tp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the 1-D tensor-parallel mesh this rank is part of; None without tensor parallelism."""
    return _dimension(device_mesh, "tp")


@checked
def has_dp_mesh(device_mesh: DeviceMesh | None) -> bool:
    """Return True if there is a data-parallel dimension."""
    return _dimension(device_mesh, "dp_shard") is not None


@checked
def get_dp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the 1-D ``dp_shard`` mesh, or the 2-D ``(dp_replicate, dp_shard)`` mesh.

    Raises:
        ValueError: if there is no data-parallel dimension; ask :func:`has_dp_mesh` first.
    """
    if device_mesh is None or not has_dp_mesh(device_mesh):
        names = () if device_mesh is None else device_mesh.mesh_dim_names
        raise ValueError(
            f"device_mesh with dimensions {names} has no data-parallel one: set dp_shard or dp_replicate above 1, "
            "or ask has_dp_mesh first"
        )
    replicated = "dp_replicate" in (device_mesh.mesh_dim_names or ())
    return device_mesh["dp_replicate", "dp_shard"] if replicated else device_mesh["dp_shard"]


@checked
def get_dp_size(device_mesh: DeviceMesh | None) -> int:
    """Return the number of ranks with data of their own, ``dp_replicate × dp_shard``; 1 without data parallelism."""
    return get_dp_mesh(device_mesh).size() if has_dp_mesh(device_mesh) else 1


@checked
def get_dp_rank(device_mesh: DeviceMesh | None) -> int:
    """Return which part of the global batch is this rank's, ``dp_replicate`` outermost; 0 without data parallelism."""
    if not has_dp_mesh(device_mesh):
        return 0
    mesh = get_dp_mesh(device_mesh)
    index = 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
        index = index * size + coordinate
    return index
