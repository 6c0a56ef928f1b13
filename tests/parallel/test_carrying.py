"""Skip connections under torch's schedules: carried along, and right."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    carry_along,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
)

WIDTH, ROWS, M = 4, 2, 4


class Part(nn.Module):
    def __init__(self, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.reads, self.writes = reads, writes

    def forward(self, hidden: Tensor, **read: Any) -> Any:
        if "mask" in read:
            hidden = hidden * read.pop("mask")
        for value in read.values():
            hidden = hidden + torch.sin(value["both"][0])
        hidden = torch.tanh(self.layer(hidden))
        values = {
            "mask": hidden.detach() > 0,
            "early": {"both": (hidden * 2,)},
            "late": {"both": (hidden * 3,)},
        }
        return (hidden, {name: values[name] for name in self.writes}) if self.writes else hidden


def parts(n: int) -> list[Part]:
    """Return stages with values for later ones.

    Two later stages read a mask and a value of the first. The last reads a value of the second.
    """
    torch.manual_seed(0)
    graph: list[Any] = [((), ())] * n
    graph[0], graph[1] = ((), ("mask", "early")), ((), ("late",))
    graph[-1], graph[-2] = (("mask", "late"), ()), (("early", "mask"), ())
    return [Part(*each) for each in graph]


def batch() -> tuple[Tensor, Tensor]:
    return (
        torch.linspace(-1, 1, 2 * M * ROWS * WIDTH, dtype=torch.float64)
        .view(2, M * ROWS, WIDTH)
        .unbind()
    )


def gradients(modules: dict[int, nn.Module]) -> dict[str, Tensor | None]:
    return {
        f"{stage}.{name}": p.grad
        for stage, module in modules.items()
        for name, p in module.named_parameters()
    }


def step(rank: int, name: str) -> tuple[float, dict[str, Any], Tensor]:
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    indices = get_stage_indices(name, get_pp_rank(mesh), 2)
    n = 2 * len(indices)
    whole = parts(n)
    modules = carry_along({i: whole[i] for i in indices}, mesh)
    example, (inputs, target) = (
        torch.empty(ROWS, WIDTH, dtype=torch.float64, device="meta"),
        batch(),
    )
    stages = [
        build_pipeline_stage(m, mesh, "cpu", stage=i, n_stages=n, inputs=example)
        for i, m in modules.items()
    ]
    pipeline = build_pipeline_schedule(stages, M, F.mse_loss, name)
    loss = pipeline.step(inputs, target=target).item()
    return loss, gradients(modules), pipeline.evaluate(inputs, on="all")


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v"])
def test_carried_values_train_as_in_one_process(name: str) -> None:
    whole, values = parts(4), {}
    hidden, target = batch()
    for part in whole:
        out = part(hidden, **{name: values[name] for name in part.reads})
        hidden, made = out if part.writes else (out, {})
        values |= made
    loss = F.mse_loss(hidden, target)
    loss.backward()
    expected = gradients(dict(enumerate(whole)))
    seen: set[str] = set()
    for found, grads, outputs in on_ranks(2, step, name, timeout_s=60):
        assert found == pytest.approx(loss.item(), rel=1e-12)
        torch.testing.assert_close(outputs, hidden, rtol=1e-12, atol=1e-12)
        for key, grad in grads.items():
            torch.testing.assert_close(grad, expected[key], rtol=1e-12, atol=1e-12)
        seen |= grads.keys()
    assert seen == expected.keys()


def refused(rank: int) -> list[str]:
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    said = []
    for modules in ({rank: Part((), ()) if rank == 0 else Part(("nothing",))}, {0: Part()}):
        with pytest.raises(ValueError, match=r"no stage writes|both hold") as caught:
            carry_along(modules, mesh)
        said.append(str(caught.value))
    return said


def test_a_value_that_nobody_writes_and_a_stage_of_two_ranks_are_refused_on_every_rank() -> None:
    for nobody, both in on_ranks(2, refused, timeout_s=60):
        assert nobody.startswith(
            "stage 1 reads 'nothing', which no stage writes (written: none): give the stage"
        )
        assert both == "ranks 0 and 1 both hold stage 0: give it to one of them"


def test_what_cannot_carry_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"stages \[0, 2\] are held: number them from 0 without gaps"
    ):
        carry_along({0: Part(), 2: Part()}, None)
    whole = dict(enumerate(parts(4)))
    carry_along(whole, None)
    with pytest.raises(ValueError, match="stage 0 carries already: call carry_along once"):
        carry_along(whole, None)
    whole = dict(enumerate(parts(4)))
    whole[2].forward = whole[2].forward
    with pytest.raises(ValueError, match="stage 2 is a Part whose forward was replaced"):
        carry_along(whole, None)
