"""Hooks on complete gradients are called once a step, so that an optimizer may step there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    init_distributed,
)
from course_pp.parallel.mesh import limit_waiting
from course_pp.runtime import Pipeline, StepFailed
from course_pp.schedule import Action, Schedule, build
from course_pp.step.hooks import called_once
from tests.processes import no_process_left

WIDTH, M, STEPS, RATE = 4, 4, 2, 0.1
NAMES = ("1f1b", "gpipe", "zb_h1")
TIES: list[dict[int, str]] = [{0: "0.bias", 1: "2.bias"}]

Stepper = Callable[[nn.Module], None]


def stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()
        for _ in range(2)
    ]


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(2 * M, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x.flip(0)


def by_hand(module: nn.Module) -> None:
    """Change a weight past autograd's check of changes in place, as memory savers do."""

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(RATE * parameter.grad)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def adam(module: nn.Module) -> None:
    for parameter in module.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=RATE)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


STEPPERS: dict[str, Stepper] = {"by hand": by_hand, "AdamW": adam}


def runtime(rank: int, name: str, module: nn.Module, tied: Any = None) -> Callable[[], float]:
    pipeline = Pipeline(
        build(name, dist.get_world_size(), M), module, F.mse_loss, tied=tied, timeout_s=20
    )
    x, y = batch()
    return lambda: pipeline.step(x, target=y).item()


