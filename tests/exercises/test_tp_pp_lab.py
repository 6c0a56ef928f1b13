"""What notebook 07 shows of its plans, its cut model and its patients."""

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.tp_pp_clinic import whole_norm
from course_pp.exercises.tp_pp_lab import (
    LLAMA,
    PATIENTS,
    clip_by_stage,
    examine,
    exchanges_of_plans,
    norm_of,
    norms_by,
    step_bytes,
    step_on_links,
    tensor_parallel_step,
)


def test_only_column_then_row_needs_one_exchange() -> None:
    plans = exchanges_of_plans(2)
    assert plans.pop("column, then row") == 1
    assert set(plans.values()) == {2}


def test_a_cut_model_has_the_gradients_of_one_process_and_sums_whole_activations() -> None:
    traffic = tensor_parallel_step(2)
    assert (traffic.sums, traffic.n_bytes, traffic.sent) == (8, 32768, 262144)
    assert traffic.largest < 1e-12


def test_tensor_parallelism_sends_four_sums_a_layer_for_one_message_a_stage() -> None:
    sent = step_bytes(LLAMA, pp=2, tp=8)
    assert sent["tensor parallel"] / sent["pipeline"] == pytest.approx(4 * 16 * 2 * 7 / 8)


def test_sums_on_the_slow_link_lengthen_the_step() -> None:
    inside, across = step_on_links(LLAMA, 450e9, 50e9, 400e12), step_on_links(LLAMA, 50e9, 450e9, 400e12)
    assert across.compute_s == inside.compute_s
    assert across.sums_s == pytest.approx(9 * inside.sums_s)
    assert across.timeline.makespan > inside.timeline.makespan


@pytest.mark.parametrize(("patient", "rows"), [("A", ("wrong, wrong, wrong, wrong", 3)), ("B", ("wrong, right", 2))])
def test_a_patient_shows_its_symptom(patient: str, rows: tuple[str, int]) -> None:
    found = examine(PATIENTS[patient])
    assert found.count(rows[0]) == rows[1]
    assert ("the two ranks differ" in found) == (patient == "B")


def every_rank_adds_all(cut: list[torch.Tensor], copied: list[torch.Tensor], mesh: object) -> torch.Tensor:
    total = torch.stack([g.square().sum() for g in cut + copied]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def test_the_norm_of_the_whole_model_is_that_of_one_process() -> None:
    *right, of_one = norms_by(whole_norm)
    assert right == pytest.approx([of_one] * 4, rel=1e-12)
    assert norms_by(every_rank_adds_all)[0] > of_one * 1.001


def test_clipping_by_stage_leaves_more_than_the_limit() -> None:
    stages = {"a": torch.tensor([3.0, 4.0])}, {"b": torch.tensor([0.0, 1.0])}
    assert norm_of(clip_by_stage(stages, 0.5)) == pytest.approx(0.5 * 2**0.5)
    assert norm_of(clip_by_stage(stages, 9.0)) == pytest.approx(26**0.5)
