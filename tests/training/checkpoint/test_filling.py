"""A module whose state_dict makes copies would stay as it is: it is refused instead of being loaded in vain."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

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


@pytest.mark.parametrize(
    "view", [Tensor.detach, lambda tensor: nn.Parameter(tensor.detach())], ids=["tensor", "parameter"]
)
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_views_of_every_class_are_filled(tmp_path: Path, view: Callable[[Tensor], Tensor], shard: bool) -> None:
    save(tmp_path, 1, layer(1.0), device_mesh=None)
    on_ranks(1, view_is_filled, tmp_path, view, shard, timeout_s=60.0)


def view_is_filled(rank: int, path: Path, view: Callable[[Tensor], Tensor], shard: bool) -> None:
    module = layer(0.0)
    if shard:
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))

    def look(_: nn.Module, state: dict[str, Tensor], *__: object) -> None:
        state |= {name: view(tensor) for name, tensor in state.items()}

    module.register_state_dict_post_hook(look)
    load(path, module, device_mesh=None)
    weight: Any = module.weight
    assert (weight.full_tensor() if shard else weight).eq(1.0).all()


def test_nothing_is_loaded_into_a_module_without_memory(tmp_path: Path) -> None:
    save(tmp_path, 1, layer(1.0), device_mesh=None)
    module = layer(0.0).to("meta")
    with pytest.raises(CheckpointError, match="weight is on the meta device"):
        load(tmp_path, module, device_mesh=None)
    load(tmp_path, module.to_empty(device="cpu"), device_mesh=None)
    assert module.weight.eq(1.0).all()


class Counting(nn.Linear):
    """Counts how often its state is asked for, which may gather or copy all of it."""

    asked = 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.asked += 1
        return super().state_dict(*args, **kwargs)


def test_the_state_of_a_module_that_gives_its_own_tensors_is_asked_for_once(tmp_path: Path) -> None:
    module = Counting(4, 4)
    save(tmp_path, 1, module, device_mesh=None)
    module.asked = 0
    load(tmp_path, module, device_mesh=None)
    assert module.asked == 1


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


def said_beside_others(rank: int, path: Path) -> list[str]:
    """FSDP1's state_dict is a collective; what rank 1 has beside it is refused there alone."""
    found = []
    for other in (layer(0.0), nn.Sequential(layer(0.0))):
        with pytest.raises(CheckpointError) as caught:
            load(path, [fsdp1(StateDictType.FULL_STATE_DICT), *([other] if rank == 1 else [])], device_mesh=None)
        found.append(str(caught.value))
    return found


def test_what_one_rank_refuses_does_not_keep_the_others_in_a_collective_of_fsdp1(tmp_path: Path) -> None:
    save(tmp_path, 1, layer(1.0), device_mesh=None)
    first, second = on_ranks(2, said_beside_others, tmp_path, timeout_s=30.0)
    assert first == second
    assert "two modules of this rank hold weight" in first[0]
    assert COPY in first[1]
