"""Find the layouts that fit, fastest first.

Every mesh of the sizes that divide is tried with a few schedules, microbatches and kinds of checkpointing. A closed
form ranks them in microseconds each; only the best are simulated.
"""

import math
from dataclasses import replace

from course_pp.arguments import checked, refuse_unless
from course_pp.plan.candidates import layouts, meshes, quick_memory, quick_time
from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout
from course_pp.plan.prediction import USABLE_MEMORY, Prediction, check_seq_len, predict
from course_pp.plan.timing import Constants
from course_pp.sizes import ModelConfig

__all__ = ["plan"]

_MOST_NODES = 512  # of a cluster that is looked for where nothing fits


@checked
def plan(
    model: ModelConfig,
    cluster: Cluster,
    global_batch: int,
    seq_len: int,
    n_best: int = 10,
    precision: str | None = None,
    constants: Constants | None = None,
    like: Layout | None = None,
) -> list[Prediction]:
    """Return the fastest layouts that fit, best first.

    Layouts that :mod:`course_pp.parallel` refuses are left out.

    Args:
        global_batch: sequences of all ranks together.
        n_best: how many to simulate and return.
        precision: as :class:`Layout` takes it; None for that of ``like``.
        like: a layout whose other settings, such as ``flash``, ``overlap`` or ``reshard``, all candidates share; its
            sizes, schedule and checkpointing are ignored. None takes :class:`Layout`'s defaults.

    Raises:
        ValueError: if none fits: says by how many bytes the smallest does not, and on how many nodes it would.
    """
    refuse_unless(1 <= n_best <= 1000, "plan", "n_best", n_best, "give 1 to 1000")
    check_seq_len(model, seq_len)
    refuse_unless(global_batch >= 1, "plan", "global_batch", global_batch, "give at least 1 sequence")
    constants, like = constants or Constants(), like or Layout()
    like = like if precision is None else like.with_(precision=precision)
    budget = cluster.gpu.memory * USABLE_MEMORY
    ranked: list[tuple[float, int, Layout]] = []
    least = math.inf
    for layout in layouts(model, cluster, global_batch, seq_len, like):
        held = quick_memory(model, layout, global_batch, seq_len)
        least = min(least, held)
        if held <= budget:
            ranked.append((quick_time(model, layout, cluster, constants, global_batch, seq_len), len(ranked), layout))
    if least == math.inf:
        raise ValueError(_why_no_mesh(model, cluster, global_batch, seq_len))
    best: list[Prediction] = []
    exact = math.inf
    for _, _, layout in sorted(ranked):
        prediction = predict(model, layout, cluster, global_batch, seq_len, constants)
        exact = min(exact, max(prediction.total_memory))
        if prediction.fits:
            best.append(prediction)
        if len(best) == n_best:
            break
    if not best:  # where something was simulated, the closed form was too kind to it
        raise ValueError(_why_none(model, cluster, global_batch, seq_len, like, exact if ranked else least))
    return sorted(best, key=lambda each: each.step_s)


def _why_no_mesh(model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int) -> str:
    """Return why nothing divides: the batch, or the sequence."""
    sizes = [(n_data, tp) for _, tp, n_data in meshes(model, cluster)]
    fitting = sorted({tp for n_data, tp in sizes if global_batch % n_data == 0})
    if fitting:  # norms share the sequence
        tp = fitting[0]
        return (
            f"seq_len={seq_len}: global_batch={global_batch} on {cluster.n_gpus} GPUs needs tp={tp}, whose norms share "
            f"the sequence: pad it to {-(-seq_len // tp) * tp}, or change the batch"
        )
    n_data, tp = min(sizes)
    return (
        f"global_batch={global_batch} on {cluster.n_gpus} GPUs: with at most {model.n_layers} stages and tp={tp} there "
        f"are {n_data} data ranks or more, and no possible number of them divides the batch: make it a multiple of "
        f"{n_data}, or change the number of GPUs"
    )


def _why_none(model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, like: Layout, least: float) -> str:
    """By how much the smallest layout does not fit, and the smallest cluster or the batch with which one would."""
    budget = cluster.gpu.memory * USABLE_MEMORY
    missing = f"no layout fits seq_len={seq_len}: the smallest needs {least:,.0f} bytes a GPU, "
    missing += f"{least - budget:,.0f} too many"
    for n_nodes in range(cluster.n_nodes + 1, max(_MOST_NODES, 4 * cluster.n_nodes) + 1):
        if _one_fits(model, replace(cluster, n_nodes=n_nodes), global_batch, seq_len, like):
            return f"{missing}; take {n_nodes} nodes of {cluster.gpus_per_node}, where one fits"
    for doublings in range(1, 10):  # more data ranks need more sequences to share
        n_nodes, batch = cluster.n_nodes * 2**doublings, global_batch * 2**doublings
        if _one_fits(model, replace(cluster, n_nodes=n_nodes), batch, seq_len, like):
            return (
                f"{missing}; take {n_nodes} nodes of {cluster.gpus_per_node} and global_batch={batch}, where one fits"
            )
    return f"{missing}, and no larger cluster helps: shorten the sequences, or take GPUs with more memory"


def _one_fits(model: ModelConfig, cluster: Cluster, global_batch: int, seq_len: int, like: Layout) -> bool:
    """Return whether the smallest layout, by the closed form, fits when it is simulated."""
    found = layouts(model, cluster, global_batch, seq_len, like, small=True)
    held = [(quick_memory(model, each, global_batch, seq_len), i, each) for i, each in enumerate(found)]
    if not held or min(held)[0] > cluster.gpu.memory * USABLE_MEMORY:
        return False
    return predict(model, min(held)[2], cluster, global_batch, seq_len).fits
