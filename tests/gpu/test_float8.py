"""Products in eight bits on a GPU equal those that a CPU emulates, and torchao's own."""

import pytest
import torch

from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import apply_float8
from tests.equality import batches
from tests.parallel.test_float8 import RECIPES, torchao_conversion

CONFIG = ModelConfig(dim=256, n_layers=2, n_heads=4, vocab_size=512, ffn_dim=768, max_seq_len=64)
[(INPUTS, TARGET)] = batches(CONFIG, 8, 64, 1)


def gradients(model: Transformer, device: str) -> list[torch.Tensor]:
    model = model.to(device, torch.bfloat16)
    CrossEntropy()(model(INPUTS.to(device)), TARGET.to(device)).backward()
    return [p.grad.float().cpu() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_torchaos_and_near_the_emulated(recipe: str) -> None:
    ours, theirs, emulated, exact = (Transformer(CONFIG) for _ in range(4))
    apply_float8(ours.cuda(), None, recipe)
    torchao_conversion(theirs, recipe, emulate=False)
    apply_float8(emulated, None, recipe)
    found = [gradients(model, "cuda") for model in (ours, theirs)]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    off = [
        max(float((a - b).norm() / b.norm()) for a, b in zip(found[0], others, strict=True))
        for others in (gradients(emulated, "cpu"), gradients(exact, "cuda"))
    ]
    print(f"{recipe}: {off[0]:.3f} off the emulated, {off[1]:.3f} off bfloat16's")
    # each rounding may fall to the other side, for a bfloat16 that differs in its last bit
    assert off[0] < 0.25
    assert off[1] < 0.5
