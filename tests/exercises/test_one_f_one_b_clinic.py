"""What notebook 03 shows of its patients, and of steps that are well."""

import pytest

from course_pp.exercises.one_f_one_b_clinic import PATIENTS, examine
from course_pp.runtime import train_step_pipeline_1f1b


def test_a_healthy_step_has_every_gradient_and_the_loss_of_one_process() -> None:
    findings = examine(train_step_pipeline_1f1b, n_ranks=2)
    assert findings.equal
    assert findings.loss == pytest.approx(findings.loss_of_one, rel=1e-12)
    assert "rank 0: 24 right,  0 none,  0 wrong" in str(findings)


# By patient: for each rank how many of its eight gradients are right, are missing, are wrong.
SYMPTOMS = {
    "A": [(0, 12, 0), (0, 12, 0), (0, 12, 0), (12, 0, 0)],
    "B": [(12, 0, 0), (11, 0, 1), (11, 0, 1), (12, 0, 0)],
}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_patient_shows_its_symptom(name: str) -> None:
    found = examine(PATIENTS[name], stagger_s=0.05)
    counts = [tuple(list(rank.values()).count(kind) for kind in ("right", "none", "wrong")) for rank in found.by_rank]
    assert counts == SYMPTOMS[name]
    assert found.loss == pytest.approx(found.loss_of_one)


def test_patient_c_has_a_wrong_loss() -> None:
    found = examine(PATIENTS["C"], stagger_s=0.05)
    assert found.loss != pytest.approx(found.loss_of_one)
    assert not found.equal
