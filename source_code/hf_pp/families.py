"""Families of models that somebody else wrote, tiny and with random weights, and an example of each."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

ROWS, SEQ_LEN, WORDS, WIDTH, LAYERS = 4, 8, 96, 32, 4
Example = dict[str, Tensor] | Tensor
NAMES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
GROUPED = NAMES | {"num_key_value_heads": 2, "max_position_embeddings": 32}
# Which module of transformers, which model, its configuration's sizes.
OF_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2, language model": (
        "gpt2",
        "GPT2LMHeadModel",
        {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4},
    ),
    "GPT-2, classification": (
        "gpt2",
        "GPT2ForSequenceClassification",
        {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4, "num_labels": 3},
    ),
    "Llama": ("llama", "LlamaForCausalLM", GROUPED),
    "Mistral": ("mistral", "MistralForCausalLM", GROUPED | {"sliding_window": None}),
    "Mistral, sliding window": ("mistral", "MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "Qwen2": ("qwen2", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "Phi": ("phi", "PhiForCausalLM", GROUPED),
    "OPT": (
        "opt",
        "OPTForCausalLM",
        NAMES
        | {
            "ffn_dim": 48,
            "word_embed_proj_dim": 16,
            "max_position_embeddings": 32,
            "do_layer_norm_before": True,
        },
    ),
    "GPT-NeoX": ("gpt_neox", "GPTNeoXForCausalLM", NAMES | {"max_position_embeddings": 32}),
    "Gemma": ("gemma", "GemmaForCausalLM", GROUPED | {"head_dim": 8}),
    "BERT": ("bert", "BertForMaskedLM", NAMES | {"max_position_embeddings": 32}),
    "T5": (
        "t5",
        "T5ForConditionalGeneration",
        {
            "d_model": WIDTH,
            "num_layers": 3,
            "num_decoder_layers": 3,
            "num_heads": 4,
            "d_kv": 8,
            "d_ff": 48,
        },
    ),
    "ViT": (
        "vit",
        "ViTForImageClassification",
        NAMES | {"image_size": 16, "patch_size": 4, "num_labels": 3},
    ),
}


class UNet(nn.Module):
    """Convolutions down and up again, with a skip connection on each level."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into = conv(3, width)
        self.down1, self.down2 = (
            conv(width, 2 * width, stride=2),
            conv(2 * width, 4 * width, stride=2),
        )
        self.middle = conv(4 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = conv(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = conv(2 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.into(images)
        second = self.down1(first)
        x = self.middle(self.down2(second))
        x = self.join2(torch.cat([self.up2(x), second], 1))
        return self.head(self.join1(torch.cat([self.up1(x), first], 1)))


def conv(n_in: int, n_out: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, stride, padding=1), nn.GroupNorm(2, n_out), nn.ReLU(inplace=True)
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 48),
            nn.Linear(48, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Repeated(nn.Module):
    """One block called four times, and positions and a scale that the model itself holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.drop = nn.Embedding(WORDS, WIDTH), Block(), nn.Dropout(0.2)
        self.positions, self.scale = (
            nn.Parameter(torch.randn(SEQ_LEN, WIDTH)),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for _ in range(LAYERS):
            if (
                self.training and torch.rand([]) < 0
            ):  # a layer dropped, as OPT does: never here, but the number is drawn
                continue
            x = self.drop(self.block(x * self.scale))
            x += self.positions
        return x @ self.embed.weight.T


def sequential() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS)
    )


OWN: dict[str, Callable[[], nn.Module]] = {
    "Sequential": sequential,
    "U-Net": UNet,
    "one block, repeated": Repeated,
}
FAMILIES = (*OF_TRANSFORMERS, *OWN)


def build(name: str) -> nn.Module:
    """The model, in float64 and with the same weights each time."""
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name]().double()
    folder, model, sizes = OF_TRANSFORMERS[name]
    code = import_module(f"transformers.models.{folder}.modeling_{folder}")
    kind = getattr(code, model)
    tokens = (
        {}
        if name == "ViT"
        else {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    )
    return kind(
        kind.config_class(
            **sizes,
            **tokens,
            use_cache=False,
        )
    ).double()


def example(name: str, seed: int = 0) -> Example:
    """A batch of the model's arguments."""
    drawn = {"generator": torch.Generator().manual_seed(seed)}
    if name in ("ViT", "U-Net"):
        return torch.randn(ROWS, 3, 16, 16, dtype=torch.float64, **drawn)
    ids = torch.randint(3, WORDS, (ROWS, SEQ_LEN), **drawn)
    if name == "T5":
        return {
            "input_ids": ids,
            "decoder_input_ids": torch.randint(3, WORDS, (ROWS, SEQ_LEN - 2), **drawn),
        }
    if name == "BERT":
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(SEQ_LEN) < SEQ_LEN - 2).expand(ROWS, -1).long(),
        }
    return ids


def tensor_of(output: Any) -> Tensor:
    """What a loss is computed from."""
    return output if isinstance(output, Tensor) else output.logits


def called(module: nn.Module, given: Example) -> Any:
    """What a module returns."""
    return module(**given) if isinstance(given, dict) else module(given)
