"""Fit the planner's two constants on table 1 of Narayanan et al. 2021, arXiv:2104.04473, and say
how far off it is.

Each row is predicted with constants fitted on the nine others, beside the naive guess that it
reaches their mean TFLOP/s. Then five runs of other papers, which the fit never saw, are predicted
as they come.

    python benchmarks/plan_calibration.py
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from course_pp.plan import Constants, Layout, cluster_of, model_named
from course_pp.plan.calibration import MEGATRON, PublishedRun, megatron_seconds
from course_pp.plan.timing import model_flops

TABLE = list(MEGATRON)


def llama(n_gpus: int, dp: int, tflops: float) -> PublishedRun:
    """Grattafiori et al. 2024, arXiv:2407.21783, table 4: bf16, TP 8, PP 16, sequences of 8,192,
    16M tokens a batch.

    Interleaved, nothing recomputed, parameters kept after forward (section 3.3.2). There a chunk
    seems to be one layer, eight a rank, of which the first holds the embedding alone and the last
    the head alone. Here every stage needs a
    layer: two larger chunks are taken.
    """
    model = model_named("llama3-405b")
    layout = Layout(
        16, 8, dp, schedule="interleaved_1f1b", precision="mixed", sequence_parallel=True
    )
    # Their TFLOP/s counts useful operations: it is the MFU beside it times the peak.
    seconds = model_flops(model, 2048, 8192) / (n_gpus * tflops * 1e12)
    return PublishedRun(
        f"llama3-405b, {n_gpus:,} GPUs",
        model,
        layout,
        cluster_of(f"{n_gpus // 8}x8xH100"),
        2048,
        8192,
        seconds,
    )


def mt_nlg(dp: int, seconds: float) -> PublishedRun:
    """Return the rows of Smith et al. 2022, arXiv:2201.11990, section 2.4.

    They trained 530B parameters on 280 to 420 DGX A100 servers with a batch of 1,920.
    """
    layout = Layout(
        35,
        8,
        dp_replicate=dp,
        ac="full",
        precision="megatron",
        flash=False,
        scatter_gather=True,
        overlap=False,
    )
    cluster = cluster_of(f"{35 * dp}x8xA100")
    return PublishedRun(
        f"mt-nlg 530b, {cluster.n_gpus:,} GPUs",
        model_named("gpt-530b"),
        layout,
        cluster,
        1920,
        2048,
        seconds,
    )


def bloom() -> PublishedRun:
    """Le Scao et al. 2022, arXiv:2211.05100, section 3.4: 384 A100, four 100 Gb/s links a node.

    The layout and 105 s a step are those of train/tr11-176B-ml/README.md in
    bigscience-workshop/bigscience.
    """
    model = model_named("bloom-176b")
    layout = Layout(
        12,
        4,
        8,
        microbatch_size=2,
        ac="full",
        precision="megatron",
        flash=False,
        overlap=False,
        reshard=False,
    )
    cluster = replace(cluster_of("48x8xA100"), inter_bandwidth=4 * 12.5e9 / 8)
    return PublishedRun("bloom-176b, 384 GPUs", model, layout, cluster, 2048, 2048, 105.0)


OTHERS = [mt_nlg(8, 60.1), mt_nlg(12, 44.4), bloom(), llama(8192, 64, 430), llama(16_384, 128, 400)]


_NAMES = ("matmul_efficiency", "memory_passes")


@dataclass(frozen=True)
class Linear:
    """The error log(predicted / published) of a row, and its slope by each constant's logarithm."""

    error: float
    slopes: tuple[float, float]

    @classmethod
    def of(cls, row: PublishedRun, at: Constants) -> "Linear":
        error = math.log(row.predicted(at).step_s / row.seconds)
        slopes = []
        for name in _NAMES:
            nudged = replace(at, **{name: getattr(at, name) * 1.01})
            there = math.log(row.predicted(nudged).step_s / row.seconds)
            slopes.append((there - error) / 0.01)
        return cls(error, (slopes[0], slopes[1]))


def stepped(rows: Sequence[Linear], at: Constants) -> Constants:
    """One Gauss-Newton step towards the least sum of squared errors."""
    a = sum(r.slopes[0] ** 2 for r in rows)
    b = sum(r.slopes[0] * r.slopes[1] for r in rows)
    d = sum(r.slopes[1] ** 2 for r in rows)
    u, v = (-sum(r.slopes[i] * r.error for r in rows) for i in (0, 1))
    steps = ((d * u - b * v) / (a * d - b * b), (a * v - b * u) / (a * d - b * b))
    return replace(at, **{n: getattr(at, n) * (1 + s) for n, s in zip(_NAMES, steps, strict=True)})


def fitted(rows: Sequence[PublishedRun], start: Constants) -> tuple[Constants, list[Linear]]:
    """The constants that fit best, and the rows near them."""
    for _ in range(4):
        linear = [Linear.of(row, start) for row in rows]
        found = stepped(linear, start)
        moved = max(abs(getattr(found, name) / getattr(start, name) - 1) for name in _NAMES)
        start = found
        if moved < 1e-3:
            break
    return start, linear


def left_out(fit: Constants, linear: Sequence[Linear]) -> tuple[list[float], list[float]]:
    """Return each row's relative error if the other rows predict it: by the model, and naively."""
    errors, naive = [], []
    for i, row in enumerate(TABLE):
        # The common fit is so near that one step from it, without this row, ends at the fit of the
        # nine others.
        predicted = row.predicted(stepped([*linear[:i], *linear[i + 1 :]], fit)).step_s
        errors.append(predicted / row.seconds - 1)
        naive.append(_rate(row) / mean(_rate(each) for each in TABLE[:i] + TABLE[i + 1 :]) - 1)
    return errors, naive


def main() -> None:
    start, linear = fitted(TABLE, Constants())
    errors, naive = left_out(start, linear)
    print(f"{'row':<12}{'published s':>12}{'left out s':>12}{'error':>8}{'naive':>8}")
    for row, error, guess in zip(TABLE, errors, naive, strict=True):
        predicted = row.seconds * (1 + error)
        errors_of = f"{error:+8.1%}{guess:+8.1%}"
        print(f"{row.name:<12}{row.seconds:12.2f}{predicted:12.2f}{errors_of}")
    for name, found in (("model", errors), ("naive", naive)):
        sizes = [abs(each) for each in found]
        print(f"{name}: median error {median(sizes):.1%}, worst {max(sizes):.1%}")
    print(
        f"\nfitted on all ten: matmul_efficiency={start.matmul_efficiency:.4f}, "
        f"memory_passes={start.memory_passes:.4f}\n"
    )
    print(f"{'never seen':<28}{'published s':>12}{'predicted s':>12}{'error':>8}")
    for row in OTHERS:
        predicted = row.predicted(start).step_s
        print(
            f"{row.name:<28}{row.seconds:12.2f}{predicted:12.2f}{predicted / row.seconds - 1:+8.1%}"
        )


def _rate(row: PublishedRun) -> float:
    """TFLOP/s a GPU as the table counts them."""
    return (
        megatron_seconds(row.model, row.global_batch, row.seq_len, row.cluster.n_gpus, 1.0)
        / row.seconds
    )


if __name__ == "__main__":
    main()
