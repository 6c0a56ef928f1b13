"""What a pipeline step does beside computing: accumulate, weigh unequal microbatches, pass keywords, refuse."""

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    get_stage_indices,
    init_distributed,
    schedule_names,
)
from course_pp.parallel.schedules import check_microbatches
from tests.equality import Trained, assert_equals_one_process, batches, snapshot_gradients, snapshot_parameters
from tests.parallel.test_equals_one_process import N_MICROBATCHES, SEQ_LEN, build, model_config

SINGLE_AND_V = ("1f1b", "zb_v", "interleaved_zb")


def summed_reference(config, data, weights, loss_fn, **kwargs):
    """Gradients of the weighted sum of the batches' losses, in one process."""
    torch.manual_seed(0)
    model = Transformer(config).double()
    losses = []
    for (inputs, target), weight in zip(data, weights, strict=True):
        loss = loss_fn(model(inputs, **kwargs), target)
        (weight * loss).backward()
        losses.append(loss.item())
    return Trained(losses, snapshot_gradients([model]), snapshot_parameters([model]))


def accumulate_on_rank(rank, pp, config, data, schedule):
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    modules, pipeline = build(config, mesh, pp, rank, schedule, CrossEntropy())
    losses = [pipeline.step(inputs, target=target).item() for inputs, target in data]
    return Trained(losses, snapshot_gradients(modules), snapshot_parameters(modules))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", SINGLE_AND_V)
def test_gradients_of_three_steps_add_up_without_being_rescaled(schedule, tied):
    config = model_config(tied)
    data = batches(config, 2 * N_MICROBATCHES, SEQ_LEN, 3)
    reference = summed_reference(config, data, (1, 1, 1), CrossEntropy())
    assert_equals_one_process(on_ranks(2, accumulate_on_rank, 2, config, data, schedule), reference, config)


def padded_batch(config):
    """Rows with 1 to SEQ_LEN real tokens, left-padded, so that microbatches count different numbers of tokens."""
    (inputs, target), *_ = batches(config, 2 * N_MICROBATCHES, SEQ_LEN, 1, seed=1)
    lengths = torch.arange(2 * N_MICROBATCHES) % SEQ_LEN + 1
    mask = torch.arange(SEQ_LEN) >= SEQ_LEN - lengths[:, None]
    target = target.masked_fill(~mask, -100)
    target[:2] = -100  # the first microbatch counts no token at all
    return inputs, target, {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def step_on_rank(rank, pp, config, data, schedule, loss_fn, kwargs):
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    modules, pipeline = build(config, mesh, pp, rank, schedule, loss_fn)
    evaluated = pipeline.eval(data[0][0], target=data[0][1], **kwargs).item()
    losses = [pipeline.step(inputs, target=target, **kwargs).item() for inputs, target in data]
    return Trained(losses, snapshot_gradients(modules), snapshot_parameters(modules)), evaluated


@pytest.mark.parametrize("schedule", schedule_names())
def test_keywords_reach_every_stage_and_unequal_microbatches_are_weighted_by_their_tokens(schedule):
    config = model_config(tied=True)
    inputs, target, kwargs = padded_batch(config)
    reference = summed_reference(config, [(inputs, target)], (1,), CrossEntropy(), **kwargs)
    ranks = on_ranks(2, step_on_rank, 2, config, [(inputs, target)], schedule, CrossEntropy(), kwargs)
    assert_equals_one_process([trained for trained, _ in ranks], reference, config)
    assert [evaluated for _, evaluated in ranks] == pytest.approx(reference.losses * 2, rel=1e-12)


def test_a_plain_loss_function_is_averaged_over_microbatches():
    config = model_config(tied=False)
    data = batches(config, 2 * N_MICROBATCHES, SEQ_LEN, 1)

    def squared(output, target):
        return (output**2).mean()

    reference = summed_reference(config, data, (1,), squared)
    ranks = on_ranks(2, step_on_rank, 2, config, data, "1f1b", squared, {})
    assert_equals_one_process([trained for trained, _ in ranks], reference, config)


def refusal_on_rank(rank, pp, config, arguments):
    """The message this rank is refused with, and whether a right step works afterwards."""
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    _, pipeline = build(config, mesh, pp, rank, "1f1b", CrossEntropy())
    args, kwargs = arguments(rank)
    try:
        pipeline.step(*args, **kwargs)
    except ValueError as error:
        inputs = torch.zeros(2 * N_MICROBATCHES, SEQ_LEN, dtype=torch.int64)
        return str(error), pipeline.step(inputs, target=inputs).item()
    return None, None


def tokens(batch=2 * N_MICROBATCHES, seq_len=SEQ_LEN):
    return torch.zeros(batch, seq_len, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda rank: ((tokens(15),), {"target": tokens(15)}), "inputs has shape (15, 8)"),
        (lambda rank: ((tokens(),), {"target": tokens(17)}), "8 × 2 = 16: drop or pad the remainder"),
        (lambda rank: ((tokens(seq_len=9),), {"target": tokens()}), "built for seq_len=8"),
        (lambda rank: ((tokens(),), {}), "target is missing on the rank that holds the last stage"),
        (lambda rank: ((), {"target": tokens()}), "inputs is missing on the rank that holds the first stage"),
        (
            lambda rank: ((tokens(),), {"target": tokens(), "position_ids": tokens(1) if rank == 1 else tokens()}),
            "keyword argument position_ids has shape (1, 8)",
        ),
    ],
    ids=["inputs", "target", "seq_len", "no-target", "no-inputs", "keyword"],
)
def test_what_does_not_fit_is_refused_on_every_rank_and_the_next_step_works(arguments, message):
    ranks = on_ranks(2, refusal_on_rank, 2, model_config(False), arguments, timeout_s=20)
    assert ranks[0][0] is not None
    assert ranks[0][0] == ranks[1][0]
    assert message in ranks[0][0]
    assert ranks[0][1] == ranks[1][1]


