"""Models of other packages, trained under any mesh, and the same training in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.parallel import (
    apply_ac,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    get_dp_mesh,
    get_dp_rank,
    has_dp_mesh,
)
from tests import equality
from tests.equality import Trained, assert_same_training, sharded_adamw

BATCH, SEQ_LEN, STEPS, WORDS, WIDTH = 8, 12, 2, 36, 32


class Block(nn.Module):
    """A feed-forward block alone, added to its input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def llama(tied: bool = False, **changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"vocab_size": WORDS, "num_hidden_layers": 3}
    return LlamaForCausalLM(
        LlamaConfig(tie_word_embeddings=tied, use_cache=False, **sizes | changes)
    )


def qwen3() -> nn.Module:
    """Return a model with norms of each head's queries and keys, and with biases."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen3Config(
        vocab_size=WORDS,
        num_hidden_layers=2,
        head_dim=8,
        attention_bias=True,
        use_cache=False,
        pad_token_id=0,
        **sizes,
    )
    return Qwen3ForCausalLM(config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = MixtralConfig(
        vocab_size=WORDS, num_hidden_layers=2, num_local_experts=4, use_cache=False, **sizes
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")  # the default takes no float64
    return model


class Crowding(nn.Module):
    """In the place of a router: every token goes to the first two experts."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = self.router(hidden_states)
        return logits, weights, torch.arange(2).expand_as(experts)


def crowded() -> nn.Module:
    model: Any = mixtral()
    for layer in model.model.layers:
        layer.mlp.gate = Crowding(layer.mlp.gate)
    return model  # type: ignore[no-any-return]


def qwen3_moe() -> nn.Module:
    """Return a model with a dense layer first, and products of all experts at once."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
    }
    config = Qwen3MoeConfig(
        vocab_size=WORDS, num_hidden_layers=3, mlp_only_layers=[0], use_cache=False, **sizes
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 16}
    sizes |= {
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, use_cache=False, **sizes))


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, WORDS)
    )


def convolutional() -> nn.Module:
    def layer(n_in: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(n_in, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())

    return nn.Sequential(layer(3), layer(8), layer(8), nn.Flatten(), nn.Linear(8 * 36, WORDS))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tied=True),
    "llama, odd words": lambda: llama(vocab_size=WORDS + 1),
    "qwen3": qwen3,
    "mixtral": mixtral,
    "mixtral, crowded": crowded,
    "qwen3 moe": qwen3_moe,
    "gpt2": gpt2,
    "sequential": sequential,
    "convolutional": convolutional,
}


def build(name: str) -> nn.Module:
    """Return one of ``MODELS`` in float64, the same on every rank."""
    torch.manual_seed(0)
    return MODELS[name]().double()


def data_of(name: str) -> list[tuple[Tensor, Tensor]]:
    """Return a batch of inputs and targets for each step."""
    generator = torch.Generator().manual_seed(1)
    if name == "convolutional":
        images = torch.randn(STEPS, BATCH, 3, 6, 6, dtype=torch.float64, generator=generator)
        return list(
            zip(images, torch.randint(WORDS, (STEPS, BATCH), generator=generator), strict=True)
        )
    tokens = torch.randint(WORDS, (STEPS, BATCH, SEQ_LEN + 1), generator=generator)
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def loss_of(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy; the batches of all ranks have equally many targets."""
    output = model(inputs)
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def train(model: nn.Module, name: str, rank: int = 0, n_ranks: int = 1) -> Trained:
    """Take two AdamW steps on this rank's part of each batch. Losses are of this part."""
    data = data_of(name)

    def step(i: int) -> Tensor:
        loss = loss_of(model, *(rows.chunk(n_ranks)[rank] for rows in data[i]))
        loss.backward()
        return loss

    return equality.train([model], len(data), step, sharded_adamw([model]))


@cache
def reference(name: str) -> Trained:
    """Train in one process."""
    return train(build(name), name)


@dataclass(frozen=True)
class Recipe:
    """The changes that are made to a model, in order."""

    model: str
    plan: Any = None
    experts: Any = None
    ac: str = "none"
    blocks: Any = None
    reshard: Any = "auto"
    options: Mapping[str, Any] | None = None


def train_on_rank(
    mesh: DeviceMesh | None, recipe: Recipe
) -> tuple[Trained, dict[str, tuple[str, ...]]]:
    """Return the result of training, and the names of modules that each change was applied to."""
    model = build(recipe.model)
    names = {
        "tensor": apply_tensor_parallel(model, mesh, recipe.plan),
        "experts": apply_expert_parallel(model, mesh, recipe.experts),
        "ac": apply_ac(model, recipe.ac, blocks=recipe.blocks, **recipe.options or {}),
        "fsdp2": apply_fsdp2(model, mesh, None, recipe.reshard, blocks=recipe.blocks),
    }
    return (
        train(
            model,
            recipe.model,
            get_dp_rank(mesh),
            get_dp_mesh(mesh).size() if has_dp_mesh(mesh) else 1,
        ),
        names,
    )


def assert_equals(ranks: list[Trained], name: str, sizes: Mapping[str, int]) -> None:
    """Assert that gradients, parameters and the data ranks' mean loss equal one process's."""
    losses = torch.tensor([trained.losses for trained in ranks], dtype=torch.float64)
    n_data = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    parts = losses.view(-1, n_data, sizes.get("tp", 1), STEPS)
    mean = parts.mean(1, keepdim=True).expand_as(parts).reshape(losses.shape)
    assert_same_training(
        [replace(trained, losses=row.tolist()) for trained, row in zip(ranks, mean, strict=True)],
        reference(name),
    )
