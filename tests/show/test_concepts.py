"""Pictures of concepts: made from what they show, described in words, legible at every size."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from course_pp import show
from course_pp.model import ModelConfig, compute_layer_assignment
from course_pp.show.course import NOTEBOOKS
from course_pp.show.ring_steps import ring_steps
from tests.show.layout import flaws
from tests.show.reading import texts, title

CONFIG = ModelConfig(dim=384, n_layers=12, n_heads=6, vocab_size=512)
LARGE = ModelConfig(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, vocab_size=128_256)


def cut(config: ModelConfig, n_stages: int) -> show.ChartFigure:
    return show.cut(config, compute_layer_assignment(config.n_layers, n_stages), tokens=256)


FIGURES = {
    "message": lambda: show.message(),
    "message of 4": lambda: show.message([1.5, 2, 3, 4, 5, 6, 7, 8], n_ranks=4, receiver=2),
    "message of 8": lambda: show.message(n_ranks=8, sender=6, receiver=1),
    "ring step": lambda: show.ring(4, step=2, n_bytes=2**20),
    **{f"ring of {n}": lambda n=n: show.ring(n) for n in (2, 3, 4, 5, 8)},
    **{f"cut in {p}": lambda p=p: cut(CONFIG, p) for p in (1, 2, 4, 8)},
    **{f"large cut in {p}": lambda p=p: cut(LARGE, p) for p in (2, 8)},
    "course map": lambda: show.course_map(),
    "course map here": lambda: show.course_map(here="03"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_size_is_legible_and_told_in_words(name: str) -> None:
    figure = FIGURES[name]()
    assert flaws(figure) == []
    assert title(figure) in figure.alt_text
    assert figure.get_figwidth() < 9.51  # as wide as the others: it fits 980 pixels


def test_words_over_each_other_or_out_of_their_box_are_flaws() -> None:
    from course_pp.show.sketch import Sketch

    sketch = Sketch(3, 2, "finding")
    sketch.box((0, 0), (1, 1), "fits")
    assert flaws(sketch.finish("")) == []
    sketch.text((0.5, 0.5), "far too wide for it", align="center")
    sketch.text((2.9, 1.5), "off the sheet, in letters that no sheet of this size has room for")
    found = " ".join(flaws(sketch.finish("")))
    assert "leaves its box" in found
    assert "overlap" in found
    assert "leaves the sheet" in found


def test_a_message_tells_its_bytes_and_who_learns_nothing() -> None:
    import torch

    figure = show.message(torch.ones(3, dtype=torch.float64), n_ranks=3, sender=2, receiver=0)
    assert title(figure) == "24 B go from the memory of rank 2 to that of rank 0; rank 1 learns nothing"
    assert {"x before", "x after", "no x"} <= set(texts(figure))


@pytest.mark.parametrize(
    "wrong", [{"n_ranks": 1}, {"receiver": 2}, {"sender": 1}, {"values": [[1.0]]}, {"values": []}, {"n_ranks": 9}]
)
def test_a_message_that_cannot_be_drawn_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give|needs"):
        show.message(**wrong)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_a_ring_ends_with_every_sum_everywhere_and_never_adds_a_part_twice(n_ranks: int) -> None:
    held, steps = ring_steps(n_ranks)
    for step in steps:
        for rank, chunk in enumerate(step.sends):
            mine, theirs = held[rank][chunk], held[(rank + 1) % n_ranks][chunk]
            assert not step.adds or not mine & theirs
        held = step.held
    everyone = frozenset(range(n_ranks))
    assert len(steps) == 2 * (n_ranks - 1)
    assert all(parts == everyone for row in held for parts in row)
    halfway = steps[n_ranks - 2].held  # each rank holds one complete chunk, the next one's number
    assert [[chunk for chunk in range(n_ranks) if row[chunk] == everyone] for row in halfway] == [
        [(rank + 1) % n_ranks] for rank in range(n_ranks)
    ]


def test_a_ring_tells_what_each_rank_sends() -> None:
    assert title(show.ring(4, n_bytes=2**20)).endswith("each rank sends 1.5 MiB for a tensor of 1 MiB")
    with pytest.raises(ValueError, match="steps 1 to 6"):
        show.ring(4, step=7)


def test_a_cut_tells_the_bytes_that_cross_and_those_that_stay() -> None:
    figure = cut(CONFIG, 4)
    weights = show.format_bytes(4 * CONFIG.n_parameters)
    assert title(figure) == f"12 layers in 4 stages: 384 KiB go over each cut and back, {weights} of weights stay"
    assert "stage 3 holds layers 9 to 11, norm and head" in figure.alt_text


@pytest.mark.parametrize("layers", [[(0, 6)], [(0, 6), (7, 12)], []])
def test_stages_that_leave_out_a_layer_are_refused(layers: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"cover each layer|stages"):
        show.cut(CONFIG, layers, tokens=256)


def test_a_model_of_ones_own_needs_sizes_only() -> None:
    sizes = {"n_embedding_parameters": 8, "n_layer_parameters": 100, "n_head_parameters": 8}
    assert title(show.cut(SimpleNamespace(dim=4, n_layers=2, **sizes), [(0, 1), (1, 2)], tokens=1))


def test_the_map_agrees_with_the_notebooks_about_what_there_is_and_what_comes_before() -> None:
    before = {}
    for path in sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        before[path.name[:2]] = tuple(re.findall(r"before\s+this:[^.]*?\[(\d\d)", first))
    assert {each.number: each.after for each in NOTEBOOKS if each.is_written} == before
