"""Train a Llama-style model on real text, on pipeline-, tensor- and data-parallel ranks.

Each of these lines stands behind `torchrun --standalone --nproc-per-node=RANKS`:

    source_code/train.py --pp 2 --schedule 1f1b --microbatches 8
    source_code/train.py --pp 2 --tp 2 --dp-shard 2 --reshard auto                     (8 ranks)
    source_code/train.py --engine runtime --schedule pipedream --versions 2bw --max-norm inf
    source_code/train.py --pp 2 --dp-shard 2 --ep 2 --experts 8 --top-k 2              (4 ranks)
    source_code/train.py --schedule own.csv --microbatches 4
    source_code/train.py --config run.toml --lr 1e-3
    source_code/train.py --checkpoint-dir runs/mine --save-every 50

A file has a key for each flag; it overrides the sizes of --model, and flags override it. The last
command, given again, goes on from the newest checkpoint, at any other layout too. On SIGTERM or
SIGUSR1 a run with --checkpoint-dir saves and ends with exit code 75; course_pp.training.preemption
says how torchrun passes that on. Without --text or --dataset the corpus is the source code of
Python's own standard library: nothing is downloaded.
"""

import sys
from contextlib import nullcontext

from course_pp.base.imports import imports_that_stay

with imports_that_stay():
    from torch.distributed.device_mesh import DeviceMesh

    from course_pp import parallel as pp
    from course_pp.model import (
        ModelConfig,
        PipelineStageModule,
        build_stage_module,
        layer_costs,
        partition_by_cost,
    )
    from course_pp.training import Trainer, stages_of_rank
    from course_pp.training.checkpointer import Checkpointer
    from course_pp.training.config import ORDER_FILE, what_changed, write_order
    from course_pp.training.data import check_vocabulary, unigram_entropy
    from course_pp.training.flags import RunOptions, flags_named, parse
    from course_pp.training.optim import DTYPES
    from course_pp.training.preemption import EXIT_CODE, Preempted, Preemption
    from course_pp.training.sampling import sample


def build_stages(
    asked: RunOptions, model: ModelConfig, mesh: DeviceMesh | None
) -> list[PipelineStageModule]:
    """Return this rank's stages, balanced so that the output head does not slow the last one."""
    indices, n_stages = stages_of_rank(asked.train, pp.get_pp_rank(mesh), pp.get_pp_size(mesh))
    flops = layer_costs(model, asked.model.seq_len)
    layer_ranges = partition_by_cost(flops.layers, n_stages, first=flops.embed, last=flops.head)
    device = pp.get_device(share=asked.layout.share_gpus)
    modules = [build_stage_module(model, i, n_stages, layer_ranges).to(device) for i in indices]

    precision = asked.train.precision
    if precision == "auto":  # half precision is slow on a CPU
        precision = "bf16" if device.type == "cuda" else "fp32"
    dtype = DTYPES[precision]
    # The order matters, and each of these calls checks it.
    for module in modules:
        pp.apply_tensor_parallel(module, mesh)
    pp.apply_expert_parallel(modules, mesh)
    for module in modules:
        if asked.train.precision == "fp8":
            pp.apply_float8(module, mesh)
        pp.apply_ac(module, asked.layout.ac, device_mesh=mesh)
        if asked.layout.compile:
            pp.apply_compile(module)
        policy = pp.default_mp_policy(dtype)
        pp.apply_fsdp2(module, mesh, policy, reshard_after_forward=asked.layout.reshard_policy)
        pp.compute_in(module, dtype)  # no-op where FSDP2 lowers the precision
    return modules


def run(asked: RunOptions, preemption: Preemption | None) -> None:
    config = asked.train
    layout = asked.layout.distributed(pp.get_world_info()[2])
    validation_rows = config.batch * config.eval_batches
    train, validation, tokenizer = asked.data.load(asked.model.seq_len, validation_rows)
    model = asked.model.config(tokenizer.vocab_size)
    check_vocabulary(model.vocab_size, tokenizer)
    mesh = pp.init_distributed(layout, config.seed)
    modules = build_stages(asked, model, mesh)
    trainer = Trainer(
        config, modules, train, validation, device_mesh=mesh, tokenizer_digest=tokenizer.digest
    )

    # A checkpoint also holds the files without which it could not be used.
    files = {"tokenizer.json": tokenizer.definition}
    if config.order:
        files[ORDER_FILE] = write_order(config.order)
    keep = {**asked.checkpoints.checkpointer, "attachments": files, "preemption": preemption}
    with Checkpointer(trainer, device_mesh=mesh, **keep) as checkpointer:
        loaded = checkpointer.resume(asked.checkpoints.resume)
        before = trainer.evaluate()
        if trainer.is_logging_rank:
            size = "a stream of tokens"
            if not asked.data.streaming:
                size = f"{len(train):,} × {train.seq_len} tokens"
            where = f"on {trainer.device}"
            if trainer.config.precision != "fp32":
                where += f", computed in {trainer.config.precision}"
            print(f"{model.n_parameters:,} parameters, {size}, {where}")
            if loaded is None:
                print(f"validation loss before training {before:.3f}", flush=True)
            else:
                print(f"resumed {loaded.path}", flush=True)
                saved = loaded.extra["config"]
                if changed := what_changed(saved, loaded.path, config.schedule, config.order):
                    print(changed, flush=True)
        fitted = trainer.fit(checkpointer.after_step)

    prompt = asked.writing.prompt
    written = sample(
        modules,
        tokenizer.encode(prompt),
        asked.writing.sample,
        device_mesh=mesh,
        vocab_size=tokenizer.vocab_size,
        special_ids=tokenizer.special_ids,
        seed=config.seed,
    )
    if trainer.is_logging_rank:
        loss = f"validation loss {fitted.validation_loss:.3f} nats a token"
        print(f"{loss}; unigram entropy {unigram_entropy(validation[:].targets):.3f}")
        if fitted.steps:
            print(f"{fitted.speed.tokens_per_s:,.0f} tokens a second")
        else:
            print("no step was left to train")
        if written:
            print(f"sample: {prompt}{tokenizer.decode(written)}")


def main() -> int:
    asked = parse(sys.argv[1:], __doc__)
    if asked is None:  # it was a call for help
        return 0
    saves = asked.checkpoints.checkpoint_dir
    try:
        with Preemption() if saves else nullcontext() as preemption:
            run(asked, preemption)
    except Preempted as preempted:
        if pp.is_rank_zero():
            print(f"train.py: {preempted}", file=sys.stderr, flush=True)
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    with pp.refusals_said_once("train.py"), flags_named():
        code = main()
    pp.destroy_distributed()
    sys.exit(code)
