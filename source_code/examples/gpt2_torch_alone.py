"""The GPT-2 of gpt2.py as one would train it with torch alone: it runs, and three things are wrong
without a word.

    torchrun --standalone --nproc-per-node=4 source_code/examples/gpt2_torch_alone.py

The numbers [1] to [3] mark them; README.md beside this file says what becomes of them.
"""

import torch
import torch.distributed as dist
from gpt2 import N_MICROBATCHES, ROWS, SEQ_LEN, VOCAB_SIZE, Stage, build_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy


def main(pp: int = 2, steps: int = 5) -> tuple[Stage, list[float]]:
    """Train, print what each rank knows, and return this rank's stage and the norms it clipped by."""
    mesh = init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))
    pp_rank, dp_rank, dp_size = (
        mesh["pp"].get_local_rank(),
        mesh["dp"].get_local_rank(),
        mesh["dp"].size(),
    )
    model = build_model()
    per_stage = model.config.n_layer // pp
    module = Stage(model, pp_rank * per_stage, (pp_rank + 1) * per_stage)
    for block in (*module.transformer.h.values(), module):
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(module, pp_rank, pp, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(
        stage, N_MICROBATCHES, lambda out, y: cross_entropy(out.flatten(0, 1), y.flatten())
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    norms = []
    for step in range(steps):
        tokens = torch.randint(
            VOCAB_SIZE, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step)
        )
        mine = tokens.chunk(dp_size)[dp_rank]
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if stage.is_first:
            schedule.step(mine[:, :-1].contiguous())
        else:
            schedule.step(target=mine[:, 1:], losses=losses)
        # [1] The embedding and the head are one weight, but each stage has only its own share of
        # the gradient.
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # [2] of this stage alone
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        # [3] of this rank's rows; elsewhere none
        loss = torch.stack(losses).mean().item() if losses else float("nan")
        print(
            f"rank {dist.get_rank()}, step {step + 1}: loss {loss:.4f}, gradient norm"
            f" {norms[-1]:.3f}",
            flush=True,
        )
    return module, norms


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
