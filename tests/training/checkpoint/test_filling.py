"""Loading a module goes through its own load_state_dict, so its hooks see the state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from course_pp.launch import on_ranks
from course_pp.parallel import auto_split, weights_on_meta
from course_pp.training.checkpoint import CheckpointError, load, load_stage, save
from tests.equality import adamw


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


class Remembering(nn.Linear):
    """Keeps a tensor beside its parameters."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.beside = torch.zeros(2)

    def get_extra_state(self) -> Tensor:
        return self.beside

    def set_extra_state(self, state: Tensor) -> None:
        self.beside = state


def test_a_module_whose_state_dict_gives_copies_is_filled(tmp_path: Path) -> None:
    save(tmp_path, 1, copying(1.0), device_mesh=None)
    save_file(copying(1.0).state_dict(), tmp_path / "any.safetensors")
    for module in (layer(0.0), copying(0.0)):
        load(tmp_path, module, device_mesh=None)
        assert module.get_parameter("weight").eq(1.0).all()
        load_stage(stage := copying(0.0), tmp_path)
        assert stage.get_parameter("weight").eq(1.0).all()
    with pytest.raises(
        CheckpointError,
        match="weight is on the meta device",
    ):
        load_stage(copying(0.0).to("meta"), tmp_path)


class Derived(nn.Linear):
    """Keeps the sum of its weight, and computes it anew when a weight is loaded.

    Subclasses say where.
    """

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("sum", torch.zeros(()), persistent=False)

    def derive(self, *_: object) -> None:
        weight = self.weight.detach()
        self.sum.copy_((weight.full_tensor() if isinstance(weight, DTensor) else weight).sum())


class InHook(Derived):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(Derived.derive)


class InOverride(Derived):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        taken = super().load_state_dict(*args, **kwargs)
        self.derive()
        return taken


class InPart(Derived):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.derive()


