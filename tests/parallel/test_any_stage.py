"""Anybody's module is a stage: equal to one process, whatever crosses its boundaries."""

from typing import Any

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    find_ties,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
)
from tests.equality import Trained, adamw, assert_same_training, snapshot_gradients, snapshot_parameters
from tests.parallel.foreign import Chain, models, trained

N_MICROBATCHES = 4
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")


def stages_on_rank(name: str, schedule: str, pp: int, mesh: Any) -> tuple[list[Chain], Any]:
    foreign = models()[name]
    model = foreign.model()
    indices = get_stage_indices(schedule, get_pp_rank(mesh), pp)
    n_stages = pp * len(indices)
    modules = [model.cut(n_stages)[i] for i in indices]
    stages = [
        build_pipeline_stage(
            module, mesh, "cpu", stage=i, n_stages=n_stages, inputs=foreign.example(N_MICROBATCHES) if i == 0 else None
        )
        for i, module in zip(indices, modules, strict=True)
    ]
    return modules, build_pipeline_schedule(stages, N_MICROBATCHES, foreign.loss, schedule, tied=find_ties(model))


def train_on_rank(rank: int, pp: int) -> dict[tuple[str, str], Any]:
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    found = {}
    for name, foreign in models().items():
        for schedule in SCHEDULES:
            modules, pipeline = stages_on_rank(name, schedule, pp, mesh)
            optimizer, losses, gradients = adamw(modules), [], {}
            for step in range(3):
                optimizer.zero_grad()
                losses.append(pipeline.step(*foreign.inputs, target=foreign.target, **foreign.kwargs).item())
                if step == 0:
                    gradients = snapshot_gradients(map(trained, modules))
                    norm = clip_grad_norm_(pipeline.stages, 1e9, device_mesh=mesh).item()
                optimizer.step()
            evaluated = pipeline.evaluate(*foreign.inputs, on="all", **foreign.kwargs)
            found[name, schedule] = Trained(losses, gradients, snapshot_parameters(modules)), norm, evaluated
    return found


@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_any_model_equals_one_process(pp: int, subtests: pytest.Subtests) -> None:
    ranks = on_ranks(pp, train_on_rank, pp)
    for name, foreign in models().items():
        reference, model = foreign.train(), foreign.model()
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in foreign.train(1).gradients.values()])).item()
        model.load_state_dict(reference.parameters, strict=False)
        expected = model(*foreign.inputs, **foreign.kwargs)
        for schedule in SCHEDULES:
            with subtests.test(model=name, schedule=schedule):
                assert_same_training([rank[name, schedule][0] for rank in ranks], reference, tied=find_ties(model))
                for rank in ranks:
                    _, found, evaluated = rank[name, schedule]
                    assert found == pytest.approx(norm, rel=1e-12)
                    logits, whole = (o["logits"] if isinstance(o, dict) else o for o in (evaluated, expected))
                    torch.testing.assert_close(logits, whole, rtol=1e-9, atol=1e-9)
