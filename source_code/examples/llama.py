"""Train a Llama of transformers on a mesh: pipeline × tensor × FSDP2, bfloat16, clipped, saved;
resume it elsewhere.

torchrun --standalone --nproc-per-node=8 source_code/examples/llama.py --pp 2 --tp 2 --folder
runs/llama torchrun --standalone --nproc-per-node=4 source_code/examples/llama.py --pp 4 --folder
runs/llama --steps 10
"""

import argparse

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from course_pp import parallel as pp
from course_pp.model import CrossEntropy
from course_pp.training.checkpoint import resume, save

ROWS, SEQ_LEN, VOCAB_SIZE, N_MICROBATCHES = 32, 16, 96, 8


class Stage(nn.Module):
    """Some layers of a Llama, with the embedding if they are its first and norm and head if its last; names stay."""

    def __init__(self, llama: LlamaForCausalLM, first: int, end: int) -> None:
        super().__init__()
        # the plan looks here whether the head is tied
        self.config, whole = llama.config, llama.model
        last = end == self.config.num_hidden_layers
        ends = ({"embed_tokens": whole.embed_tokens} if first == 0 else {}) | (
            {"norm": whole.norm} if last else {}
        )
        layers = nn.ModuleDict({str(i): whole.layers[i] for i in range(first, end)})
        self.model = nn.ModuleDict({"layers": layers, "rotary_emb": whole.rotary_emb, **ends})
        self.lm_head = llama.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.model.embed_tokens(x) if "embed_tokens" in self.model else x
        angles = self.model.rotary_emb(
            x, position_ids=torch.arange(x.shape[1], device=x.device)[None]
        )
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=angles)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))


def build_model(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "vocab_size": VOCAB_SIZE,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


def build(model: LlamaForCausalLM, mesh: DeviceMesh | None, schedule: str) -> pp.PipelineSchedule:
    """The pipeline over this rank's stages."""
    indices = pp.get_stage_indices(schedule, pp.get_pp_rank(mesh), pp.get_pp_size(mesh))
    ranges = pp.compute_layer_assignment(
        model.config.num_hidden_layers, pp.get_pp_size(mesh) * len(indices)
    )
    tied, modules = (
        pp.find_ties(model),
        {i: Stage(model, *ranges[i]).to(pp.get_device()) for i in indices},
    )
    for module in modules.values():
        pp.apply_tensor_parallel(module, mesh, plan=pp.llama_plan)
        pp.apply_fsdp2(module, mesh, pp.default_mp_policy())
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
    for name, default in {"pp": 2, "tp": 1, "steps": 5, "folder": "runs/llama"}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=args.pp, tp=args.tp))
    pipeline = build(build_model(), mesh, "1f1b")
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    loaded = resume(args.folder, pipeline.modules, optimizer, device_mesh=mesh)
    for step in range(loaded.step if loaded else 0, args.steps):
        inputs, target = batch(step, mesh)
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target=target)
        norm = pp.clip_grad_norm_(pipeline.stages, 1.0, device_mesh=mesh)
        optimizer.step()
        print(
            f"rank {pp.get_world_info()[0]}, step {step + 1}: loss {loss:.4f}, gradient norm"
            f" {norm:.3f}"
        )
    save(args.folder, args.steps, pipeline.modules, optimizer, device_mesh=mesh)
    pp.destroy_distributed()
