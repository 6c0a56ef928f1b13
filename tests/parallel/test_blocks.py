"""Blocks of any model: found, or named by class or pattern, or refused with what would work."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from course_pp.model import ModelConfig, Transformer, build_stage_module
from course_pp.parallel import apply_ac, apply_fsdp2, find_blocks
from tests.parallel.whole_models import Block, build, llama

CONFIG = ModelConfig(
    dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=20, max_seq_len=16
)


class Parts(nn.Module):
    """Holds modules by name."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def blocks(n: int) -> nn.ModuleList:
    return nn.ModuleList(Block(4) for _ in range(n))


def experts() -> nn.Module:
    """Return a block that holds a longer list than its model does."""
    return Parts(experts=blocks(5))


SHARED = Block(4)
FOUND: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "ours": (lambda: Transformer(CONFIG), None, ["layers.0", "layers.1", "layers.2"]),
    "our stage of one layer": (lambda: build_stage_module(CONFIG, 1, 3), None, ["layers.1"]),
    "llama": (llama, None, [f"model.layers.{i}" for i in range(3)]),
    "gpt2": (lambda: build("gpt2"), None, [f"transformer.h.{i}" for i in range(3)]),
    "a run in a Sequential": (lambda: build("sequential"), None, ["1", "2", "3"]),
    "Sequentials": (lambda: build("convolutional"), None, ["0", "1", "2"]),
    "the longest": (lambda: Parts(a=blocks(2), b=blocks(3)), None, ["b.0", "b.1", "b.2"]),
    "the outermost": (
        lambda: Parts(layers=nn.ModuleList([experts(), experts()])),
        None,
        ["layers.0", "layers.1"],
    ),
    "not the wrapper": (
        lambda: nn.Sequential(Parts(layers=blocks(2))),
        None,
        ["0.layers.0", "0.layers.1"],
    ),
    "a Sequential of one": (lambda: nn.Sequential(Block(4)), None, ["0"]),
    "by class": (lambda: Parts(a=blocks(1), b=blocks(1)), Block, ["a.0", "b.0"]),
    "by pattern": (lambda: Parts(a=blocks(2), b=blocks(2)), "b.*", ["b.0", "b.1"]),
    "by several": (
        lambda: Parts(a=blocks(2), b=nn.Embedding(2, 2)),
        ("a.1", nn.Embedding, "a.0.up"),
        ["a.1", "b", "a.0.up"],
    ),
    "the whole": (lambda: nn.Linear(2, 2), (), [""]),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "nothing to find": (
        lambda: Parts(conv=nn.Conv2d(1, 1, 1), head=nn.Linear(2, 2)),
        None,
        "Parts holds no ModuleList, ModuleDict or Sequential of like modules, so its blocks cannot"
        " be found: it has "
        r"Conv2d, Linear; pass blocks= a class or a name pattern, or \(\) for the whole module as"
        r" one block",
    ),
    "equally long": (
        lambda: Parts(encoder=blocks(2), decoder=blocks(2)),
        None,
        (
            "Parts holds 2 Block from 'encoder.0' on and as many Block from 'decoder.0' on, so its"
            " blocks cannot be told"
        ),
    ),
    "no such name": (
        lambda: Parts(layers=blocks(2)),
        "layer.*",
        r"blocks='layer.\*' matches no module of Parts: the nearest names are 'layers.*'layers",
    ),
    "no such class": (
        lambda: Parts(layers=blocks(2)),
        nn.Conv2d,
        "blocks=Conv2d matches no module of Parts: it has",
    ),
    "inside": (
        lambda: Parts(layers=blocks(2)),
        (Block, "layers.1.up"),
        (
            "block 'layers.1.up' is inside 'layers.1', which is a block too: choose blocks of one"
            " level"
        ),
    ),
    "the module itself": (
        lambda: Block(4),
        (Block, nn.LayerNorm),
        "block 'norm' is inside the module itself",
    ),
    "one module twice": (
        lambda: Parts(layers=nn.ModuleList([SHARED, SHARED])),
        None,
        "blocks 'layers.0' and 'layers.1' are one module under two names: name it once",
    ),
    "wrapped": (
        lambda: Parts(model=nn.DataParallel(Parts(layers=blocks(2)))),
        None,
        (
            "'model' of the module is wrapped in DataParallel, which counts on one forward and one"
            " backward a step"
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks_are_found_by_name_in_order(name: str) -> None:
    build_model, wanted, names = FOUND[name]
    model = build_model()
    found = find_blocks(model, wanted)
    assert list(found) == names
    assert all(model.get_submodule(name) is block for name, block in found.items())


@pytest.mark.parametrize("name", REFUSED)
def test_blocks_that_cannot_be_are_refused_with_what_would_work(name: str) -> None:
    build_model, wanted, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        find_blocks(build_model(), wanted)


def tied_blocks() -> nn.Module:
    model = Parts(layers=blocks(3), head=nn.Linear(8, 4))
    model.head.weight = model.layers[1].down.weight
    return model


def test_a_parameter_that_two_groups_would_shard_is_refused_by_name() -> None:
    message = (
        r"'head.weight' is the same parameter as 'layers.1.down.weight', but blocks are sharded one"
        r" by one, and the "
        "two would part: leave 'layers.1' out of blocks=, so that one group holds both names"
    )
    with pytest.raises(ValueError, match=message):
        apply_fsdp2(tied_blocks(), None)
    apply_fsdp2(tied_blocks(), None, blocks=("layers.0", "layers.2"))
    apply_fsdp2(tied_blocks(), None, blocks=())
    two = Parts(layers=blocks(2))
    two.layers[1].norm = two.layers[0].norm
    with pytest.raises(
        ValueError, match=r"'layers.1.norm.weight' is the same parameter as 'layers.0.norm.weight'"
    ):
        apply_fsdp2(two, None)
    apply_fsdp2(llama(tied=True), None)


class Attention(nn.Linear):
    """A module that a checkpoint recomputes."""


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            lambda: Block(4),
            (
                r"block 'layers.0' has 0 parts whose class is named …Attention…, but .* a block has"
                r" 'norm' \(Lay"
            ),
        ),
        (
            lambda: Parts(one=Attention(1, 1), two=Attention(1, 1)),
            r"has 2 parts .* \('one', 'two'\), but",
        ),
    ],
)
def test_selective_checkpointing_needs_one_attention_in_each_block(
    block: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        apply_ac(Parts(layers=nn.ModuleList([block(), block()])), "selective")


def test_the_names_of_what_is_recomputed_are_returned() -> None:
    names = [f"model.layers.{i}" for i in range(3)]
    assert apply_ac(llama(), "none") == ()
    assert apply_ac(llama(), "full") == tuple(names)
    assert apply_ac(llama(), "selective") == tuple(f"{name}.self_attn" for name in names)
    assert apply_ac(llama(), "full", blocks="model.layers.1.mlp") == ("model.layers.1.mlp",)
    inner = [Parts(mixer=Parts(attn=Attention(1, 1))) for _ in range(2)]
    assert apply_ac(nn.Sequential(*inner), "selective") == ("0.mixer.attn", "1.mixer.attn")


def test_a_cache_that_recomputation_would_fill_again_is_refused() -> None:
    model = llama()
    apply_ac(model, "full")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"past_key_values is a DynamicCache.*train with use_cache=False"
    ):
        model(tokens, use_cache=True)
    with torch.no_grad():
        assert model(tokens, use_cache=True).past_key_values.get_seq_length() == 4
