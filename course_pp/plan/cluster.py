"""GPUs, clusters and models by name. Every number has its source beside it."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from course_pp.base.arguments import checked
from course_pp.base.sizes import ModelConfig


@dataclass(frozen=True)
class Gpu:
    """One accelerator: memory in bytes, bandwidths in bytes a second.

    Attributes:
        peak: dense 16-bit matrix products, in flop/s.
        link_bandwidth: bandwidth to the other GPUs of its node, one way.
        source: source of the numbers.
        peak_32: products in float32, in flop/s; None takes ``peak``. Products in float64 run at
            half of it.
    """

    name: str
    peak: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    source: str = "measured"
    peak_32: float | None = None

    def peak_of(self, itemsize: int) -> float:
        wide = self.peak if self.peak_32 is None else self.peak_32
        return {4: wide, 8: wide / 2}.get(itemsize, self.peak)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs.

    Attributes:
        intra_bandwidth: bandwidth between two GPUs of a node, one way, in bytes a second; None
            takes the GPU's links.
        inter_bandwidth: a GPU's share of the links between nodes, one way, in bytes a second.
        latency: seconds of a message without bytes.
    """

    n_nodes: int
    gpus_per_node: int
    gpu: Gpu
    intra_bandwidth: float | None = None
    inter_bandwidth: float = 50e9
    latency: float = 5e-6

    def __post_init__(self) -> None:
        for field in ("n_nodes", "gpus_per_node"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"{field}={value}: give at least 1")
        if self.intra_bandwidth is None:
            object.__setattr__(self, "intra_bandwidth", self.gpu.link_bandwidth)

    @property
    def n_gpus(self) -> int:
        return self.n_nodes * self.gpus_per_node

    def bandwidth(self, span: int, apart: int = 1) -> float:
        """Return the bytes a second that a rank of a ring sends.

        A ring that leaves the node uses the adapters of all its ranks there, because NCCL lays a
        ring over each adapter.

        Args:
            span: number of ranks from the first of the ring to its last.
            apart: number of ranks from one of the ring to the next.
        """
        inside = float(self.intra_bandwidth or 0)
        if span <= self.gpus_per_node:
            return inside
        return min(inside, max(1, self.gpus_per_node // apart) * self.inter_bandwidth)


_GPUS = {
    gpu.name: gpu
    for gpu in (
        # Data sheets of Hopper and Blackwell print twice the dense rate, "with sparsity", and the
        # bandwidth of NVLink for both ways.
        Gpu(
            "A100", 312e12, 80e9, 2.039e12, 300e9, "NVIDIA A100 80GB SXM data sheet, 2021", 19.5e12
        ),
        Gpu("H100", 989.4e12, 80e9, 3.35e12, 450e9, "NVIDIA H100 white paper, SXM5, 2022", 66.9e12),
        Gpu(
            "H200",
            989.4e12,
            141e9,
            4.8e12,
            450e9,
            "NVIDIA H200 SXM data sheet, 2023; products as H100",
            66.9e12,
        ),
        Gpu(
            "B200",
            2250e12,
            180e9,
            8e12,
            900e9,
            "NVIDIA HGX B200 and DGX B200 data sheets, 2024",
            75e12,
        ),
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

# Links between nodes of the systems that have these GPUs, one way and a GPU, in bytes a second.
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
    """Return a GPU by name."""
    known = {each.lower(): gpu for each, gpu in _GPUS.items()}
    if name.lower() not in known:
        raise ValueError(f"unknown GPU, name={name!r}: {nearest(name, list(_GPUS))}")
    return known[name.lower()]


@checked
def cluster_of(text: str) -> Cluster:
    """Return the cluster written as ``2048x8xH100``: nodes, GPUs a node, GPU.

    It has the network that is sold with such nodes.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(.+)", text.strip())
    if found is None:
        raise ValueError(
            f"text={text!r} is no cluster: write nodes x GPUs a node x GPU, such as 2048x8xH100"
        )
    gpu = gpu_named(found[3])
    return Cluster(int(found[1]), int(found[2]), gpu, inter_bandwidth=_BETWEEN_NODES[gpu.name])


def nearest(name: str, known: list[str]) -> str:
    """Return a suggestion for an unknown name: the nearest known ones, or all."""
    near = get_close_matches(name.lower(), [each.lower() for each in known], n=2)
    found = [each for each in known if each.lower() in near]
    if found:
        return f"did you mean {' or '.join(found)}?"
    return f"use one of {', '.join(known)}"


def _llama3(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> ModelConfig:
    return ModelConfig(
        dim,
        n_layers,
        n_heads,
        128_256,
        n_kv_heads=8,
        ffn_dim=ffn_dim,
        max_seq_len=8192,
        rope_theta=500_000.0,
    )


def _gpt(dim: int, n_layers: int, n_heads: int, vocab_size: int = 51_200) -> ModelConfig:
    """Return GPT's sizes, without biases and positions.

    Head and embedding are one matrix there, on two stages.
    """
    return ModelConfig(dim, n_layers, n_heads, vocab_size, gated_ffn=False)


_MODELS = {
    # Radford et al. 2019, table 2: the smallest and the largest.
    "gpt2": ModelConfig(
        768, 12, 12, 50_257, max_seq_len=1024, gated_ffn=False, tie_embeddings=True
    ),
    "gpt2-xl": ModelConfig(
        1600, 48, 25, 50_257, max_seq_len=1024, gated_ffn=False, tie_embeddings=True
    ),
    # The 12-layer model of the course's article: 179.4M parameters.
    "article": ModelConfig(768, 12, 12, 50_000, max_seq_len=512, ffn_dim=2688),
    # Touvron et al. 2023, arXiv:2307.09288, whose sizes are those of arXiv:2302.13971, table 2,
    # with 4,096 tokens; feed-forward width and vocabulary of the published weights.
    "llama2-7b": ModelConfig(4096, 32, 32, 32_000, ffn_dim=11_008, max_seq_len=4096),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3; the vocabulary with its 256 special
    # tokens.
    "llama3-8b": _llama3(4096, 32, 32, 14_336),
    "llama3-70b": _llama3(8192, 80, 64, 28_672),
    "llama3-405b": _llama3(16_384, 126, 128, 53_248),
    # Narayanan et al. 2021, arXiv:2104.04473, table 1.
    "gpt-1.7b": _gpt(2304, 24, 24),
    "gpt-3.6b": _gpt(3072, 30, 32),
    "gpt-7.5b": _gpt(4096, 36, 32),
    "gpt-18b": _gpt(6144, 40, 48),
    "gpt-39b": _gpt(8192, 48, 64),
    "gpt-76b": _gpt(10_240, 60, 80),
    "gpt-145b": _gpt(12_288, 80, 96),
    "gpt-310b": _gpt(16_384, 96, 128),
    "gpt-530b": _gpt(20_480, 105, 128),
    "gpt-1t": _gpt(25_600, 128, 160),
    # Le Scao et al. 2022, arXiv:2211.05100, table 3; its 250,680 tokens are padded to 250,880 rows.
    "bloom-176b": _gpt(14_336, 70, 112, 250_880),
    # Jiang et al. 2024, arXiv:2401.04088, table 1: 46.7 billion parameters, 12.9 of them active.
    "mixtral-8x7b": ModelConfig(
        4096,
        32,
        32,
        32_000,
        n_kv_heads=8,
        ffn_dim=14_336,
        max_seq_len=32_768,
        rope_theta=1e6,
        n_experts=8,
        top_k=2,
    ),
    # Yang et al. 2025, arXiv:2505.09388, table 2, and the published config.json: 235 billion, 22
    # active.
    "qwen3-235b-a22b": ModelConfig(
        4096,
        94,
        64,
        151_936,
        n_kv_heads=4,
        ffn_dim=12_288,
        max_seq_len=32_768,
        rope_theta=1e6,
        qk_norm=True,
        head_width=128,
        n_experts=128,
        top_k=8,
        expert_dim=1536,
    ),
    # DeepSeek-AI 2024, arXiv:2412.19437, section 4.2: 671 billion, 37 active; without its
    # multi-token prediction. Its latent attention has 128 heads, queries and keys of 192 channels,
    # values of 128, and 187.1 million parameters a layer. Grouped-query attention of 128 heads of
    # 96 channels with 8 for keys and values has 187.2, so weights, gradients and products are
    # right; the scores, 60 % as wide, are counted too low.
    "deepseek-v3": ModelConfig(
        7168,
        61,
        128,
        129_280,
        n_kv_heads=8,
        ffn_dim=18_432,
        max_seq_len=4096,
        head_width=96,
        n_experts=256,
        top_k=8,
        n_shared_experts=1,
        expert_dim=2048,
        n_dense_layers=3,
        router="sigmoid",
        router_scale=2.5,
        balance="bias",
        balance_coef=0.001,
    ),
}


def model_names() -> tuple[str, ...]:
    """Return the names that :func:`model_named` knows."""
    return tuple(_MODELS)


@checked
def model_named(name: str) -> ModelConfig:
    """Return the sizes of a model by name."""
    if name.lower() not in _MODELS:
        raise ValueError(f"unknown model, name={name!r}: {nearest(name, list(_MODELS))}")
    return _MODELS[name.lower()]
