"""Cut GPT-2 automatically over the ranks, run it through a pipeline, and compare with the model in
one piece.

    torchrun --standalone --nproc-per-node=4 source_code/hf_pp/pippy_gpt2.py torchrun --standalone
    --nproc-per-node=4 source_code/hf_pp/pippy_gpt2.py --head lm --schedule zb_v --forward-only
    torchrun --standalone --nproc-per-node=4 source_code/hf_pp/pippy_gpt2.py --decoders 3 3 3 3

The 124M configuration with random weights, so nothing is downloaded. The head for classification
wants input_ids again on the last rank; the one for language modelling is tied to the embedding on
the first. The cut evens out time: with equal parameters, rank 0 would hold the embedding and no
decoder. Needs transformers: pip install 'course_pp[hf]'.
"""

import argparse
import sys
import time
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.utils import logging

from course_pp import parallel
from course_pp.base.ranks import Ranks

HEADS = {"classification": GPT2ForSequenceClassification, "lm": GPT2LMHeadModel}
SIZES = {"batch": 4, "microbatches": 4, "batches": 1, "seq-len": 64, "layers": 12, "width": 768}
SEED, TOLERANCE, PADDING = 42, 1e-5, 50256  # the last token


def build_gpt2(args: argparse.Namespace) -> nn.Module:
    """The whole model, the same on every rank; without dropout, so that its results can be compared."""
    logging.set_verbosity_error()
    torch.manual_seed(SEED)
    config = GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=max(1, args.width // 64), use_cache=False
    )
    config.pad_token_id = PADDING
    return HEADS[args.head](config).eval()


def split(
    args: argparse.Namespace, model: nn.Module, one: Tensor, n_stages: int
) -> list[nn.Module]:
    """The stages, with the decoders that were asked for or of equal cost."""
    if args.decoders is None:
        return parallel.auto_split(model, one, n_stages, by=args.by)
    if (
        len(args.decoders) != n_stages
        or sum(args.decoders) != args.layers
        or min(args.decoders) < 1
    ):
        raise ValueError(
            f"--decoders {' '.join(map(str, args.decoders))} must be {n_stages} numbers, one a"
            f" stage, of 1 or more, that add up to --layers {args.layers}"
        )
    return parallel.auto_split(
        model, one, at=[f"transformer.h.{i}" for i in accumulate(args.decoders[:-1])]
    )


def batch(args: argparse.Namespace, number: int) -> tuple[Tensor, Tensor]:
    """Token ids (batch, seq), and classes (batch,) or the next tokens (batch, seq)."""
    size, generator = (args.batch, args.seq_len + 1), torch.Generator().manual_seed(SEED + number)
    tokens = torch.randint(PADDING, size, generator=generator).to(parallel.get_device())
    return tokens[:, :-1].contiguous(), (
        tokens[:, -1] % 2 if args.head == "classification" else tokens[:, 1:]
    )


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def differences(
    args: argparse.Namespace, result: Any, modules: list[nn.Module]
) -> list[tuple[float, str]]:
    """How far the result and the gradients of this rank's stages are from those of the model in one piece."""
    whole = build_gpt2(args).to(parallel.get_device())
    inputs, target = batch(args, args.batches - 1)
    with torch.set_grad_enabled(not args.forward_only):
        output = whole(inputs)
    if args.forward_only:
        return [(apart(result.logits, output.logits), "the result")]
    loss = loss_fn(output, target)
    loss.backward()
    named = [
        (name, p.grad, whole.get_parameter(name).grad)
        for part in modules
        for name, p in part.named_parameters()
    ]
    return [
        (apart(result, loss), "the loss"),
        *((apart(grad, expected), name) for name, grad, expected in named),
    ]


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference, in parts of the largest number where that is above 1."""
    return ((one - other).abs().max() / other.abs().max().clamp(min=1)).nan_to_num(torch.inf).item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", choices=HEADS, default="classification")
    parser.add_argument("--schedule", choices=parallel.schedule_names(), default="1f1b")
    parser.add_argument("--forward-only", action="store_true", help="evaluate instead of training")
    parser.add_argument(
        "--by", choices=("parameters", "time", "memory"), default="time", help="what is balanced"
    )
    parser.add_argument(
        "--decoders",
        type=int,
        nargs="+",
        help="instead of --by: how many each stage holds, in order",
    )
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()

    if min(args.batch, args.microbatches, args.batches) < 1 or args.batch % args.microbatches:
        raise ValueError(
            f"--batch {args.batch} does not divide into --microbatches {args.microbatches} of 1 row"
            " or more"
        )
    rank, _, n_ranks = parallel.get_world_info()
    mesh, device = (
        parallel.init_distributed(parallel.DistributedConfig(pp=n_ranks)),
        parallel.get_device(),
    )
    mine = parallel.get_stage_indices(args.schedule, rank, n_ranks)
    n_stages = n_ranks * len(mine)
    model, one = build_gpt2(args), batch(args, 0)[0][: args.batch // args.microbatches].cpu()
    stages = split(args, model, one, n_stages)
    if rank == 0:
        sizes = [
            f"{sum(p.numel() for p in each.parameters()) / 1e6:.1f}M" for each in (model, *stages)
        ]
        print(model.config)
        print(
            f"{sizes[0]} parameters, by stage {', '.join(sizes[1:])} (tied:"
            f" {[*map(dict, stages[0].ties)]})",
            flush=True,
        )
    n_decoders = sum(isinstance(part, GPT2Block) for i in mine for part in stages[i].modules())
    print(f"Rank {rank} on {device}: stages {mine}, {n_decoders} decoders", flush=True)

    known = {"device_mesh": mesh, "device": device, "n_stages": n_stages, "inputs": one}
    built = [parallel.build_pipeline_stage(stages[i].to(device), stage=i, **known) for i in mine]
    del model, stages  # the rest of the model goes
    pipeline = parallel.build_pipeline_schedule(built, args.microbatches, loss_fn, args.schedule)
    for number in range(args.batches):
        inputs, target = batch(args, number)
        for module in pipeline.modules:
            module.zero_grad()
        start = time.perf_counter()
        result = (
            pipeline.evaluate(inputs, on="all")
            if args.forward_only
            else pipeline.step(inputs, target=target)
        )
        if rank == 0:
            loss = "" if args.forward_only else f"loss {result.item():.4f}, "
            print(f"Batch {number}: {loss}{time.perf_counter() - start:.1f} s", flush=True)

    found = [
        pair
        for theirs in Ranks().gather(differences(args, result, pipeline.modules))
        for pair in theirs
    ]
    furthest, name = max(found)
    if rank == 0:
        what = "logits" if args.forward_only else f"loss and {len(found) - n_ranks} gradients"
        print(
            f"{what}, compared with the model in one piece: {name} differs most, by {furthest:.0e}",
            flush=True,
        )
    if furthest > TOLERANCE:
        sys.exit(f"results DIFFER: that is more than {TOLERANCE}")
    print(f"Rank {rank} completes", flush=True)
    parallel.destroy_distributed()


if __name__ == "__main__":
    with parallel.refusals_said_once("pippy_gpt2.py"):
        main()
