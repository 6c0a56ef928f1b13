"""The pipeline step written by hand equals one process, in the papers' order and memory."""

import weakref
from collections import Counter
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_pp.launch import on_ranks
from course_pp.model import compute_layer_assignment
from course_pp.runtime import by_hand
from course_pp.runtime.by_hand import (
    Link,
    get_stage_layers,
    partition_model,
    train_step_pipeline_1f1b,
    train_step_pipeline_gpipe,
)
from course_pp.schedule import Costs, build, simulate
from tests.equality import GRADIENT_TOLERANCE, snapshot_gradients

STEPS = {"gpipe": train_step_pipeline_gpipe, "1f1b": train_step_pipeline_1f1b}
EVEN, UNEVEN = 12, 7  # layers: 12 divide by 1, 2, 3 and 4 ranks, 7 by 1 only
MICROBATCHES = (1, 2, 5, 8)
WIDTH, BATCH = 6, 40

each_step = pytest.mark.parametrize("name", STEPS)
each_size = pytest.mark.parametrize("pp", [1, 2, 3, 4])


def layers(n, seed=0):
    """The whole model in float64: n layers, each with its own weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n))
    ).double()


def data(seed=1):
    """A batch of inputs and targets, each (BATCH, WIDTH)."""
    return torch.randn(
        2, BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def squared_error(output, target):
    return (output - target).square().mean()


def link_for(m, group=None):
    return Link((BATCH // m, WIDTH), torch.float64, group=group)


def step_by_hand(name, stage, m, link=None, batch=None):
    """Run a step on this rank with m equal microbatches; return the mean loss, if known here."""
    inputs, targets = data() if batch is None else batch
    losses = STEPS[name](
        stage, inputs.chunk(m), targets.chunk(m), squared_error, link or link_for(m)
    )
    return torch.stack(losses).mean().item() if losses else None


def in_one_process(n_layers, *batches):
    """Loss of each batch in one piece through the whole model, and the sum of their gradients."""
    model = layers(n_layers)
    losses = [squared_error(model(inputs), targets) for inputs, targets in batches or [data()]]
    torch.stack(losses).sum().backward()
    return [loss.item() for loss in losses], snapshot_gradients([model])


def assert_equal(ranks, expected_loss, expected):
    """Assert that the ranks' loss and gradients are the reference's."""
    assert [loss for loss, _ in ranks[:-1]] == [None] * (len(ranks) - 1)
    assert ranks[-1][0] == pytest.approx(expected_loss, rel=GRADIENT_TOLERANCE)
    held = Counter(key for _, gradients in ranks for key in gradients)
    assert held == Counter(expected.keys())
    for _, gradients in ranks:
        for key, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, expected[key], rtol=0, atol=GRADIENT_TOLERANCE, msg=key
            )


def every_case_on_rank(rank, pp):
    results = {}
    for name, m, n_layers in product(STEPS, MICROBATCHES, (EVEN, UNEVEN)):
        stage = partition_model(layers(n_layers), pp, rank)
        results[name, m, n_layers] = step_by_hand(name, stage, m), snapshot_gradients([stage])
    return results


@pytest.mark.sample(3)
@each_size
def test_loss_and_every_gradient_equal_one_process(pp, subtests):
    assert_every_case_equal(on_ranks(pp, every_case_on_rank, pp), subtests)


def assert_every_case_equal(ranks, subtests):
    for n_layers in (EVEN, UNEVEN):
        [loss], gradients = in_one_process(n_layers)
        for name, m in product(STEPS, MICROBATCHES):
            with subtests.test(name=name, m=m, n_layers=n_layers):
                assert_equal([rank[name, m, n_layers] for rank in ranks], loss, gradients)


@each_step
def test_one_process_needs_no_process_group(name):
    stage = partition_model(layers(EVEN), 1, 0)
    [loss], gradients = in_one_process(EVEN)
    assert_equal([(step_by_hand(name, stage, 5), snapshot_gradients([stage]))], loss, gradients)


def two_steps_on_rank(rank, pp, batches):
    results = {}
    for name in STEPS:
        stage = partition_model(layers(EVEN), pp, rank)
        losses = [step_by_hand(name, stage, 4, batch=batch) for batch in batches]
        results[name] = losses[-1], snapshot_gradients([stage])
    return results


def test_gradients_of_two_steps_add_up():
    batches = [data(1), data(2)]
    ranks = on_ranks(2, two_steps_on_rank, 2, batches)
    losses, gradients = in_one_process(EVEN, *batches)
    for name in STEPS:
        assert_equal([rank[name] for rank in ranks], losses[-1], gradients)


def two_pipelines_on_rank(rank):
    """Ranks 0 and 2 are one pipeline, 1 and 3 another, each with its own data."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = rank % 2
    results = {}
    for name in STEPS:
        link = link_for(5, groups[mine])
        stage = partition_model(layers(EVEN), link.n_ranks, link.rank)
        results[name] = step_by_hand(name, stage, 5, link, data(mine)), snapshot_gradients([stage])
    return results


