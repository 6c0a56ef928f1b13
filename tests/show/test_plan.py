"""A planned run in a picture says what the numbers say."""

import pytest

from course_pp import show
from course_pp.plan import Layout, cluster_of, model_named, predict
from course_pp.show.meshes import dimensions_of
from tests.show.layout import flaws


def planned(pp):
    return predict(model_named("gpt-145b"), Layout(pp, 8), cluster_of(f"{pp}x8xA100"), 64, 2048)


def words_of(axes):
    return [text.get_text() for text in axes.texts]


def test_the_largest_part_and_the_fullest_rank_are_named():
    found = planned(4)
    figure = show.plan(found)
    times, memory, _ = figure.axes
    assert found.bound_by in times.get_title(loc="left")
    assert "rank, 0, does not fit" in figure.alt_text

    def right_end(axes):
        return max(patch.get_x() + patch.get_width() for patch in axes.patches)

    assert right_end(times) == pytest.approx(found.step_s)
    assert right_end(memory) == pytest.approx(max(found.total_memory) / 1e9)


LAYOUTS = {
    "one": ("gpt2", Layout(), "1x1xA100", 0),
    "a node": ("gpt-1.7b", Layout(2, 2, 2), "1x8xA100", 3),
    "two nodes": ("gpt-1.7b", Layout(2, 2, 2), "2x4xA100", 5),
    "eight nodes": ("gpt-1.7b", Layout(4, 4, 4), "8x8xA100", 21),
    "2,048 nodes": ("llama3-405b", Layout(16, 8, 16, 8), "2048x8xH100", 9001),
    "the last of them": ("llama3-405b", Layout(16, 8, 16, 8), "2048x8xH100", 16_383),
    "nodes of 72": ("llama3-70b", Layout(8, 8, 9), "8x72xB200", 80),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.slow
def test_the_mesh_can_be_read(name):
    model, layout, cluster, rank = LAYOUTS[name]
    batch = 2 * layout.n_data
    prediction = predict(model_named(model), layout, cluster_of(cluster), batch, 1024)
    figure = show.plan(prediction, rank=rank)
    assert not flaws(figure)
    assert figure.get_figheight() < 12


def test_a_rank_s_neighbours_are_marked_and_the_rest_is_left_out():
    model, layout, cluster, rank = LAYOUTS["2,048 nodes"]
    prediction = predict(model_named(model), layout, cluster_of(cluster), 256, 1024)
    figure = show.plan(prediction, rank=rank)
    words = words_of(figure.axes[2])
    assert {"9001", "9002 t", "9009 s", "9129 r", "10025 p", "9010"} <= set(words)
    assert "111 nodes not shown" in words
    assert "pp: 16 ranks, 1024 apart, between nodes" in figure.alt_text
    assert "arrow to rank 10025" in figure.alt_text
    assert not any(word.startswith("100 ") for word in words)


def test_neighbours_are_those_of_the_layout():
    layout = Layout(4, 2, 2, 3)
    sizes = {"pp": 4, "dp_replicate": 3, "dp_shard": 2, "tp": 2}
    for rank in range(layout.n_ranks):
        here = layout.place(rank)
        for dimension in dimensions_of(sizes, 8, rank):
            [group] = dimension.groups
            assert len(group) == sizes[dimension.name]
            others = sizes.keys() - {dimension.name}
            for each in group:
                there = layout.place(each)
                for other in others:
                    assert getattr(here, other) == getattr(there, other)
            assert dimension.crosses == (len({each // 8 for each in group}) > 1)


def test_the_errors_of_published_runs_are_the_finding():
    figure = show.published({"a": (10.0, 11.0), "b": (20.0, 19.0), "c": (5.0, 5.0)})
    assert figure.axes[0].get_title(loc="left") == "Median error 5.0%, worst 10.0%"
    assert [text.get_text() for text in figure.axes[0].texts] == ["+10.0%", "-5.0%", "+0.0%"]
    assert "b 20 s, predicted 19 s (-5.0%)" in figure.alt_text
