"""Only a missing argument gets a default: not 0, an empty list or text, or half a stage."""

from collections.abc import Callable

import pytest
import torch

from course_pp.parallel import get_stage_indices
from course_pp.runtime import Link
from course_pp.schedule import bound, build, fit, simulate, theory
from course_pp.show import bytes_by_kind, pareto, pieces
from course_pp.training.checkpoint import Piece
from course_pp.training.data import Sequences, packed, padded

SCHEDULE = build("1f1b", 2, 4)
TIMELINE = simulate(SCHEDULE)
ROWS = torch.arange(12).view(3, 4)
SILENT: dict[str, tuple[Callable[[], object], str]] = {
    f"{name} of {value!r}": (lambda call=call, value=value: call(value), argument)
    for name, argument, call in (
        ("simulate", "costs", lambda value: simulate(SCHEDULE, value)),
        ("bound", "costs", lambda value: bound(2, 4, value)),
        ("predict", "costs", lambda value: theory.predict("1f1b", 2, 4, value)),
        ("fit", "expected", lambda value: fit(TIMELINE, value)),
        ("pareto", "costs", lambda value: pareto(2, 4, value)),
    )
    for value in (0, [], {}, "", False)
} | {
    "pareto of no schedules": (lambda: pareto(2, 4, schedules=()), "schedules"),
    "half a stage a rank": (
        lambda: get_stage_indices("interleaved_1f1b", 0, 2, 1.5),
        "stages_per_rank",
    ),
    "half a rank": (lambda: get_stage_indices("1f1b", 0.5, 2), "pp_rank"),
    "targets of another shape": (lambda: Sequences(ROWS, ROWS[:, :3]), "targets"),
    "inputs in one dimension": (lambda: Sequences(ROWS[0], ROWS[0]), "inputs"),
    "float inputs": (lambda: Sequences(ROWS.float(), ROWS), "inputs"),
    "a mask of another shape": (lambda: Sequences(ROWS, ROWS, ROWS[:2] > 0), "attention_mask"),
    "a mask of numbers": (lambda: Sequences(ROWS, ROWS, ROWS), "attention_mask"),
    "padded floats": (lambda: padded([torch.rand(5)], 4), "documents"),
    "padded tables": (lambda: padded([ROWS], 4), "documents"),
    "packed floats": (lambda: packed([torch.rand(9)], 4), "documents"),
    "padded halves of rows": (lambda: padded([torch.arange(5)], 2.5), "seq_len"),
    "a link for text": (lambda: Link("ab"), "shape"),
    "a link for half a row": (lambda: Link((1.5, 2)), "shape"),
    "a link for fewer than no rows": (lambda: Link((-1, 2)), "shape"),
    "a link of a type named in text": (lambda: Link((1, 2), "float32"), "dtype"),
    "a link of integers": (lambda: Link((1, 2), torch.int64), "dtype"),
    "a link to a device that is none": (lambda: Link((1, 2), device="nowhere"), "device"),
    "a link over text": (lambda: Link((1, 2), group="all"), "group"),
}


@pytest.mark.parametrize("what", SILENT)
def test_refuses_what_it_would_have_taken_for_something_else(what: str) -> None:
    call, argument = SILENT[what]
    with pytest.raises((TypeError, ValueError), match=argument):
        call()


def test_an_empty_title_is_no_title_in_every_figure() -> None:
    piece = Piece((0, 0), (2, 2), "a", 16)
    bars = bytes_by_kind({"weights": 1024}, title="")
    boxes = pieces({"a": [piece]}, title="")
    assert bars.axes[0].get_title(loc="left") == ""
    assert "piece" not in " ".join(text.get_text() for text in boxes.texts)