def test_two_pipelines_side_by_side_do_not_meet():
    ranks = on_ranks(4, two_pipelines_on_rank)
    for name in STEPS:
        for first in (0, 1):
            [loss], gradients = in_one_process(EVEN, data(first))
            assert_equal([rank[name] for rank in ranks[first::2]], loss, gradients)


class Watched(nn.Module):
    """Counts the microbatches whose saved tensors are alive: those that have yet to go backward."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.kept = weakref.WeakSet()
        self.n_forwards = 0
        self.peak = 0

    def forward(self, x):
        microbatch = self.n_forwards
        self.n_forwards = self.n_forwards + 1

        def keep(tensor):
            kept = Kept(tensor, microbatch)
            self.kept.add(kept)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
            y = self.stage(x)
        self.peak = max(self.peak, len({kept.microbatch for kept in self.kept}))
        return y


class Kept:
    def __init__(self, tensor, microbatch):
        self.tensor = tensor
        self.microbatch = microbatch


def most_in_flight_on_rank(rank, pp):
    peaks = {}
    for name in STEPS:
        for m in MICROBATCHES:
            stage = Watched(partition_model(layers(EVEN), pp, rank))
            step_by_hand(name, stage, m)
            peaks[name, m] = stage.peak
    return peaks


@pytest.mark.sample(3)
@each_size
def test_activations_in_flight_are_all_m_or_as_many_as_ranks_to_come(pp):
    ranks = on_ranks(pp, most_in_flight_on_rank, pp)
    for m in MICROBATCHES:
        assert [rank["gpipe", m] for rank in ranks] == [m] * pp
        assert [rank["1f1b", m] for rank in ranks] == [min(m, pp - rank) for rank in range(pp)]
        for name in STEPS:
            predicted = simulate(build(name, pp, m), Costs()).peak_activations
            assert [rank[name, m] for rank in ranks] == list(predicted)


def order_on_rank(rank, pp):
    """Return this rank's actions, as the schedule prints them."""
    done = []
    outputs = []
    forward = by_hand.forward_stage
    backward = by_hand.backward_stage

    def forward_stage(*args):
        outputs.append(forward(*args))
        done.append(f"{rank}F{len(outputs) - 1}")
        return outputs[-1]

    def backward_stage(x, y, dy):
        [microbatch] = [i for i, output in enumerate(outputs) if output is y]
        done.append(f"{rank}B{microbatch}")
        return backward(x, y, dy)

    by_hand.forward_stage = forward_stage
    by_hand.backward_stage = backward_stage
    orders = {}
    for name in STEPS:
        for m in MICROBATCHES:
            done.clear()
            outputs.clear()
            step_by_hand(name, partition_model(layers(EVEN), pp, rank), m)
            orders[name, m] = tuple(done)
    return orders


@pytest.mark.sample(3)
@each_size
def test_what_is_done_and_in_which_order_is_the_schedule_of_that_name(pp):
    ranks = on_ranks(pp, order_on_rank, pp)
    for name in STEPS:
        for m in MICROBATCHES:
            expected = [tuple(map(str, actions)) for actions in build(name, pp, m).actions]
            assert [rank[name, m] for rank in ranks] == expected


def blocking_sends_on_rank(rank, pp):
    def send(tensor, **where):
        dist.send(tensor, **where)
        return SimpleNamespace(wait=lambda: True)

    dist.isend = send
    return every_case_on_rank(rank, pp)


@pytest.mark.sample(3)
@pytest.mark.parametrize("pp", [4, 2, 3])
def test_the_order_of_messages_could_do_with_blocking_sends_as_nccl_requires(pp, subtests):
    assert_every_case_equal(on_ranks(pp, blocking_sends_on_rank, pp, timeout_s=20), subtests)


class Held:
    """A send's work that can be counted."""

    def __init__(self, work, everyone):
        self.wait = work.wait
        everyone.add(self)


def sends_held_on_rank(rank, pp, m):
    held = weakref.WeakSet()
    peak = 0
    isend = dist.isend

    def counted(tensor, **where):
        nonlocal peak
        work = Held(isend(tensor, **where), held)
        peak = max(peak, len(held))
        return work

    dist.isend = counted
    step_by_hand("1f1b", partition_model(layers(EVEN), pp, rank), m)
    return peak, len(held)


def test_1f1b_keeps_at_most_one_sent_tensor_a_rank_however_many_microbatches():
    ranks = on_ranks(4, sends_held_on_rank, 4, BATCH)
    assert max(peak for peak, _ in ranks) <= 4
    assert [left for _, left in ranks] == [0] * 4


class Transposed(nn.Module):
    """Gives an output, and passes back a gradient, that is not contiguous."""

    def forward(self, x):
        return x.mT.contiguous().mT


