"""Modules that are not this package's: one norm for the whole model, or a refusal on every rank."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    auto_split,
    clip_grad_norm_,
    get_dp_mesh,
    init_distributed,
)
from tests.equality import full

WIDTH, WORDS, N_STAGES = 4, 6, 4
TIED = [{0: "embed.weight", 3: "head.weight"}]
NORM_TYPES = (2.0, 1.0, math.inf)


class Stage(nn.Module):
    """A holder of modules that no test runs."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self) -> None: ...


def build_model() -> nn.ModuleList:
    """Return four stages of one model, whose output matrix is the embedding's."""
    torch.manual_seed(0)
    ends = {
        0: {"embed": nn.Embedding(WORDS, WIDTH)},
        3: {"head": nn.Linear(WIDTH, WORDS, bias=False)},
    }
    ends[3]["head"].weight = ends[0]["embed"].weight
    return nn.ModuleList(
        [Stage(body=nn.Linear(WIDTH, WIDTH), **ends.get(i, {})) for i in range(N_STAGES)]
    ).double()


def with_gradients(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def stages_here(
    indices: Sequence[int], mesh: DeviceMesh | None, sharded: bool
) -> dict[int, nn.Module]:
    """Return this rank's stages with the whole model's gradients.

    No stage shares a tensor with another.
    """
    model = with_gradients(build_model())
    here: dict[int, nn.Module] = {}
    for index in indices:
        source, stage = model[index], build_model()[index]
        if sharded and mesh is not None:
            fully_shard(stage, mesh=get_dp_mesh(mesh))
        for p, original in zip(stage.parameters(), source.parameters(), strict=True):
            p.grad = original.grad.clone()
            if sharded:
                whole = torch.distributed.tensor.distribute_tensor(
                    p.grad, p.device_mesh, p.placements
                )
                p.grad = whole
        here[index] = stage
    return here


def norms_on_rank(
    rank: int, layout: DistributedConfig, placement: Sequence[Sequence[int]]
) -> list[Any]:
    """Return norms of each kind, and the clipped gradients of the last."""
    mesh = init_distributed(layout)
    pp_rank = rank * len(placement) // torch.distributed.get_world_size()
    found: list[Any] = []
    for norm_type in NORM_TYPES:
        here = stages_here(placement[pp_rank], mesh, sharded=layout.dp_shard > 1)
        found.append(
            clip_grad_norm_(here, 0.1, device_mesh=mesh, tied=TIED, norm_type=norm_type).item()
        )
    return [
        *found,
        {f"{i}.{name}": full(p.grad) for i, m in here.items() for name, p in m.named_parameters()},
    ]


LAYOUTS = {
    "a stage a rank": (DistributedConfig(pp=4), [[0], [1], [2], [3]]),
    "both ends on one rank": (DistributedConfig(pp=2), [[0, 3], [1, 2]]),
    "sharded stages": (DistributedConfig(pp=2, dp_shard=2), [[0, 1], [2, 3]]),
    "one process": (DistributedConfig(), [[0, 1, 2, 3]]),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_foreign_models_norm_is_that_of_one_process_and_counts_a_tied_weight_once(
    name: str,
) -> None:
    layout, placement = LAYOUTS[name]
    expected = []
    for norm_type in NORM_TYPES:
        model = with_gradients(build_model())
        expected.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type).item())
    gradients = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    for *norms, clipped in on_ranks(
        layout.pp * max(1, layout.dp_shard), norms_on_rank, layout, placement
    ):
        assert norms == pytest.approx(expected, rel=1e-12)
        for name, gradient in clipped.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-15)


def test_one_parameter_under_two_names_counts_once_without_being_named() -> None:
    model = with_gradients(build_model())
    expected = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    assert clip_grad_norm_(model, math.inf).item() == pytest.approx(expected, rel=1e-12)
    assert clip_grad_norm_(list(model), math.inf).item() == pytest.approx(expected, rel=1e-12)
    assert clip_grad_norm_(dict(enumerate(model)), math.inf, tied=TIED).item() == pytest.approx(
        expected, rel=1e-12
    )


def norms_of_a_cut_model(rank: int, form: Callable[[int, nn.Module], Any]) -> float:
    """Return the norm of a stage of auto_split, which knows its number and its ties."""
    mesh = init_distributed(DistributedConfig(pp=2))
    model = with_gradients(cuttable())
    stage = auto_split(model, torch.zeros(2, 3, dtype=torch.int64), 2)[rank]
    for name, p in stage.named_parameters():
        replacement = nn.Parameter(p.detach().clone())
        replacement.grad = p.grad
        stage.get_submodule(name.rpartition(".")[0]).weight = replacement
    return clip_grad_norm_(form(rank, stage), math.inf, device_mesh=mesh).item()


def cuttable() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *body, nn.Linear(WIDTH, WORDS, bias=False)
    ).double()
    model[-1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "form", [lambda _, stage: stage, lambda rank, stage: {rank: stage}], ids=["alone", "by stage"]
)
def test_stages_of_a_cut_model_count_their_tied_weight_once(
    form: Callable[[int, nn.Module], Any],
) -> None:
    expected = nn.utils.clip_grad_norm_(with_gradients(cuttable()).parameters(), math.inf).item()
    assert on_ranks(2, norms_of_a_cut_model, form) == pytest.approx([expected] * 2, rel=1e-12)


