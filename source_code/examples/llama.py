"""Train a Llama of transformers on pipeline × tensor × FSDP2, save it, and resume on fewer ranks.

    torchrun --standalone --nproc-per-node=8 source_code/examples/llama.py --pp 2 --tp 2
    torchrun --standalone --nproc-per-node=4 source_code/examples/llama.py --pp 4 --steps 10

The stages compute in bfloat16, and gradients are clipped by the norm of the whole model.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from course_pp import parallel as pp
from course_pp.model import CrossEntropy
from course_pp.training.checkpoint import resume, save

ROWS = 32
SEQ_LEN = 16
VOCAB_SIZE = 96
N_MICROBATCHES = 8


class Stage(nn.Module):
    """Some layers of a Llama. The first stage has the embedding, the last one norm and head.

    Parameters keep the names of the whole model, so that checkpoints fit any number of stages.
    """

    def __init__(self, llama: LlamaForCausalLM, first: int, end: int) -> None:
        super().__init__()
        self.config = llama.config  # `llama_plan` looks here whether the head is tied
        whole = llama.model
        layers = {str(i): whole.layers[i] for i in range(first, end)}
        self.model = nn.ModuleDict({"layers": nn.ModuleDict(layers)})
        self.model["rotary_emb"] = whole.rotary_emb
        self.lm_head = None
        if first == 0:
            self.model["embed_tokens"] = whole.embed_tokens
        if end == self.config.num_hidden_layers:
            self.model["norm"] = whole.norm
            self.lm_head = llama.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if "embed_tokens" in self.model:
            x = self.model.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        # The rotary angles are cheaper to compute in every stage than to send.
        angles = self.model.rotary_emb(x, position_ids=positions)
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=angles)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))


def build_model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def build(model: LlamaForCausalLM, mesh: DeviceMesh | None, schedule: str) -> pp.PipelineSchedule:
    """Return the pipeline over this rank's stages."""
    n_ranks = pp.get_pp_size(mesh)
    indices = pp.get_stage_indices(schedule, pp.get_pp_rank(mesh), n_ranks)
    ranges = pp.compute_layer_assignment(model.config.num_hidden_layers, n_ranks * len(indices))
    tied = pp.find_ties(model)  # before the model is cut, as a stage has only one end of a tie
    rows = ROWS // pp.get_dp_size(mesh) // N_MICROBATCHES
    stages = []
    for i in indices:
        module = Stage(model, *ranges[i]).to(pp.get_device())
        pp.apply_tensor_parallel(module, mesh, plan=pp.llama_plan)
        pp.apply_fsdp2(module, mesh, pp.default_mp_policy())
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
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", default="runs/llama")
    args = parser.parse_args()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=args.pp, tp=args.tp))
    rank, _, _ = pp.get_world_info()
    pipeline = build(build_model(), mesh, "1f1b")
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    loaded = resume(args.folder, pipeline.modules, optimizer, device_mesh=mesh)
    for step in range(loaded.step if loaded else 0, args.steps):
        inputs, target = batch(step, mesh)
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target=target)
        norm = pp.clip_grad_norm_(pipeline.stages, 1.0, device_mesh=mesh)
        optimizer.step()
        print(f"rank {rank}, step {step + 1}: loss {loss:.4f}, gradient norm {norm:.3f}")
    save(args.folder, args.steps, pipeline.modules, optimizer, device_mesh=mesh)
    pp.destroy_distributed()
