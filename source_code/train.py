"""Train a Llama-style model on real text, over pipeline, tensor- and data-parallel ranks, and lose nothing on the way.

    torchrun --standalone --nproc-per-node=2 source_code/train.py --pp 2 --schedule 1f1b --microbatches 8
    torchrun --standalone --nproc-per-node=8 source_code/train.py --pp 2 --tp 2 --dp-shard 2 --reshard auto
    torchrun --standalone --nproc-per-node=2 source_code/train.py --checkpoint-dir runs/mine --save-every 50

The last command, given again, goes on from the newest checkpoint, at any other layout too. On SIGTERM or SIGUSR1 a run
with --checkpoint-dir saves and ends with exit code 75 (course_pp.training.preemption: what torchrun makes of that).
Without --text or --dataset the corpus is the source code of Python's own standard library: nothing is downloaded.
"""

import argparse
import sys
from contextlib import nullcontext

from torch.distributed.device_mesh import DeviceMesh

from course_pp.model import ModelConfig, PipelineStageModule, build_stage_module, layer_costs, partition_by_cost
from course_pp.parallel import (
    apply_ac,
    apply_fsdp2,
    apply_tensor_parallel,
    destroy_distributed,
    get_device,
    get_pp_rank,
    get_pp_size,
    get_world_info,
    init_distributed,
    is_rank_zero,
    refusals_said_once,
)
from course_pp.training import TrainConfig, Trainer, stages_of_rank
from course_pp.training.arguments import (
    add_checkpoint_arguments,
    add_layout_arguments,
    add_sample_arguments,
    add_train_arguments,
    checkpoint_options,
    distributed_config,
    flags_named,
    reshard_policy,
    sample_options,
    train_config,
)
from course_pp.training.checkpointer import Checkpointer
from course_pp.training.data import (
    Sequences,
    Tokenizer,
    check_vocabulary,
    encode,
    load_corpus,
    packed,
    padded,
    train_tokenizer,
    unigram_entropy,
)
from course_pp.training.preemption import EXIT_CODE, Preempted, Preemption
from course_pp.training.sampling import sample


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for add_arguments in (add_layout_arguments, add_train_arguments, add_checkpoint_arguments, add_sample_arguments):
        add_arguments(parser)
    add = parser.add_argument
    add("--dim", type=int, default=128, help="model width (default 128)")
    add("--layers", type=int, default=4, help="decoder layers (default 4)")
    add("--heads", type=int, default=4, help="attention heads (default 4)")
    add("--tie-embeddings", action="store_true", help="share the input embedding with the output head")
    add("--seq-len", type=int, default=128, help="tokens a sequence (default 128)")
    add("--vocab-size", type=int, help="rows of the model's embedding (default: the tokenizer's size)")
    add("--tokenizer-size", type=int, default=1024, help="entries of the BPE tokenizer (default 1024)")
    add("--text", nargs="+", help="text files or folders to train on")
    add("--dataset", help="name or path of a Hugging Face dataset to train on")
    add("--padded", action="store_true", help="one document a sequence, padded, instead of packed sequences")
    return parser.parse_args()


def load_data(args: argparse.Namespace) -> tuple[Sequences, Sequences, Tokenizer]:
    """Training and validation sequences, the same on every rank."""
    train, validation = load_corpus(texts=args.text, dataset=args.dataset).split()
    tokenizer = train_tokenizer(train, args.tokenizer_size)
    arrange = padded if args.padded else packed
    rows, held_out = (arrange(encode(part, tokenizer), args.seq_len) for part in (train, validation))
    return rows, held_out, tokenizer


def build_stages(
    args: argparse.Namespace, config: TrainConfig, model: ModelConfig, mesh: DeviceMesh | None
) -> list[PipelineStageModule]:
    """This rank's stages, balanced so that the output head does not slow the last one down."""
    indices, n_stages = stages_of_rank(config, get_pp_rank(mesh), get_pp_size(mesh))
    flops = layer_costs(model, args.seq_len)
    layer_ranges = partition_by_cost(flops.layers, n_stages, first=flops.embed, last=flops.head)
    device = get_device(share=args.share_gpus)
    modules = [build_stage_module(model, i, n_stages, layer_ranges).to(device) for i in indices]
    for module in modules:
        apply_tensor_parallel(module, mesh)
        apply_ac(module, args.ac)
        apply_fsdp2(module, mesh, reshard_after_forward=reshard_policy(args.reshard))
    return modules


def run(args: argparse.Namespace, preemption: Preemption | None) -> None:
    config, keep, text = train_config(args), checkpoint_options(args), sample_options(args)
    layout = distributed_config(args, get_world_info()[2])
    train, validation, tokenizer = load_data(args)
    vocab_size = tokenizer.vocab_size if args.vocab_size is None else args.vocab_size
    check_vocabulary(vocab_size, tokenizer)
    sizes = args.dim, args.layers, args.heads, vocab_size
    model = ModelConfig(*sizes, max_seq_len=args.seq_len, tie_embeddings=args.tie_embeddings)
    mesh = init_distributed(layout, args.seed)
    modules = build_stages(args, config, model, mesh)
    trainer = Trainer(config, modules, train, validation, device_mesh=mesh, tokenizer_digest=tokenizer.digest)
    keep |= {"attachments": {"tokenizer.json": tokenizer.definition}, "preemption": preemption}
    with Checkpointer(trainer, device_mesh=mesh, **keep) as checkpointer:
        loaded = checkpointer.resume(args.resume)
        before = trainer.evaluate()
        if trainer.is_logging_rank:
            print(f"{model.n_parameters:,} parameters, {len(train):,} × {args.seq_len} tokens, on {trainer.device}")
            print(f"resumed {loaded.path}" if loaded else f"validation loss before training {before:.3f}", flush=True)
        fitted = trainer.fit(checkpointer.after_step)
    written = sample(modules, tokenizer.encode(args.prompt), device_mesh=mesh, vocab_size=tokenizer.vocab_size, **text)
    if trainer.is_logging_rank:
        entropy = unigram_entropy(validation.targets, vocab_size)
        print(f"validation loss {fitted.validation_loss:.3f} nats a token; unigram entropy {entropy:.3f}")
        print(f"{fitted.speed.tokens_per_s:,.0f} tokens a second" if fitted.steps else "no step was left to train")
        if written:
            print(f"sample: {args.prompt}{tokenizer.decode(written)}")


def main() -> int:
    args = parse_args()
    try:
        with Preemption() if args.checkpoint_dir else nullcontext() as preemption:
            run(args, preemption)
    except Preempted as preempted:
        if is_rank_zero():
            print(f"train.py: {preempted}", file=sys.stderr, flush=True)
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    with refusals_said_once("train.py"), flags_named():
        code = main()
    destroy_distributed()
    sys.exit(code)
