"""``python -m course_pp plan``: the fastest layouts that fit, as a table."""

import argparse

from course_pp.plan.cluster import cluster_of, gpu_names, model_named, model_names
from course_pp.plan.layout import PRECISIONS
from course_pp.plan.prediction import Prediction
from course_pp.plan.search import plan, why_no_pipeline

HELP = "rank the layouts of a model on a cluster, on paper"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"one of {', '.join(model_names())}")
    parser.add_argument(
        "--cluster", required=True, help=f"as 2048x8xH100; GPUs are {', '.join(gpu_names())}"
    )
    parser.add_argument(
        "--batch", type=int, required=True, help="sequences in a step, of all ranks together"
    )
    parser.add_argument("--seq-len", type=int, required=True, help="tokens in a sequence")
    parser.add_argument(
        "--precision", default="mixed", help=f"{', '.join(PRECISIONS)} (default: mixed)"
    )
    parser.add_argument(
        "--ep", type=int, help="ranks that share a layer's experts (default: all numbers are tried)"
    )
    parser.add_argument(
        "--rows", type=int, default=10, help="how many layouts to show (default: 10)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the table. If the first layout has no pipeline, a last line says why.

    Raises:
        ValueError: for unknown names, and if nothing fits.
    """
    model = model_named(arguments.model)
    found = plan(
        model,
        cluster_of(arguments.cluster),
        global_batch=arguments.batch,
        seq_len=arguments.seq_len,
        n_best=arguments.rows,
        precision=arguments.precision,
        ep=arguments.ep,
    )
    if model.n_experts:
        total, active = model.n_parameters / 1e9, model.n_active_parameters / 1e9
        print(f"{arguments.model}: {total:.4g} billion parameters, {active:.3g} billion active")
    print(table(found), flush=True)
    if any(each.layout.pp > 1 for each in found):
        print(said_of_buffers(found[0].layout.receives_ahead))
    if found[0].layout.pp == 1:
        print(why_no_pipeline(found[0], arguments.ep))


def said_of_buffers(ahead: bool) -> str:
    """Return the sentence that says how many receive buffers the memory of a pipeline holds."""
    if ahead:
        return (
            "GB holds a receive buffer for every message of a step, as torch before 2.15 makes them"
        )
    return "GB holds one receive buffer a boundary, as torch has from 2.15 on"


def table(found: list[Prediction]) -> str:
    """Return the predictions as rows."""
    rows = [("layout", "step s", "tokens/s", "TFLOP/s", "MFU", "GB", "bound by")]
    for each in found:
        row = (
            str(each.layout),
            f"{each.step_s:.3g}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.tflops_per_gpu:.0f}",
            f"{each.mfu:.1%}",
            f"{max(each.total_memory) / 1e9:.1f}",
            each.bound_by,
        )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
