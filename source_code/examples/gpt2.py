"""Train a GPT-2 of transformers through a pipeline.

    torchrun --standalone --nproc-per-node=4 source_code/examples/gpt2.py --pp 2 --schedule zb_v

The head of a GPT-2 is its embedding, so the first and the last stage share a weight. Ranks that the
pipeline does not use shard each stage. Weights are random: nothing is downloaded."""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from course_pp import parallel as pp
from course_pp.model import CrossEntropy

ROWS = 32
SEQ_LEN = 16
VOCAB_SIZE = 96
N_MICROBATCHES = 8


class Stage(nn.Module):
    """Some blocks of a GPT-2. The first stage has the embeddings, the last one norm and head.

    Parameters keep the names of the whole model, so that checkpoints fit any number of stages.
    """

    def __init__(self, gpt2: GPT2LMHeadModel, first: int, end: int) -> None:
        super().__init__()
        whole = gpt2.transformer
        blocks = {str(i): whole.h[i] for i in range(first, end)}
        self.transformer = nn.ModuleDict({"h": nn.ModuleDict(blocks)})
        self.lm_head = None
        if first == 0:
            self.transformer.update({"wte": whole.wte, "wpe": whole.wpe})
        if end == gpt2.config.n_layer:
            self.transformer["ln_f"] = whole.ln_f
            self.lm_head = gpt2.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if "wte" in self.transformer:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.transformer.wte(x) + self.transformer.wpe(positions)
        for block in self.transformer.h.values():
            x = block(x)
        return x if self.lm_head is None else self.lm_head(self.transformer.ln_f(x))


def build_model(tied: bool = True) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=32, n_head=4, n_positions=SEQ_LEN, vocab_size=VOCAB_SIZE,
        # Dropout would draw other numbers in a pipeline than in one process.
        embd_pdrop=0, attn_pdrop=0, resid_pdrop=0,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def build(model: GPT2LMHeadModel, mesh: DeviceMesh | None, schedule: str) -> pp.PipelineSchedule:
    """Return the pipeline over this rank's stages."""
    n_ranks = pp.get_pp_size(mesh)
    indices = pp.get_stage_indices(schedule, pp.get_pp_rank(mesh), n_ranks)
    ranges = pp.compute_layer_assignment(model.config.n_layer, n_ranks * len(indices))
    tied = pp.find_ties(model)  # before the model is cut, as a stage has only one end of a tie
    rows = ROWS // pp.get_dp_size(mesh) // N_MICROBATCHES
    stages = []
    for i in indices:
        module = Stage(model, *ranges[i]).to(pp.get_device())
        pp.apply_fsdp2(module, mesh, blocks=GPT2Block)
        stage = pp.build_pipeline_stage(
            module, mesh, pp.get_device(), rows, SEQ_LEN, stage=i, n_stages=len(ranges)
        )
        stages.append(stage)
    return pp.build_pipeline_schedule(stages, N_MICROBATCHES, CrossEntropy(), schedule, tied=tied)


def batch(step: int, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Return this data-parallel rank's rows of a batch, and the tokens that follow."""
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB_SIZE, (ROWS, SEQ_LEN + 1), generator=drawn)
    mine = tokens.chunk(pp.get_dp_size(mesh))[pp.get_dp_rank(mesh)].to(pp.get_device())
    return mine[:, :-1], mine[:, 1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=args.pp))
    rank, _, _ = pp.get_world_info()
    pipeline = build(build_model(), mesh, args.schedule)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    for step in range(5):
        inputs, target = batch(step, mesh)
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target=target)
        norm = pp.clip_grad_norm_(pipeline.stages, 1.0, device_mesh=mesh)
        optimizer.step()
        print(f"rank {rank}, step {step + 1}: loss {loss:.4f}, gradient norm {norm:.3f}")
    pp.destroy_distributed()
