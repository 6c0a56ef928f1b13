"""Published step times, on which the planner's two constants are fitted and with which predictions are compared."""

from dataclasses import dataclass

from course_pp.plan.cluster import Cluster, cluster_of
from course_pp.plan.layout import Layout
from course_pp.plan.models import model_named
from course_pp.plan.prediction import Prediction, predict
from course_pp.plan.timing import Constants
from course_pp.sizes import ModelConfig

__all__ = ["MEGATRON", "PublishedRun", "megatron_seconds"]


@dataclass(frozen=True)
class PublishedRun:
    """A run that somebody timed: ``seconds`` a step."""

    name: str
    model: ModelConfig
    layout: Layout
    cluster: Cluster
    global_batch: int
    seq_len: int
    seconds: float

    def predicted(self, constants: Constants | None = None) -> Prediction:
        """Return what the planner says of it, by its own constants unless given others."""
        constants = Constants() if constants is None else constants
        return predict(self.model, self.layout, self.cluster, self.global_batch, self.seq_len, constants)


def megatron_seconds(model: ModelConfig, global_batch: int, seq_len: int, n_gpus: int, tflops: float) -> float:
    """Return a step's seconds from the TFLOP/s that Megatron-LM reports: its equation 3, with recomputed forwards."""
    h, n_layers = model.dim, model.n_layers
    more = 1 + seq_len / (6 * h) + model.vocab_size / (16 * n_layers * h)
    return 96 * global_batch * seq_len * n_layers * h * h * more / (n_gpus * tflops * 1e12)


def _megatron(
    name: str, tp: int, pp: int, n_gpus: int, batch: int, tflops: float, size: int, n_chunks: int, overlap: bool
) -> PublishedRun:
    model = model_named(name)
    layout = Layout(
        pp,
        tp,
        dp_replicate=n_gpus // tp // pp,
        schedule="interleaved_1f1b" if n_chunks > 1 else "1f1b",
        n_chunks=n_chunks if n_chunks > 1 else None,
        microbatch_size=size,
        ac="full",
        precision="megatron",
        flash=False,
        scatter_gather=True,
        overlap=overlap,
        reduces="backward" if overlap else "after",
        receives_ahead=False,
    )
    seconds = megatron_seconds(model, batch, 2048, n_gpus, tflops)
    return PublishedRun(name, model, layout, cluster_of(f"{n_gpus // 8}x8xA100"), batch, 2048, seconds)


# torch's own DDP, whose reductions run beside the last backward, also where the batch is several microbatches (18B),
# was used up to 18B; Megatron's, which waits, from 39B.
MEGATRON = (
    _megatron("gpt-1.7b", 1, 1, 32, 512, 137, 16, 1, True),
    _megatron("gpt-3.6b", 2, 1, 64, 512, 138, 16, 1, True),
    _megatron("gpt-7.5b", 4, 1, 128, 512, 142, 16, 1, True),
    _megatron("gpt-18b", 8, 1, 256, 1024, 135, 8, 1, True),
    _megatron("gpt-39b", 8, 2, 512, 1536, 138, 4, 1, False),
    _megatron("gpt-76b", 8, 4, 1024, 1792, 140, 2, 3, False),
    _megatron("gpt-145b", 8, 8, 1536, 2304, 148, 2, 2, False),
    _megatron("gpt-310b", 8, 16, 1920, 2160, 155, 1, 2, False),
    _megatron("gpt-530b", 8, 35, 2520, 2520, 163, 1, 3, False),
    _megatron("gpt-1t", 8, 64, 3072, 3072, 163, 1, 1, False),
)
"""Table 1 of Narayanan et al. 2021, arXiv:2104.04473: ten runs of up to 3,072 A100.

Microbatch sizes and interleaving, which the table lacks, are those of examples/sc21/run_table_1.sh in
NVIDIA/Megatron-LM.
"""
