import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from course_pp.launch import on_ranks
from course_pp.runtime import Recorder
from course_pp.runtime.memory import Meter, RankMemory
from course_pp.schedule import Action, Span

ROWS, WIDTH, HIDDEN = 4, 8, 16
FLOAT64 = 8


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)).double()


def received() -> Tensor:
    """Return an input as the stage before sends it."""
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)


# The first layer saves its input, the ReLU its output, which the second layer saves as well.
OF_TWO_LAYERS = (ROWS * WIDTH + ROWS * HIDDEN) * FLOAT64


def activations(meter: Meter) -> int:
    return meter.kept["activation"]


def test_a_stage_keeps_the_input_and_the_activations_of_its_layers_until_after_its_backward() -> (
    None
):
    meter = Meter()
    stage = two_layers()
    meter.ignore(stage.parameters())
    with meter.saving(0, 0):
        output = stage(received())
    assert meter.kept == {
        "activation": OF_TWO_LAYERS,
        "buffer": 0,
        "queued": 0,
        "version": 0,
        "total": OF_TWO_LAYERS,
    }
    output.sum().backward()
    assert not any(meter.kept.values())
    (memory,) = [meter.log().seen_from(0, 0)]
    assert memory.peaks == {
        "activation": OF_TWO_LAYERS,
        "buffer": 0,
        "queued": 0,
        "version": 0,
        "total": OF_TWO_LAYERS,
    }


def test_parameters_and_a_batch_count_unless_they_are_ignored() -> None:
    stage = two_layers()
    batch = torch.randn(3 * ROWS, WIDTH, dtype=torch.float64)
    for ignored in (False, True):
        meter = Meter()
        meter.ignore([*stage.parameters(), batch] if ignored else [])
        with meter.saving(0, 0):
            output = stage(batch[:ROWS])
        # Without a gradient of its input the first layer saves no weight; the second one does.
        weight = 0 if ignored else WIDTH * HIDDEN * FLOAT64 + batch.nbytes
        assert activations(meter) == ROWS * HIDDEN * FLOAT64 + weight
        del output


def test_a_storage_counts_once_and_whole_however_many_tensors_share_it() -> None:
    meter = Meter()
    x = received()
    with meter.saving(0, 0):
        output = x[:2] * x[2:] + x[0].exp() * x.T.reshape(WIDTH, ROWS).sum()
    n_bytes = x.untyped_storage().nbytes()
    assert n_bytes < activations(meter)  # the products beside it
    before = activations(meter)
    holds = [meter.hold(x), meter.hold(x[1:]), meter.hold(x.view(-1))]
    assert activations(meter) == before
    del output
    assert activations(meter) == n_bytes
    for hold in holds:
        assert activations(meter) == n_bytes
        hold.release()
    assert activations(meter) == 0


def test_a_hold_on_what_autograd_has_saved_too_counts_until_both_let_go() -> None:
    meter = Meter()
    stage = two_layers()
    x = received()
    meter.ignore(stage.parameters())
    hold = meter.hold(x)
    with meter.saving(1, 2):
        output = stage(x)
    assert activations(meter) == OF_TWO_LAYERS
    output.sum().backward()
    assert activations(meter) == ROWS * WIDTH * FLOAT64
    hold.release()
    hold.release()
    assert activations(meter) == 0


def test_a_storage_of_two_kinds_counts_in_both_and_once_in_the_total() -> None:
    meter = Meter()
    message = torch.zeros(10, dtype=torch.float64)
    buffer = meter.hold(message, "buffer")
    queued = meter.hold(message, "queued")
    assert meter.kept == {"activation": 0, "buffer": 80, "queued": 80, "version": 0, "total": 80}
    buffer.release()
    assert meter.kept == {"activation": 0, "buffer": 0, "queued": 80, "version": 0, "total": 80}
    queued.release()
    assert [change for _, kind, change in meter.log().changes if kind == "total"] == [80, -80]


@pytest.mark.parametrize("collected", [False, True])
def test_a_hold_keeps_what_it_counts_until_it_is_released_or_collected(collected: bool) -> None:
    meter = Meter()
    output = torch.zeros(10)
    storage = weakref.ref(output.untyped_storage())
    hold = meter.hold(output, "buffer")
    del output
    assert storage() is not None
    assert meter.kept["buffer"] == 40
    if not collected:
        hold.release()
        assert storage() is None
    del hold
    assert meter.kept["buffer"] == 0


def test_a_storage_that_is_resized_meanwhile_gives_back_what_was_counted() -> None:
    meter = Meter()
    message = torch.zeros(10)
    first = meter.hold(message)
    message.untyped_storage().resize_(0)
    second = meter.hold(message)
    first.release()
    second.release()
    assert meter.kept["total"] == 0


def test_new_memory_where_ignored_memory_was_is_counted() -> None:
    meter = Meter()
    for _ in range(20):
        batch = torch.zeros(1000)
        meter.ignore([batch])
        hold = meter.hold(batch)
        assert activations(meter) == 0
        hold.release()
        del batch, hold  # the allocator gives its memory to the next
        with meter.saving(0, 0):
            output = torch.ones(1000, requires_grad=True).exp()
        assert activations(meter) == 4000
        del output


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_forward_without_a_backward_keeps_nothing_once_its_output_is_gone() -> None:
    """A saved output that kept its own graph would never be freed."""
    meter = Meter()
    with meter.saving(0, 0):
        output = received().exp().relu()
    assert activations(meter) == 2 * ROWS * WIDTH * FLOAT64
    del output
    assert activations(meter) == 0


