"""What a run is on: GPUs by name, and clusters of them. Every number has its source beside it."""

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches

from course_pp.arguments import checked

__all__ = ["Cluster", "Gpu", "cluster_of", "gpu_named", "gpu_names", "nearest"]


def _refuse_not_above_0(field: str, value: float | None) -> None:
    if value is None or not 0 < value < math.inf:
        raise ValueError(f"{field}={value}: give a finite number above 0")


@checked
@dataclass(frozen=True)
class Gpu:
    """One accelerator.

    Attributes:
        name: how :func:`gpu_named` knows it.
        peak: dense 16-bit matrix products, in flop/s.
        memory: in bytes.
        memory_bandwidth: in bytes a second.
        link_bandwidth: to the other GPUs of its node, one way, in bytes a second.
        source: where the numbers are from.
        peak_32: products in float32, in flop/s; None: as ``peak``. Those in float64 run at half of it.
    """

    name: str
    peak: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    source: str = "measured"
    peak_32: float | None = None

    def __post_init__(self) -> None:
        for field in ("peak", "memory", "memory_bandwidth", "link_bandwidth"):
            _refuse_not_above_0(field, getattr(self, field))
        if self.peak_32 is not None:
            _refuse_not_above_0("peak_32", self.peak_32)
        if not self.source:
            raise ValueError("source='': say where the numbers are from")

    @checked
    def peak_of(self, itemsize: int) -> float:
        """Return the peak of products of elements of ``itemsize`` bytes, in flop/s."""
        wide = self.peak if self.peak_32 is None else self.peak_32
        return {4: wide, 8: wide / 2}.get(itemsize, self.peak)


@checked
@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    Attributes:
        n_nodes, gpus_per_node: how many.
        gpu: what they are.
        intra_bandwidth: between two GPUs of a node, one way, in bytes a second; None: as the GPU's links.
        inter_bandwidth: a GPU's share of the links between nodes, one way, in bytes a second.
        latency: of a message, in seconds.

    Raises:
        ValueError: for a count below 1, a bandwidth that is not above 0, a latency below 0.
    """

    n_nodes: int
    gpus_per_node: int
    gpu: Gpu
    intra_bandwidth: float | None = None
    inter_bandwidth: float = 50e9
    latency: float = 5e-6

    def __post_init__(self) -> None:
        for field in ("n_nodes", "gpus_per_node"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: give at least 1")
        if self.intra_bandwidth is None:
            object.__setattr__(self, "intra_bandwidth", self.gpu.link_bandwidth)
        for field in ("intra_bandwidth", "inter_bandwidth"):
            _refuse_not_above_0(field, getattr(self, field))
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency={self.latency}: give seconds, 0 or more")

    @property
    def n_gpus(self) -> int:
        return self.n_nodes * self.gpus_per_node

    @checked
    def bandwidth(self, span: int, apart: int = 1) -> float:
        """Return what a rank of a ring sends, in bytes a second.

        A ring that leaves the node uses the adapters of all its ranks there: NCCL lays a ring over each.

        Args:
            span: ranks from the ring's first to its last, both counted.
            apart: ranks from one of the ring to the next.
        """
        inside = float(self.intra_bandwidth or 0)
        if span <= self.gpus_per_node:
            return inside
        return min(inside, max(1, self.gpus_per_node // apart) * self.inter_bandwidth)


_GPUS = {
    gpu.name: gpu
    for gpu in (
        # Data sheets of Hopper and Blackwell print twice the dense rate, "with sparsity"; NVLink's is of both ways.
        Gpu("A100", 312e12, 80e9, 2.039e12, 300e9, "NVIDIA A100 80GB SXM data sheet, 2021", 19.5e12),
        Gpu("H100", 989.4e12, 80e9, 3.35e12, 450e9, "NVIDIA H100 white paper, SXM5, 2022", 66.9e12),
        Gpu("H200", 989.4e12, 141e9, 4.8e12, 450e9, "NVIDIA H200 SXM data sheet, 2023; products as H100", 66.9e12),
        Gpu("B200", 2250e12, 180e9, 8e12, 900e9, "NVIDIA HGX B200 and DGX B200 data sheets, 2024", 75e12),
        Gpu(
            "laptop",
            5e10,
            4e9,
            1e10,
            1e9,
            "one core, in float32: orders of magnitude, calibrate your own",
        ),
    )
}

# The links between nodes of the systems these GPUs are sold in, one way and a GPU, in bytes a second.
_BETWEEN_NODES = {
    "A100": 25e9,  # DGX A100: eight 200 Gb/s HDR InfiniBand adapters
    "H100": 50e9,  # DGX H100: eight 400 Gb/s NDR adapters
    "H200": 50e9,  # DGX H200: the same
    "B200": 50e9,  # DGX B200: the same
    "laptop": 1e9,
}


def gpu_names() -> tuple[str, ...]:
    """Return the names that :func:`gpu_named` knows."""
    return tuple(_GPUS)


@checked
def gpu_named(name: str) -> Gpu:
    """Return a GPU by name.

    Raises:
        ValueError: for an unknown name; names the nearest.
    """
    known = {each.lower(): gpu for each, gpu in _GPUS.items()}
    if name.lower() not in known:
        raise ValueError(f"unknown GPU, name={name!r}: {nearest(name, list(_GPUS))}")
    return known[name.lower()]


@checked
def cluster_of(text: str) -> Cluster:
    """Return the cluster written as ``2048x8xH100``: nodes, GPUs a node, GPU; with the network sold with such nodes.

    Raises:
        ValueError: for text that does not read so.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(.+)", text.strip())
    if found is None:
        raise ValueError(f"text={text!r} is no cluster: write nodes x GPUs a node x GPU, such as 2048x8xH100")
    gpu = gpu_named(found[3])
    return Cluster(int(found[1]), int(found[2]), gpu, inter_bandwidth=_BETWEEN_NODES[gpu.name])


def nearest(name: str, known: list[str]) -> str:
    """Return what to suggest for an unknown name: the nearest known ones, or all."""
    near = get_close_matches(name.lower(), [each.lower() for each in known], n=2)
    found = [each for each in known if each.lower() in near]
    return f"did you mean {' or '.join(found)}?" if found else f"use one of {', '.join(known)}"
