"""What a pipeline step does beside computing: accumulate, weigh unequal microbatches, pass keywords, refuse."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
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
    get_pp_mesh,
    get_pp_rank,
    get_stage_indices,
    init_distributed,
    schedule_names,
)
from course_pp.parallel.schedules import check_microbatches
from course_pp.parallel.tied import tied_gradients
from tests.equality import Trained, assert_equals_one_process, batches, snapshot_gradients, snapshot_parameters
from tests.parallel.small import N_MICROBATCHES, SEQ_LEN, build, model_config

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
        (lambda rank: ((tokens(),), {"target": tokens(), "masks": [tokens()]}), "keyword argument masks is a list"),
        (lambda rank: (([1, 2],), {"target": tokens()}), "inputs is a list: pass a tensor of shape (16, 8)"),
        (lambda rank: ((tokens().float(),), {"target": tokens()}), "inputs is torch.float32"),
        (lambda rank: ((tokens(),), {"target": tokens().float()}), "target is torch.float32"),
        (lambda rank: ((tokens() + 61,), {"target": tokens()}), "token ids from 61 to 61, but vocab_size=61"),
    ],
    ids=[
        "inputs",
        "target",
        "seq_len",
        "no-target",
        "no-inputs",
        "keyword",
        "nested",
        "list",
        "float",
        "float-target",
        "vocabulary",
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_and_the_next_step_works(arguments, message):
    ranks = on_ranks(2, refusal_on_rank, 2, model_config(False), arguments, timeout_s=20)
    assert ranks[0][0] is not None
    assert ranks[0][0] == ranks[1][0]
    assert message in ranks[0][0]
    assert ranks[0][1] == ranks[1][1]


def one_data_rank_refusal_on_rank(rank):
    """Two pipelines of two ranks, of which the second is given too few rows."""
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    _, pipeline = build(model_config(False), mesh, 2, get_pp_rank(mesh), "1f1b", CrossEntropy())
    batch = tokens(15) if get_dp_mesh(mesh).get_local_rank() else tokens()
    with pytest.raises(ValueError, match="shape") as refusal:
        pipeline.step(batch, target=batch)
    return str(refusal.value), pipeline.step(tokens(), target=tokens()).item()


def test_what_does_not_fit_one_data_parallel_rank_is_refused_on_all():
    ranks = on_ranks(4, one_data_rank_refusal_on_rank, timeout_s=30)
    assert len(set(ranks)) == 1
    assert ranks[0][0].startswith("inputs has shape (15, 8)")


def build_on_rank(rank, pp, change):
    """Build a pipeline on which ``change`` may make one rank different; return the refusal."""
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    options = {"schedule": "1f1b", "n_microbatches": 4, "batch_size": 2, "indices": None, "config": model_config(False)}
    options |= change(rank)
    indices = options["indices"] or [rank]
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
        (lambda rank: {"n_microbatches": 1 if rank else 4}, "n_microbatches=1, but schedule '1f1b' needs at least"),
        (lambda rank: {"schedule": "2f2b" if rank else "1f1b"}, "unknown schedule '2f2b'"),
        (lambda rank: {"config": replace(model_config(False), rope_theta=5.0 + rank)}, "rope_theta=6.0"),
        (lambda rank: {"schedule": "zb_v", "indices": [rank, 2 + rank]}, "places stages [0, 3] there"),
    ],
    ids=["schedule", "batch", "microbatches", "too-few", "unknown", "config", "placement"],
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


@pytest.mark.parametrize("given", [nn.Linear(2, 2), [], [nn.Linear(2, 2)]], ids=["model", "nothing", "models"])
def test_a_pipeline_of_anything_but_stages_is_refused(given):
    with pytest.raises(TypeError, match=r"must come from build_pipeline_stage, not \[.*\]: cut the model with"):
        build_pipeline_schedule(given, 4, CrossEntropy())


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


def uncounted_on_rank(rank, pp, config):
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    modules, pipeline = build(config, mesh, pp, rank, "1f1b", CrossEntropy())
    loss = pipeline.step(tokens(), target=torch.full_like(tokens(), -100)).item()
    return loss, max(p.grad.abs().max().item() for m in modules for p in m.parameters())


def test_a_batch_that_counts_no_token_has_loss_zero_and_gradients_zero():
    assert on_ranks(2, uncounted_on_rank, 2, model_config(True)) == [(0.0, 0.0)] * 2


def data_parallel_on_rank(rank, config, batch, schedule):
    """Two pipelines of two ranks, each with half of the batch; gradients averaged over the two by hand."""
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    data_rank, group = get_dp_mesh(mesh).get_local_rank(), get_dp_mesh(mesh).get_group()
    inputs, target = (part.chunk(2)[data_rank] for part in batch)
    modules, pipeline = build(config, mesh, 2, get_pp_rank(mesh), schedule, CrossEntropy(), 8, len(inputs))
    evaluated = pipeline.eval(inputs, target=target).item()
    loss = pipeline.step(inputs, target=target).item()
    assert evaluated == pytest.approx(loss, rel=1e-12)
    for module in modules:
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= 2
    return Trained([loss], snapshot_gradients(modules), snapshot_parameters(modules))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_the_divisor_counts_the_tokens_of_all_data_parallel_ranks(schedule):
    config = model_config(tied=True)
    (inputs, target), *_ = batches(config, 16, SEQ_LEN, 1)
    target[:8, :6] = -100  # the first half of the batch counts a quarter of its tokens
    reference = summed_reference(config, [(inputs, target)], (1,), CrossEntropy())
    assert_equals_one_process(on_ranks(4, data_parallel_on_rank, config, (inputs, target), schedule), reference, config)


def lone_pipelines_on_rank(rank, config, data):
    """No pipeline dimension in a world of two: each rank holds every stage, for every placement."""
    mesh = init_distributed(DistributedConfig(dp_replicate=2, dp_shard=1), seed=0)
    return [
        build(config, mesh, 1, 0, schedule, CrossEntropy())[1].step(data[0], target=data[1]).item()
        for schedule in ("1f1b", "interleaved_1f1b", "zb_v")
    ]


def test_without_a_pipeline_dimension_a_rank_runs_all_stages_itself():
    config = model_config(tied=True)
    [data] = batches(config, 2 * N_MICROBATCHES, SEQ_LEN, 1)
    expected = summed_reference(config, [data], (1,), CrossEntropy()).losses[0]
    for losses in on_ranks(2, lone_pipelines_on_rank, config, data):
        assert losses == pytest.approx([expected] * 3, rel=1e-12)


def half_on_rank(rank, config, dtype):
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    module = build_stage_module(config, rank, 2).to(dtype)
    stage = build_pipeline_stage(module, mesh, "cpu", 16, 16, dtype)
    ids = torch.arange(64 * 16).view(64, 16) % config.vocab_size
    return build_pipeline_schedule(stage, 4, CrossEntropy(), "1f1b").step(ids, target=ids).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_loss_of_a_half_precision_model_is_summed_in_float32(dtype):
    config = model_config(tied=False)
    torch.manual_seed(0)
    ids = torch.arange(64 * 16).view(64, 16) % config.vocab_size
    expected = CrossEntropy()(Transformer(config)(ids), ids).item()
    first, second = on_ranks(2, half_on_rank, config, dtype)
    assert first == second
    assert first == pytest.approx(expected, rel=1e-3)


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
        assert "one end of the tied embedding is frozen" in refusal


def test_a_tie_frozen_at_both_ends_trains_the_rest():
    first, second = on_ranks(2, ends_on_rank, lambda n: {0, n - 1}, "1f1b", timeout_s=20)
    assert first == second


def ranges_on_rank(rank, layer_ranges):
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    module = build_stage_module(model_config(False), rank, 2, layer_ranges[rank])
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
        assert f"stage 1 begins with layer {second[1][0]}, but the stages before it end with layer 3" in refusal


def raising_loss_on_rank(rank):
    """A tied pipeline whose second step raises in the loss; the gradients of the first must survive."""
    init_distributed(DistributedConfig(), seed=0)
    module = build_stage_module(model_config(True), 0, 2)
    before = torch.ones_like(module.embed.weight)
    module.embed.weight.grad = before.clone()
    with pytest.raises(RuntimeError, match="boom"), tied_gradients([module.embed.weight], None, None):
        raise RuntimeError("boom")
    return torch.equal(module.embed.weight.grad, before)


def test_gradients_of_earlier_steps_survive_a_step_that_raises():
    assert on_ranks(1, raising_loss_on_rank) == [True]


def timeouts_on_rank(rank):
    destroy_distributed()
    mesh = init_distributed(DistributedConfig(pp=2, timeout_s=7))
    groups = [dist.group.WORLD, get_pp_mesh(mesh).get_group(), get_dp_mesh(mesh).get_group()]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_the_time_limit_holds_for_every_group_of_the_mesh():
    assert on_ranks(4, timeouts_on_rank, backend=None) == [[7, 7, 7]] * 4
