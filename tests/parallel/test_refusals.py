"""A pipeline refuses faults on every rank, before any message, and names the remedy."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    destroy_distributed,
    get_dp_mesh,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
    schedule_names,
)
from course_pp.parallel.schedules import order_of
from course_pp.runtime import Recorder
from course_pp.schedule import names
from tests.parallel.small import N_MICROBATCHES, SEQ_LEN, build, model_config, tokens


def refusal_on_rank(rank, pp, config, arguments):
    """Return the refusal on this rank, and whether a right step works afterwards."""
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    _, pipeline = build(config, mesh, pp, rank, "1f1b", CrossEntropy())
    args, kwargs = arguments(rank)
    try:
        pipeline.step(*args, **kwargs)
    except ValueError as error:
        inputs = torch.zeros(2 * N_MICROBATCHES, SEQ_LEN, dtype=torch.int64)
        return str(error), pipeline.step(inputs, target=inputs).item()
    return None, None


WRONG_BATCHES = {
    "target": (
        lambda rank: ((tokens(),), {"target": tokens(9)}),
        "4 × 2 = 8: drop or pad the remainder",
    ),
    "length": (
        lambda rank: ((tokens(),), {"target": tokens(seq_len=9)}),
        "but the pipeline was built for (8, 8)",
    ),
    "no target": (
        lambda rank: ((tokens(),), {}),
        "target is missing on the rank that holds the last stage",
    ),
    "dtype": (
        lambda rank: ((tokens(),), {"target": tokens().float()}),
        "target is torch.float32: pass token ids",
    ),
    "keyword": (
        lambda rank: (
            (tokens(),),
            {"target": tokens(), "position_ids": tokens(1) if rank == 1 else tokens()},
        ),
        (
            "keyword argument position_ids is a tensor of shape (1, 8), whose first dimension is"
            " not the whole batch, 8"
        ),
    ),
    "nested": (
        lambda rank: ((tokens(),), {"target": tokens(), "attention_mask": [tokens()]}),
        "attention_mask is a list",
    ),
    "no stage takes it": (
        lambda rank: ((tokens(),), {"target": tokens(), "masks": [tokens()]}),
        "takes",
    ),
    "a word of the other engine": (
        lambda rank: ((tokens(),), {"targets": torch.zeros(8)}),
        "target=",
    ),
    "ids": (
        lambda rank: ((tokens() + 61,), {"target": tokens()}),
        "token ids from 61 to 61, but vocab_size=61",
    ),
    "divisor": (
        lambda rank: ((tokens(),), {"target": tokens(), "divisor": "x" if rank else None}),
        "divisor is 'x'",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", WRONG_BATCHES)
def test_what_does_not_fit_is_refused_on_every_rank_and_the_next_step_works(what):
    arguments, message = WRONG_BATCHES[what]
    ranks = on_ranks(
        2, refusal_on_rank, 2, model_config(False, n_layers=2), arguments, timeout_s=20
    )
    assert ranks[0][0] is not None
    assert ranks[0] == ranks[1]
    assert message in ranks[0][0]


def one_data_rank_refusal_on_rank(rank):
    """Return the refusals of two pipelines of two ranks. The second gets too few rows."""
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    _, pipeline = build(
        model_config(False, n_layers=2), mesh, 2, get_pp_rank(mesh), "1f1b", CrossEntropy()
    )
    batch = tokens(7) if get_dp_mesh(mesh).get_local_rank() else tokens()
    with pytest.raises(ValueError, match="inputs") as refusal:
        pipeline.step(batch, target=batch)
    return str(refusal.value), pipeline.step(tokens(), target=tokens()).item()


def test_what_does_not_fit_one_data_parallel_rank_is_refused_on_all():
    ranks = on_ranks(4, one_data_rank_refusal_on_rank, timeout_s=30)
    assert len(set(ranks)) == 1
    assert ranks[0][0].startswith("inputs is int64 (7, 8), but")


def build_on_rank(rank, pp, change):
    """Build a pipeline on which ``change`` may make one rank different; return the refusal."""
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    options = {
        "schedule": "1f1b",
        "n_microbatches": 4,
        "batch_size": 2,
        "indices": None,
        "config": model_config(False),
    }
    options |= change(rank)
    indices = options["indices"] or [rank]
    modules = [build_stage_module(options["config"], i, pp * len(indices)) for i in indices]
    stages = [
        build_pipeline_stage(m, mesh, "cpu", options["batch_size"], SEQ_LEN, torch.float32)
        for m in modules
    ]
    try:
        build_pipeline_schedule(
            stages, options["n_microbatches"], CrossEntropy(), options["schedule"]
        )
    except ValueError as error:
        return str(error)
    return None


DIFFERENT = {
    "schedule": (
        lambda rank: {"schedule": "gpipe" if rank else "1f1b"},
        "rank 1 was given schedule='gpipe'",
    ),
    "batch": (lambda rank: {"batch_size": 2 + rank}, "(batch_size, seq_len)=(3, 8)"),
    "microbatches": (lambda rank: {"n_microbatches": 4 + rank}, "n_microbatches=5"),
    "unknown": (lambda rank: {"schedule": "2f2b" if rank else "1f1b"}, "unknown schedule '2f2b'"),
    "config": (
        lambda rank: {"config": replace(model_config(False), rope_theta=5.0 + rank)},
        "rope_theta=6.0",
    ),
    "placement": (
        lambda rank: {"schedule": "zb_v", "indices": [rank, 2 + rank]},
        "places stages [0, 3] there",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_build_different_pipelines_are_told_so_together(what):
    change, message = DIFFERENT[what]
    first, second = on_ranks(2, build_on_rank, 2, change, timeout_s=20)
    assert first is not None
    assert first == second
    assert message in first


@pytest.fixture
def lone_rank():
    init_distributed(DistributedConfig())
    yield
    destroy_distributed()


@pytest.mark.parametrize(
    ("schedule", "n_microbatches", "pp", "message"),
    [
        ("dualpipe_v", 7, 4, "fills all 8 stages .* give at least 8 microbatches"),
        ("interleaved_1f1b", 7, 2, "make 3 rounds of unequal size: .* such as 6 or 8"),
    ],
)
def test_a_number_of_microbatches_a_schedule_cannot_run_is_refused(
    schedule, n_microbatches, pp, message
):
    n_stages = 2 * pp if schedule in ("dualpipe_v", "interleaved_1f1b") else pp
    with pytest.raises(ValueError, match=message):
        order_of(schedule, n_microbatches, n_stages, pp)


def test_an_unknown_schedule_is_answered_with_those_that_torch_can_run():
    with pytest.raises(ValueError, match="2f2b") as refusal:
        order_of("2f2b", 4, 2, 2)
    offered = {name for name in names() if re.search(rf"\b{name}\b", str(refusal.value))}
    assert offered == {*schedule_names()}
    assert offered < {*names()}


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "message"),
    [
        ("1f1b", 2, "2 stages a rank.*interleaved_1f1b"),
        ("hanayo", 3, "3 stages a rank.*looped_bfs"),
        ("looped_bfs", 0, "stages_per_rank is 0 .*give at least 1"),
        ("looped_bfs", 1.5, "stages_per_rank is 1.5 .*pass an integer"),
    ],
)
def test_stages_a_rank_that_a_schedule_does_not_allow_are_refused(
    schedule, stages_per_rank, message
):
    with pytest.raises((TypeError, ValueError), match=message):
        get_stage_indices(schedule, 0, 2, stages_per_rank)


def test_a_stage_that_computes_in_another_dtype_is_refused_before_any_message(lone_rank):
    module = build_stage_module(model_config(False), 0, 1)
    with pytest.raises(
        ValueError, match=r"computes in torch.float32, but param_dtype declares that torch.bfloat16"
    ):
        build_pipeline_stage(module, None, "cpu", 2, SEQ_LEN, torch.bfloat16)


def test_a_whole_model_is_not_a_stage(lone_rank):
    with pytest.raises(
        TypeError, match="must be a PipelineStageModule, not Transformer: cut the model"
    ):
        build_pipeline_stage(
            Transformer(model_config(False)), None, "cpu", 2, SEQ_LEN, torch.float32
        )


def test_a_stage_is_recorded_as_its_pipeline_runs_it_and_refused_before_there_is_one(lone_rank):
    batch, recorder = torch.ones(2, 3), Recorder()
    stage = build_pipeline_stage(nn.Linear(3, 3), None, "cpu", inputs=batch[:1])
    with pytest.raises(ValueError, match="stage 0 is in no pipeline"):
        recorder.attach(stage)
    pipeline = build_pipeline_schedule(stage, 2, nn.MSELoss(), "gpipe")
    for attached in (stage, pipeline.stages):
        with recorder.attach(attached):
            pipeline.step(batch, target=batch)
    assert [str(span.action) for span in recorder.timeline().spans] == 2 * [
        "0F0",
        "0F1",
        "0B0",
        "0B1",
    ]


def mesh_refusals_on_rank(rank):
    """Return the refusals of half a mesh, and of stages that two pipeline ranks cannot share."""
    mesh, refusals = init_distributed(DistributedConfig(pp=2)), []
    for given, n_stages in ((mesh["pp"], 2), (mesh, 3)):
        with pytest.raises(ValueError, match="ranks") as refusal:
            build_pipeline_stage(
                build_stage_module(model_config(False), 0, n_stages),
                given,
                "cpu",
                2,
                SEQ_LEN,
                torch.float32,
            )
        refusals.append(str(refusal.value))
    return refusals


def test_a_mesh_that_does_not_fit_the_ranks_or_the_stages_is_refused():
    for part, three in on_ranks(4, mesh_refusals_on_rank):
        assert part.startswith(
            "device_mesh ('pp',) has 2 of 4 ranks: pass the whole mesh of init_distributed"
        )
        assert three.startswith(
            "stage 0 is one of 3, which 2 pipeline ranks cannot share equally: cut the model into"
        )


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "message"),
    [
        (0, 8, "batch_size=0 must be"),
        (2, 0, "seq_len=0 must be"),
        (2, 17, "over the model's max_seq_len=16"),
    ],
)
def test_impossible_sizes_of_a_microbatch_are_refused(lone_rank, batch_size, seq_len, message):
    module = build_stage_module(model_config(False), 0, 1)
    with pytest.raises(ValueError, match=message):
        build_pipeline_stage(module, None, "cpu", batch_size, seq_len, torch.float32)


def test_a_stage_without_a_process_group_is_refused():
    module = build_stage_module(ModelConfig(dim=8, n_layers=1, n_heads=2, vocab_size=5), 0, 1)
    with pytest.raises(RuntimeError, match="call init_distributed"):
        build_pipeline_stage(module, None, "cpu", 2, SEQ_LEN, torch.float32)


def ends_on_rank(rank, frozen, schedule):
    """Build a tied model whose embedding or head is frozen on the rank that holds it."""
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    indices = get_stage_indices(schedule, rank, 2)
    n_stages = 2 * len(indices)
    modules = [build_stage_module(model_config(True), i, n_stages) for i in indices]
    for module in modules:
        if module.stage_id in frozen(n_stages):
            module.tied_weight.requires_grad_(False)
    stages = [build_pipeline_stage(m, mesh, "cpu", 2, SEQ_LEN, torch.float32) for m in modules]
    try:
        pipeline = build_pipeline_schedule(stages, 4, CrossEntropy(), schedule)
    except ValueError as error:
        return str(error)
    return pipeline.step(tokens(8), target=tokens(8)).item()


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("frozen", [lambda n: {0}, lambda n: {n - 1}], ids=["embedding", "head"])
def test_a_tie_with_one_end_frozen_is_refused_on_every_rank(frozen, schedule):
    for refusal in on_ranks(2, ends_on_rank, frozen, schedule, timeout_s=20):
        assert "one end of the tied weight {0: 'embed.weight'" in refusal


def test_a_tie_frozen_at_both_ends_trains_the_rest():
    first, second = on_ranks(2, ends_on_rank, lambda n: {0, n - 1}, "1f1b", timeout_s=20)
    assert first == second


def ranges_on_rank(rank, layer_ranges):
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    module = build_stage_module(model_config(False, n_layers=8), rank, 2, layer_ranges[rank])
    stage = build_pipeline_stage(module, mesh, "cpu", 2, SEQ_LEN, torch.float32)
    try:
        build_pipeline_schedule(stage, 4, CrossEntropy(), "1f1b")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("second", [[(0, 2), (2, 8)], [(0, 6), (6, 8)]], ids=["twice", "never"])
def test_layers_held_twice_or_never_are_refused_on_every_rank(second):
    first = [(0, 4), (4, 8)]
    for refusal in on_ranks(2, ranges_on_rank, [first, second], timeout_s=20):
        assert (
            f"stage 1 begins with layer {second[1][0]}, but the stages before it end with layer 3"
            in refusal
        )


class Failing(nn.Linear):
    """A stage that raises at its second microbatch."""

    def forward(self, inputs):
        self.seen = getattr(self, "seen", -1) + 1
        if self.seen == 2:  # the first forward finds what the stage returns
            raise ArithmeticError("a stage that cannot go on")
        return super().forward(inputs)


def fail_in_mid_step(rank):
    """Run a step that fails, in each of two processes."""
    mesh = init_distributed(DistributedConfig(pp=2))
    module = Failing(4, 4) if rank else nn.Linear(4, 4)
    stage = build_pipeline_stage(
        module, mesh, "cpu", inputs=torch.zeros(1, 4), outputs=torch.zeros(1, 4)
    )
    build_pipeline_schedule(stage, 4, nn.functional.mse_loss).step(
        torch.zeros(4, 4), target=torch.zeros(4, 4)
    )


@pytest.mark.long
def test_a_rank_that_waits_for_one_that_has_raised_names_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import fail_in_mid_step as f; f({rank})"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    waiting, raised = (process.communicate(timeout=90)[1] for process in processes)
    assert "ArithmeticError: a stage that cannot go on" in raised
    assert (
        "StepFailed: the step failed on rank 1, for which this rank waited: ArithmeticError: a"
        " stage" in waiting
    )
