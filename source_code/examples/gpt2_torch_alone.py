"""Train the GPT-2 of gpt2.py with torch alone. It runs, and three things go wrong in silence.

    torchrun --standalone --nproc-per-node=4 source_code/examples/gpt2_torch_alone.py

The numbers [1] to [3] mark the faults; README.md beside this file says what they do to training.
"""

import torch
import torch.distributed as dist
from gpt2 import N_MICROBATCHES, ROWS, SEQ_LEN, VOCAB_SIZE, Stage, build_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def main(pp: int = 2, steps: int = 5) -> tuple[Stage, list[float]]:
    """Train, print the numbers of each rank, and return this rank's stage and gradient norms."""
    mesh = init_device_mesh("cpu", (pp, dist.get_world_size() // pp), mesh_dim_names=("pp", "dp"))
    pp_rank = mesh["pp"].get_local_rank()
    model = build_model()
    per_stage = model.config.n_layer // pp
    module = Stage(model, pp_rank * per_stage, (pp_rank + 1) * per_stage)
    for block in (*module.transformer.h.values(), module):
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(module, pp_rank, pp, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, N_MICROBATCHES, loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    norms = []
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB_SIZE, (ROWS, SEQ_LEN + 1), generator=drawn)
        mine = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if stage.is_first:
            schedule.step(mine[:, :-1].contiguous())
        else:
            schedule.step(target=mine[:, 1:], losses=losses)
        # [1] The embedding and the head are one weight, but each of the two stages has only its own
        # part of the gradient.
        # [2] This is the norm of one stage, not of the model.
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        # [3] This is the loss of this rank's rows. The first stage has none at all.
        loss = torch.stack(losses).mean().item() if losses else float("nan")
        numbers = f"loss {loss:.4f}, gradient norm {norms[-1]:.3f}"
        print(f"rank {dist.get_rank()}, step {step + 1}: {numbers}", flush=True)
    return module, norms


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
