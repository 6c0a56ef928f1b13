"""The comparison that notebooks make of the schedules they draw: equal where it is, and unequal where it is not."""

import pytest

from course_pp.notebook import compare_gradients, comparing
from course_pp.schedule import build


def test_schedules_of_several_sizes_have_the_gradients_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare_gradients([build("zb_v", 2, 4), build("1f1b", 1, 2), build("zb_h1", 2, 3)])
    assert len(found) == 3
    assert max(found) < 1e-12
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "zb_v   2 ranks, 16 gradients",
        "1f1b   1 rank, 4 gradients",
        "zb_h1  2 ranks, 8 gradients",
    ]


def test_a_gradient_that_is_missing_or_wrong_is_told() -> None:
    import torch

    assert comparing._difference(None, torch.ones(2)) == float("inf")
    assert comparing._difference(torch.ones(2), torch.tensor([1.0, 1.5])) == 0.5


def test_too_many_ranks_and_no_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match="schedules is empty"):
        compare_gradients([])
    with pytest.raises(ValueError, match="9 ranks"):
        compare_gradients([build("1f1b", 9, 9)])
