"""What notebook 12 leans on, on paper: published runs, data parallelism as a schedule, ways beside one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from course_pp.plan import Cluster, Layout, ModelConfig, predict
from course_pp.plan.calibration import MEGATRON as PUBLISHED
from course_pp.schedule import Action, Schedule

__all__ = ["PUBLISHED", "beside_data", "data_parallel"]


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

    Data parallelism is torch's DDP, whose ring runs beside the last backward. Memory does not count: what does not fit
    is timed all the same.

    Args:
        tokens: of a sequence; a microbatch is one.
        per_rank: sequences of a batch on each GPU.
    """
    n = cluster.n_gpus
    longer = replace(model, max_seq_len=max(tokens))
    plain = Layout(precision="bfloat16")  # in mixed precision one data-parallel rank would cast its weights, too
    layouts = plain.with_(**{way: n}), plain.with_(dp_replicate=n, reduces="backward")

    def ratio(seq_len: int) -> float:
        a, b = (predict(longer, each, cluster, per_rank * n, seq_len).step_s for each in layouts)
        return a / b

    return {each: ratio(each) for each in tokens}
