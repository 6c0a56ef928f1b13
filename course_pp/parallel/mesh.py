"""The process groups as one named mesh.

    mesh     ``pp`` outermost, then ``dp_replicate``, ``dp_shard``, ``tp``
    experts  the same ranks, with ``dp_shard`` cut into ``efsdp`` × ``ep``: neighbours share the
    experts out

The outermost dimension has the largest stride between neighbours, so with ranks numbered node by
node the tensor-parallel ranks, which talk most, are the closest, and the pipeline stages, which
talk least, the farthest.
"""

import os
import random
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_pp.base.arguments import checked, refuse_bad_timeout
from course_pp.base.ranks import Ranks
from course_pp.base.torch_private import set_timeout
from course_pp.parallel.cores import share_cores
from course_pp.parallel.world import Backend, get_device, get_world_info, visible_gpus

_DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
# The attribute under which a mesh keeps the mesh of experts: torch's class has no place for it.
_OF_EXPERTS = "_course_pp_experts"
# Other packages' names of the same dimensions: a mesh with these names would pass for a mesh
# without our dimensions, and nothing would be cut. Dimensions of experts lie within dp_shard.
_MISNAMED = frozenset(
    (
        *(
            "dp",
            "ddp",
            "fsdp",
            "hsdp",
            "data",
            "replicate",
            "shard",
            "batch",
            "pipe",
            "pipeline",
            "stage",
            "tensor",
        ),
        *("model", "ep", "efsdp", "expert"),
    )
)


@checked
@dataclass(frozen=True)
class DistributedConfig:
    """The number of ranks over which each kind of parallelism cuts the run.

    Attributes:
        pp: pipeline-parallel ranks.
        dp_replicate: copies of the sharded model (HSDP); 1 for none.
        dp_shard: ranks a parameter is sharded over (FSDP2); -1 takes what the other factors leave.
        tp: tensor-parallel ranks.
        ep: expert-parallel ranks, neighbours among the ``dp_shard`` ones: each has data of its own,
            and a part of the experts; it divides ``dp_shard``.
        backend: ``"gloo"`` or ``"nccl"``; None takes NCCL where every local rank has a GPU, else
            gloo.
        timeout_s: seconds a collective may wait for its peers.
        share_gpus: whether several ranks compute on one GPU if a host has fewer GPUs than ranks.
            Their messages then go through host memory (gloo). Only `course_pp.runtime` can do
            that. Build the stages on ``get_device(share=True)``, too.
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
                f"share_gpus=True with backend={self.backend!r}: NCCL has no two ranks on one GPU,"
                " and 'gloo' means the CPU. Leave backend at None"
            )
        refuse_bad_timeout("DistributedConfig", self.timeout_s)
        if self.dp_shard != -1:
            self._check_ep(self.dp_shard)

    def _check_ep(self, dp_shard: int) -> None:
        if dp_shard % self.ep:
            works = [k for k in range(1, dp_shard + 1) if dp_shard % k == 0]
            raise ValueError(
                f"ep={self.ep} must divide dp_shard={dp_shard}, whose ranks share the experts out:"
                f" use ep={' or '.join(map(str, works))}, or change dp_shard"
            )

    def sizes(self, world_size: int) -> dict[str, int]:
        """Return the sizes of all four dimensions, outermost first, with -1 resolved.

        Refuse a ``world_size`` that is not their product.
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
    """Join the process group, seed every rank alike, share out the node's cores, build the mesh.

    A group that exists already (as inside ``on_ranks``) is used as it is, and so are the cores.
    Dimensions of size 1 are left out of the mesh; ``dp_shard`` stays when ``dp_replicate > 1``,
    because ``fully_shard`` takes the last dimension as the one to shard over. Rank 0 warns if the
    ``tp`` ranks of a group are not all on one node.

    Seeded alike, ranks make equal weights and draw equal batches. In a step of a pipeline, each
    stage and data rank draws random numbers of its own all the same
    (:mod:`course_pp.step.random_streams`).

    Returns:
        The mesh, or None for one process (which still gets a group of its own, so that collectives
        work).
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
        n_gpus, n_ranks, _ = visible_gpus()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and n_gpus >= n_ranks else "gloo"
        store = dist.HashStore() if world_size == 1 else None
        rendezvous = (
            {"store": store, "rank": 0, "world_size": 1} if store else {"init_method": "env://"}
        )
        dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s), **rendezvous)
    kept = {
        name: n
        for name, n in sizes.items()
        if n > 1 or (name == "dp_shard" and config.dp_replicate > 1)
    }
    if not kept:
        return None
    mesh = mesh_of(device.type, kept, config.ep)
    for group in _groups_of(mesh):
        set_timeout(group, timedelta(seconds=config.timeout_s))
    if config.tp > 1:
        _warn_if_tp_leaves_a_node(config.tp)
    return mesh


def mesh_of(kind: str, sizes: Mapping[str, int], ep: int) -> DeviceMesh:
    """Return a mesh with these dimensions, on devices of this kind.

    If ``ep`` is above 1, it carries the mesh of experts as an attribute.
    """
    mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if ep > 1:
        parts: dict[str, int] = {}
        for name, n in sizes.items():
            parts |= {"efsdp": n // ep, "ep": ep} if name == "dp_shard" else {name: n}
        setattr(
            mesh,
            _OF_EXPERTS,
            init_device_mesh(kind, tuple(parts.values()), mesh_dim_names=tuple(parts)),
        )
    return mesh


def _warn_if_tp_leaves_a_node(tp: int) -> None:
    """Warn on rank 0 if ranks of one ``tp`` group are on different nodes.

    It is a collective, because no rank knows alone how tasks were placed.
    """
    # Neither tells nodes apart alone: virtual nodes share a host name, and a node number that was
    # inherited from a batch script is 0 everywhere.
    nodes = Ranks().gather(f"{os.environ.get('SLURM_NODEID', '')}@{socket.gethostname()}")
    groups = (range(first, first + tp) for first in range(0, len(nodes), tp))
    torn = next((group for group in groups if len({nodes[rank] for rank in group}) > 1), None)
    if torn is not None and dist.get_rank() == 0:
        warnings.warn(
            f"tp={tp} crosses nodes: ranks {torn[0]} to {torn[-1]} share each layer but not a node,"
            f" so every layer waits for the network. Start a multiple of {tp} ranks on every node,"
            " numbered node by node (srun --distribution=block), or lower tp and raise pp, whose"
            " messages are few",
            stacklevel=4,
        )


def limit_waiting(device_mesh: DeviceMesh | None, timeout_s: float) -> None:
    """Limit, from now on, how long a rank waits for the others.

    The limit holds for the default group and for every group of the mesh.
    """
    for group in (dist.group.WORLD, *_groups_of(device_mesh)):
        if group is not None:
            set_timeout(group, timedelta(seconds=timeout_s))


def _groups_of(device_mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """Return this rank's group along each dimension, the mesh of experts included."""
    meshes = (mesh for mesh in (device_mesh, mesh_of_experts(device_mesh)) if mesh is not None)
    return [mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names or ()]


