"""Duties of a pipeline step beside computing: weigh unequal microbatches, pass keywords."""

import pytest
import torch
import torch.distributed as dist

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    destroy_distributed,
    get_dp_mesh,
    get_pp_mesh,
    get_stage_indices,
    init_distributed,
    schedule_names,
)
from course_pp.schedule import find
from tests.equality import (
    Trained,
    assert_equals_one_process,
    batches,
    snapshot_gradients,
    snapshot_parameters,
)
from tests.parallel.small import BATCH, SEQ_LEN, build, model_config, tokens

HALVES = (torch.bfloat16, torch.float16)


def in_one_process(config, batch, loss_fn, **kwargs):
    torch.manual_seed(0)
    model = Transformer(config).double()
    loss = loss_fn(model(batch[0], **kwargs), batch[1])
    loss.backward()
    return Trained([loss.item()], snapshot_gradients([model]), snapshot_parameters([model]))


def padded_batch(config):
    """Return left-padded rows with 1 to SEQ_LEN real tokens.

    So microbatches count different numbers of tokens.
    """
    (inputs, target), *_ = batches(config, BATCH, SEQ_LEN, 1, seed=1)
    lengths = torch.arange(BATCH) % SEQ_LEN + 1
    mask = torch.arange(SEQ_LEN) >= SEQ_LEN - lengths[:, None]
    target = target.masked_fill(~mask, -100)
    target[:2] = -100  # the first microbatch counts no token at all
    return (
        inputs,
        target,
        {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
    )


def step_on_rank(rank, pp, config, data, schedule, loss_fn, kwargs):
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    modules, pipeline = build(config, mesh, pp, rank, schedule, loss_fn)
    evaluated = pipeline.eval(data[0][0], target=data[0][1], **kwargs).item()
    losses = [pipeline.step(inputs, target=target, **kwargs).item() for inputs, target in data]
    return Trained(losses, snapshot_gradients(modules), snapshot_parameters(modules)), evaluated


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "schedule",
    [*(name for name in schedule_names() if find(name).torch_name), "interleaved_zb", "v_min"],
)
def test_keywords_reach_every_stage_and_unequal_microbatches_are_weighted_by_their_tokens(schedule):
    config = model_config(tied=True)
    inputs, target, kwargs = padded_batch(config)
    reference = in_one_process(config, (inputs, target), CrossEntropy(), **kwargs)
    ranks = on_ranks(
        2, step_on_rank, 2, config, [(inputs, target)], schedule, CrossEntropy(), kwargs
    )
    assert_equals_one_process([trained for trained, _ in ranks], reference, config)
    assert [evaluated for _, evaluated in ranks] == pytest.approx(reference.losses * 2, rel=1e-12)


def test_a_plain_loss_function_is_averaged_over_microbatches():
    config = model_config(tied=False)
    data = batches(config, BATCH, SEQ_LEN, 1)

    def squared(output, target):
        return (output**2).mean()

    reference = in_one_process(config, data[0], squared)
    ranks = on_ranks(2, step_on_rank, 2, config, data, "1f1b", squared, {})
    assert_equals_one_process([trained for trained, _ in ranks], reference, config)


@pytest.mark.parametrize(
    "alias", ["Interleaved1F1B", "ScheduleInterleaved1F1B", "INTERLEAVED_1F1B", "interleaved_zb"]
)
def test_torch_class_names_are_accepted(alias):
    assert get_stage_indices(alias, 1, 3) == [1, 4]


@pytest.mark.parametrize("pp_rank", [-1, 3])
def test_a_rank_that_is_none_is_refused(pp_rank):
    with pytest.raises(ValueError, match=f"pp_rank={pp_rank} .*below pp_size=3"):
        get_stage_indices("1f1b", pp_rank, 3)


def uncounted_on_rank(rank, pp, config):
    mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
    modules, pipeline = build(config, mesh, pp, rank, "1f1b", CrossEntropy())
    loss = pipeline.step(tokens(), target=torch.full_like(tokens(), -100)).item()
    return loss, max(p.grad.abs().max().item() for m in modules for p in m.parameters())


def test_a_batch_that_counts_no_token_has_loss_zero_and_gradients_zero():
    assert on_ranks(2, uncounted_on_rank, 2, model_config(True)) == [(0.0, 0.0)] * 2


def lone_pipelines_on_rank(rank, config, data):
    """No pipeline dimension in a world of two: each rank holds every stage, for every placement."""
    mesh = init_distributed(DistributedConfig(dp_replicate=2, dp_shard=1), seed=0)
    return [
        build(config, mesh, 1, 0, schedule, CrossEntropy())[1].step(data[0], target=data[1]).item()
        for schedule in ("1f1b", "interleaved_1f1b", "zb_v")
    ]


def test_without_a_pipeline_dimension_a_rank_runs_all_stages_itself():
    config = model_config(tied=True)
    [data] = batches(config, BATCH, SEQ_LEN, 1)
    expected = in_one_process(config, data, CrossEntropy()).losses[0]
    for losses in on_ranks(2, lone_pipelines_on_rank, config, data):
        assert losses == pytest.approx([expected] * 3, rel=1e-12)


def half_on_rank(rank, config):
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    return [_half(rank, mesh, config, dtype) for dtype in HALVES]


def _half(rank, mesh, config, dtype):
    module = build_stage_module(config, rank, 2).to(dtype)
    stage = build_pipeline_stage(module, mesh, "cpu", 16, 16, dtype)
    ids = torch.arange(64 * 16).view(64, 16) % config.vocab_size
    return build_pipeline_schedule(stage, 4, CrossEntropy(), "1f1b").step(ids, target=ids).item()


def test_the_loss_of_a_half_precision_model_is_summed_in_float32():
    config = model_config(tied=False, n_layers=2)
    torch.manual_seed(0)
    ids = torch.arange(64 * 16).view(64, 16) % config.vocab_size
    expected = CrossEntropy()(Transformer(config)(ids), ids).item()
    first, second = on_ranks(2, half_on_rank, config)
    assert first == second
    assert first == pytest.approx([expected] * len(HALVES), rel=1e-3)


def views_on_rank(rank):
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    return [_views(rank, mesh, rows) for rows in (1, 4)]


def _views(rank, mesh, rows):
    """Return the loss for inputs and targets that overlap in memory, and for copies of them."""
    _, pipeline = build(
        model_config(False, n_layers=2), mesh, 2, rank, "gpipe", CrossEntropy(), rows, rows
    )
    text = torch.arange(rows * (SEQ_LEN + 1)).view(rows, -1) % 61
    inputs, target = text[:, :-1], text[:, 1:]
    whole = pipeline.step(torch.tensor(inputs.tolist()), target=torch.tensor(target.tolist()))
    return pipeline.step(inputs, target=target).item(), whole.item()


def test_inputs_may_be_views():
    for losses in on_ranks(2, views_on_rank):
        for viewed, whole in losses:
            assert viewed == whole


def timeouts_on_rank(rank):
    destroy_distributed()
    mesh = init_distributed(DistributedConfig(pp=2, timeout_s=7))
    groups = [dist.group.WORLD, get_pp_mesh(mesh).get_group(), get_dp_mesh(mesh).get_group()]
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    ]


def test_the_time_limit_holds_for_every_group_of_the_mesh():
    assert on_ranks(4, timeouts_on_rank, backend=None) == [[7, 7, 7]] * 4
