"""Families of models that are not ours, tiny and with random weights, and a batch for each."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 4
SEQ_LEN = 8
WORDS = 96
WIDTH = 32
LAYERS = 4
Example = dict[str, Tensor] | Tensor
# Sizes under the names that most configurations of transformers use. GPT-2 and T5 have their own.
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48}
TEXT = SIZES | {"max_position_embeddings": 32}
GROUPED = TEXT | {"num_key_value_heads": 2}
GPT2 = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 4}
OPT = TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": True}
T5 = {"d_model": WIDTH, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
T5 |= {"d_kv": 8, "d_ff": 48}
VIT = SIZES | {"image_size": 16, "patch_size": 4, "num_labels": 3}
# The module of transformers, the class, and the fields of its configuration.
OF_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2, language model": ("gpt2", "GPT2LMHeadModel", GPT2),
    "GPT-2, classification": ("gpt2", "GPT2ForSequenceClassification", GPT2 | {"num_labels": 3}),
    "Llama": ("llama", "LlamaForCausalLM", GROUPED),
    "Mistral": ("mistral", "MistralForCausalLM", GROUPED | {"sliding_window": None}),
    "Mistral, sliding window": ("mistral", "MistralForCausalLM", GROUPED | {"sliding_window": 4}),
    "Qwen2": ("qwen2", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "Phi": ("phi", "PhiForCausalLM", GROUPED),
    "OPT": ("opt", "OPTForCausalLM", OPT),
    "GPT-NeoX": ("gpt_neox", "GPTNeoXForCausalLM", TEXT),
    "Gemma": ("gemma", "GemmaForCausalLM", GROUPED | {"head_dim": 8}),
    "BERT": ("bert", "BertForMaskedLM", TEXT),
    "T5": ("t5", "T5ForConditionalGeneration", T5),
    "ViT": ("vit", "ViTForImageClassification", VIT),
}


class UNet(nn.Module):
    """Convolutions down and up again. Each level has a skip connection."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.into = conv(3, width)
        self.down1 = conv(width, 2 * width, stride=2)
        self.down2 = conv(2 * width, 4 * width, stride=2)
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
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 48)
        self.down = nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Repeated(nn.Module):
    """One block that is called four times. The model itself holds positions and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        self.drop = nn.Dropout(0.2)
        self.positions = nn.Parameter(torch.randn(SEQ_LEN, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for _ in range(LAYERS):
            # OPT draws a number to drop a layer. This line draws one, too, but drops none.
            if self.training and torch.rand([]) < 0:
                continue
            x = self.drop(self.block(x * self.scale))
            x += self.positions
        return x @ self.embed.weight.T


def sequential() -> nn.Module:
    embed = nn.Embedding(WORDS, WIDTH)
    blocks = [Block() for _ in range(LAYERS)]
    return nn.Sequential(embed, *blocks, nn.Linear(WIDTH, WORDS))


OWN: dict[str, Callable[[], nn.Module]] = {
    "Sequential": sequential,
    "U-Net": UNet,
    "one block, repeated": Repeated,
}
FAMILIES = (*OF_TRANSFORMERS, *OWN)


def build(name: str) -> nn.Module:
    """Return the model in float64, with the same weights each time."""
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name]().double()
    folder, model, sizes = OF_TRANSFORMERS[name]
    code = import_module(f"transformers.models.{folder}.modeling_{folder}")
    kind = getattr(code, model)
    tokens = {}
    if name != "ViT":
        tokens = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return kind(kind.config_class(**sizes, **tokens, use_cache=False)).double()


def example(name: str, seed: int = 0) -> Example:
    """Return a batch of the model's arguments."""
    drawn = torch.Generator().manual_seed(seed)
    if name in ("ViT", "U-Net"):
        return torch.randn(ROWS, 3, 16, 16, dtype=torch.float64, generator=drawn)
    ids = torch.randint(3, WORDS, (ROWS, SEQ_LEN), generator=drawn)
    if name == "T5":
        decoded = torch.randint(3, WORDS, (ROWS, SEQ_LEN - 2), generator=drawn)
        return {"input_ids": ids, "decoder_input_ids": decoded}
    if name == "BERT":
        mask = (torch.arange(SEQ_LEN) < SEQ_LEN - 2).expand(ROWS, -1).long()
        return {"input_ids": ids, "attention_mask": mask}
    return ids


def tensor_of(output: Any) -> Tensor:
    """Return the tensor of a model's output for the loss."""
    return output if isinstance(output, Tensor) else output.logits


def called(module: nn.Module, given: Example) -> Any:
    """Call the module with a batch of `example`."""
    return module(**given) if isinstance(given, dict) else module(given)
