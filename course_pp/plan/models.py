"""Models by name: the sizes of published dense decoders, each with its source, and of the course's own."""

from course_pp.arguments import checked
from course_pp.plan.cluster import nearest
from course_pp.sizes import ModelConfig

__all__ = ["model_named", "model_names"]


def _llama3(dim: int, n_layers: int, n_heads: int, ffn_dim: int) -> ModelConfig:
    return ModelConfig(
        dim, n_layers, n_heads, 128_256, n_kv_heads=8, ffn_dim=ffn_dim, max_seq_len=8192, rope_theta=500_000.0
    )


def _gpt(dim: int, n_layers: int, n_heads: int, vocab_size: int = 51_200) -> ModelConfig:
    """GPT's sizes. Head and embedding are one matrix there, on two stages; biases and positions are left out."""
    return ModelConfig(dim, n_layers, n_heads, vocab_size, gated_ffn=False)


_MODELS = {
    # Radford et al. 2019, table 2: the smallest and the largest.
    "gpt2": ModelConfig(768, 12, 12, 50_257, max_seq_len=1024, gated_ffn=False, tie_embeddings=True),
    "gpt2-xl": ModelConfig(1600, 48, 25, 50_257, max_seq_len=1024, gated_ffn=False, tie_embeddings=True),
    # The 12-layer model of the course's article: 179.4M parameters.
    "article": ModelConfig(768, 12, 12, 50_000, max_seq_len=512, ffn_dim=2688),
    # Touvron et al. 2023, arXiv:2307.09288, whose sizes are those of arXiv:2302.13971, table 2, with 4,096 tokens;
    # feed-forward width and vocabulary of the published weights.
    "llama2-7b": ModelConfig(4096, 32, 32, 32_000, ffn_dim=11_008, max_seq_len=4096),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3; the vocabulary with its 256 special tokens.
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
}


def model_names() -> tuple[str, ...]:
    """Return the names that :func:`model_named` knows."""
    return tuple(_MODELS)


@checked
def model_named(name: str) -> ModelConfig:
    """Return the sizes of a model by name.

    Raises:
        ValueError: for an unknown name; names the nearest.
    """
    if name.lower() not in _MODELS:
        raise ValueError(f"unknown model, name={name!r}: {nearest(name, list(_MODELS))}")
    return _MODELS[name.lower()]
