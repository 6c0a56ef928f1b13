"""Cut GPT-2 automatically over the ranks, run it through a pipeline, and compare with the model in one piece.

    torchrun --standalone --nproc-per-node=4 source_code/hf_pp/pippy_gpt2.py
    torchrun --standalone --nproc-per-node=4 source_code/hf_pp/pippy_gpt2.py --head lm --schedule zb_v --forward-only

The 124M configuration with random weights, so nothing is downloaded. The head for classification wants input_ids again
on the last rank; the one for language modelling is tied to the embedding on the first. Needs transformers:
pip install 'course_pp[hf]'.
"""

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.utils import logging

from course_pp.parallel import (
    DistributedConfig,
    auto_split,
    build_pipeline_schedule,
    build_pipeline_stage,
    destroy_distributed,
    get_device,
    get_stage_indices,
    get_world_info,
    init_distributed,
    refusals_said_once,
    schedule_names,
)

HEADS = {"classification": GPT2ForSequenceClassification, "lm": GPT2LMHeadModel}
SIZES = {"batch": 4, "microbatches": 4, "batches": 1, "seq-len": 64, "layers": 12, "width": 768}
SEED, TOLERANCE = 42, 1e-5


def build_gpt2(args: argparse.Namespace) -> nn.Module:
    """The whole model, the same on every rank; without dropout, so that its results can be compared."""
    logging.set_verbosity_error()
    torch.manual_seed(SEED)
    config = GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=max(1, args.width // 64), use_cache=False)
    config.pad_token_id = config.eos_token_id
    return HEADS[args.head](config).eval()


def batch(args: argparse.Namespace, model: nn.Module, number: int) -> tuple[Tensor, Tensor]:
    """Token ids (batch, seq), and classes (batch,) or the next tokens (batch, seq)."""
    size, generator = (args.batch, args.seq_len + 1), torch.Generator().manual_seed(SEED + number)
    tokens = torch.randint(model.config.vocab_size - 1, size, generator=generator)  # the last one is padding
    target = tokens[:, -1] % 2 if args.head == "classification" else tokens[:, 1:]
    return tokens[:, :-1].contiguous().to(get_device()), target.contiguous().to(get_device())


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def compare(
    args: argparse.Namespace, result: Any, mine: dict[int, nn.Module], places: list[tuple[int, str, int]]
) -> None:
    """Compare with the model in one piece on rank 0; places are stage, name and rank of every gradient."""
    rank, found, whole = get_world_info()[0], {}, build_gpt2(args).to(get_device())
    if rank == 0:
        inputs, target = batch(args, whole, args.batches - 1)
        with torch.set_grad_enabled(not args.forward_only):
            output = whole(inputs)
        expected = output.logits if args.forward_only else loss_fn(output, target)
        found["result"] = furthest_apart(getattr(result, "logits", result), expected)
        if not args.forward_only:
            expected.backward()
    for stage, name, owner in [] if args.forward_only else places:
        gradient = (
            mine[stage].get_parameter(name).grad if rank == owner else torch.empty_like(whole.get_parameter(name))
        )
        if owner > 0 and rank in (0, owner):
            dist.recv(gradient, owner) if rank == 0 else dist.send(gradient, 0)
        if rank == 0:
            found[f"{name} of stage {stage}"] = furthest_apart(gradient, whole.get_parameter(name).grad)
    if rank == 0:
        worst = max(found, key=found.get)
        what = "logits" if args.forward_only else f"loss and {len(found) - 1} gradients"
        print(f"{what}, compared with the model in one piece: {worst} differs most, by {found[worst]:.0e}", flush=True)
        if not found[worst] <= TOLERANCE:
            sys.exit(f"results DIFFER: that is more than {TOLERANCE}")


def furthest_apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, in parts of the largest number where that is above 1."""
    return ((one - other).abs().max() / other.abs().max().clamp(min=1)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", choices=HEADS, default="classification")
    parser.add_argument("--schedule", choices=schedule_names(), default="1f1b")
    parser.add_argument("--forward-only", action="store_true", help="evaluate instead of training")
    parser.add_argument("--by", choices=("parameters", "time", "memory"), default="parameters", help="what is balanced")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()

    if min(args.batch, args.microbatches, args.batches) < 1 or args.batch % args.microbatches:
        raise ValueError(
            f"--batch {args.batch} does not divide into --microbatches {args.microbatches} of 1 row or more"
        )
    rank, _, n_ranks = get_world_info()
    mesh, device = init_distributed(DistributedConfig(pp=n_ranks)), get_device()
    model = build_gpt2(args)
    owners = {stage: r for r in range(n_ranks) for stage in get_stage_indices(args.schedule, r, n_ranks)}
    one = batch(args, model, 0)[0].cpu()[: args.batch // args.microbatches]
    stages = auto_split(model, one, len(owners), by=args.by)
    mine = {stage: stages[stage].to(device) for stage, owner in owners.items() if owner == rank}
    places = [(i, name, owners[i]) for i, stage in enumerate(stages) for name, _ in stage.named_parameters()]
    report(model, stages, mine)
    del model, stages  # the rest of the model goes

    known = {"device_mesh": mesh, "device": device, "n_stages": len(owners), "inputs": one}
    built = [build_pipeline_stage(module, stage=i, **known) for i, module in mine.items()]
    pipeline = build_pipeline_schedule(built, args.microbatches, loss_fn, args.schedule)
    for number in range(args.batches):
        inputs, target = batch(args, pipeline.modules[0], number)
        for module in pipeline.modules:
            module.zero_grad()
        start = time.perf_counter()
        result = pipeline.evaluate(inputs, on="all") if args.forward_only else pipeline.step(inputs, target=target)
        if rank == 0:
            loss = "" if args.forward_only else f"loss {result.item():.4f}, "
            print(f"Batch {number}: {loss}{time.perf_counter() - start:.1f} s", flush=True)
    compare(args, result, mine, places)
    print(f"Rank {rank} completes", flush=True)
    destroy_distributed()


def report(model: nn.Module, stages: list[nn.Module], mine: dict[int, nn.Module]) -> None:
    """Print what there is, and what of it is here."""
    rank, n_decoders = get_world_info()[0], sum(isinstance(p, GPT2Block) for m in mine.values() for p in m.modules())
    if rank == 0:
        sizes = [sum(p.numel() for p in stage.parameters()) / 1e6 for stage in stages]
        print(model.config)
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, by stage ", end="")
        print(", ".join(f"{size:.1f}M" for size in sizes), f"(tied: {list(map(dict, stages[0].ties))})", flush=True)
    print(f"Rank {rank} on {get_device()}: stages {list(mine)}, {n_decoders} decoders", flush=True)


if __name__ == "__main__":
    with refusals_said_once("pippy_gpt2.py"):
        main()
