"""Activations on paper are activations on ranks: what each keeps for backward, at its fullest."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch.utils import checkpoint

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
)
from course_pp.plan import Layout
from course_pp.plan.memory import peaks_in_flight
from course_pp.plan.run import Work
from course_pp.runtime.memory import Meter, _storages
from course_pp.schedule import Costs, simulate

SEQ_LEN = 32
BATCH = 2


@dataclass
class Fullest:
    """The most bytes kept at once: by forwards, and by recomputing one module beside them."""

    meter: Meter
    recomputing: int = 0

    def look(self, frame: checkpoint._CheckpointFrame, group: int) -> None:
        kept = self.meter.kept["activation"]
        held = {storage for kind, storage in self.meter._holders if kind == "activation"}
        made = {id(s): s for t in frame.recomputed[group].values() for s in _storages(t)}
        more = sum(
            s.nbytes() for i, s in made.items() if i not in held and s not in self.meter._ignored
        )
        self.recomputing = max(self.recomputing, kept + more)

    @property
    def n_bytes(self) -> int:
        return max(self.recomputing, self.meter.log().seen_from(0, 0).peaks["activation"])


@contextmanager
def watching(meter: Meter) -> Iterator[Fullest]:
    """Count the tensors saved in the body, in forward and again in a recomputing backward."""
    fullest, frames = Fullest(meter), checkpoint._CheckpointFrame
    own = frames.check_recomputed_tensors_match

    def look(frame: checkpoint._CheckpointFrame, group: int) -> None:
        fullest.look(frame, group)
        own(frame, group)

    frames.check_recomputed_tensors_match = look
    try:
        with meter.saving(0, 0):
            yield fullest
    finally:
        frames.check_recomputed_tensors_match = own


def hold_outputs(stage, meter: Meter) -> None:
    """Count the output of a stage, which torch's pipeline keeps until its backward."""
    forward = stage.forward_one_chunk
    backward = stage.backward_one_chunk
    held = {}

    def forward_one_chunk(microbatch, *args, **kwargs):
        output = forward(microbatch, *args, **kwargs)
        held[microbatch] = meter.hold(output if isinstance(output, torch.Tensor) else output[0])
        return output

    def backward_one_chunk(microbatch, *args, **kwargs):
        backward(microbatch, *args, **kwargs)
        held.pop(microbatch).release()

    stage.forward_one_chunk = forward_one_chunk
    stage.backward_one_chunk = backward_one_chunk


def fullest_of_step(rank: int, config: ModelConfig, layout: Layout, n_microbatches: int) -> int:
    """The most bytes of activations on this rank in a step of the pipeline."""
    mesh = init_distributed(DistributedConfig(layout.pp, 1, 1, layout.tp), seed=0)
    dtype = getattr(torch, layout.precision)
    indices = get_stage_indices(layout.schedule, get_pp_rank(mesh), layout.pp)
    modules = [build_stage_module(config, i, layout.n_stages).to(dtype) for i in indices]
    for module in modules:
        apply_tensor_parallel(module, mesh)
        apply_ac(module, layout.ac)
    stages = [
        build_pipeline_stage(module, mesh, "cpu", BATCH, SEQ_LEN, dtype) for module in modules
    ]
    given = stages if len(stages) > 1 else stages[0]
    runner = build_pipeline_schedule(given, n_microbatches, CrossEntropy(), layout.schedule)
    tokens = torch.randint(config.vocab_size, (BATCH * n_microbatches, SEQ_LEN))
    runner.step(tokens, target=tokens)
    meter = Meter()
    meter.ignore(
        [tokens, *(t for module in modules for t in (*module.parameters(), *module.buffers()))]
    )
    for stage in runner.stages:
        hold_outputs(stage, meter)
    with watching(meter) as fullest:
        runner.step(tokens, target=tokens)
    return fullest.n_bytes


def fullest_of_steps(
    rank: int, jobs: list[tuple[ModelConfig, Layout]], n_microbatches: int
) -> list[int]:
    """The same of several layouts on the same ranks."""
    return [fullest_of_step(rank, config, layout, n_microbatches) for config, layout in jobs]


SIZES = {
    "wide": ModelConfig(64, 9, 4, 96, n_kv_heads=2, max_seq_len=SEQ_LEN),
    "many words": ModelConfig(32, 9, 4, 2000, max_seq_len=SEQ_LEN, gated_ffn=False),
}


MESHES = [
    (2, 1, "1f1b"),
    (2, 2, "1f1b"),
    (2, 1, "interleaved_1f1b"),
    (2, 1, "gpipe"),
    (4, 1, "1f1b"),
    (3, 1, "gpipe"),
    (2, 2, "interleaved_1f1b"),
]
KINDS = list(product(SIZES, ("float32", "bfloat16"), ("full", "none", "selective")))


@pytest.mark.parametrize(
    ("mesh", "every"),
    [
        (MESHES[0], 5),
        pytest.param(MESHES[1], 5, marks=pytest.mark.long),
        *(pytest.param(mesh, 1, marks=pytest.mark.full) for mesh in MESHES),
    ],
    ids=str,
)
def test_activations_are_what_real_ranks_keep(mesh, every):
    pp, tp, schedule = mesh
    layouts = [
        Layout(
            pp,
            tp,
            schedule=schedule,
            microbatch_size=BATCH,
            ac=ac,
            precision=dtype,
            fused_norms=False,
        ).with_(splits_head=False)
        for _, dtype, ac in KINDS[::every]
    ]
    jobs = [
        (SIZES[sizes], layout) for (sizes, *_), layout in zip(KINDS[::every], layouts, strict=True)
    ]
    timeline = simulate(layouts[0].order(2 * pp), Costs())
    ranks = on_ranks(pp * tp, fullest_of_steps, jobs, 2 * pp, timeout_s=110)
    for (config, layout), measured in zip(jobs, zip(*ranks, strict=True), strict=True):
        predicted = peaks_in_flight(Work(config, layout, SEQ_LEN), timeline)
        for rank, held in enumerate(measured):
            what = f"{layout.precision}, ac={layout.ac}, width {config.dim}, rank {rank}"
            assert predicted[layout.place(rank).pp] == pytest.approx(held, rel=0.03), what
