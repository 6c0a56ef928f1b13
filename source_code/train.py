"""Train a Llama-style model on real text, over pipeline, tensor- and data-parallel ranks.

    torchrun --standalone --nproc-per-node=2 source_code/train.py --pp 2 --schedule 1f1b --microbatches 8
    torchrun --standalone --nproc-per-node=8 source_code/train.py --pp 2 --tp 2 --dp-shard 2 --reshard auto

Without --text or --dataset the corpus is the source code of Python's own standard library, so nothing is downloaded.
"""

import argparse
import sys
import time
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from course_pp.model import CrossEntropy, ModelConfig, build_stage_module, layer_costs, partition_by_cost
from course_pp.parallel import (
    DistributedConfig,
    PipelineSchedule,
    ReshardPolicy,
    apply_ac,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    destroy_distributed,
    get_device,
    get_dp_rank,
    get_dp_size,
    get_pp_rank,
    get_pp_size,
    get_stage_indices,
    get_world_info,
    init_distributed,
    refusals_said_once,
    schedule_names,
)
from course_pp.training.data import (
    Batches,
    Sequences,
    check_vocabulary,
    encode,
    load_corpus,
    packed,
    padded,
    train_tokenizer,
    unigram_entropy,
    validation_batches,
)


def parse_args(world_size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pp", type=int, help="pipeline ranks (default: what the other factors leave)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    add("--dp-shard", type=int, default=1, help="ranks that FSDP2 shards over; -1 takes what is left (default 1)")
    add("--dp-replicate", type=int, default=1, help="copies of the sharded model (default 1)")
    add("--reshard", default="auto", help="after forward: auto, true, false or a number of ranks")
    add("--ac", default="none", choices=("none", "selective", "full"), help="activation checkpointing (default none)")
    add("--schedule", default="1f1b", help=f"one of {', '.join(schedule_names())} (default 1f1b)")
    add("--microbatches", type=int, default=8, help="microbatches a step (default 8)")
    add("--batch-size", type=int, default=32, help="sequences a step (default 32)")
    add("--seq-len", type=int, default=128, help="tokens a sequence (default 128)")
    add("--steps", type=int, default=200, help="optimizer steps (default 200)")
    add("--lr", type=float, default=3e-3, help="peak learning rate of AdamW, after warm-up (default 3e-3)")
    add("--max-norm", type=float, default=1.0, help="clip the norm of the whole gradient (default 1.0)")
    add("--seed", type=int, default=42, help="seed of the weights and of the data order (default 42)")
    add("--dim", type=int, default=128, help="model width (default 128)")
    add("--layers", type=int, default=4, help="decoder layers (default 4)")
    add("--heads", type=int, default=4, help="attention heads (default 4)")
    add("--tie-embeddings", action="store_true", help="share the input embedding with the output head")
    add("--vocab-size", type=int, help="rows of the model's embedding (default: the tokenizer's size)")
    add("--tokenizer-size", type=int, default=1024, help="entries of the BPE tokenizer (default 1024)")
    add("--text", nargs="+", help="text files or folders to train on")
    add("--dataset", help="name or path of a Hugging Face dataset to train on")
    add("--padded", action="store_true", help="one document a sequence, padded, instead of packed sequences")
    args = parser.parse_args()
    if min(args.steps, args.microbatches) < 1 or not args.lr > 0:
        raise ValueError(
            f"--steps {args.steps} and --microbatches {args.microbatches} must be at least 1, --lr above 0"
        )
    if not args.max_norm > 0:
        raise ValueError(f"--max-norm {args.max_norm} must be above 0; inf only measures")
    args.reshard = reshard_policy(args.reshard)
    if args.pp is None:
        args.pp = remaining(world_size, {"tp": args.tp, "dp_replicate": args.dp_replicate, "dp_shard": args.dp_shard})
    return args


def reshard_policy(text: str) -> ReshardPolicy:
    words: dict[str, ReshardPolicy] = {"auto": "auto", "true": True, "false": False}
    if text.lower() not in words and not text.isdecimal():
        raise ValueError(f"--reshard {text} must be auto, true, false or a number of ranks")
    return words[text.lower()] if text.lower() in words else int(text)


def remaining(world_size: int, factors: dict[str, int]) -> int:
    """The pipeline ranks that the other factors leave; 1 where something else takes the rest or nothing fits."""
    taken = prod(factors.values())
    return world_size // taken if taken > 0 and world_size % taken == 0 else 1


def load_data(args: argparse.Namespace) -> tuple[Sequences, Sequences, int]:
    """Training and validation sequences, and the model's vocabulary size; the same on every rank."""
    train, validation = load_corpus(texts=args.text, dataset=args.dataset).split()
    tokenizer = train_tokenizer(train, args.tokenizer_size)
    vocab_size = tokenizer.vocab_size if args.vocab_size is None else args.vocab_size
    check_vocabulary(vocab_size, tokenizer)
    arrange = padded if args.padded else packed
    sequences = (arrange(encode(part, tokenizer), args.seq_len) for part in (train, validation))
    return *sequences, vocab_size


def build_pipeline(
    args: argparse.Namespace, config: ModelConfig, mesh: DeviceMesh | None
) -> tuple[list[torch.nn.Module], PipelineSchedule]:
    """This rank's stages, balanced so that the output head does not slow the last one down, and the schedule."""
    device = get_device()
    indices = get_stage_indices(args.schedule, get_pp_rank(mesh), args.pp)
    n_stages = args.pp * len(indices)
    flops = layer_costs(config, args.seq_len)
    layer_ranges = partition_by_cost(flops.layers, n_stages, first=flops.embed, last=flops.head)
    modules = [build_stage_module(config, i, n_stages, layer_ranges).to(device) for i in indices]
    for module in modules:
        apply_tensor_parallel(module, mesh)
        apply_ac(module, args.ac)
        apply_fsdp2(module, mesh, reshard_after_forward=args.reshard)
    shape = rows_of_a_microbatch(args, get_dp_size(mesh)), args.seq_len
    stages = [build_pipeline_stage(module, mesh, device, *shape, torch.float32) for module in modules]
    return list(modules), build_pipeline_schedule(stages, args.microbatches, CrossEntropy(), args.schedule)


def rows_of_a_microbatch(args: argparse.Namespace, n_data: int) -> int:
    parts = args.microbatches * n_data
    if args.batch_size % parts:
        among = f" on each of {n_data} data-parallel ranks" if n_data > 1 else ""
        raise ValueError(
            f"--batch-size {args.batch_size} does not divide into --microbatches {args.microbatches}{among}: "
            f"use a multiple of {parts}, such as {-(-args.batch_size // parts) * parts}"
        )
    return int(args.batch_size // parts)


def own_part(batch: Sequences, mesh: DeviceMesh | None) -> dict[str, torch.Tensor]:
    """This data-parallel rank's rows as the arguments of a step; every stage gets the mask of padded sequences."""
    arguments = {"inputs": batch.inputs, "target": batch.targets, "attention_mask": batch.attention_mask}
    return {
        name: value.chunk(get_dp_size(mesh))[get_dp_rank(mesh)].to(get_device())
        for name, value in arguments.items()
        if value is not None
    }


def evaluate(pipeline: PipelineSchedule, batches: tuple[Sequences, ...], mesh: DeviceMesh | None) -> float:
    """Mean loss over the validation batches, in nats a token."""
    total = sum(batch.n_targets * pipeline.eval(**own_part(batch, mesh)).item() for batch in batches)
    return total / sum(batch.n_targets for batch in batches)


def main() -> None:
    args = parse_args(get_world_info()[2])
    train, validation, vocab_size = load_data(args)
    sizes = {"max_seq_len": args.seq_len, "tie_embeddings": args.tie_embeddings}
    config = ModelConfig(args.dim, args.layers, args.heads, vocab_size, **sizes)
    mesh = init_distributed(DistributedConfig(args.pp, args.dp_replicate, args.dp_shard, args.tp), args.seed)
    modules, pipeline = build_pipeline(args, config, mesh)
    batches = Batches(train, args.batch_size, args.seed)
    held_out = validation_batches(validation, args.batch_size, max_batches=8)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=args.lr)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=min(20, args.steps))

    is_first_of_its_stage = dist.get_rank() % (dist.get_world_size() // get_pp_size(mesh)) == 0
    speaks, in_terminal = pipeline.holds_last_stage and is_first_of_its_stage, sys.stderr.isatty()
    untrained = evaluate(pipeline, held_out, mesh)
    if speaks:
        print(f"{config.n_parameters:,} parameters, {len(train):,} sequences of {args.seq_len} tokens")
        print(f"validation loss before training {untrained:.3f}", flush=True)
    start = time.perf_counter()
    for step in (progress := tqdm(range(args.steps), unit="step", disable=not (speaks and in_terminal))):
        optimizer.zero_grad()
        loss = pipeline.step(**own_part(batches[step], mesh))
        clip_grad_norm_(modules, args.max_norm, device_mesh=mesh)
        optimizer.step()
        warm_up.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        if speaks and not in_terminal and (step + 1) % 20 == 0:  # where output is kept, lines read better than a bar
            print(f"step {step + 1}/{args.steps}  loss {loss.item():.3f}", flush=True)
    seconds = time.perf_counter() - start
    loss = evaluate(pipeline, held_out, mesh)
    if speaks:
        entropy = unigram_entropy(validation.targets, vocab_size)
        print(f"validation loss {loss:.3f} nats a token; unigram entropy {entropy:.3f}")
        print(f"{args.steps * args.batch_size * args.seq_len / seconds:,.0f} tokens a second")
    destroy_distributed()


if __name__ == "__main__":
    with refusals_said_once("train.py"):
        main()