def build_on_rank(rank, pp, change):
    """Build a pipeline on which ``change`` may make one rank different; return the refusal."""
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    options = {"schedule": "1f1b", "n_microbatches": 4, "batch_size": 2, "indices": None, "config": model_config(False)}
    options |= change(rank)
    indices = options["indices"] or get_stage_indices(options["schedule"], rank, pp)
    modules = [build_stage_module(options["config"], i, pp * len(indices)) for i in indices]
    stages = [build_pipeline_stage(m, mesh, "cpu", options["batch_size"], SEQ_LEN, torch.float32) for m in modules]
    try:
        build_pipeline_schedule(stages, options["n_microbatches"], CrossEntropy(), options["schedule"])
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rank: {"schedule": "gpipe" if rank else "1f1b"}, "rank 1 says schedule='ScheduleGPipe'"),
        (lambda rank: {"batch_size": 2 + rank}, "(batch_size, seq_len)=(3, 8)"),
        (lambda rank: {"n_microbatches": 4 + rank}, "n_microbatches=5"),
        (lambda rank: {"schedule": "zb_v", "indices": [rank, 2 + rank]}, "places stages [0, 3] there"),
    ],
    ids=["schedule", "batch", "microbatches", "placement"],
)
def test_ranks_that_build_different_pipelines_are_told_so_together(change, message):
    first, second = on_ranks(2, build_on_rank, 2, change, timeout_s=20)
    assert first is not None
    assert first == second
    assert message in first


@pytest.fixture
def lone_rank():
    init_distributed(DistributedConfig())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("schedule", "n_microbatches", "pp", "message"),
    [
        ("1f1b", 3, 4, "needs at least as many as its 4 stages: use 4 or more"),
        ("dualpipe_v", 7, 4, "needs at least as many as its 8 stages"),
        ("interleaved_1f1b", 7, 2, "does not split into 3 equal rounds.*use 6 or 8"),
        ("gpipe", 0, 2, "n_microbatches=0 must be"),
        ("2f2b", 4, 2, "unknown schedule '2f2b': choose one of gpipe, 1f1b"),
    ],
)
def test_a_number_of_microbatches_a_schedule_cannot_run_is_refused(schedule, n_microbatches, pp, message):
    n_stages = 2 * pp if schedule == "dualpipe_v" else pp
    with pytest.raises(ValueError, match=message):
        check_microbatches(schedule, n_microbatches, n_stages, pp)


@pytest.mark.parametrize("alias", ["Interleaved1F1B", "ScheduleInterleaved1F1B", "INTERLEAVED_1F1B"])
def test_torch_class_names_are_accepted(alias):
    assert get_stage_indices(alias, 1, 3) == [1, 4]


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "message"),
    [("1f1b", 2, "takes exactly 1"), ("zb_v", 3, "takes exactly 2"), ("looped_bfs", 0, "takes at least 1")],
)
def test_stages_a_rank_that_a_schedule_does_not_allow_are_refused(schedule, stages_per_rank, message):
    with pytest.raises(ValueError, match=message):
        get_stage_indices(schedule, 0, 2, stages_per_rank)


def test_a_stage_that_computes_in_another_dtype_is_refused_before_any_message(lone_rank):
    module = build_stage_module(model_config(False), 0, 1)
    with pytest.raises(ValueError, match=r"computes in torch.float32, but param_dtype declares that torch.bfloat16"):
        build_pipeline_stage(module, None, "cpu", 2, SEQ_LEN)


def test_a_whole_model_is_not_a_stage(lone_rank):
    with pytest.raises(TypeError, match="must be a PipelineStageModule, not Transformer: cut the model"):
        build_pipeline_stage(Transformer(model_config(False)), None, "cpu", 2, SEQ_LEN, torch.float32)


@pytest.mark.parametrize(
    ("batch_size", "seq_len", "message"),
    [(0, 8, "batch_size=0 must be"), (2, 0, "seq_len=0 must be"), (2, 17, "over the model's max_seq_len=16")],
)
def test_impossible_sizes_of_a_microbatch_are_refused(lone_rank, batch_size, seq_len, message):
    module = build_stage_module(model_config(False), 0, 1)
    with pytest.raises(ValueError, match=message):
        build_pipeline_stage(module, None, "cpu", batch_size, seq_len, torch.float32)


def test_a_stage_without_a_process_group_is_refused():
    module = build_stage_module(ModelConfig(dim=8, n_layers=1, n_heads=2, vocab_size=5), 0, 1)
    with pytest.raises(RuntimeError, match="call init_distributed"):
        build_pipeline_stage(module, None, "cpu", 2, SEQ_LEN, torch.float32)