def destroy_distributed() -> None:
    """Leave the process group; a no-op without one, so it is safe to call repeatedly."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # The threads of a cached group would run until the interpreter is taken down around them.
    lone_group.cache_clear()


@lru_cache(maxsize=1)
def lone_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of this rank alone within ``world``.

    All stages of a model without a pipeline use the same one.
    """
    group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group  # and not torch's mark of a rank outside the group


def _dimension(device_mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    """Return one dimension of the mesh, or None if the mesh does not have it.

    Refuse names that other packages give to our dimensions. Ignore dimensions that are none of
    ours.
    """
    names = () if device_mesh is None else device_mesh.mesh_dim_names or (None,)
    if (
        None in names
        or not _MISNAMED.isdisjoint(names)
        or ("dp_replicate" in names and "dp_shard" not in names)
    ):
        raise ValueError(
            f"mesh dimensions {names} must be named {', '.join(_DIMENSIONS)}, and dp_replicate"
            " needs a dp_shard beside it, of size 1 if nothing is sharded: use init_distributed,"
            " or name them so in init_device_mesh. Others, such as cp, may stand beside these; ep"
            " lies within dp_shard, DistributedConfig(ep=…)"
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
    """Return the data-parallel mesh; refuse a mesh without one.

    It is the 1-D ``dp_shard``, or the 2-D ``(dp_replicate, dp_shard)``.
    """
    if device_mesh is None or not has_dp_mesh(device_mesh):
        names = () if device_mesh is None else device_mesh.mesh_dim_names
        raise ValueError(
            f"device_mesh with dimensions {names} has no data-parallel one: set dp_shard or"
            " dp_replicate above 1, or ask has_dp_mesh first"
        )
    replicated = "dp_replicate" in (device_mesh.mesh_dim_names or ())
    return device_mesh["dp_replicate", "dp_shard"] if replicated else device_mesh["dp_shard"]


def get_ep_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the 1-D expert-parallel mesh this rank is part of; None without expert parallelism."""
    mesh = mesh_of_experts(device_mesh)
    return None if mesh is None else mesh["ep"]


def get_efsdp_mesh(device_mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of the ranks that hold the same experts.

    It is the 1-D ``efsdp``, or the 2-D ``(dp_replicate, efsdp)``.
    """
    mesh = mesh_of_experts(device_mesh)
    assert mesh is not None  # only called where there are experts
    return (
        mesh["dp_replicate", "efsdp"]
        if "dp_replicate" in (mesh.mesh_dim_names or ())
        else mesh["efsdp"]
    )


def mesh_of_experts(device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh of experts, or None without expert parallelism.

    It has the same ranks as ``device_mesh``, and ``efsdp`` and ``ep`` in place of ``dp_shard``.
    """
    _dimension(device_mesh, "dp_shard")  # refuses a mesh whose dimensions have other names
    mesh: DeviceMesh | None = getattr(device_mesh, _OF_EXPERTS, None)
    return mesh


def get_dp_size(device_mesh: DeviceMesh | None) -> int:
    """Return the number of ranks with data of their own; 1 without data parallelism.

    It is ``dp_replicate × dp_shard``.
    """
    return get_dp_mesh(device_mesh).size() if has_dp_mesh(device_mesh) else 1


def get_dp_rank(device_mesh: DeviceMesh | None) -> int:
    """Return the number of this rank's part of the global batch; 0 without data parallelism.

    Parts are numbered with ``dp_replicate`` outermost.
    """
    if not has_dp_mesh(device_mesh):
        return 0
    mesh = get_dp_mesh(device_mesh)
    index = 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate() or (), strict=True):
        index = index * size + coordinate
    return index
