"""What notebook 12 leans on, on paper: published runs, data parallelism as a schedule, ways beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from course_pp.plan import Cluster, Layout, ModelConfig, Prediction, cluster_of, model_named, predict
from course_pp.schedule import Action, Schedule

__all__ = ["PUBLISHED", "PublishedRun", "beside_data", "data_parallel"]


@dataclass(frozen=True)
class PublishedRun:
    """A run that somebody timed.

    Attributes:
        tflops: a GPU, as the paper counts them: recomputed forwards included.
        seconds: of a step, from ``tflops``.
    """

    name: str
    model: ModelConfig
    layout: Layout
    cluster: Cluster
    global_batch: int
    tflops: float
    seconds: float

    def predicted(self) -> Prediction:
        return predict(self.model, self.layout, self.cluster, self.global_batch, 2048)


def _megatron(
    name: str, tp: int, pp: int, n_gpus: int, batch: int, tflops: float, size: int, n_chunks: int
) -> PublishedRun:
    """A row of table 1 of Narayanan et al. 2021, arXiv:2104.04473; what it lacks is from their script for it.

    Up to 18B torch's DDP reduced beside the backward; from 39B on Megatron's own waited for its end.
    """
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
        overlap=pp == 1,
    )
    # Their equation 3.
    h, more = model.dim, 1 + 2048 / (6 * model.dim) + model.vocab_size / (16 * model.n_layers * model.dim)
    seconds = 96 * batch * 2048 * model.n_layers * h * h * more / (n_gpus * tflops * 1e12)
    return PublishedRun(name, model, layout, cluster_of(f"{n_gpus // 8}x8xA100"), batch, tflops, seconds)


PUBLISHED = (
    _megatron("gpt-1.7b", 1, 1, 32, 512, 137, 16, 1),
    _megatron("gpt-3.6b", 2, 1, 64, 512, 138, 16, 1),
    _megatron("gpt-7.5b", 4, 1, 128, 512, 142, 16, 1),
    _megatron("gpt-18b", 8, 1, 256, 1024, 135, 8, 1),
    _megatron("gpt-39b", 8, 2, 512, 1536, 138, 4, 1),
    _megatron("gpt-76b", 8, 4, 1024, 1792, 140, 2, 3),
    _megatron("gpt-145b", 8, 8, 1536, 2304, 148, 2, 2),
    _megatron("gpt-310b", 8, 16, 1920, 2160, 155, 1, 2),
    _megatron("gpt-530b", 8, 35, 2520, 2520, 163, 1, 3),
    _megatron("gpt-1t", 8, 64, 3072, 3072, 163, 1, 1),
)
"""Ten runs of up to 3,072 A100: the table on which the planner's two constants were fitted."""


def data_parallel(n_ranks: int) -> Schedule:
    """Data parallelism as a schedule: every rank does its own work, then the gradients go round a ring.

    Stage 0 is the work of a rank, one "microbatch" each. The stages that follow are the 2 (n - 1) steps of the
    all-reduce: part c of the gradients starts on rank c, and each step of it is one rank further.
    """
    n_stages = 2 * (n_ranks - 1) + 1
    placement = tuple(tuple((c + s) % n_ranks for c in range(n_ranks)) for s in range(n_stages))
    rows: list[list[Action]] = [[] for _ in range(n_ranks)]
    for s in range(n_stages):
        for c in range(n_ranks):
            rows[(c + s) % n_ranks].append(Action(s, "F", c))
    return Schedule("data parallel", placement, tuple(map(tuple, rows)))


def beside_data(
    model: ModelConfig, way: Literal["pp", "tp"], cluster: Cluster, tokens: Sequence[int], per_rank: int = 4
) -> dict[int, float]:
    """Step times of pipeline (``pp``) or tensor parallelism (``tp``) alone over those of data parallelism alone.

    Memory is not asked for: what does not fit is timed all the same.

    Args:
        tokens: of a sequence; a microbatch is one.
        per_rank: sequences of a batch, for each GPU.
    """
    n = cluster.n_gpus
    longer = replace(model, max_seq_len=max(tokens))
    layouts = Layout().with_(**{way: n}), Layout(dp_replicate=n)

    def ratio(seq_len: int) -> float:
        a, b = (predict(longer, each, cluster, per_rank * n, seq_len).step_s for each in layouts)
        return a / b

    return {each: ratio(each) for each in tokens}
