"""FLOPs are those the model needs, and utilisation is their rate over the peak."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer
from course_pp.training.logs import Peak, Speed, find_peak, matmul_flops, training_flops
from tests.training.small import MODEL, SEQ_LEN, rows


def test_training_flops_are_those_torch_counts_with_causal_attention_halved() -> None:
    model, batch = Transformer(MODEL), rows(1)
    with FlopCounterMode(display=False) as counter:
        CrossEntropy()(model(batch.inputs), batch.targets).backward()
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(flops for operator, flops in counted.items() if "attention" not in str(operator))
    attention = 3 * 4 * MODEL.dim * MODEL.n_layers * SEQ_LEN * (SEQ_LEN + 1) / 2
    assert training_flops(MODEL, SEQ_LEN) == matrices + attention


def test_speed_is_tokens_and_flops_over_the_seconds_of_the_steps() -> None:
    speed = Speed(tokens_of_a_step=100, flops_of_a_step=6e9, peak=Peak(1e10, "given"))
    assert (speed.tokens_per_s, speed.utilisation) == (0.0, 0.0)
    speed = speed.after(1.0).after(3.0)
    assert speed.tokens_per_s == 50.0
    assert speed.utilisation == pytest.approx(0.3)


def peaks(rank: int) -> tuple[Peak, Peak]:
    cpu = torch.device("cpu")
    return find_peak(2e12, cpu, torch.float32), find_peak(None, cpu, torch.float32)


def test_the_peak_is_that_of_all_ranks_and_says_where_it_comes_from() -> None:
    (given, measured), (_, on_the_other) = on_ranks(2, peaks, timeout_s=60)
    assert given == Peak(4e12, "given")
    assert measured == on_the_other
    assert measured.source == "measured"
    assert measured.flops > 0


def test_a_measured_peak_counts_two_operations_for_each_multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("course_pp.training.logs.time.perf_counter", lambda: next(clock))
    assert matmul_flops(torch.device("cpu"), torch.float64, size=4, repeats=2) == 2 * 4**3
