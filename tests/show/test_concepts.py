"""Pictures of concepts: made from what they show, described in words, legible at every size."""

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.patches import ArrowStyle, FancyArrowPatch

from course_pp import show
from course_pp.model import ModelConfig, compute_layer_assignment
from course_pp.parallel import (
    DistributedConfig,
    default_mp_policy,
    predict_collectives,
    predict_unsharded_bytes,
    wire_factor,
)
from course_pp.schedule import Action, build, simulate
from course_pp.show.course import NOTEBOOKS
from course_pp.show.meshes import dimensions_of
from course_pp.show.sending import ring_steps
from course_pp.show.sharding import gathers_of, most_held, sharded_step
from course_pp.show.through_ranks import frame_at
from tests.schedule.layouts import naive
from tests.show.layout import flaws
from tests.show.reading import texts, title

CONFIG = ModelConfig(dim=384, n_layers=12, n_heads=6, vocab_size=512)
LARGE = ModelConfig(
    dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, vocab_size=128_256
)


def cut(config: ModelConfig, n_stages: int) -> show.ChartFigure:
    return show.cut(config, compute_layer_assignment(config.n_layers, n_stages), tokens=256)


def carried(n_cuts: int, begins: tuple[int, ...] | None = None) -> Any:
    """A model of 24 modules whose third is read by its last but one as well."""
    if begins is None:
        begins = tuple(24 * (i + 1) // (n_cuts + 1) for i in range(n_cuts))
    values = [SimpleNamespace(made=begin - 1, read=(begin,), n_bytes=4096) for begin in begins]
    if begins:
        values.append(SimpleNamespace(made=2, read=(3, 22), n_bytes=8192))
    calls = tuple(f"model.blocks.{i}" for i in range(24))
    return SimpleNamespace(calls=calls, begins=begins, values=values)


def figures() -> dict[str, Callable[[], show.ChartFigure]]:
    """Pictures of every concept, small and large."""
    mesh = DistributedConfig(pp=4, dp_replicate=2, dp_shard=2, tp=4)
    found: dict[str, Callable[[], show.ChartFigure]] = {
        "message": show.message,
        "message of 4": partial(show.message, [1.5, 2, 3, 4, 5, 6, 7, 8], n_ranks=4, receiver=2),
        "message of 8": partial(show.message, n_ranks=8, sender=6, receiver=1),
        "ring step": partial(show.ring, 4, step=2, n_bytes=2**20),
        "2 × 2": partial(show.mesh, {"pp": 2, "tp": 2}, gpus_per_node=2),
        "2 × 8": partial(show.mesh, {"pp": 2, "tp": 8}),
        "8 × 2, sums across": partial(show.mesh, {"tp": 8, "pp": 2}, rank=3),
        "4 × 2 × 2 × 4": partial(show.mesh, mesh, rank=5),
        "one node": partial(show.mesh, {"tp": 4}),
        "fsdp": show.fsdp_step,
        "fsdp, a number": partial(show.fsdp_step, (True, 2, False), n_layers=4),
        "replicas": lambda: show.placement(build("pipedream", 4, 8, replicas=(2, 1, 1))),
        "measured, on the way": partial(show.microbatches, naive(2, 0.2, 0.4, unit="s")),
        "carried side by side": partial(show.carried, carried(3, begins=(10, 11, 12))),
        "course map": show.course_map,
        "course map here": partial(show.course_map, here="03"),
    }
    for n in (2, 3, 4, 5, 8):
        found[f"ring of {n}"] = partial(show.ring, n)
    for p in (1, 2, 4, 8):
        found[f"cut in {p}"] = partial(cut, CONFIG, p)
    for p in (2, 8):
        found[f"large cut in {p}"] = partial(cut, LARGE, p)
    for n in (2, 4, 8):
        found[f"tensor cut over {n}"] = partial(show.tensor_cut, n)
    for plan in product(("column", "row"), repeat=2):
        found[", ".join(plan)] = partial(show.tensor_cut, 2, plan)
    for m in (2, 8):
        step = partial(show.fsdp_step, schedule=build("1f1b", 2, m), n_shards=2)
        found[f"fsdp, 1f1b of {m}"] = step
    for name, p in product(("1f1b", "interleaved_1f1b", "zb_v"), (2, 4, 8, 16)):
        found[f"{name} placed on {p}"] = partial(show.placement, build(name, p, 2 * p))
    for p, m in ((1, 1), (2, 3), (4, 4), (8, 8)):
        found[f"{p} stages, {m}"] = partial(show.autograd, p, m)
    on_the_way = [("naive", 4, 1), ("gpipe", 2, 4), ("1f1b", 8, 16), ("gpipe", 8, 64)]
    for name, p, m in [*on_the_way, ("dualpipe_v", 4, 8)]:
        frames = partial(show.microbatches, build(name, p, m))
        found[f"{name} of {p} and {m} on the way"] = frames
    for n in (0, 1, 3, 7):
        found[f"carried over {n} cuts"] = partial(show.carried, carried(n))
    for n, e in ((1, 1), (13, 8), (16, 12)):
        choices = [(i % e, i * i % e) for i in range(n)]
        found[f"{n} tokens to {e} experts"] = partial(show.routing, choices, e)
    for e in (1, 8, 16):
        tokens = {"a layer": range(e), "another": [10_000] * e}
        found[f"loads of {e}"] = partial(show.loads, tokens)
    for n in (1, 4, 8):
        sends = [[i * j for j in range(n)] for i in range(n)]
        found[f"exchange of {n}"] = partial(show.exchange, sends)
    return found


FIGURES = figures()


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.slow
def test_every_size_is_legible_and_told_in_words(name: str) -> None:
    figure = FIGURES[name]()
    assert flaws(figure) == []
    assert title(figure) in figure.alt_text
    assert figure.get_figwidth() < 9.51  # as wide as the others: it fits 980 pixels


def test_what_a_cut_carries_is_told_and_added_up() -> None:
    figure = show.carried(carried(3))
    assert "each cut carries 2 tensors; 1 skip a stage" in title(figure)
    assert texts(figure).count("2 tensors, 12 KiB") == 3
    assert "before model.blocks.12 carries 12 KiB" in figure.alt_text
    assert "model.blocks.2 (for model.blocks.3 and model.blocks.22)" in figure.alt_text


def test_an_arrow_leads_to_each_reader_and_says_how_many_tensors_it_is() -> None:
    # The second module's result goes to the third, to the fifth and into the model's result; the
    # fourth makes three.
    values = [SimpleNamespace(made=1, read=(2, 4, 5), n_bytes=1)]
    values += 3 * [SimpleNamespace(made=3, read=(4,), n_bytes=1)]
    figure = show.carried(SimpleNamespace(calls=tuple("abcde"), begins=(2, 4), values=values))
    n_heads = 0
    for each in figure.axes[0].get_children():
        if isinstance(each, FancyArrowPatch):
            n_heads += isinstance(each.get_arrowstyle(), ArrowStyle.CurveFilledB)
    assert (n_heads, texts(figure).count("×3")) == (4, 1)
    assert "b (for c, e and the result) and d (3 tensors)" in figure.alt_text


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


def test_experts_are_told_by_who_is_fullest() -> None:
    routed = show.routing([(0, 2), (2, 1), (2, 0)], 4, words=["a", "b", "c"])
    for words in ("expert 2 gets 3", "mean is 1.5", "nobody chose expert 3"):
        assert words in title(routed)
    assert "b to 2 and 1" in routed.alt_text
    loaded = show.loads({"even": [4, 4], "uneven": [6, 2]})
    assert title(loaded).startswith("uneven: ")
    assert "1.5 times the mean" in title(loaded)
    exchanged = show.exchange([[1, 5], [0, 2]])
    assert title(exchanged).startswith("Rank 1 gets 7 rows, 1.75 times the mean")
    assert {"1", "7", "6", "8"} <= set(texts(exchanged))  # what ranks get, send, and all of it
    assert title(show.exchange([[1, 2], [2, 1]])) == "Every rank gets 3 rows"


def test_a_message_tells_its_bytes_and_who_learns_nothing() -> None:
    figure = show.message(torch.ones(3, dtype=torch.float64), n_ranks=3, sender=2, receiver=0)
    for words in ("24 B", "memory of rank 2", "that of rank 0", "rank 1 learns nothing"):
        assert words in title(figure)
    assert {"x before", "x after", "no x"} <= set(texts(figure))


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 8])
def test_a_ring_ends_with_every_sum_everywhere_and_never_adds_a_part_twice(n_ranks: int) -> None:
    held, steps = ring_steps(n_ranks)
    for step in steps:
        for rank, chunk in enumerate(step.sends):
            mine = held[rank][chunk]
            theirs = held[(rank + 1) % n_ranks][chunk]
            assert not step.adds or not mine & theirs
        held = step.held
    everyone = frozenset(range(n_ranks))
    assert len(steps) == 2 * (n_ranks - 1)
    assert all(parts == everyone for row in held for parts in row)

    # After the reduce-scatter each rank holds one complete chunk, the next one's number.
    for rank, row in enumerate(steps[n_ranks - 2].held):
        complete = [chunk for chunk in range(n_ranks) if row[chunk] == everyone]
        assert complete == [(rank + 1) % n_ranks]


