"""Steps that were timed: fit a cluster's real speed to a few of them; and published ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from course_pp.base.arguments import checked
from course_pp.base.sizes import ModelConfig
from course_pp.plan.cluster import Cluster, cluster_of, model_named
from course_pp.plan.layout import Layout
from course_pp.plan.prediction import Prediction, check_seq_len, predict
from course_pp.plan.run import Constants

FITTED = ("peak", "memory_passes", "memory_bandwidth", "bandwidth", "latency")
"""The five fitted numbers. ``peak`` and ``memory_bandwidth`` belong to :class:`Gpu`,
``memory_passes`` to :class:`Constants`, ``bandwidth`` to all links, ``latency`` to each message.
"""

_TURNS = 30
_STEP = 1e-3  # relative change of a number, for the derivatives
_PRIOR = 1e-4  # weight that keeps a number where it was if no step depends on it
_ENOUGH = 1e-6  # the search ends when it moves less
_FURTHEST = 1.0  # longest move in one turn, in logarithms
_FAR = 300.0  # ratio that means milliseconds in place of seconds, or another kind of machine
_OFF = 3.0  # ratio to the fit that is no noise


@dataclass(frozen=True)
class TimedStep:
    """A step that was timed, as :func:`course_pp.plan.predict` takes it.

    Attributes:
        seconds: time of one step, optimizer included: a median of several, without warm-up.
    """

    model: ModelConfig
    layout: Layout
    global_batch: int
    seq_len: int
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds}: give a finite number above 0")
        self.layout.n_microbatches(self.global_batch)
        check_seq_len(self.model, self.seq_len)

    def predicted(self, cluster: Cluster, constants: Constants | None = None) -> Prediction:
        return predict(self.model, self.layout, cluster, self.global_batch, self.seq_len, constants)


@checked
def calibrate(
    steps: Sequence[TimedStep], cluster: Cluster, constants: Constants | None = None
) -> tuple[Cluster, Constants]:
    """Return the cluster and constants whose predictions come nearest to some timed steps.

    It fits the five numbers of :data:`FITTED`. Bandwidths inside and between nodes keep their
    ratio, and so do the peaks of 16 and 32 bits. It minimises the sum of squared errors of the
    logarithms (Levenberg-Marquardt), so a short step counts as much as a long one.

    Time steps in which each of the five matters: narrow and wide layers, few and many tokens for
    the same parameters, layouts with a pipeline, with tensor and with data parallelism.

    Args:
        steps: at least five different ones, all of layouts of ``cluster``.
        cluster: the cluster on which they ran. The fit begins with its numbers.
        constants: constants with which the fit begins; None takes the ones fitted on the Megatron
            table.

    Returns:
        The cluster and the constants. The measured rate is ``gpu.peak`` times
        ``matmul_efficiency``, so an MFU on this cluster refers to this peak, not to a data sheet's.
        Of the constants ``memory_passes`` is fitted.
    """
    start = constants or Constants()
    # The fit multiplies each number, and a product with 0 would stay 0.
    if not cluster.latency:
        raise ValueError(
            "latency=0.0 of the cluster would stay 0: begin with a guess above 0, such as 1e-4"
            " seconds"
        )
    different = len({replace(step, seconds=1.0) for step in steps})
    if different < len(FITTED):
        raise ValueError(
            f"{different} different steps for {len(FITTED)} numbers ({', '.join(FITTED)}): time at"
            f" least {len(FITTED)}, of other models, batches or layouts"
        )
    ratio = median(step.seconds / step.predicted(cluster, start).step_s for step in steps)
    if not 1 / _FAR < ratio < _FAR:
        raise ValueError(
            f"the steps took {ratio:.2g} times as long as on cluster: give times in seconds, or a"
            " cluster that is nearer to the one they ran on"
        )

    def found(moves: Sequence[float]) -> tuple[Cluster, Constants]:
        return _moved(cluster, start, moves)

    def errors(moves: Sequence[float]) -> list[float]:
        of = found(moves)
        off = [math.log(step.predicted(*of).step_s / step.seconds) for step in steps]
        prior = [math.sqrt(_PRIOR) * each for each in moves]
        return off + prior

    best = found(_least_squares(errors, len(FITTED)))
    seconds = [step.predicted(*best).step_s for step in steps]
    off = [abs(math.log(fit / step.seconds)) for fit, step in zip(seconds, steps, strict=True)]
    worst = max(range(len(steps)), key=off.__getitem__)
    if off[worst] > math.log(_OFF):
        raise ValueError(
            f"steps[{worst}] ({steps[worst].layout}) took {steps[worst].seconds:.3g} s, the nearest"
            f" fit to all steps says {seconds[worst]:.3g} s: they contradict each other; time it"
            " again, or leave it out"
        )
    return best


def _moved(
    cluster: Cluster, constants: Constants, moves: Sequence[float]
) -> tuple[Cluster, Constants]:
    """Return the numbers times the exponentials of ``moves``, in the order of :data:`FITTED`."""
    peak, passes, memory, link, latency = (math.exp(each) for each in moves)
    gpu = cluster.gpu
    measured = replace(
        gpu,
        peak=gpu.peak * peak,
        peak_32=None if gpu.peak_32 is None else gpu.peak_32 * peak,
        memory_bandwidth=gpu.memory_bandwidth * memory,
        link_bandwidth=gpu.link_bandwidth * link,
        source="measured",
    )
    moved = replace(
        cluster,
        gpu=measured,
        intra_bandwidth=float(cluster.intra_bandwidth or 0) * link,
        inter_bandwidth=cluster.inter_bandwidth * link,
        latency=cluster.latency * latency,
    )
    # Bounded, because a turn of the search may go too far.
    return moved, replace(constants, memory_passes=min(999.0, constants.memory_passes * passes))


def _least_squares(errors: Callable[[Sequence[float]], list[float]], n: int) -> list[float]:
    """Return ``n`` numbers with the least sum of squared ``errors``. The search begins at zeros."""
    import numpy as np  # a program that only plans does not wait for this import

    at = np.zeros(n)
    damping = 1e-3
    here = np.array(errors(at.tolist()))
    for _ in range(_TURNS):
        nudged = np.array([errors(each.tolist()) for each in at + _STEP * np.eye(n)])
        slopes = (nudged - here) / _STEP
        normal = slopes @ slopes.T
        normal[np.diag_indices(n)] *= 1 + damping
        step = np.linalg.solve(normal, -slopes @ here)
        there = at + step * min(1.0, _FURTHEST / max(1e-12, np.abs(step).max()))
        new = np.array(errors(there.tolist()))
        if new @ new < here @ here:
            at = there
            here = new
            damping /= 4
        else:
            damping *= 8
        if np.abs(step).max() < _ENOUGH:
            break
    return list(at.tolist())


@dataclass(frozen=True)
class PublishedRun:
    """A published run, with the seconds of a step."""

    name: str
    model: ModelConfig
    layout: Layout
    cluster: Cluster
    global_batch: int
    seq_len: int
    seconds: float

    def predicted(self, constants: Constants | None = None) -> Prediction:
        return predict(
            self.model,
            self.layout,
            cluster=self.cluster,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            constants=constants,
        )


def megatron_seconds(
    model: ModelConfig, global_batch: int, seq_len: int, n_gpus: int, tflops: float
) -> float:
    """Return a step's seconds from the TFLOP/s that Megatron-LM reports.

    They are its equation 3, with recomputed forwards.
    """
    h = model.dim
    n_layers = model.n_layers
    more = 1 + seq_len / (6 * h) + model.vocab_size / (16 * n_layers * h)
    return 96 * global_batch * seq_len * n_layers * h * h * more / (n_gpus * tflops * 1e12)


def _megatron(
    name: str,
    tp: int,
    pp: int,
    n_gpus: int,
    batch: int,
    tflops: float,
    size: int,
    n_chunks: int,
    overlap: bool,
) -> PublishedRun:
    """Return a row of the table: GPUs, batch, TFLOP/s, size of a microbatch, chunks a rank."""
    model = model_named(name)
    layout = Layout(
        pp=pp,
        tp=tp,
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
    return PublishedRun(
        name=name,
        model=model,
        layout=layout,
        cluster=cluster_of(f"{n_gpus // 8}x8xA100"),
        global_batch=batch,
        seq_len=2048,
        seconds=megatron_seconds(model, batch, seq_len=2048, n_gpus=n_gpus, tflops=tflops),
    )


# Up to 18B, torch's own DDP was used. Its reductions run beside the last backward, also where the
# batch is several microbatches (18B). From 39B on, Megatron's DDP was used, which waits.
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

The table lacks microbatch sizes and interleaving. They are from examples/sc21/run_table_1.sh in
NVIDIA/Megatron-LM.
"""
