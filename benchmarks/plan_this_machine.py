"""Calibrate the planner on this machine, and hold its predictions of two real ranks against what
they take.

    python benchmarks/plan_this_machine.py [repeats]

A few steps are timed on two ranks over gloo, with a pipeline, tensor and data parallelism.
`course_pp.plan.calibrate` fits what this machine can do to them. Twelve other runs, of other
widths, depths, batches and schedules, are then predicted. All take turns, each repeat in another
order, so that a machine that slows down slows all; printed are medians. Leave the machine alone
meanwhile: it takes two minutes.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from runtime_speed import time_of
from torch import nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    default_mp_policy,
    get_dp_rank,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
)
from course_pp.plan import (
    Cluster,
    Constants,
    Layout,
    ModelConfig,
    TimedStep,
    calibrate,
    gpu_named,
    predict,
)

HERE = Cluster(1, 2, gpu_named("laptop"), latency=1e-4)


@dataclass(frozen=True)
class Run:
    """What is timed: batch in sequences of both ranks together."""

    dim: int
    n_layers: int
    batch: int
    seq_len: int
    layout: Layout

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(self.dim, self.n_layers, self.dim // 32, 2048, max_seq_len=self.seq_len)

    def timed(self, seconds: float) -> TimedStep:
        return TimedStep(self.model, self.layout, self.batch, self.seq_len, seconds)

    def __str__(self) -> str:
        return (
            f"{self.dim:>4} × {self.n_layers:<2} {self.batch:>3} × {self.seq_len:<4} {self.layout}"
        )


def pipeline(schedule: str, microbatch_size: int, **more: object) -> Layout:
    return Layout(2, schedule=schedule, microbatch_size=microbatch_size, precision="float32").with_(
        **more
    )


def tensor(microbatch_size: int) -> Layout:
    return Layout(tp=2, microbatch_size=microbatch_size, precision="float32")


def data(microbatch_size: int, reshard: bool = True) -> Layout:
    # gloo's threads have no cores of their own: what they do is not done beside the work.
    layout = Layout(dp_shard=2, microbatch_size=microbatch_size, precision="float32", overlap=False)
    return layout.with_(reshard=reshard)


CALIBRATING = (
    Run(128, 4, 16, 128, pipeline("1f1b", 2)),
    Run(256, 8, 8, 128, pipeline("1f1b", 1)),
    Run(512, 4, 8, 128, pipeline("gpipe", 2)),
    Run(256, 4, 8, 256, tensor(8)),
    Run(512, 2, 4, 128, tensor(4)),
    Run(256, 4, 16, 128, data(8)),
    Run(512, 4, 4, 128, data(2)),
    Run(128, 6, 8, 256, pipeline("gpipe", 1)),
)
PREDICTED = (
    Run(192, 8, 16, 128, pipeline("1f1b", 2)),
    Run(320, 6, 8, 192, pipeline("1f1b", 1)),
    Run(384, 4, 12, 128, pipeline("gpipe", 2)),
    Run(384, 8, 8, 128, pipeline("1f1b", 2)),
    Run(256, 8, 16, 64, pipeline("interleaved_1f1b", 2, n_chunks=2)),
    Run(384, 8, 8, 128, pipeline("gpipe", 1, ac="full")),
    Run(448, 5, 8, 128, pipeline("1f1b", 2)),
    Run(320, 8, 16, 128, pipeline("zb_v", 2)),
    Run(384, 4, 8, 128, tensor(8)),
    Run(192, 6, 8, 256, tensor(8)),
    Run(384, 6, 8, 128, data(4)),
    Run(192, 4, 16, 192, data(8)),
)


def main(repeats: int = 11) -> None:
    runs = (*CALIBRATING, *PREDICTED)
    seconds = on_ranks(2, take_turns, runs, repeats, timeout_s=900.0)[0]
    medians = dict(zip(runs, map(median, seconds), strict=True))
    cluster, constants = calibrate([run.timed(medians[run]) for run in CALIBRATING], HERE)
    gpu = cluster.gpu
    print(
        f"torch {torch.__version__}, two ranks of one thread over gloo, medians of {repeats}"
        " interleaved repeats"
    )
    print(
        f"fitted: {gpu.peak * constants.matmul_efficiency / 1e9:.1f} Gflop/s of products, memory"
        f" {gpu.memory_bandwidth / 1e9:.2f} GB/s, memory_passes {constants.memory_passes:.2f},"
        f" links {cluster.inter_bandwidth / 1e9:.2f} GB/s, latency {cluster.latency * 1e6:.0f} µs"
    )
    for title, rows in (("calibrated on", CALIBRATING), ("predicted", PREDICTED)):
        errors = print_rows(title, rows, medians, cluster, constants)
        print(f"median error {median(errors):.1%}, worst {max(errors):.1%}, of {len(errors)}")


def print_rows(
    title: str,
    rows: tuple[Run, ...],
    medians: dict[Run, float],
    cluster: Cluster,
    constants: Constants,
) -> list[float]:
    """One row a run; the sizes of the relative errors."""
    sizes = f"{title}: width × layers, batch × tokens"
    print(f"\n{sizes:<72}{'predicted ms':>14}{'measured ms':>13}{'error':>8}")
    errors = []
    for run in rows:
        predicted = predict(
            run.model, run.layout, cluster, run.batch, run.seq_len, constants
        ).step_s
        error = predicted / medians[run] - 1
        errors.append(abs(error))
        print(f"{run!s:<72}{predicted * 1e3:14.1f}{medians[run] * 1e3:13.1f}{error:+8.1%}")
    return errors


def take_turns(rank: int, runs: tuple[Run, ...], repeats: int) -> list[list[float]]:
    """Seconds of each run in each repeat, from the first rank's start to the last one's end."""
    steps = [step_of(run) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    turns, draw = list(range(len(runs))), random.Random(0)  # the same order on both ranks
    for repeat in range(repeats + 2):
        draw.shuffle(turns)
        for turn in turns:
            lasted = time_of(steps[turn])
            if repeat >= 2:
                seconds[turn].append(lasted)
    return seconds


def step_of(run: Run) -> Callable[[], None]:
    """One training step as a user would write it: forward, backward, AdamW."""
    layout, model = run.layout, run.model
    mesh = init_distributed(
        DistributedConfig(layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    )
    indices = (
        get_stage_indices(layout.schedule, get_pp_rank(mesh), layout.pp) if layout.pp > 1 else [0]
    )
    modules: list[nn.Module] = [
        build_stage_module(model, i, layout.pp * len(indices)) for i in indices
    ]
    for module in modules:
        apply_tensor_parallel(module, mesh)
        apply_ac(module, layout.ac)
        apply_fsdp2(module, mesh, default_mp_policy(), reshard_after_forward=layout.reshard)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()])
    batch = torch.randint(model.vocab_size, (run.batch, run.seq_len + 1))
    batch = batch.chunk(layout.n_data)[get_dp_rank(mesh)]
    inputs, target, loss_fn = batch[:, :-1].contiguous(), batch[:, 1:].contiguous(), CrossEntropy()
    if layout.pp == 1:

        def work() -> None:
            loss_fn(modules[0](inputs), target).backward()

    else:
        stages = [
            build_pipeline_stage(m, mesh, "cpu", layout.microbatch_size, run.seq_len, torch.float32)
            for m in modules
        ]
        given = stages if len(stages) > 1 else stages[0]
        runner = build_pipeline_schedule(
            given, layout.n_microbatches(run.batch), loss_fn, layout.schedule
        )

        def work() -> None:
            runner.step(inputs, target=target)

    def step() -> None:
        optimizer.zero_grad()
        work()
        optimizer.step()

    return step


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
