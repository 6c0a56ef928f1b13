"""The exercises of notebook 12: a rank's bytes, two break-evens, a layout, a bottleneck, and a clinic of planners."""

from __future__ import annotations

from course_pp.exercises.capstone_clinic import grade_planned_report, planned_report
from course_pp.exercises.capstone_formulas import break_even, bytes_held, grade_break_even, grade_bytes_held
from course_pp.exercises.capstone_plans import bottleneck, fastest_layout, grade_bottleneck, grade_fastest_layout
from course_pp.exercises.exercise import Exercise

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "bytes_held",
        "12",
        "what a rank holds",
        2,
        7,
        (
            "Count the parameters first: this rank's layers, the embedding if it is the first, the head if the last.",
            "16 bytes for each of them, cut into `shard` parts. Activations are not cut.",
            "Under 1F1B `min(pp - rank, m)` microbatches are in flight; each keeps `kept` bytes for each layer here.",
        ),
        bytes_held,
        grade_bytes_held,
    ),
    Exercise(
        "break_even",
        "12",
        "ring against bubble",
        2,
        8,
        (
            "Both ways do the same work. Data parallelism adds a ring, the pipeline adds a bubble: set them equal.",
            "The ring: `2 * (n - 1) / n` times the gradients' bytes, over the bandwidth. The bubble: `n - 1` "
            "microbatches of a stage, and a stage has an n-th of the work of a sequence.",
            "`(n - 1) / n` and the parameters are on both sides. What is left has `each`, `speed` and `bandwidth`.",
        ),
        break_even,
        grade_break_even,
    ),
    Exercise(
        "fastest_layout",
        "12",
        "find the layout",
        2,
        10,
        (
            "Try every `pp` and `tp` that divide the GPUs, and every `ac`. The data-parallel ranks are what is left.",
            "`predict` raises `ValueError` for what cannot be laid out: pass it over.",
            "Keep the least `step_s` among the predictions with `fits`, and return its `layout`.",
        ),
        fastest_layout,
        grade_fastest_layout,
        limit_s=60.0,
    ),
    Exercise(
        "bottleneck",
        "12",
        "name the bottleneck",
        2,
        7,
        (
            "The largest part of a step need not be what helps most: predict again with twice of each.",
            "`replace(cluster, inter_bandwidth=2 * cluster.inter_bandwidth)`, and likewise the others; the memory's "
            "bandwidth is the GPU's. `predict` takes the rest from the prediction.",
            "With twice the batch a step does twice the work: halve its time, then take the least.",
        ),
        bottleneck,
        grade_bottleneck,
        limit_s=30.0,
    ),
    Exercise(
        "planned_report",
        "12",
        "bug clinic",
        2,
        8,
        (
            "Check each number against something you know. An MFU cannot be above 1.",
            "A rank gets `batch // layout.n_data` sequences. A peak is of one GPU.",
            "The ends hold more than layers: rank 0 the embedding, the last rank final norm and head.",
        ),
        planned_report,
        grade_planned_report,
    ),
)
