"""What each precision costs: milliseconds a step in either engine, and bytes that a rank keeps.

    python benchmarks/precision.py [repeats]

Two stages on two ranks, 1F1B; the precisions take turns. ``state`` is parameters, gradients and
AdamW's moments of the first rank, ``kept`` the most that its autograd keeps for backward, as the
runtime's recorder counts it. On GPUs ``peak`` is what the allocator gave out during a step beyond
what was there. Leave the machine alone meanwhile.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    compute_in,
    get_device,
    init_distributed,
)
from course_pp.runtime import Pipeline, Recorder
from course_pp.schedule import build
from course_pp.training.optim import DTYPES

MODEL = ModelConfig(dim=256, n_layers=8, n_heads=4, vocab_size=1000, max_seq_len=128)
ROWS, SEQ_LEN, N_MICROBATCHES = 16, 128, 8


class Cost(NamedTuple):
    """Of one rank, in seconds and bytes."""

    parallel: list[float]
    runtime: list[float]
    state: int
    kept: int
    peak: int


def main(repeats: int = 10) -> None:
    first, _ = on_ranks(2, measure, repeats, backend=None, timeout_s=600)
    print(
        f"torch {torch.__version__}, {MODEL.n_parameters:,} parameters, {ROWS} × {SEQ_LEN} tokens a"
        " step"
    )
    titles = f"{'state MB':>10}{'kept MB':>9}{'peak MB':>9}"
    print(f"{'precision':<10}{'parallel ms':>13}{'runtime ms':>12}{titles}")
    for name, cost in first.items():
        parallel = statistics.median(cost.parallel) * 1e3
        runtime = statistics.median(cost.runtime) * 1e3
        sizes = f"{cost.state / 1e6:>10.1f}{cost.kept / 1e6:>9.1f}{cost.peak / 1e6:>9.1f}"
        print(f"{name:<10}{parallel:>13.0f}{runtime:>12.0f}{sizes}")


def measure(rank: int, repeats: int) -> dict[str, Cost]:
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=1))
    device = get_device()
    tokens = torch.randint(
        MODEL.vocab_size, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0)
    )
    inputs, target = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    steps: dict[str, list[Callable[[], object]]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for name, dtype in DTYPES.items():
        module = build_stage_module(MODEL, rank, 2).to(device)
        compute_in(module, dtype)
        optimizer = torch.optim.AdamW(module.parameters())
        stage = build_pipeline_stage(module, mesh, device, ROWS // N_MICROBATCHES, SEQ_LEN)
        pipeline = build_pipeline_schedule(stage, N_MICROBATCHES, CrossEntropy())
        schedule = build("1f1b", 2, N_MICROBATCHES)
        recorder = Recorder(memory=True)
        recorded = Pipeline(schedule, module, CrossEntropy(), device=device, recorder=recorder)
        recorded.step(inputs, target=target)
        optimizer.step()
        moments = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
        state = sum(2 * p.nbytes for p in module.parameters()) + moments
        sizes[name] = state, recorder.memory()[rank].peaks["total"]
        plain = Pipeline(schedule, module, CrossEntropy(), device=device)
        steps[name] = [
            lambda p=pipeline: p.step(inputs, target=target),
            lambda p=plain: p.step(inputs, target=target),
        ]
        for step in steps[name]:
            step()
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in DTYPES}
    peaks = dict.fromkeys(DTYPES, 0)
    for _ in range(repeats):
        for name, pair in steps.items():
            for seconds, step in zip(times[name], pair, strict=True):
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                begin = time.perf_counter()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated() - before)
                seconds.append(time.perf_counter() - begin)
    return {name: Cost(*times[name], *sizes[name], peaks[name]) for name in DTYPES}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
