"""Train LoRA adapters of peft on the GPT-2 of gpt2.py, whose own weights are frozen.

    torchrun --standalone --nproc-per-node=2 source_code/examples/lora.py --first-layer 4

Layers from --first-layer on get adapters. At 4, the first of two stages has none, so it has no
gradient. With --folder the adapters alone are saved; the same command with more --steps goes on
from there, on any number of ranks. In float64, losses, norms, gradients and adapters are compared
with one process that never stopped. The script needs peft: pip install peft
"""

import argparse
import sys

import torch
from gpt2 import batch, build, build_model
from torch import nn
from transformers import GPT2LMHeadModel

from course_pp import parallel as pp
from course_pp.model import CrossEntropy
from course_pp.training.checkpoint import resume, save

TOLERANCE = 1e-12
MAX_NORM = 0.005


def adapted(first_layer: int) -> GPT2LMHeadModel:
    """Return the model with adapters beside its attention.

    The adapters are added before the model is cut, so they have the names of the whole model.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            f"adapters come from peft, which cannot be imported ({error}): pip install peft"
        ) from error
    model = build_model()
    layers = list(range(first_layer, model.config.n_layer))
    if not layers or first_layer < 0:
        raise ValueError(
            f"--first-layer is {first_layer}: give 0 to {model.config.n_layer - 1}, the model's"
            " layers"
        )
    config = LoraConfig(
        r=4, target_modules=["c_attn"], layers_to_transform=layers, fan_in_fan_out=True
    )
    # peft freezes all other weights.
    return inject_adapter_in_model(config, model).double()


def trained(modules: list[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the adapters of a rank's stages by name; none if all of them lie on other ranks."""
    found = {}
    for module in modules:
        for name, p in module.named_parameters():
            if p.requires_grad:
                found[name] = p
    return found


def adamw(modules: list[nn.Module]) -> torch.optim.AdamW:
    # An optimizer refuses an empty list of parameters, but takes an empty group.
    return torch.optim.AdamW([{"params": list(trained(modules).values())}], lr=1e-2)


def keep_adapters(module: nn.Module, state: dict[str, object], *_: object) -> None:
    """Drop frozen weights from a stage's ``state_dict``, so a checkpoint holds adapters alone."""
    for name in state.keys() - trained([module]).keys():
        del state[name]


def in_one_process(
    first_layer: int, steps: int
) -> tuple[GPT2LMHeadModel, list[tuple[float, float]]]:
    """Return the model after ``steps`` with its last gradients, and (loss, norm) of each step."""
    model = adapted(first_layer).to(pp.get_device())
    optimizer = adamw([model])
    seen = []
    for step in range(steps):
        inputs, target = batch(step, None)
        optimizer.zero_grad()
        loss = CrossEntropy()(model(inputs).logits, target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return model, seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first-layer", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", help="where adapters are saved, and found")
    args = parser.parse_args()
    rank, _, n_ranks = pp.get_world_info()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=n_ranks))
    pipeline = build(adapted(args.first_layer), mesh, "1f1b")
    modules = pipeline.modules
    optimizer = adamw(modules)
    for module in modules:
        module.register_state_dict_post_hook(keep_adapters)
    start = 0
    if args.folder and (loaded := resume(args.folder, modules, optimizer, device_mesh=mesh)):
        start = loaded.step

    expected, seen = in_one_process(args.first_layer, args.steps)
    furthest = 0.0
    for step in range(start, args.steps):
        inputs, target = batch(step, mesh)
        optimizer.zero_grad()
        loss = pipeline.step(inputs, target=target).item()
        norm = pp.clip_grad_norm_(pipeline.stages, MAX_NORM, device_mesh=mesh).item()
        optimizer.step()
        furthest = max(furthest, abs(loss - seen[step][0]), abs(norm - seen[step][1]))
        print(f"rank {rank}, step {step + 1}: loss {loss:.4f}, gradient norm {norm:.3f}")
    if args.folder and start < args.steps:
        save(args.folder, args.steps, modules, optimizer, device_mesh=mesh)

    ours = trained(modules)
    for name, p in ours.items():
        one = expected.get_parameter(name)
        furthest = max(furthest, (p - one).abs().max().item())
        if start < args.steps:  # without a step there is no gradient
            furthest = max(furthest, (p.grad - one.grad).abs().max().item())
    same = "equal to" if furthest <= TOLERANCE else "DIFFER FROM"
    compared = f"losses, norms and {len(ours)} adapter weights"
    print(f"rank {rank}: {compared} {same} one process: {furthest:.0e}")
    pp.destroy_distributed()
    sys.exit(furthest > TOLERANCE)


if __name__ == "__main__":
    with pp.refusals_said_once("lora.py"):
        main()