def test_a_ring_tells_what_each_rank_sends() -> None:
    assert "1.5 MiB for a tensor of 1 MiB" in title(show.ring(4, n_bytes=2**20))


def test_a_cut_tells_the_bytes_that_cross_and_those_that_stay() -> None:
    figure = cut(CONFIG, 4)
    weights = show.format_bytes(4 * CONFIG.n_parameters)
    assert "384 KiB go over each cut" in title(figure)
    assert f"{weights} of weights" in title(figure)
    assert "stage 3 holds layers 9 to 11, norm and head" in figure.alt_text


def test_a_model_of_ones_own_needs_sizes_only() -> None:
    sizes = {"n_embedding_parameters": 8, "layer_parameters": (100, 100), "n_head_parameters": 8}
    assert title(show.cut(SimpleNamespace(dim=4, n_layers=2, **sizes), [(0, 1), (1, 2)], tokens=1))


@pytest.mark.parametrize(
    ("plan", "exchanges"),
    [
        (("column", "row"), ["all-reduce of 32 KiB"]),
        (("column", "column"), ["all-gather of 128 KiB", "all-gather of 32 KiB"]),
        (("row", "row"), ["all-reduce of 128 KiB", "all-reduce of 32 KiB"]),
        (("row", "column"), ["all-reduce of 128 KiB", "all-gather of 32 KiB"]),
    ],
    ids=lambda given: "-".join(given),
)
def test_only_column_then_row_needs_one_exchange(
    plan: tuple[Any, Any], exchanges: list[str]
) -> None:
    assert re.findall(r"all-\w+ of \d+ KiB", title(show.tensor_cut(2, plan))) == exchanges


