"""The bug clinic of notebook 12: three planners that miscount, and the report that all of them should have given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import close, expect_int, expect_list, expect_number
from course_pp.plan import Cluster, Layout, ModelConfig, Prediction, cluster_of, model_named, predict
from course_pp.plan.timing import model_flops
from course_pp.sizes import compute_layer_assignment

__all__ = ["PATIENTS", "grade_planned_report", "planned_report", "ward_round"]

Report = tuple[int, float, list[int]]
"""Microbatches of a rank, MFU, parameters of each pipeline rank."""


def planned_report(
    model: ModelConfig, layout: Layout, cluster: Cluster, batch: int, seq_len: int, step_s: float
) -> Report:
    """(microbatches of a rank, MFU, parameters of each pipeline rank)"""
    m = batch // layout.n_data // layout.microbatch_size
    mfu = model_flops(model, batch, seq_len) / (step_s * cluster.gpu.peak * cluster.n_gpus)
    held = [
        (end - start) * model.n_layer_parameters for start, end in compute_layer_assignment(model.n_layers, layout.pp)
    ]
    held[0] += model.n_embedding_parameters
    held[-1] += model.n_head_parameters
    return m, mfu, held


_Right = Callable[[ModelConfig, Layout, Cluster, int, int, float], Report]


def _report(*illnesses: str) -> _Right:
    """``planned_report`` with some of the three illnesses."""

    def ill(model: ModelConfig, layout: Layout, cluster: Cluster, batch: int, seq_len: int, step_s: float) -> Report:
        m, mfu, held = planned_report(model, layout, cluster, batch, seq_len, step_s)
        if "peak" in illnesses:
            mfu *= cluster.gpus_per_node
        if "embedding" in illnesses:
            held[0] -= model.n_embedding_parameters
        if "head" in illnesses:
            held[-1] -= model.n_head_parameters
        if "batch" in illnesses:
            m *= layout.n_data
        return m, mfu, held

    return ill


@dataclass(frozen=True)
class _Patient:
    """What a planner says of a run, by layout: tokens a step, MFU, gigabytes of the first and a middle rank."""

    report: _Right

    def says(self, run: Prediction) -> tuple[int, float, float, float]:
        asked = run.model, run.layout, run.cluster, run.global_batch, run.seq_len, run.step_s
        m, mfu, held = self.report(*asked)
        tokens = m * run.layout.microbatch_size * run.layout.n_data * run.seq_len
        first, second = (16 * each / run.layout.dp_shard / 1e9 for each in held[:2])
        return tokens, mfu, first, second


PATIENTS = {"A": _Patient(_report("batch")), "B": _Patient(_report("peak")), "C": _Patient(_report("embedding"))}
"""Three planners, each with one illness."""


def ward_round() -> str:
    """What the three say of two runs, below what is right, line by line."""
    model, told = model_named("llama3-8b"), {"right": _Patient(planned_report), **PATIENTS}
    lines = ["               tokens a step      MFU     GB of rank 0   GB of rank 1"]
    for where, layout in (("2x2xH100", Layout(pp=4)), ("4x4xH100", Layout(pp=4, dp_shard=4))):
        run = predict(model, layout, cluster_of(where), 64, 8192)
        lines.append(f"{where}, {layout}")
        for name, patient in told.items():
            tokens, mfu, first, second = patient.says(run)
            lines.append(f"  {name:<12}{tokens:>14,} {mfu:8.0%} {first:>13.1f} {second:>14.1f}")
    return "\n".join(lines)


_CASES: tuple[tuple[str, str, Layout, int, int, float], ...] = (
    ("llama3-8b", "2x8xH100", Layout(4, dp_shard=4), 64, 8192, 4.2),
    ("llama3-8b", "2x8xH100", Layout(dp_shard=8, dp_replicate=2, microbatch_size=2), 64, 8192, 3.9),
    ("llama3-70b", "4x8xH100", Layout(3, 1, 2, 1, microbatch_size=3), 36, 4096, 11.0),
    ("gpt2-xl", "1x4xA100", Layout(2, dp_replicate=2), 10, 1024, 1.5),
)


def _case(
    name: str, where: str, layout: Layout, batch: int, seq_len: int, step_s: float
) -> tuple[ModelConfig, Layout, Cluster, int, int, float]:
    return replace(model_named(name), tie_embeddings=False), layout, cluster_of(where), batch, seq_len, step_s


def grade_planned_report(answer: Answer) -> None:
    """Ask for all three numbers of four runs."""
    cases = [_case(*case) for case in _CASES]
    found: list[Report] = []
    for (name, where, layout, *_), got in zip(_CASES, answer.calls(cases, "planned_report(…)"), strict=True):
        found.append(_as_report(got, f"planned_report of {name} on {where}, {layout}", layout.pp))
    right = [planned_report(*case) for case in cases]
    for part, what in enumerate(("microbatches of a rank", "MFU", "parameters of each pipeline rank")):
        for (name, where, layout, *_), got, wanted, case in zip(_CASES, found, right, cases, strict=True):
            if _differ(got[part], wanted[part]):
                raise Mistake(
                    f"{name} on {where}, {layout}: {what} {got[part]}, which should be {wanted[part]}.",
                    _why(part, got, case),
                )


def _as_report(got: Any, what: str, pp: int) -> Report:
    m, mfu, held = expect_list(got, what, 3)
    counts = [expect_int(each, f"{what}[2][{i}]") for i, each in enumerate(expect_list(held, f"{what}[2]", pp))]
    return expect_int(m, f"{what}[0]"), expect_number(mfu, f"{what}[1]"), counts


def _differ(got: Any, wanted: Any) -> bool:
    return not close(got, wanted) if isinstance(wanted, float) else bool(got != wanted)


def _why(part: int, got: Report, case: tuple[Any, ...]) -> str:
    known = {
        "batch": "That is the global batch: each data-parallel rank has a part of it.",
        "peak": "That is above what the GPUs could do: count all of them, not the nodes.",
        "embedding": "Rank 0 holds the embedding, too.",
        "head": "The last rank holds final norm and head, too.",
    }
    for illness, told in known.items():
        if not _differ(_report(illness)(*case)[part], got[part]) and _differ(planned_report(*case)[part], got[part]):
            return told
    if part == 2 and not _differ(_report("embedding", "head")(*case)[2], got[2]):
        return "The ends hold more than layers: rank 0 the embedding, the last rank final norm and head."
    return ("A rank's sequences, divided by those of a microbatch.", "Operations a second over the peak of all GPUs.",
            "Layers as `compute_layer_assignment` shares them, and what the ends hold beside them.")[part]  # fmt: skip