def not_contiguous_on_rank(rank, pp):
    stage = nn.Sequential(Transposed(), *partition_model(layers(4), pp, rank), Transposed())
    return step_by_hand("1f1b", stage, 4)


def test_a_stage_may_give_tensors_that_are_not_contiguous():
    assert on_ranks(3, not_contiguous_on_rank, 3)[-1] == pytest.approx(in_one_process(4)[0][0])


@pytest.mark.parametrize("n_layers", [1, 4, 7, 12])
def test_layers_go_to_stages_as_in_the_rest_of_the_course(n_layers):
    for n_stages in range(1, n_layers + 1):
        ranges = [get_stage_layers(n_layers, n_stages, stage) for stage in range(n_stages)]
        assert [(r.start, r.stop) for r in ranges] == compute_layer_assignment(n_layers, n_stages)


@pytest.mark.parametrize(
    "as_given", [nn.Sequential, lambda *each: list(each), lambda *each: nn.ModuleList(each)]
)
def test_a_part_holds_the_whole_models_layers_under_their_names(as_given):
    shared = nn.Tanh()
    each = [nn.Linear(2, 2), shared, nn.Linear(2, 2), shared, nn.Linear(2, 2)]
    parts = [partition_model(as_given(*each), 2, stage) for stage in range(2)]
    assert [list(dict(part.named_parameters())) for part in parts] == [
        ["0.weight", "0.bias", "2.weight", "2.bias"],
        ["4.weight", "4.bias"],
    ]
    assert [layer for part in parts for layer in part] == each


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 0, 0), "0 stages: a pipeline needs at least 1"),
        (
            (4, 5, 0),
            (
                "5 stages need at least 5 layers, and this model has n_layers=4; use at most 4"
                " stages, or a deeper model"
            ),
        ),
        ((1, 2, 0), "use at most 1 stage, or"),
        ((4, 2, 2), "stage 2 must lie between 0 and 1, the last of 2 stages"),
        ((4, 2, -1), "stage -1 must lie between 0 and 1"),
    ],
)
def test_a_split_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        get_stage_layers(*sizes)
    with pytest.raises(ValueError, match=message):
        partition_model(layers(sizes[0]), *sizes[1:])


@pytest.mark.parametrize(
    ("n_inputs", "n_targets", "message"),
    [
        (0, 0, "0 microbatches: a step needs at least 1"),
        (3, 2, "3 microbatches and 2 targets: give one target a"),
    ],
)
@each_step
def test_microbatches_and_targets_that_do_not_pair_up_are_refused(
    name, n_inputs, n_targets, message
):
    batch = torch.zeros(1, WIDTH)
    with pytest.raises(ValueError, match=message):
        STEPS[name](
            nn.Identity(), [batch] * n_inputs, [batch] * n_targets, squared_error, Link((1, WIDTH))
        )


@each_step
def test_a_loss_that_is_not_one_number_is_refused(name):
    batch = [torch.zeros(3, WIDTH)]
    with pytest.raises(ValueError, match=r"shape \(3, 6\)"):
        STEPS[name](
            nn.Linear(WIDTH, WIDTH), batch, batch, lambda y, target: y - target, Link((3, WIDTH))
        )


def refusal_on_rank(rank, name, link):
    """Rank 1 takes no part: the refusal comes before any message."""
    if rank == 0:
        with pytest.raises(ValueError) as refusal:  # noqa: PT011
            step_by_hand(name, partition_model(layers(2), 2, 0), 4, link)
        return str(refusal.value)
    return None


@pytest.mark.parametrize(
    ("link", "declared"),
    [
        (
            Link((BATCH // 4, WIDTH + 1), torch.float64),
            "the link declares torch.float64 of shape (10, 7)",
        ),
        (Link((BATCH // 4, WIDTH)), "the link declares torch.float32 of shape (10, 6)"),
    ],
    ids=["shape", "dtype"],
)
@each_step
def test_an_output_the_neighbour_would_misread_is_refused_before_it_is_sent(name, link, declared):
    message, _ = on_ranks(2, refusal_on_rank, name, link, timeout_s=20)
    assert f"stage 0 gave torch.float64 of shape (10, 6), but {declared}" in message


class Deaf(nn.Module):
    """Ignores what it gets."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x):
        return self.weight.expand(x.shape)


def deaf_on_rank(rank, name):
    step_by_hand(name, layers(1) if rank == 0 else Deaf(), 4)


@each_step
def test_a_stage_that_ignores_its_input_is_named(name):
    with pytest.raises(RuntimeError, match="stage 1 has no gradient for rank 0"):
        on_ranks(2, deaf_on_rank, name, timeout_s=20)


def outsider_on_rank(rank):
    group = dist.new_group([0])
    if rank == 0:
        return Link((1,), group=group).n_ranks
    with pytest.raises(ValueError, match="not in the link's group"):
        Link((1,), group=group)
    return None


def test_a_rank_outside_the_group_is_refused():
    assert on_ranks(2, outsider_on_rank) == [1, None]