def test_a_mesh_knows_whose_groups_leave_their_node() -> None:
    inside = {each.name: each for each in dimensions_of({"pp": 2, "dp": 1, "tp": 8}, 8)}
    assert set(inside) == {"pp", "tp"}
    assert (inside["pp"].stride, inside["pp"].crosses) == (8, 8)
    assert (inside["tp"].stride, inside["tp"].crosses) == (1, 0)
    assert inside["pp"].groups[3] == (3, 11)
    across = {each.name: each.crosses for each in dimensions_of({"tp": 8, "pp": 2}, 8)}
    assert across == {"tp": 2, "pp": 0}
    finding = title(show.mesh({"pp": 2, "tp": 8}))
    assert "tp stays inside a node, pp crosses" in finding


def test_a_mesh_of_many_small_groups_has_no_letters_too_small_to_read() -> None:
    figure = show.mesh({"pp": 8, "dp_shard": 4, "tp": 2})
    sizes = {text.get_text(): text.get_size() for axes in figure.axes for text in axes.texts}
    assert min(sizes.values()) >= 8
    assert {"63h", "63p", "af"} <= set(sizes)


def test_a_mesh_numbers_ranks_as_torch_does() -> None:
    sizes = {"pp": 2, "dp_shard": 3, "tp": 4}
    grid = torch.arange(24).reshape(*sizes.values())
    for axis, dimension in enumerate(dimensions_of(sizes, 8)):
        lines = grid.movedim(axis, -1).reshape(-1, list(sizes.values())[axis])
        assert sorted(dimension.groups) == sorted(map(tuple, lines.tolist()))


MODEL = ModelConfig(dim=64, n_layers=6, n_heads=4, vocab_size=128, max_seq_len=32)
FLOAT32 = default_mp_policy(torch.float32)