@pytest.mark.usefixtures("no_garbage_collection")
def test_a_forward_that_raises_keeps_nothing() -> None:
    meter = Meter()
    with contextlib.suppress(KeyError), meter.saving(0, 0):
        received().exp()
        raise KeyError
    assert activations(meter) == 0


def test_a_graph_that_is_retained_is_counted_until_it_is_gone_through_the_last_time() -> None:
    meter = Meter()
    x = received()
    with meter.saving(0, 0):
        output = x.exp()
    (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    assert activations(meter) == ROWS * WIDTH * FLOAT64
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.equal(x.detach().exp())
    del output, first
    assert activations(meter) == 0


@pytest.mark.parametrize("changed", ["input", "output", "ignored weight"])
def test_a_saved_tensor_changed_in_place_is_refused_as_autograd_does(changed: str) -> None:
    weight = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    meter = Meter()
    meter.ignore([weight])
    with meter.saving(4, 2):
        inner = weight * 2
        output = (inner * weight).exp()
    with torch.no_grad():
        {"input": inner, "output": output, "ignored weight": weight}[changed].add_(1)
    with pytest.raises(RuntimeError, match=r"\(2, 3\) .* microbatch 2 in stage 4"):
        output.sum().backward()


def bytes_of_dtensor(rank: int) -> tuple[int, int, bool]:
    mesh = init_device_mesh("cpu", (1,))
    meter = Meter()
    x = distribute_tensor(torch.ones(10), mesh, [Replicate()]).requires_grad_()
    with meter.saving(0, 0):
        output = x.exp()
    before = activations(meter)
    output.sum().backward()
    return before, activations(meter), isinstance(x.grad, DTensor)


def test_a_dtensor_counts_what_it_has_locally() -> None:
    assert on_ranks(1, bytes_of_dtensor, timeout_s=60.0) == [(40, 0, True)]


def test_a_sparse_tensor_counts_nothing_and_breaks_nothing() -> None:
    meter = Meter()
    sparse = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse()
    x = torch.ones(2, 3, requires_grad=True)
    with meter.saving(0, 0):
        output = sparse @ x
    assert activations(meter) == 0
    output.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(torch.tensor([[2.0] * 3, [1.0] * 3]))


def test_a_checkpointed_stage_keeps_its_input_alone() -> None:
    meter = Meter()
    stage = two_layers()
    meter.ignore(stage.parameters())
    with meter.saving(0, 0):
        output = checkpoint(stage, received(), use_reentrant=False)
    assert activations(meter) == ROWS * WIDTH * FLOAT64
    output.sum().backward()
    assert activations(meter) == 0


def test_clearing_forgets_the_past_and_goes_on_counting_what_is_kept() -> None:
    meter = Meter()
    hold = meter.hold(torch.zeros(10), "buffer")
    meter.hold(torch.zeros(1000), "buffer").release()
    meter.clear()
    log = meter.log().seen_from(0, 0)
    assert log.peaks["buffer"] == 40
    assert log.curves["buffer"] == ((0.0, 40),)
    hold.release()
    assert meter.log().seen_from(0, 0).curves["buffer"][-1][1] == 0


def test_the_curve_has_the_zero_of_the_timeline_and_what_came_before_is_put_there() -> None:
    now = iter(range(10, 100, 10))
    meter = Meter(lambda: next(now))
    early, late = meter.hold(torch.zeros(1)), meter.hold(torch.zeros(2))  # at 10 and 20 ns
    early.release()
    late.release()
    memory = meter.log().seen_from(3, 15)
    assert memory.rank == 3
    assert memory.curves["activation"] == ((0.0, 0), (0.0, 4), (5e-9, 12), (15e-9, 8), (25e-9, 0))


def held_in_a_span(rank: int) -> tuple[tuple[Span, ...], tuple[RankMemory, ...]]:
    recorder = Recorder(memory=True)
    assert recorder.meter is not None
    dist.barrier()
    with recorder.span(Action(rank, "F", 0)):
        hold = recorder.meter.hold(torch.zeros(rank + 1, dtype=torch.float64))
        hold.release()
    return recorder.timeline().spans, recorder.memory()


def test_every_rank_gets_the_memory_of_all_with_the_times_of_the_timeline() -> None:
    (spans, memories), other = on_ranks(2, held_in_a_span, timeout_s=60.0)
    assert (spans, memories) == other
    for rank, (span, memory) in enumerate(zip(spans, memories, strict=True)):
        assert memory.rank == span.rank == rank
        assert memory.peaks["activation"] == 8 * (rank + 1)
        times = [seconds for seconds, _ in memory.curves["activation"][1:]]
        assert len(times) == 2
        assert all(span.start <= seconds <= span.end for seconds in times)


def test_a_recorder_that_counts_no_memory_says_how_to_make_one_that_does() -> None:
    with pytest.raises(RuntimeError, match=r"Recorder\(memory=True\)"):
        Recorder().memory()
