"""Train a Llama-style model on real text, over pipeline, tensor- and data-parallel ranks, and lose
nothing on the way.

    torchrun --standalone --nproc-per-node=2 source_code/train.py --pp 2 --schedule 1f1b
    --microbatches 8 torchrun --standalone --nproc-per-node=8 source_code/train.py --pp 2 --tp 2
    --dp-shard 2 --reshard auto torchrun --nproc-per-node 2 source_code/train.py --engine runtime
    --schedule pipedream --versions 2bw --max-norm inf torchrun --standalone --nproc-per-node=4
    source_code/train.py --pp 2 --dp-shard 2 --ep 2 --experts 8 --top-k 2 torchrun --standalone
    --nproc-per-node=2 source_code/train.py --schedule own.csv --microbatches 4 torchrun
    --standalone --nproc-per-node=2 source_code/train.py --config run.toml --lr 1e-3 torchrun
    --standalone --nproc-per-node=2 source_code/train.py --checkpoint-dir runs/mine --save-every 50

A file has a key for each flag; it overrides the sizes of --model, and flags override it. The last
command, given again, goes on from the newest checkpoint, at any other layout too. On SIGTERM or
SIGUSR1 a run with --checkpoint-dir saves and ends with exit code 75 (course_pp.training.preemption:
what torchrun makes of that). Without --text or --dataset the corpus is the source code of Python's
own standard library: nothing is downloaded.
"""

import sys
from contextlib import nullcontext

from course_pp.base.imports import imports_that_stay

with imports_that_stay():
    from torch.distributed.device_mesh import DeviceMesh

    from course_pp.model import (
        ModelConfig,
        PipelineStageModule,
        build_stage_module,
        layer_costs,
        partition_by_cost,
    )
    from course_pp.parallel import (
        apply_ac,
        apply_compile,
        apply_expert_parallel,
        apply_float8,
        apply_fsdp2,
        apply_tensor_parallel,
        compute_in,
        default_mp_policy,
        destroy_distributed,
        get_device,
        get_pp_rank,
        get_pp_size,
        get_world_info,
        init_distributed,
        is_rank_zero,
        refusals_said_once,
    )
    from course_pp.training import Trainer, stages_of_rank
    from course_pp.training.checkpointer import Checkpointer
    from course_pp.training.config import ORDER_FILE, Precision, what_changed, write_order
    from course_pp.training.data import check_vocabulary, unigram_entropy
    from course_pp.training.flags import RunOptions, flags_named, parse
    from course_pp.training.optim import DTYPES
    from course_pp.training.preemption import EXIT_CODE, Preempted, Preemption
    from course_pp.training.sampling import sample


def build_stages(
    asked: RunOptions, model: ModelConfig, mesh: DeviceMesh | None
) -> list[PipelineStageModule]:
    """This rank's stages, balanced so that the output head does not slow the last one down."""
    indices, n_stages = stages_of_rank(asked.train, get_pp_rank(mesh), get_pp_size(mesh))
    flops = layer_costs(model, asked.model.seq_len)
    layer_ranges = partition_by_cost(flops.layers, n_stages, first=flops.embed, last=flops.head)
    device = get_device(share=asked.layout.share_gpus)
    # half precision is slow on a CPU
    usual: Precision = "bf16" if device.type == "cuda" else "fp32"
    dtype = DTYPES[usual if asked.train.precision == "auto" else asked.train.precision]
    modules = [build_stage_module(model, i, n_stages, layer_ranges).to(device) for i in indices]
    for module in modules:
        apply_tensor_parallel(module, mesh)
    apply_expert_parallel(modules, mesh)
    for module in modules:
        if asked.train.precision == "fp8":
            apply_float8(module, mesh)
        apply_ac(module, asked.layout.ac, device_mesh=mesh)
        if asked.layout.compile:
            apply_compile(module)
        apply_fsdp2(
            module,
            mesh,
            default_mp_policy(dtype),
            reshard_after_forward=asked.layout.reshard_policy,
        )
        compute_in(module, dtype)  # where no FSDP2 does
    return modules


def run(asked: RunOptions, preemption: Preemption | None) -> None:
    config, keep, text = asked.train, asked.checkpoints.checkpointer, asked.writing
    layout = asked.layout.distributed(get_world_info()[2])
    train, validation, tokenizer = asked.data.load(
        asked.model.seq_len, config.batch * config.eval_batches
    )
    model = asked.model.config(tokenizer.vocab_size)
    check_vocabulary(model.vocab_size, tokenizer)
    mesh = init_distributed(layout, config.seed)
    modules = build_stages(asked, model, mesh)
    trainer = Trainer(
        config, modules, train, validation, device_mesh=mesh, tokenizer_digest=tokenizer.digest
    )
    files = {"tokenizer.json": tokenizer.definition} | (
        {ORDER_FILE: write_order(config.order)} if config.order else {}
    )
    keep |= {"attachments": files, "preemption": preemption}
    with Checkpointer(trainer, device_mesh=mesh, **keep) as checkpointer:
        loaded = checkpointer.resume(asked.checkpoints.resume)
        before = trainer.evaluate()
        if trainer.is_logging_rank:
            sequences = (
                "a stream of tokens"
                if asked.data.streaming
                else f"{len(train):,} × {train.seq_len} tokens"
            )
            precision = trainer.config.precision
            lowered = "" if precision == "fp32" else f", computed in {precision}"
            print(f"{model.n_parameters:,} parameters, {sequences}, on {trainer.device}{lowered}")
            print(
                (
                    f"resumed {loaded.path}"
                    if loaded
                    else f"validation loss before training {before:.3f}"
                ),
                flush=True,
            )
            said = loaded and what_changed(
                loaded.extra["config"], loaded.path, config.schedule, config.order
            )
            if said:
                print(said, flush=True)
        fitted = trainer.fit(checkpointer.after_step)
    how = {
        "vocab_size": tokenizer.vocab_size,
        "special_ids": tokenizer.special_ids,
        "seed": config.seed,
    }
    written = sample(modules, tokenizer.encode(text.prompt), text.sample, device_mesh=mesh, **how)
    if trainer.is_logging_rank:
        entropy = unigram_entropy(validation[:].targets)
        print(
            f"validation loss {fitted.validation_loss:.3f} nats a token; unigram entropy"
            f" {entropy:.3f}"
        )
        print(
            f"{fitted.speed.tokens_per_s:,.0f} tokens a second"
            if fitted.steps
            else "no step was left to train"
        )
        if written:
            print(f"sample: {text.prompt}{tokenizer.decode(written)}")


def main() -> int:
    asked = parse(sys.argv[1:], __doc__)
    if asked is None:  # help was
        return 0
    try:
        with Preemption() if asked.checkpoints.checkpoint_dir else nullcontext() as preemption:
            run(asked, preemption)
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
