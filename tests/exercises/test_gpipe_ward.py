"""What notebook 02 shows of its patients, and of a step that is well."""

import pytest

from course_pp.exercises.gpipe_clinic import mended_step
from course_pp.exercises.gpipe_ward import PATIENTS, examine, time_cuts


def test_a_healthy_step_has_the_loss_and_the_gradients_of_one_process() -> None:
    findings = examine(mended_step, 4)
    assert findings.loss == pytest.approx(findings.loss_of_one, rel=1e-12)
    assert findings.sizes == pytest.approx((1, 1, 1), rel=1e-12)
    assert findings.largest < 1e-12


def test_each_patient_has_a_symptom_of_its_own() -> None:
    a, b, c = (examine(PATIENTS[name], 4) for name in "ABC")
    assert c.sizes == pytest.approx((4, 4, 4))
    assert c.cosines == pytest.approx((1, 1, 1))
    assert b.loss != pytest.approx(b.loss_of_one, rel=1e-6)
    assert a.loss == pytest.approx(a.loss_of_one)
    assert a.cosines[2] == pytest.approx(1)
    assert max(a.cosines[:2]) < 0.99


def test_cuts_are_timed_on_one_rank_and_on_two() -> None:
    slots = time_cuts((1, 2), rows=16, repeats=1)
    assert slots.best in (1, 2)
    assert slots.shared[2].n_ranks == 2
    assert slots.slot_ms(2) == pytest.approx(500 * float(slots.alone[2].makespan))
    assert str(slots).startswith("m =  1: m + 1 slots of ")