class OfTheWhole(nn.Sequential):
    """Its hook is a method of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.sum = torch.zeros(())
        self.register_load_state_dict_post_hook(self.derive)

    def derive(self, *_: object) -> None:
        self.sum = torch.stack([p.detach().sum() for p in self.parameters()]).sum()


def sums_after_loading(rank: int, path: Path) -> list[bool]:
    """Two stages a rank, sharded, with an optimizer."""
    mesh = init_device_mesh("cpu", (2,))
    stages = {index: nn.Sequential(kind()) for index, kind in enumerate((InHook, InPart))}
    stages[2] = InOverride()  # type: ignore[assignment]
    for stage in stages.values():
        fully_shard(stage, mesh=mesh)
    load(path, stages, adamw(stages.values()), device_mesh=None)
    derived = [
        part for stage in stages.values() for part in stage.modules() if isinstance(part, Derived)
    ]
    return [part.sum.eq(16.0 * (index + 1)).item() for index, part in enumerate(derived)]


def test_what_a_module_derives_from_its_weights_is_derived_from_those_that_are_loaded(
    tmp_path: Path,
) -> None:
    for kind in (InHook, InOverride, InPart):
        module = kind()
        nn.init.constant_(module.weight, 1.0)
        save(tmp_path / kind.__name__, 1, module, device_mesh=None)
        load(tmp_path / kind.__name__, fresh := kind(), device_mesh=None)
        assert fresh.sum == 16.0
        save_file(module.state_dict(), tmp_path / "any.safetensors")
        with weights_on_meta():
            fresh = kind()
        load_stage(fresh, tmp_path)
        assert fresh.sum == 16.0
    stages = auto_split(OfTheWhole(), torch.ones(1, 4), 2)
    save(tmp_path / "cut", 1, stages, device_mesh=None)
    load(tmp_path / "cut", stages, device_mesh=None)
    for stage in stages:
        assert torch.isclose(stage.sum, sum(p.sum() for p in stage.parameters()))
    stages = {0: nn.Sequential(layer(1.0)), 1: nn.Sequential(layer(2.0)), 2: layer(3.0)}
    optimizer = adamw(stages.values())
    save(tmp_path / "sharded", 1, stages, optimizer, device_mesh=None)
    assert on_ranks(2, sums_after_loading, tmp_path / "sharded", timeout_s=60.0) == [[True] * 3] * 2


class Replacing(nn.Linear):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(
            {k: v.clone() for k, v in state.items()}, strict, assign=True
        )


class Failing(nn.Linear):
    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(state)


class Asking(nn.Linear):
    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        state[f"{prefix}more"] = torch.zeros(1)


def said_by(rank: int, path: Path, kind: type[nn.Linear]) -> str:
    module = kind(4, 4) if rank else nn.Linear(4, 4)
    with pytest.raises(CheckpointError) as caught:
        load(path, {rank: module}, adamw([module]), device_mesh=None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            Replacing,
            "load_state_dict replaces stages.1.weight, which the optimizer trains: let it copy",
        ),
        (
            Failing,
            (
                "load_state_dict of Failing failed (TypeError: Failing.load_state_dict() got an"
                " unexpected"
            ),
        ),
        (Asking, "Asking has more in its state_dict, and its load_state_dict does not take it"),
    ],
)
def test_what_one_ranks_module_does_not_load_is_refused_on_every_rank(
    tmp_path: Path, kind: type[nn.Linear], said: str
) -> None:
    stages = {0: nn.Linear(4, 4), 1: kind(4, 4)}
    save(tmp_path, 1, stages, adamw(stages.values()), device_mesh=None)
    first, second = on_ranks(2, said_by, tmp_path, kind, timeout_s=60.0)
    assert first == second
    assert first.startswith(said)


def test_tensors_beside_the_parameters_are_filled(tmp_path: Path) -> None:
    remembering = Remembering()
    remembering.beside.fill_(2.0)
    save(tmp_path, 1, remembering, device_mesh=None)
    load(tmp_path, fresh := Remembering(), device_mesh=None)
    assert fresh.beside.eq(2.0).all()


def fsdp1(kind: StateDictType, **options: Any) -> nn.Module:
    wrapped = FullyShardedDataParallel(layer(0.0), device_id=torch.device("cpu"), **options)
    FullyShardedDataParallel.set_state_dict_type(wrapped, kind)
    return wrapped


def ones() -> nn.Linear:
    module = layer(1.0)
    nn.init.ones_(module.bias)
    return module


WRAPS: dict[str, Callable[[], nn.Module]] = {
    "one flat parameter": lambda: fsdp1(StateDictType.FULL_STATE_DICT),
    "original parameters": lambda: fsdp1(StateDictType.FULL_STATE_DICT, use_orig_params=True),
    "shards": lambda: fsdp1(StateDictType.SHARDED_STATE_DICT),
}


@pytest.mark.parametrize(
    "view",
    [Tensor.detach, lambda tensor: nn.Parameter(tensor.detach())],
    ids=["tensor", "parameter"],
)
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_views_of_every_class_are_filled(
    tmp_path: Path, view: Callable[[Tensor], Tensor], shard: bool
) -> None:
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


def filled_fsdp1(rank: int, path: Path) -> list[bool]:
    found = []
    for wrap in WRAPS.values():
        load(path, module := wrap(), device_mesh=None)
        with FullyShardedDataParallel.summon_full_params(module):
            found.append(all(parameter.eq(1.0).all() for parameter in module.parameters()))
    return found


def test_modules_of_fsdp1_are_filled(tmp_path: Path) -> None:
    save(tmp_path, 1, ones(), device_mesh=None)
    assert on_ranks(2, filled_fsdp1, tmp_path, timeout_s=60.0) == [[True] * len(WRAPS)] * 2


def said_beside_others(rank: int, path: Path) -> str:
    """FSDP1's state_dict is a collective; what rank 1 has beside it is refused there alone."""
    with pytest.raises(CheckpointError) as caught:
        load(
            path,
            [fsdp1(StateDictType.FULL_STATE_DICT), *([layer(0.0)] if rank == 1 else [])],
            device_mesh=None,
        )
    return str(caught.value)


def test_what_one_rank_refuses_does_not_keep_the_others_in_a_collective_of_fsdp1(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1, layer(1.0), device_mesh=None)
    first, second = on_ranks(2, said_beside_others, tmp_path, timeout_s=30.0)
    assert first == second
    assert "two modules of this rank hold weight" in first