def parallel(rank: int, name: str, module: nn.Module, tied: Any = None) -> Callable[[], float]:
    mesh = init_distributed(DistributedConfig(pp=dist.get_world_size()))
    x, y = batch()
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=x[: len(x) // M])
    pipeline = build_pipeline_schedule(stage, M, F.mse_loss, name, tied=tied)
    return lambda: pipeline.step(x, target=y).item()


ENGINES = {"runtime": runtime, "parallel": parallel}


def parameters(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def trained(
    rank: int, engine: str, tied: Any
) -> dict[tuple[str, str], tuple[list[float], list[Tensor]]]:
    """The losses and what the parameters of ``rank`` are at last, by schedule and stepper."""
    found = {}
    for name in NAMES:
        for which, add_hooks in STEPPERS.items():
            module = stages()[rank]
            if tied:
                nn.init.zeros_(module.get_parameter(tied[0][rank]))
            step = ENGINES[engine](rank, name, module, tied)
            add_hooks(module)
            losses = [step() for _ in range(STEPS)]
            assert all(parameter.grad is None for parameter in module.parameters())
            found[name, which] = losses, parameters(module)
    return found


def trained_here(add_hooks: Stepper, tied: Any) -> tuple[list[float], list[list[Tensor]]]:
    modules = stages()
    if tied:
        shared = modules[0].get_parameter(tied[0][0])
        nn.init.zeros_(shared)
        modules[1].get_submodule("2").bias = shared  # type: ignore[assignment]
    whole = nn.Sequential(*modules)
    losses = []
    add_hooks(whole)
    for _ in range(STEPS):
        x, y = batch()
        loss = F.mse_loss(whole(x), y)
        loss.backward()
        losses.append(loss.item())
    return losses, [parameters(module) for module in modules]


@pytest.mark.parametrize("tied", [[], TIES], ids=["nothing tied", "tied"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_that_steps_in_a_hook_steps_once_as_in_one_process(
    engine: str, tied: Any
) -> None:
    with no_process_left():
        ranks = on_ranks(2, trained, engine, tied, timeout_s=60.0)
    for (name, which), _ in ranks[0].items():
        losses, expected = trained_here(STEPPERS[which], tied)
        for rank, found in enumerate(ranks):
            assert found[name, which][0] == pytest.approx(losses, rel=1e-12), (
                f"{name}, {which}, rank {rank}"
            )
            torch.testing.assert_close(
                found[name, which][1], expected[rank], rtol=1e-12, atol=1e-14
            )


def refused(rank: int) -> list[str]:
    """Return each engine's refusal of the optimizers that torch hides in rank 1's graph."""
    said = []
    for engine in ENGINES.values():
        module = stages()[rank]
        step = engine(rank, "1f1b", module)
        if rank == 1:
            _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": RATE})
        with pytest.raises((ValueError, StepFailed)) as caught:
            step()
        said.append(str(caught.value))
    return said


def test_optimizers_that_torch_lets_step_in_each_backward_are_refused_by_name_on_every_rank() -> (
    None
):
    for said in on_ranks(2, refused, timeout_s=60.0):
        for words in said:
            assert "'0.weight' of stage 1 has an optimizer that steps in the backward" in words


def counted(rank: int, engine: str) -> dict[str, int]:
    """Return how often hooks are called in a step, by kind."""
    module = stages()[rank]
    calls = dict.fromkeys(("gradient", "complete gradient", "node"), 0)
    assert isinstance(module, nn.Sequential)
    step = ENGINES[engine](rank, "zb_h1", module)
    weight = module[0].weight

    def note(kind: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[kind] += 1

        return hook

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    weight.register_hook(note("gradient"))
    weight.register_post_accumulate_grad_hook(note("complete gradient"))
    node.register_hook(note("node"))
    step()
    return calls


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_on_gradients_and_on_their_nodes_are_called_for_each_microbatch(engine: str) -> None:
    expected = {"gradient": M, "complete gradient": 1, "node": M}
    assert on_ranks(2, counted, engine, timeout_s=60.0) == [expected, expected]


def sharded(rank: int, engine: str) -> list[Tensor]:
    """Return the parameters after steps in hooks of FSDP2's shards, reduced once a step."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp_shard"))
    module = fully_shard(stages()[rank], mesh=mesh["dp_shard"])
    step = ENGINES[engine](rank, "zb_h1", module)
    by_hand(module)
    for _ in range(STEPS):
        step()
    return [
        parameter.full_tensor()
        for parameter in parameters(module)
        if isinstance(parameter, DTensor)
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_that_steps_in_a_hook_of_a_shard_steps_once(engine: str) -> None:
    _, expected = trained_here(by_hand, [])
    for found, own in zip(on_ranks(2, sharded, engine, timeout_s=60.0), expected, strict=True):
        torch.testing.assert_close(found, own, rtol=1e-12, atol=1e-14)


def backward(module: nn.Module) -> None:
    module(torch.ones(1, WIDTH)).sum().backward()


def failing_at_last(rank: int, engine: str) -> int:
    """Return how often hooks are called if rank 0 fails in its last backward, after the others."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double()
    heard = []
    called = []
    step = ENGINES[engine](rank, "1f1b", module)
    bias = module.get_parameter("0.bias")

    def fail_at_last(gradient: Tensor) -> None:
        heard.append(gradient)
        if len(heard) == M:
            raise KeyError("my bug")

    if rank == 0:
        bias.register_hook(fail_at_last)
    bias.register_post_accumulate_grad_hook(called.append)
    dist.barrier()
    limit_waiting(None, 3.0)  # if the machine is slow, they fail earlier and call as little
    with pytest.raises(RuntimeError):  # on every rank
        step()
    return len(called)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_rank_calls_hooks_if_another_fails_in_its_last_backward(engine: str) -> None:
    assert on_ranks(4, failing_at_last, engine, timeout_s=60.0) == [0] * 4


def test_hooks_of_parameters_that_got_no_gradient_are_not_called() -> None:
    used = nn.Linear(WIDTH, 1)
    unused = nn.Linear(WIDTH, 1)
    called = []
    for module in (used, unused):
        module.weight.register_post_accumulate_grad_hook(called.append)
        module.weight.grad = torch.zeros_like(module.weight)
    with called_once([used, None, unused]):
        backward(used)
        backward(used)
        assert not called
    assert [parameter is used.weight for parameter in called] == [True]


def test_hooks_of_a_body_that_raises_are_not_called_and_stay() -> None:
    module = nn.Linear(WIDTH, 1)
    called = []
    module.weight.register_post_accumulate_grad_hook(called.append)

    def fail() -> None:
        with called_once([module]):
            backward(module)
            raise KeyError("my bug")

    with pytest.raises(KeyError):
        fail()
    assert not called
    backward(module)
    assert len(called) == 1


def test_hooks_are_called_in_order_and_may_remove_themselves() -> None:
    module = nn.Linear(WIDTH, 1)
    called = []

    def first(_: Tensor) -> None:
        called.append("first")
        handle.remove()

    handle = module.weight.register_post_accumulate_grad_hook(first)
    module.weight.register_post_accumulate_grad_hook(lambda _: called.append("second"))
    for _ in range(2):
        with called_once([module]):
            backward(module)
    assert called == ["first", "second", "second"]


def test_hooks_that_are_removed_inside_are_not_called_and_stay_away() -> None:
    module = nn.Linear(WIDTH, 1)
    called = []
    first, handle, last = (
        module.weight.register_post_accumulate_grad_hook(
            lambda _, which=which: called.append(which)
        )
        for which in ("first", "removed", "last")
    )
    with called_once([module]):
        handle.remove()
        backward(module)
    backward(module)
    assert called == ["first", "last"] * 2
    first.remove()
    last.remove()
    backward(module)
    assert len(called) == 4


def test_a_hook_may_remove_that_of_another_parameter() -> None:
    """As in a backward, where it may have heard enough."""
    module = nn.Linear(WIDTH, 1)
    called = []

    def remove_others(parameter: Tensor) -> None:
        called.append(parameter)
        for other, handle in handles.items():
            if other is not parameter:
                handle.remove()

    handles = {p: p.register_post_accumulate_grad_hook(remove_others) for p in module.parameters()}
    with called_once([module]):
        backward(module)
    assert len(called) == 1
    backward(module)
    assert len(called) == 2


def test_one_inside_another_calls_hooks_at_the_end_of_the_outer_one() -> None:
    module = nn.Linear(WIDTH, 1)
    called = []
    module.weight.register_post_accumulate_grad_hook(called.append)
    with called_once([module]) as reached:
        for _ in range(2):
            with called_once([module]):
                backward(module)
        assert not called
        assert [*reached] == [module.weight]
    assert len(called) == 1
    with called_once([module]) as reached:
        backward(module)
        reached.clear()
    assert len(called) == 1


def detaching(rank: int, engine: str) -> tuple[int, Tensor]:
    """Return the calls of a tied weight's hook, if rank 0 makes no gradient, and the weight."""
    module = stages()[rank]
    called = []
    nn.init.zeros_(module.get_parameter(TIES[0][rank]))
    step = ENGINES[engine](rank, "1f1b", module, TIES)
    bias = module.get_parameter(TIES[0][rank])
    first = module.get_submodule("0")

    def descend(parameter: Tensor) -> None:
        called.append(parameter)
        parameter.sub_(parameter.grad)

    bias.register_post_accumulate_grad_hook(descend)
    if rank == 0:
        first.forward = lambda x: F.linear(x, first.weight, first.bias.detach())
    step()
    return len(called), bias.detach().clone()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_hook_of_a_tied_weight_is_called_where_its_gradient_comes_from_other_ranks_alone(
    engine: str,
) -> None:
    (one, here), (other, there) = on_ranks(2, detaching, engine, timeout_s=60.0)
    assert one == other == 1
    assert here.any()
    torch.testing.assert_close(here, there, rtol=0.0, atol=0.0)


def replicated(rank: int) -> int:
    """Return the calls of a hook on two replicas of a stage; one has no microbatch."""
    module = stages()[0]
    called = []
    schedule = Schedule("two replicas", ((0, 1),), ((Action(0, "F", 0), Action(0, "B", 0)), ()))
    pipeline = Pipeline(schedule, module, F.mse_loss, timeout_s=20)
    module.get_parameter("0.bias").register_post_accumulate_grad_hook(called.append)
    x, y = batch()
    pipeline.step(x, target=y)
    return len(called)


def test_hooks_of_a_replica_without_a_microbatch_are_called_too() -> None:
    assert on_ranks(2, replicated, timeout_s=60.0) == [1, 1]