@pytest.mark.parametrize("policy", [True, 2, False])
def test_fsdp_holds_and_gathers_what_the_package_predicts(policy: bool | int) -> None:
    moments = sharded_step(6, policy, 4, [Action(0, "F", 0), Action(0, "B", 0)], pipeline=False)
    layout = DistributedConfig(dp_shard=4)
    peak, *_ = predict_unsharded_bytes(
        MODEL, layout, reshard_after_forward=policy, mp_policy=FLOAT32
    )
    ends = MODEL.n_embedding_parameters + MODEL.n_head_parameters
    assert 4 * (ends + most_held(moments) * MODEL.n_layer_parameters) == peak
    assert {gathers_of(moments, layer) for layer in range(6)} == {1 if policy is False else 2}
    assert all(sum(layer in moment.reduces for moment in moments) == 1 for layer in range(6))


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fsdp_in_a_pipeline_gathers_what_the_package_predicts(policy: bool, name: str) -> None:
    layout, schedule = DistributedConfig(pp=2, dp_shard=2), build(name, 2, 8)
    counted = predict_collectives(
        MODEL,
        layout,
        batch_size=1,
        seq_len=32,
        n_microbatches=8,
        schedule=name,
        reshard_after_forward=policy,
        clip=False,
    )
    for rank in range(2):
        moments = sharded_step(3, policy, 2, list(schedule.actions[rank]), pipeline=True)
        groups = 4  # three layers and the root
        assert groups * gathers_of(moments, 0) == counted[2 * rank]["dp_shard", "all_gather"].number
        assert most_held(moments) == 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", "A line: 4 stages on 4 ranks, 3 messages .* far apart"),
        ("interleaved_1f1b", "A loop: 8 stages on 4 ranks, 7 messages .* far apart"),
        ("zb_v", "A V: 8 stages on 4 ranks, 6 messages .* on one rank"),
        ("hanayo 4", "2 waves: 16 stages on 4 ranks, 12 messages .* on one rank"),
        ("chimera", "Two ways, .*: 4 stages on 4 ranks, 3 messages .* on one rank"),
    ],
)
def test_a_placement_tells_its_shape_and_its_messages(name: str, shape: str) -> None:
    name, _, chunks = name.partition(" ")
    figure = show.placement(build(name, 4, 8, int(chunks) if chunks else None))
    assert re.fullmatch(shape, title(figure))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_v", "dualpipe_v"])
def test_frames_keep_what_the_timeline_says_and_lose_no_microbatch(name: str) -> None:
    tl = simulate(build(name, 4, 8))
    most_kept = [0] * 4
    for span in tl.spans:
        frame = frame_at(tl, span.start)
        for rank, kept in enumerate(frame.kept):
            most_kept[rank] = max(most_kept[rank], len(kept))
            assert set(kept).isdisjoint(frame.waiting)
        assert set(frame.waiting).isdisjoint(frame.done)
    assert tuple(most_kept) == tl.peak_activations
    assert frame_at(tl, tl.makespan).done == tuple(range(8))


def test_the_bytes_of_each_parallelism_are_those_of_its_formula() -> None:
    table = show.parallelisms(MODEL, n_ranks=4, tokens=256, itemsize=4)
    weights, activation = 4 * MODEL.n_parameters, 4 * 256 * 64
    sent = {row.name: row.sent for row in table.rows}
    assert sent == {
        "data": 1.5 * weights,
        "FSDP": 2.25 * weights,
        "tensor": 6 * 6 * activation,
        "pipeline": 2 * activation,
    }
    even = show.parallelisms(MODEL, n_ranks=4, tokens=round(table.break_even_tokens), itemsize=4)
    assert even["data"].sent == pytest.approx(even["pipeline"].sent, rel=1e-3)
    assert str(table).count("\n| ") == 5
    assert table._repr_html_().count("<tr>") == 5


def test_the_bytes_of_the_table_are_those_that_the_package_predicts() -> None:
    sizes = {"batch_size": 2, "seq_len": 32, "clip": False, "mp_policy": FLOAT32}
    table = show.parallelisms(MODEL, n_ranks=2, tokens=64, itemsize=4)

    def sent(layout: DistributedConfig, dimension: str, kind: str, **more: Any) -> float:
        # A rank in the middle: of two stages, what goes down from the first and up from the second.
        ranks = predict_collectives(MODEL, layout, **(sizes | more))
        return sum(wire_factor(kind, 2) * each[dimension, kind].n_bytes for each in ranks[:1])

    shards = DistributedConfig(dp_shard=2)
    gathered = sent(shards, "dp_shard", "all_gather") + sent(shards, "dp_shard", "reduce_scatter")
    assert table["FSDP"].sent == gathered
    piped = sent(DistributedConfig(pp=2, dp_shard=1), "pp", "send", n_microbatches=2, batch_size=1)
    assert table["pipeline"].sent == 2 * piped


def test_the_map_agrees_with_the_notebooks_about_what_there_is_and_what_comes_before() -> None:
    before = {}
    for path in sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb")):
        first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
        _, _, named = re.sub(r"\s+", " ", first).partition("before this:")
        before[path.name[:2]] = tuple(re.findall(r"\[(\d\d) ·", named))
    assert {each.number: each.after for each in NOTEBOOKS} == before
