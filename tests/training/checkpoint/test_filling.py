"""A module whose state_dict makes copies would stay as it is: it is refused instead of being loaded in vain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from course_pp.launch import on_ranks
from course_pp.training.checkpoint import CheckpointError, load, save

COPY = "state_dict gives a copy of"


def layer(value: float) -> nn.Linear:
    module = nn.Linear(4, 4)
    nn.init.constant_(module.weight, value)
    return module


def copying(value: float) -> nn.Module:
    """As modules do whose weights are in another form inside."""
    module = layer(value)

    def copy(_: nn.Module, state: dict[str, Tensor], *__: object) -> None:
        state |= {name: tensor.detach().clone() for name, tensor in state.items()}

    module.register_state_dict_post_hook(copy)
    return module


def viewing(value: float) -> nn.Module:
    """The same memory under new names of Python."""
    module = layer(value)

    def view(_: nn.Module, state: dict[str, Tensor], *__: object) -> None:
        state |= {name: tensor.detach() for name, tensor in state.items()}

    module.register_state_dict_post_hook(view)
    return module


class Remembering(nn.Linear):
    """Keeps a tensor beside its parameters."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.beside = torch.zeros(2)

    def get_extra_state(self) -> Tensor:
        return self.beside

    def set_extra_state(self, state: Tensor) -> None:
        self.beside = state


def test_a_state_dict_of_copies_is_saved_and_cannot_be_loaded_into(tmp_path: Path) -> None:
    save(tmp_path, 1, copying(1.0), device_mesh=None)
    module = layer(0.0)
    load(tmp_path, module, device_mesh=None)
    assert module.weight.eq(1.0).all()
    with pytest.raises(CheckpointError, match=f"{COPY} weight"):
        load(tmp_path, copying(0.0), device_mesh=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_views_and_tensors_beside_the_parameters_are_filled(tmp_path: Path, dtype: torch.dtype) -> None:
    save(tmp_path / "views", 1, viewing(1.0).to(dtype), device_mesh=None)
    module = viewing(0.0).to(dtype)
    load(tmp_path / "views", module, device_mesh=None)
    assert all(module.get_parameter("weight").eq(1.0).flatten())
    remembering = Remembering()
    remembering.beside.fill_(2.0)
    save(tmp_path / "beside", 1, remembering, device_mesh=None)
    fresh = Remembering()
    load(tmp_path / "beside", fresh, device_mesh=None)
    assert fresh.beside.eq(2.0).all()


def fsdp1(kind: StateDictType, **options: Any) -> nn.Module:
    wrapped = FullyShardedDataParallel(layer(0.0), device_id=torch.device("cpu"), **options)
    FullyShardedDataParallel.set_state_dict_type(wrapped, kind)
    return wrapped


WRAPS: dict[str, Callable[[], nn.Module]] = {
    "one flat parameter": lambda: fsdp1(StateDictType.FULL_STATE_DICT),
    "original parameters": lambda: fsdp1(StateDictType.FULL_STATE_DICT, use_orig_params=True),
}


def said(rank: int, path: Path) -> list[str]:
    found = []
    for wrap in WRAPS.values():
        with pytest.raises(CheckpointError) as caught:
            load(path, wrap(), device_mesh=None)
        found.append(str(caught.value))
    return found


def test_nothing_is_loaded_into_fsdp1_without_a_word(tmp_path: Path) -> None:
    save(tmp_path, 1, layer(1.0), device_mesh=None)
    for row in on_ranks(2, said, tmp_path, timeout_s=60.0):
        assert all(COPY in words for words in row), row
