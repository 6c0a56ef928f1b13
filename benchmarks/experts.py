"""The cost of experts beside a dense twin: a model with as many active parameters.

    python benchmarks/experts.py [repeats]

Two ranks run all models in turn. The fastest of some steps counts, as other work of the machine
only adds. The load is even by force, so no rank waits for a busier one. The twin's feed-forward
blocks are as wide as a token's experts together. From row to row one thing is added:

    dense       the twin
    2 of 2      every token goes to both experts, so there is a router, a sort by expert and back,
                and two products in place of one
    2 of 8      there are more experts than a token has, so products are smaller, gradients larger,
                and all experts are updated
    2 of 8, ep  each rank has half of the experts, and tokens travel; with FSDP2 weights travel

``CPU ms`` is the processor time of both ranks together, without waiting.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Router, build_stage_module
from course_pp.model.experts import Routing
from course_pp.parallel import (
    DistributedConfig,
    apply_expert_parallel,
    apply_fsdp2,
    build_pipeline_schedule,
    build_pipeline_stage,
    default_mp_policy,
    get_device,
    get_dp_rank,
    get_dp_size,
    get_pp_rank,
    get_pp_size,
    init_distributed,
)

DENSE = ModelConfig(dim=256, n_layers=2, n_heads=4, ffn_dim=1024, vocab_size=1000, max_seq_len=128)
ROWS = 16
SEQ_LEN = 128
N_MICROBATCHES = 4
TWO = replace(DENSE, n_experts=2, top_k=2, expert_dim=512, balance="loss")
EIGHT = replace(TWO, n_experts=8)
PIPELINE = DistributedConfig(pp=2)
SHARDED = DistributedConfig(dp_shard=2)
MODELS = {
    "dense, pp=2": (DENSE, PIPELINE),
    "2 of 2, pp=2": (TWO, PIPELINE),
    "2 of 8, pp=2": (EIGHT, PIPELINE),
    "dense, FSDP2": (DENSE, SHARDED),
    "2 of 8, FSDP2": (EIGHT, SHARDED),
    "2 of 8, ep=2": (EIGHT, replace(SHARDED, ep=2)),
}


def main(repeats: int = 20) -> None:
    ranks = on_ranks(2, measure, repeats, backend=None, timeout_s=600)
    print(
        f"torch {torch.__version__}, {ROWS} × {SEQ_LEN} tokens a step, {N_MICROBATCHES}"
        " microbatches"
    )
    titles = f"{'step ms':>9}{'ratio':>7}{'CPU ms':>8}{'ratio':>7}"
    print(f"{'model':<15}{'parameters':>11}{'active':>11}{titles}")
    costs = {}
    for name in MODELS:
        steps, cpus = zip(*(rank[name] for rank in ranks), strict=True)
        costs[name] = (max(steps), sum(cpus))
    for name, (step, cpu) in costs.items():
        config, layout = MODELS[name]
        step_of_twin, cpu_of_twin = costs["dense, pp=2" if layout == PIPELINE else "dense, FSDP2"]
        sizes = f"{config.n_parameters:>11,}{config.n_active_parameters:>11,}"
        on_the_clock = f"{step * 1e3:>9.0f}{step / step_of_twin:>7.2f}"
        on_the_cpu = f"{cpu * 1e3:>8.0f}{cpu / cpu_of_twin:>7.2f}"
        print(f"{name:<15}{sizes}{on_the_clock}{on_the_cpu}")


def evenly(
    router: Router, x: Tensor, routed: Callable[[Router, Tensor], Routing] = Router.forward
) -> Routing:
    """Route as the router does, but to one expert after the other."""
    found = routed(router, x)
    turns = torch.arange(found.experts.numel(), device=x.device) % router.config.n_experts
    experts = turns.view_as(found.experts)
    weights = found.scores.gather(-1, experts)
    return found._replace(experts=experts, weights=weights / weights.sum(-1, keepdim=True))


def measure(rank: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of each model's fastest step, on the clock and of this processor."""
    device = get_device()
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(DENSE.vocab_size, (ROWS, SEQ_LEN + 1), generator=drawn).to(device)
    steps = {name: step_of(*model, tokens) for name, model in MODELS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in MODELS}
    with patch.object(Router, "forward", evenly):
        for repeat in range(repeats + 1):  # the first opens connections
            for name, step in steps.items():
                begin = time.perf_counter()
                began = time.process_time()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat:
                    times[name].append((time.perf_counter() - begin, time.process_time() - began))
    fastest = {}
    for name, taken in times.items():
        walls, cpus = zip(*taken, strict=True)
        fastest[name] = (min(walls), min(cpus))
    return fastest


def step_of(config: ModelConfig, layout: DistributedConfig, tokens: Tensor) -> Callable[[], None]:
    mesh = init_distributed(layout)
    module = build_stage_module(config, get_pp_rank(mesh), get_pp_size(mesh)).to(get_device())
    if layout.ep > 1:
        apply_expert_parallel(module, mesh)
    apply_fsdp2(module, mesh, default_mp_policy(torch.float32))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    rows = tokens.chunk(get_dp_size(mesh))[get_dp_rank(mesh)]
    stage = build_pipeline_stage(module, mesh, get_device(), len(rows) // N_MICROBATCHES, SEQ_LEN)
    pipeline = build_pipeline_schedule(stage, N_MICROBATCHES, CrossEntropy())
    inputs = rows[:, :-1].contiguous()
    target = rows[:, 1:].contiguous()

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(inputs, target=target)
        optimizer.step()

    return step


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
