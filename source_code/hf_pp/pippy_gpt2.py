"""Cut GPT-2 automatically, run it through a pipeline, and compare with the model in one piece.

Each of these lines stands behind `torchrun --standalone --nproc-per-node=4`:

    source_code/hf_pp/pippy_gpt2.py
    source_code/hf_pp/pippy_gpt2.py --head lm --schedule zb_v --forward-only
    source_code/hf_pp/pippy_gpt2.py --decoders 3 3 3 3

The model has the sizes of GPT-2 124M and random weights, so nothing is downloaded. The head for
classification needs input_ids again on the last rank. The head for language modelling is tied to
the embedding on the first rank. The cut evens out time: with equal parameters, rank 0 would hold
the embedding and no decoder. The script needs transformers: pip install 'course_pp[hf]'.
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
SEED = 42
TOLERANCE = 1e-5
PADDING = 50256  # the last token


def build_gpt2(args: argparse.Namespace) -> nn.Module:
    """Return the whole model, the same on every rank, without dropout."""
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
    """Return the stages, with the numbers of decoders in --decoders or of equal cost."""
    wanted = args.decoders
    if wanted is None:
        return parallel.auto_split(model, one, n_stages, by=args.by)
    if len(wanted) != n_stages or sum(wanted) != args.layers or min(wanted) < 1:
        raise ValueError(
            f"--decoders {' '.join(map(str, wanted))} must be {n_stages} numbers, one a stage, of 1"
            f" or more, that add up to --layers {args.layers}"
        )
    cuts = [f"transformer.h.{first}" for first in accumulate(wanted[:-1])]
    return parallel.auto_split(model, one, at=cuts)


def batch(args: argparse.Namespace, number: int) -> tuple[Tensor, Tensor]:
    """Return token ids (batch, seq), and classes (batch,) or the next tokens (batch, seq)."""
    drawn = torch.Generator().manual_seed(SEED + number)
    tokens = torch.randint(PADDING, (args.batch, args.seq_len + 1), generator=drawn)
    tokens = tokens.to(parallel.get_device())
    inputs = tokens[:, :-1].contiguous()
    if args.head == "classification":
        return inputs, tokens[:, -1] % 2
    return inputs, tokens[:, 1:]


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), target.flatten())


def differences(
    args: argparse.Namespace, result: Any, modules: list[nn.Module]
) -> list[tuple[float, str]]:
    """Compare the result and this rank's gradients with the model in one piece."""
    whole = build_gpt2(args).to(parallel.get_device())
    inputs, target = batch(args, args.batches - 1)
    with torch.set_grad_enabled(not args.forward_only):
        output = whole(inputs)
    if args.forward_only:
        return [(apart(result.logits, output.logits), "the result")]
    loss = loss_fn(output, target)
    loss.backward()
    found = [(apart(result, loss), "the loss")]
    for module in modules:
        for name, p in module.named_parameters():
            found.append((apart(p.grad, whole.get_parameter(name).grad), name))
    return found


def apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, relative to the largest number if that is above 1."""
    return ((one - other).abs().max() / other.abs().max().clamp(min=1)).nan_to_num(torch.inf).item()


def millions(module: nn.Module) -> str:
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.1f}M"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", choices=HEADS, default="classification")
    parser.add_argument("--schedule", choices=parallel.schedule_names(), default="1f1b")
    parser.add_argument("--forward-only", action="store_true", help="evaluate instead of training")
    parser.add_argument(
        "--by", choices=("parameters", "time", "memory"), default="time", help="the cost to balance"
    )
    parser.add_argument(
        "--decoders", type=int, nargs="+", help="instead of --by: the decoders of each stage"
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
    mesh = parallel.init_distributed(parallel.DistributedConfig(pp=n_ranks))
    device = parallel.get_device()
    mine = parallel.get_stage_indices(args.schedule, rank, n_ranks)
    n_stages = n_ranks * len(mine)
    model = build_gpt2(args)
    inputs, _ = batch(args, 0)
    one = inputs[: args.batch // args.microbatches].cpu()
    parts = split(args, model, one, n_stages)
    if rank == 0:
        print(model.config)
        stages = ", ".join(map(millions, parts))
        ties = [*map(dict, parts[0].ties)]
        print(f"{millions(model)} parameters, by stage {stages} (tied: {ties})", flush=True)
    n_decoders = sum(isinstance(part, GPT2Block) for i in mine for part in parts[i].modules())
    print(f"Rank {rank} on {device}: stages {mine}, {n_decoders} decoders", flush=True)

    built = []
    for i in mine:
        stage = parallel.build_pipeline_stage(
            parts[i].to(device), mesh, device, stage=i, n_stages=n_stages, inputs=one
        )
        built.append(stage)
    del model, parts  # so that the memory of other ranks' stages is free
    pipeline = parallel.build_pipeline_schedule(built, args.microbatches, loss_fn, args.schedule)
    for number in range(args.batches):
        inputs, target = batch(args, number)
        for module in pipeline.modules:
            module.zero_grad()
        start = time.perf_counter()
        loss = ""
        if args.forward_only:
            result = pipeline.evaluate(inputs, on="all")
        else:
            result = pipeline.step(inputs, target=target)
            loss = f"loss {result.item():.4f}, "
        if rank == 0:
            print(f"Batch {number}: {loss}{time.perf_counter() - start:.1f} s", flush=True)

    found = []
    for theirs in Ranks().gather(differences(args, result, pipeline.modules)):
        found += theirs
    furthest, name = max(found)
    if rank == 0:
        compared = "logits" if args.forward_only else f"loss and {len(found) - n_ranks} gradients"
        print(
            f"{compared}, compared with the model in one piece: {name} differs most, by"
            f" {furthest:.0e}",
            flush=True,
        )
    if furthest > TOLERANCE:
        sys.exit(f"results DIFFER: that is more than {TOLERANCE}")
    print(f"Rank {rank} completes", flush=True)
    parallel.destroy_distributed()


if __name__ == "__main__":
    with parallel.refusals_said_once("pippy_gpt2.py"):
        main()
