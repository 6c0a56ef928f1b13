"""What notebook 11 leans on: what was drawn or a worked order, torch's executor, messages without buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from course_pp.exercises.own_schedule_clinic import Program, programs_of
from course_pp.launch import RanksHung, on_ranks
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_stage_indices,
    init_distributed,
)
from course_pp.schedule import Schedule

if TYPE_CHECKING:
    from course_pp.show import Board  # which ranks, who import this module, have no use for

__all__ = ["drawn", "run_in_torch", "run_unbuffered"]

_CONFIG = ModelConfig(dim=32, n_layers=4, n_heads=4, vocab_size=61, max_seq_len=16)
_ROWS, _SEQ_LEN = 2, 8


def drawn(board: Board) -> Schedule:
    """Return what is on ``board``; if that is not complete, its level's order, with a line that says so."""
    if board.is_complete:
        return board.schedule
    assert board.level is not None
    reference = board.level.reference
    print(f"Level {board.level.number} is not complete: this is its worked order, {reference.name}.")
    return reference


def run_in_torch(schedule: Schedule) -> float:
    """Run a step by torch's executor; return the largest difference of loss or gradients from one process."""
    return max(on_ranks(schedule.n_ranks, _stepped, schedule))


def _stepped(rank: int, schedule: Schedule) -> float:
    m = schedule.n_microbatches
    mesh = init_distributed(DistributedConfig(pp=schedule.n_ranks), seed=0)
    seeded = torch.Generator().manual_seed(1)
    tokens = torch.randint(_CONFIG.vocab_size, (_ROWS * m, _SEQ_LEN + 1), generator=seeded)
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    loss_fn = CrossEntropy()

    torch.manual_seed(0)
    whole = build_stage_module(_CONFIG, 0, 1).double()
    loss = loss_fn(whole(inputs), target)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

    indices = get_stage_indices(schedule, rank, schedule.n_ranks)
    modules = [build_stage_module(_CONFIG, index, schedule.n_stages).double() for index in indices]
    for module in modules:
        module.load_state_dict({name: whole.state_dict()[name] for name in module.state_dict()})
    stages = [
        build_pipeline_stage(module, mesh, "cpu", _ROWS, _SEQ_LEN, param_dtype=torch.float64) for module in modules
    ]
    pipeline = build_pipeline_schedule(stages, m, loss_fn, schedule)
    differences = [abs(pipeline.step(inputs, target=target).item() - loss.item())]
    for module in modules:
        for name, parameter in module.named_parameters():
            got, wanted = parameter.grad, expected[name]
            assert got is not None
            assert wanted is not None
            differences.append((got - wanted).abs().max().item())
    return max(differences)


def run_unbuffered(order: Schedule | Sequence[Program], timeout_s: float = 2.0) -> bool:
    """Send and receive what ``order`` says, each send waiting for its receiver; say who hangs. True if nobody does."""
    programs = programs_of(order) if isinstance(order, Schedule) else list(order)
    try:
        on_ranks(len(programs), _exchange, programs, timeout_s=timeout_s)
    except RanksHung as hung:
        for wait in hung.waits:
            whom = f" with rank {wait.peers[0]}" if wait.peers else ""
            print(f"rank {wait.rank}: {wait.operation}{whom}")
        return False
    print("Every message arrived.")
    return True


def _exchange(rank: int, programs: Sequence[Program]) -> None:
    names = sorted({event[2] for program in programs for event in program if event[0] == "send"})
    for event in programs[rank]:
        if event[0] == "send":
            dist.send(torch.ones(1), event[1], tag=names.index(event[2]))
        elif event[0] == "recv":
            dist.recv(torch.empty(1), event[1], tag=names.index(event[2]))
