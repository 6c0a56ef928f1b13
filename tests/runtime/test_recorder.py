import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from course_pp.launch import on_ranks
from course_pp.parallel.torch_stage import LocalNeighboursStage
from course_pp.runtime import Recorder
from course_pp.schedule import Action, Product, Timeline

WIDTH, N_MICROBATCHES = 8, 4

Schedules = dict[str, tuple[type, Callable[[int, int], list[int]], str]]

# The stages of each rank, and the kinds of action a stage does for each microbatch.
SCHEDULES: Schedules = {
    "GPipe": (pipelining.ScheduleGPipe, lambda rank, n: [rank], "FB"),
    "1F1B": (pipelining.Schedule1F1B, lambda rank, n: [rank], "FB"),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, lambda rank, n: [rank, rank + n], "FB"),
    "ZBV": (pipelining.ScheduleZBVZeroBubble, lambda rank, n: [rank, 2 * n - 1 - rank], "FIW"),
}


def record_torch(rank: int, name: str) -> Timeline:
    """Two training steps under one of torch's schedules, the second one recorded."""
    make, stages_of, _ = SCHEDULES[name]
    n_ranks = dist.get_world_size()
    indices = stages_of(rank, n_ranks)
    n_stages = n_ranks * len(indices)
    torch.manual_seed(0)
    stages = [
        LocalNeighboursStage(nn.Linear(WIDTH, WIDTH), index, n_stages, torch.device("cpu"))
        for index in indices
    ]
    several = len(stages) > 1
    schedule = make(
        stages if several else stages[0], N_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    batch = torch.randn(2 * N_MICROBATCHES, WIDTH)

    def step() -> None:
        inputs = (batch,) if 0 in indices else ()
        targets = {"target": batch} if n_stages - 1 in indices else {}
        schedule.step(*inputs, **targets)

    recorder = Recorder()
    with recorder.attach(*stages):
        step()
        recorder.clear()
        step()
    step()  # detached: leaves no trace
    return recorder.timeline()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_of_torch_is_recorded_action_by_action_each_after_what_it_needs(name: str) -> None:
    first, second = on_ranks(2, record_torch, name, timeout_s=60.0)
    assert first == second
    assert min(span.start for span in first.spans) == 0
    _, stages_of, kinds = SCHEDULES[name]
    for rank, row in enumerate(first.by_rank):
        done = [span.action for span in row]
        must = {
            Action(stage, kind, microbatch)
            for stage in stages_of(rank, 2)
            for kind in kinds
            for microbatch in range(N_MICROBATCHES)
        }
        done_in_full = {a for a in done if a.kind != "B"} | {
            Action(a.stage, kind, a.microbatch)
            for a in done
            if a.kind == "B"
            for kind in kinds.strip("F")
        }
        assert done_in_full == must
        assert len(done) == len(set(done))
    ready = {
        product: s.end for s in first.spans for part in s.action.parts for product in part.provides
    }
    for span in first.spans:
        for part in span.action.parts:
            assert all(ready[product] <= span.start for product in part.needs(first.n_stages))


def test_a_body_that_raises_is_not_recorded_and_the_recorder_goes_on() -> None:
    recorder = Recorder()
    for body in (recorder.span(Action(0, "F", 0)), recorder.receiving(Product("gradient", 1, 0))):
        with pytest.raises(KeyError), body:
            raise KeyError
    with recorder.span(Action(0, "F", 1)):
        pass
    assert [str(span.action) for span in recorder.timeline().spans] == ["0F1"]
    assert recorder.timeline().receives == ()


def hand_over(rank: int) -> Timeline:
    """Rank 0 computes and sends; rank 1, which has begun to wait by then, receives and computes."""
    recorder = Recorder()
    message = torch.zeros(1)
    if rank == 0:
        dist.barrier()
        with recorder.span(Action(0, "F", 0)):
            time.sleep(0.01)
        dist.send(message, 1)
    else:
        with recorder.receiving(Product("activation", 0, 0)):
            dist.barrier()
            dist.recv(message, 0)
        with recorder.span(Action(1, "F", 0)):
            pass
    return recorder.timeline(name="by hand")


def test_a_rank_that_is_blocked_until_a_message_is_there_is_recorded_as_receiving_it() -> None:
    tl, other = on_ranks(2, hand_over, timeout_s=60.0)
    assert tl == other
    assert tl.name == other.name == "by hand"
    first, second = tl.spans
    (receive,) = tl.receives
    assert (receive.rank, receive.product) == (1, Product("activation", 0, 0))
    assert first.start == receive.start == 0  # the receive began earlier, and is cut off there
    assert first.end <= receive.end <= second.start
    assert tl.waited == (0, receive.duration)


def test_receives_count_from_the_first_span_or_the_first_of_them() -> None:
    recorder = Recorder()
    for microbatch in range(2):
        with recorder.receiving(Product("gradient", 1, microbatch)):
            pass
    receives = recorder.timeline().receives
    assert [receive.product.microbatch for receive in receives] == [0, 1]
    assert receives[0].start == 0
    with recorder.span(Action(0, "B", 0)):
        pass
    assert recorder.timeline().receives == ()


def test_a_span_and_a_receive_are_refused_within_each_other() -> None:
    recorder = Recorder()
    gradient = Product("gradient", 1, 0)
    name = "the receive of the gradient of microbatch 0 from stage 1"
    with (
        recorder.span(Action(0, "F", 0)),
        pytest.raises(RuntimeError, match=f"{name} starts while 0F0 is being recorded"),
        recorder.receiving(gradient),
    ):
        pass
    with (
        recorder.receiving(gradient),
        pytest.raises(RuntimeError, match=f"0F1 starts while {name} is being recorded"),
        recorder.span(Action(0, "F", 1)),
    ):
        pass
    with (
        recorder.receiving(gradient),
        pytest.raises(RuntimeError, match=f"{name} is still being recorded"),
    ):
        recorder.timeline()


def test_clearing_forgets_spans_receives_and_memory() -> None:
    recorder = Recorder(memory=True)
    assert recorder.meter is not None
    with recorder.span(Action(0, "F", 0)):
        pass
    with recorder.receiving(Product("gradient", 1, 0)):
        recorder.meter.hold(torch.zeros(1), "buffer").release()
    recorder.clear()
    assert recorder.timeline() == Timeline(1, (), unit="s")
    assert set(recorder.memory()[0].peaks.values()) == {0}


def clear_on_one_rank(rank: int) -> list[Timeline]:
    recorder = Recorder()
    with recorder.span(Action(rank, "F", 0)):
        pass
    before = recorder.timeline()
    if rank == 1:
        recorder.clear()
    return [before, recorder.timeline()]


def test_a_rank_may_clear_alone() -> None:
    for before, after in on_ranks(2, clear_on_one_rank, timeout_s=60.0):
        assert [len(row) for row in before.by_rank] == [1, 1]
        assert [len(row) for row in after.by_rank] == [1, 0]


class OwnStage:
    """A stage with the methods that the recorder needs."""

    stage_index = 3
    has_backward = True

    def forward_one_chunk(self, fwd_chunk_id: int, *args: object) -> str:
        return f"output {fwd_chunk_id}"

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: object = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> str:
        return f"gradient {bwd_chunk_id} {full_backward} {last_backward}"

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> str:
        return f"weights {bwd_chunk_id} {last_backward}"


def test_an_attached_stage_does_what_it_did_and_is_recorded() -> None:
    stage = OwnStage()
    recorder = Recorder()
    with recorder.attach(stage):
        assert stage.forward_one_chunk(0, "input") == "output 0"
        assert (
            stage.backward_one_chunk(0, None, full_backward=False, last_backward=True)
            == "gradient 0 False True"
        )
        assert stage.backward_weight_one_chunk(0, last_backward=True) == "weights 0 True"
        assert stage.backward_one_chunk(1) == "gradient 1 True False"
    assert stage.forward_one_chunk(2) == "output 2"
    assert [str(s.action) for s in recorder.timeline().spans] == ["3F0", "3I0", "3W0", "3B1"]
    assert not vars(stage)


def test_a_backward_that_evaluation_skips_is_not_recorded() -> None:
    stage = OwnStage()
    recorder = Recorder()
    stage.has_backward = False
    with recorder.attach(stage):
        stage.backward_one_chunk(0)
        stage.backward_weight_one_chunk(0)
    assert recorder.timeline().spans == ()


def test_when_a_stage_is_refused_or_the_run_raises_none_is_attached() -> None:
    good = OwnStage()
    with pytest.raises(KeyError), Recorder().attach(good):
        raise KeyError
    assert not vars(good)
    with pytest.raises(ValueError, match="cannot record Linear: attach a pipeline stage of torch"):
        Recorder().attach(good, nn.Linear(1, 1))
    assert not vars(good)
