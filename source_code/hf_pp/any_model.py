"""Cut a model of any family automatically, train one step in a pipeline, compare with one process.

    torchrun --standalone --nproc-per-node=2 source_code/hf_pp/any_model.py T5 --schedule 1f1b
    python source_code/hf_pp/any_model.py --list

The models are tiny and in float64, with random weights, so nothing is downloaded. The script prints
the values that cross each cut: T5's decoder also needs the encoder's output, and the U-Net has skip
connections. It needs transformers: pip install 'course_pp[hf]'.
"""

import argparse
import sys
from typing import Any

import torch
import torch.distributed as dist
from families import FAMILIES, ROWS, Example, build, called, example, tensor_of
from torch import Tensor, nn

from course_pp.parallel import (
    DistributedConfig,
    auto_split,
    destroy_distributed,
    explain,
    get_world_info,
    init_distributed,
    refusals_said_once,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build as build_schedule
from course_pp.schedule import names

TOLERANCE = 1e-9  # transformers' norms round to float32


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return (tensor_of(output) - target).square().mean()


def in_one_process(name: str) -> tuple[nn.Module, Tensor, float]:
    """Return the model with its gradients, the target, and the loss."""
    model = build(name).eval()
    output = tensor_of(called(model, example(name)))
    drawn = torch.Generator().manual_seed(1)
    target = torch.randn(output.shape, dtype=output.dtype, generator=drawn)
    loss = loss_fn(output, target)
    loss.backward()
    return model, target, loss.item()


def crossing(stage: nn.Module) -> str:
    """Return the shapes that a stage sends for a microbatch, without the model's own arguments."""
    _, sent = stage.sent_for_example()
    return ", ".join(str(tuple(tensor.shape)) for tensor in sent["values"])


def first_row(batch: Example) -> Example:
    """Return one microbatch, which the cut and the messages are planned for."""
    if isinstance(batch, dict):
        return {key: value[:1] for key, value in batch.items()}
    return batch[:1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=FAMILIES, default=FAMILIES[0], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the families")
    parser.add_argument("--schedule", choices=names(), default="1f1b")
    args = parser.parse_args()
    if args.list:
        print("\n".join(FAMILIES))
        return

    rank, _, n_ranks = get_world_info()
    schedule = build_schedule(args.schedule, n_ranks, ROWS)
    batch = example(args.name)
    one = first_row(batch)
    stages = auto_split(build(args.name).eval(), one, schedule.n_stages)
    init_distributed(DistributedConfig(pp=n_ranks))
    mine = {stage: stages[stage] for stage, ranks in enumerate(schedule.placement) if rank in ranks}
    pipeline = Pipeline(schedule, mine, loss_fn, tied=stages[0].ties)

    whole, target, expected = in_one_process(args.name)
    loss = pipeline.step(batch, target=target).item()
    furthest = abs(loss - expected)
    for stage in mine.values():
        for name, parameter in stage.named_parameters():
            other = whole.get_parameter(name).grad
            furthest = max(furthest, (parameter.grad - other).abs().max().item())

    if rank == 0:
        obstacles = explain(whole, one) or "nothing stops a cut"
        print(f"{args.name}: {type(whole).__name__}, {obstacles}")
        for number, stage in enumerate(stages):
            size = f"{sum(p.numel() for p in stage.parameters()):,} parameters"
            if sent := crossing(stage):
                size += f", sends {sent}"
            print(f"stage {number}: {size}")
        print(f"tied: {[dict(tie) for tie in stages[0].ties]}", flush=True)
    same = "equal to" if furthest <= TOLERANCE else "DIFFER FROM"
    compared = f"loss {loss:.6f} and gradients {same} one process: {furthest:.0e}"
    for stage in mine:
        print(f"Rank {rank}, stage {stage}: {compared}", flush=True)
    if dist.is_initialized():
        destroy_distributed()
    if furthest > TOLERANCE:
        sys.exit(1)


if __name__ == "__main__":
    with refusals_said_once("any_model.py"):
        main()
