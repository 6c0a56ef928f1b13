"""Train a GPT-2 of transformers through a pipeline. Its head is its embedding, on the first and on
the last stage.

    torchrun --standalone --nproc-per-node=4 source_code/examples/gpt2.py --pp 2 --schedule zb_v

The ranks that the pipeline leaves shard each stage. Weights are random: nothing is downloaded."""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from course_pp import parallel as pp
from course_pp.model import CrossEntropy

ROWS, SEQ_LEN, VOCAB_SIZE, N_MICROBATCHES = 32, 16, 96, 8


class Stage(nn.Module):
    """Some blocks of a GPT-2, with the embeddings if they are its first and the head if its last; names stay."""

    def __init__(self, gpt2: GPT2LMHeadModel, first: int, end: int) -> None:
        super().__init__()
        whole, last = gpt2.transformer, end == gpt2.config.n_layer
        self.transformer = nn.ModuleDict(
            {"h": nn.ModuleDict({str(i): whole.h[i] for i in range(first, end)})}
        )
        self.transformer.update({"wte": whole.wte, "wpe": whole.wpe} if first == 0 else {})
        self.transformer.update({"ln_f": whole.ln_f} if last else {})
        self.lm_head = gpt2.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        if "wte" in self.transformer:
            x = self.transformer.wte(x) + self.transformer.wpe(
                torch.arange(x.shape[1], device=x.device)
            )
        for block in self.transformer.h.values():
            x = block(x)
        return x if self.lm_head is None else self.lm_head(self.transformer.ln_f(x))


def build_model(tied: bool = True) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {
        "n_layer": 8,
        "n_embd": 32,
        "n_head": 4,
        "n_positions": SEQ_LEN,
        "vocab_size": VOCAB_SIZE,
    }
    plain = {
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "resid_pdrop": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, **plain, tie_word_embeddings=tied))


def build(model: GPT2LMHeadModel, mesh: DeviceMesh | None, schedule: str) -> pp.PipelineSchedule:
    """The pipeline over this rank's stages."""
    indices = pp.get_stage_indices(schedule, pp.get_pp_rank(mesh), pp.get_pp_size(mesh))
    ranges = pp.compute_layer_assignment(model.config.n_layer, pp.get_pp_size(mesh) * len(indices))
    tied, modules = (
        pp.find_ties(model),
        {i: Stage(model, *ranges[i]).to(pp.get_device()) for i in indices},
    )
    for module in modules.values():
        pp.apply_fsdp2(module, mesh, blocks=GPT2Block)
    sizes = (mesh, pp.get_device(), ROWS // pp.get_dp_size(mesh) // N_MICROBATCHES, SEQ_LEN)
    stages = [
        pp.build_pipeline_stage(m, *sizes, stage=i, n_stages=len(ranges))
        for i, m in modules.items()
    ]
    return pp.build_pipeline_schedule(stages, N_MICROBATCHES, CrossEntropy(), schedule, tied=tied)


def batch(step: int, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """This data-parallel rank's rows of a batch, and the tokens that follow."""
    tokens = torch.randint(
        VOCAB_SIZE, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step)
    )
    mine = tokens.chunk(pp.get_dp_size(mesh))[pp.get_dp_rank(mesh)].to(pp.get_device())
    return mine[:, :-1], mine[:, 1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=args.pp))
    pipeline = build(build_model(), mesh, args.schedule)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for step in range(5):
        inputs, target = batch(step, mesh)
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target=target)
        norm = pp.clip_grad_norm_(pipeline.stages, 1.0, device_mesh=mesh)
        optimizer.step()
        print(
            f"rank {pp.get_world_info()[0]}, step {step + 1}: loss {loss:.4f}, gradient norm"
            f" {norm:.3f}"
        )
    pp.destroy_distributed()