def norm_of_a_sharded_model(rank: int) -> float:
    """Return the norm without a mesh.

    FSDP2's own mesh spans all ranks, which shows that no part is missing.
    """
    mesh = init_distributed(DistributedConfig(dp_shard=2))
    model = Stage(**{f"part{i}": stage for i, stage in enumerate(build_model())})
    whole = {name: p.grad for name, p in with_gradients(model).named_parameters()}
    fully_shard(model, mesh=mesh)
    for name, p in model.named_parameters():
        p.grad = torch.distributed.tensor.distribute_tensor(
            whole[name], p.device_mesh, p.placements
        )
    return clip_grad_norm_(model, math.inf).item()


def test_a_model_that_is_sharded_over_all_ranks_needs_no_mesh() -> None:
    expected = nn.utils.clip_grad_norm_(with_gradients(build_model()).parameters(), math.inf).item()
    assert on_ranks(2, norm_of_a_sharded_model) == pytest.approx([expected] * 2, rel=1e-12)


def refusals_on_rank(rank: int) -> dict[str, str]:
    """Return every rank's refusals of arguments that are wrong on one rank alone."""
    mesh = init_distributed(DistributedConfig(pp=2))
    assert mesh is not None
    here = stages_here([rank, rank + 2], mesh, sharded=False)
    lone = nn.Linear(WIDTH, WIDTH)
    said = {}

    def refused(what: str, call: Callable[[], Any]) -> None:
        with pytest.raises((TypeError, ValueError)) as refusal:
            call()
        said[what] = str(refusal.value)

    def clip(given: Any = here, tied: Any = (), device_mesh: DeviceMesh | None = mesh) -> Any:
        return clip_grad_norm_(given, 1.0, device_mesh=device_mesh, tied=tied)

    wrapped = [
        PipelineStage(m, i, N_STAGES, torch.device("cpu"), group=mesh.get_group())
        for i, m in here.items()
    ]
    refused("no mesh", lambda: clip(lone, device_mesh=None))
    refused("torch's stages, one left out", lambda: clip(wrapped[: 2 - rank]))
    refused("a stage twice", lambda: clip({0: lone}))
    refused("a stage's number as text", lambda: clip({str(rank): lone}))
    refused("numbers unknown", lambda: clip(list(here.values()), TIED))
    refused("different ties", lambda: clip(here, TIED if rank else []))
    refused("no such parameter", lambda: clip(here, [{0: "embed.weight", 3: "tail.weight"}]))
    refused("no such stage", lambda: clip(here, [{0: "embed.weight", 7: "head.weight"}]))
    refused("no tie", lambda: clip(here, [{0: "embed.weight"}]))
    refused("forgotten", lambda: clip(here, None))
    refused("forgotten, by rank", lambda: clip(list(here.values()), [] if rank else None))
    for p in here[3].head.parameters() if rank else ():
        p.grad = p.grad / 2
    refused("not summed", lambda: clip(here, TIED))
    for p in here[3].head.parameters() if rank else ():
        p.grad = torch.full_like(p, math.nan)
    refused("not a number at one end", lambda: clip(here, TIED))
    alike = DistributedConfig(dp_replicate=2, dp_shard=1)
    lone.weight.grad = torch.full((WIDTH, WIDTH), 1.0 + rank)
    refused("not averaged", lambda: clip(lone, device_mesh=init_distributed(alike)))
    return said


def test_what_is_not_one_whole_model_is_refused_on_every_rank() -> None:
    first, second = on_ranks(2, refusals_on_rank)
    assert first == second
    assert "device_mesh is None in a process group of 2 ranks" in first["no mesh"]
    assert "given stages [0, 1, 2] of 4" in first["torch's stages, one left out"]
    assert "stage 0 was passed twice" in first["a stage twice"]
    assert "stage '0' must be a whole number" in first["a stage's number as text"]
    assert "pass {stage: module" in first["numbers unknown"]
    assert "rank 1 was given tied=[{0: 'embed.weight'" in first["different ties"]
    assert "rank 1: tied" in first["no such parameter"]
    assert (
        "stage 3 has no parameter 'tail.weight': it has body.weight" in first["no such parameter"]
    )
    assert "tied names stage 7, but the stages are 0 to 3" in first["no such stage"]
    assert "at least two of them" in first["no tie"]
    for case in ("forgotten", "forgotten, by rank"):
        assert "'embed.weight' of stage 0 and 'head.weight' of stage 3 have the same" in first[case]
        assert first[case].endswith("if not, tied=[]")
    assert "sum them over its stages before clipping" in first["not summed"]
    assert "nan on stage 3: sum them" in first["not a number at one end"]
    assert "rank 0 finds a gradient of norm 4, rank 1 one of 8" in first["not averaged"]


def flattened_on_rank(rank: int) -> list[str]:
    """Return the refusals of models in pieces of FSDP1.

    Their norms are equal, so that the pieces look like copies.
    """
    mesh, said = init_distributed(DistributedConfig(dp_shard=2)), []
    for keeps_parameters in (False, True):
        model = FullyShardedDataParallel(
            nn.Linear(WIDTH, WIDTH, bias=False),
            use_orig_params=keeps_parameters,
            device_id=torch.device("cpu"),
        )
        model(torch.ones(1, WIDTH)).sum().backward()
        for given in (model, model.module, nn.Sequential(model)):
            with pytest.raises(
                ValueError, match="in pieces of FullyShardedDataParallel"
            ) as refusal:
                clip_grad_norm_(given, math.inf, device_mesh=mesh)
            said.append(str(refusal.value))
    return said


def test_pieces_of_fsdp1_are_refused_as_they_may_look_like_copies() -> None:
    first, second = on_ranks(2, flattened_on_rank)
    assert first == second
    assert first[0].startswith(
        "'_fsdp_wrapped_module._flat_param' of FullyShardedDataParallel is in pieces"
    )
    assert first[-1].startswith("'0._fsdp_wrapped_module.weight' of Sequential is in pieces")
