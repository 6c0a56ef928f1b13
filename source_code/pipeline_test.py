"""The classic: a small decoder cut by hand over the ranks, one GPipe step over four microbatches.

    torchrun --nnodes=1 --nproc-per-node=2 source_code/pipeline_test.py
    srun -p gpu -N 1 --gres=gpu:2 torchrun --nproc-per-node=2 source_code/pipeline_test.py

The script uses torch's own pipelining and our model, nothing else; train.py shows the same with the
whole package. It runs on one rank or more, up to the number of layers. The last rank prints the
loss of each microbatch.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from course_pp.model import ModelConfig, Transformer, compute_layer_assignment
from course_pp.parallel import (
    DistributedConfig,
    destroy_distributed,
    get_device,
    get_world_info,
    init_distributed,
    refusals_said_once,
)

N_MICROBATCHES = 4
BATCH_SIZE = 32
SEQ_LEN = 64


def manual_split(config: ModelConfig, stage: int, n_stages: int) -> Transformer:
    """Return the layers of one stage, cut from a whole model that never takes memory.

    The whole model is built on the meta device, and the layers of other stages are dropped. Only
    then does the rest get storage and values. These lines are the point of this script;
    course_pp.model.drop_other_stages does the same. Raises ValueError if there are more stages than
    layers.
    """
    with torch.device("meta"):
        model = Transformer(config)
    start, end = compute_layer_assignment(config.n_layers, n_stages)[stage]
    for i in range(config.n_layers):
        if not start <= i < end:
            del model.layers[str(i)]
    if stage > 0:
        model.embed = None
    if stage < n_stages - 1:
        model.norm = model.head = None
    return model


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=int, default=8, help="decoder layers, at least one a rank (default 8)"
    )
    args = parser.parse_args()

    rank, _, n_ranks = get_world_info()
    config = ModelConfig(
        dim=128, n_layers=args.layers, n_heads=4, vocab_size=1000, max_seq_len=SEQ_LEN
    )
    model = manual_split(config, rank, n_ranks)
    init_distributed(DistributedConfig(pp=n_ranks))
    device = get_device()
    model.to_empty(device=device).init_weights_and_freqs()

    # All ranks have the same seed, so they draw the same tokens.
    tokens = torch.randint(config.vocab_size, (BATCH_SIZE, SEQ_LEN + 1)).to(device)
    inputs = tokens[:, :-1].contiguous()
    target = tokens[:, 1:].contiguous()

    stage = PipelineStage(model, rank, n_ranks, device)
    schedule = ScheduleGPipe(stage, N_MICROBATCHES, loss_fn=cross_entropy)

    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(inputs, target=target, losses=losses)
    else:
        schedule.step(target=target, losses=losses)
    if rank == n_ranks - 1:
        print(f"losses: {[round(loss.item(), 4) for loss in losses]}", flush=True)

    dist.barrier()  # a rank that leaves first would close connections that others still use
    destroy_distributed()


if __name__ == "__main__":
    with refusals_said_once("pipeline_test.py"):
        main()
