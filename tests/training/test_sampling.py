"""A sample is the text that the whole model would write, with and without a cache."""

from typing import Any

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    apply_compile,
    apply_fsdp2,
    default_mp_policy,
    get_pp_rank,
    init_distributed,
)
from course_pp.training.data import BOT_ID, PAD_ID
from course_pp.training.sampling import sample

CONFIG = ModelConfig(dim=16, n_layers=4, n_heads=2, n_kv_heads=1, vocab_size=29, max_seq_len=12)
PROMPT = [7, 8, 9]
N_TOKENS = 14


def sharpened(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.double()


def sampled(rank: int, layout: dict[str, int], compiled: bool) -> tuple[list[int], list[int]]:
    """The sample, and how many positions each forward of this rank's stage has seen."""
    mesh = init_distributed(DistributedConfig(**layout), seed=0)
    pp = layout.get("pp", 1)
    module = sharpened(build_stage_module(CONFIG, get_pp_rank(mesh), pp))
    if layout.get("dp_shard", 1) > 1:
        apply_fsdp2(module, mesh, default_mp_policy(torch.float64))
    if compiled:
        apply_compile(module, backend="eager")
    seen: list[int] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    tokens = sample([module], PROMPT, N_TOKENS, device_mesh=mesh, temperature=0.0)
    return tokens, seen


@pytest.mark.parametrize(
    ("layout", "compiled"),
    [
        ({"pp": 2, "dp_shard": 1}, False),
        ({"pp": 1, "dp_shard": 2}, False),
        ({"pp": 2, "dp_shard": 1}, True),
    ],
    ids=["a pipeline", "shards", "compiled"],
)
def test_a_sample_is_that_of_the_whole_model(layout: dict[str, int], compiled: bool) -> None:
    torch.manual_seed(0)
    model, tokens = sharpened(Transformer(CONFIG)), [BOT_ID, *PROMPT]
    for _ in range(N_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-CONFIG.max_seq_len :]]))[0, -1]
        logits[[PAD_ID, BOT_ID]] = -torch.inf
        tokens.append(int(logits.argmax()))
    for found, seen in on_ranks(2, sampled, layout, compiled, timeout_s=60):
        assert found == tokens[1 + len(PROMPT) :][: len(found)]
        assert len(found) > 10
        # A compiled block would be compiled again for each length, so it sees one.
        assert seen == ([12] * 14 if compiled else [4, *[1] * 8, *[12] * 5])[: len(seen)]
