"""The cut into stages: each holds its parts, the model is the same, and the cut is the best."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from course_pp.model import (
    ModelConfig,
    PipelineStageModule,
    Transformer,
    build_stage_module,
    compute_layer_assignment,
    drop_other_stages,
    layer_costs,
    partition_by_cost,
)
from tests.grids import examples

UNTIED = ModelConfig(dim=32, n_layers=5, n_heads=4, vocab_size=61, n_kv_heads=2, max_seq_len=16)
TIED = replace(UNTIED, tie_embeddings=True)
SEED = 9


def built(config: ModelConfig, stage_id: int, n_stages: int) -> Transformer:
    return build_stage_module(config, stage_id, n_stages)


def carved(config: ModelConfig, stage_id: int, n_stages: int) -> Transformer:
    layers = compute_layer_assignment(config.n_layers, n_stages)[stage_id]
    return drop_other_stages(Transformer(config), stage_id, n_stages, layers)


def on_meta(way: "Way", *sizes: Any) -> Transformer:
    with torch.device("meta"):
        stage = way(*sizes)
    assert all(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers()))
    stage.to_empty(device="cpu")
    return stage


Way = Callable[[ModelConfig, int, int], Transformer]
WAYS: list[Way] = [built, partial(on_meta, built), carved, partial(on_meta, carved)]
configs = pytest.mark.parametrize("config", [UNTIED, TIED], ids=["untied", "tied"])
splits = pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 5])


def whole(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    model.init_weights_and_freqs(seed=SEED)
    return model


def stages(config: ModelConfig, n_stages: int) -> list[Transformer]:
    parts = [built(config, stage_id, n_stages) for stage_id in range(n_stages)]
    for part in parts:
        part.init_weights_and_freqs(seed=SEED)
    return parts


class TestStages:
    @pytest.mark.sample(4)
    @configs
    @splits
    @pytest.mark.parametrize("way", WAYS)
    def test_one_seed_is_one_model_whatever_the_split(
        self, way: Way, n_stages: int, config: ModelConfig
    ) -> None:
        expected = whole(config).state_dict()
        found: dict[str, Tensor] = {}
        for stage_id in range(n_stages):
            stage = way(config, stage_id, n_stages)
            stage.init_weights_and_freqs(seed=SEED)
            state = stage.state_dict()
            assert not found.keys() & state.keys()
            found |= state
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    @pytest.mark.sample(4)
    @configs
    @splits
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_one_after_the_other_are_exactly_the_whole_model(
        self, dtype: torch.dtype, n_stages: int, config: ModelConfig
    ) -> None:
        tokens = torch.randint(
            config.vocab_size, (3, 7), generator=torch.Generator().manual_seed(0)
        )
        mask = torch.ones_like(tokens)
        mask[1, :3] = 0
        model, parts = (
            whole(config).to(dtype),
            [part.to(dtype) for part in stages(config, n_stages)],
        )
        for options in (
            {},
            {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
        ):
            x = tokens
            for part in parts:
                x = part(x, **options)
            assert torch.equal(x, model(tokens, **options))

    @pytest.mark.sample(3)
    @configs
    @splits
    def test_allocate_their_own_parameters_only(self, n_stages: int, config: ModelConfig) -> None:
        for stage_id, (start, end) in enumerate(
            compute_layer_assignment(config.n_layers, n_stages)
        ):
            own = (end - start) * config.n_layer_parameters
            own += config.n_embedding_parameters * (stage_id == 0)
            own += config.n_head_parameters * (stage_id == n_stages - 1)
            own -= config.n_embedding_parameters * (n_stages == 1 and config.tie_embeddings)
            for way in WAYS:
                stage = way(config, stage_id, n_stages)
                stage.init_weights_and_freqs()
                storages = {p.data_ptr(): p.untyped_storage().nbytes() for p in stage.parameters()}
                assert sum(storages.values()) == 4 * own

    def test_hold_the_full_models_layer_keys_and_know_their_place(self) -> None:
        first, middle, last = (build_stage_module(UNTIED, stage_id, 3) for stage_id in range(3))
        assert [list(stage.layers) for stage in (first, middle, last)] == [
            ["0", "1"],
            ["2", "3"],
            ["4"],
        ]
        assert (middle.config, middle.stage_id, middle.num_stages, middle.layer_range) == (
            UNTIED,
            1,
            3,
            (2, 4),
        )
        assert first.embed is not None
        assert (first.norm, first.head, middle.embed, middle.norm, middle.head, last.embed) == (
            None,
        ) * 6
        assert last.norm is not None
        assert last.head is not None

    def test_follow_given_layer_ranges(self) -> None:
        ranges = [(0, 4), (4, 5)]
        assert [build_stage_module(UNTIED, i, 2, ranges).layer_range for i in range(2)] == ranges


class TestStageRefusals:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda: build_stage_module(UNTIED, -1, 2),
                "stage -1 must lie between 0 and 1, the last of 2 stages",
            ),
            (
                lambda: build_stage_module(UNTIED, 2, 2),
                "stage 2 must lie between 0 and 1, the last of 2 stages",
            ),
            (lambda: PipelineStageModule(UNTIED, 2, 2, (0, 1)), "stage 2 must lie between"),
            (lambda: build_stage_module(UNTIED, 0, 2, [(0, 5)]), "1 layer ranges for 2 stages"),
            (
                lambda: build_stage_module(UNTIED, 0, 2, [(0, 3), (2, 5)]),
                r"holds layers \(2, 5\), but must start at layer 3",
            ),
            (
                lambda: build_stage_module(UNTIED, 0, 2, [(0, 0), (0, 5)]),
                r"stage 0 holds layers \(0, 0\)",
            ),
            (
                lambda: build_stage_module(UNTIED, 0, 2, [(0, 2), (2, 4)]),
                "end at 4, but must end at n_layers=5",
            ),
            (
                lambda: compute_layer_assignment(3, 4),
                "4 stages need at least 4 layers, and this model has n_layers=3",
            ),
            (lambda: compute_layer_assignment(3, 0), "0 stages: a pipeline needs at least 1"),
            (lambda: layer_costs(UNTIED, 0), "seq_len=0 must lie between 1 and max_seq_len=16"),
            (lambda: layer_costs(UNTIED, 17), "seq_len=17 must lie between 1 and max_seq_len=16"),
            (
                lambda: partition_by_cost([1.0, float("nan")], 1),
                "cost nan",
            ),
            (lambda: partition_by_cost([1.0, -2.0], 1), r"cost -2\.0"),
            (lambda: partition_by_cost([1.0, 1.0], 1, float("inf")), "cost inf"),
            (lambda: partition_by_cost([1.0, 1.0], 3), "3 stages need at least 3 layers"),
        ],
    )
    def test_what_cannot_be_cut(self, call: Callable[[], object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            call()

    def test_carving_out_what_is_already_gone(self) -> None:
        first = drop_other_stages(Transformer(UNTIED), 0, 2, (0, 3))
        with pytest.raises(
            ValueError, match=r"must lie within the layers this model holds, \(0, 3\)"
        ):
            drop_other_stages(first, 1, 2, (3, 5))
        with pytest.raises(ValueError, match="needs the head, which this model no longer has"):
            drop_other_stages(first, 1, 2, (1, 3))
        last = drop_other_stages(Transformer(UNTIED), 1, 2, (3, 5))
        with pytest.raises(ValueError, match="needs the embed, which this model no longer has"):
            drop_other_stages(last, 0, 2, (3, 4))
        assert list(last.layers) == ["3", "4"]


class TestLayerAssignment:
    @pytest.mark.parametrize(
        ("n_layers", "pp_size", "expected"),
        [
            (4, 1, [(0, 4)]),
            (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
            (5, 2, [(0, 3), (3, 5)]),
            (10, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        ],
    )
    def test_is_even_and_earlier_stages_take_the_extras(
        self, n_layers: int, pp_size: int, expected: list[tuple[int, int]]
    ) -> None:
        assert compute_layer_assignment(n_layers, pp_size) == expected


def best_by_trying_all(
    costs: list[float], n_stages: int, first: float, last: float
) -> list[tuple[int, int]]:
    """Return the best split: fastest slowest stage, least sum of squares, longest early stages."""

    def rank(cuts: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        sums = [
            sum(map(Fraction, costs[a:b]), Fraction(0)) for a, b in pairwise((0, *cuts, len(costs)))
        ]
        sums[0] += Fraction(first)
        sums[-1] += Fraction(last)
        return max(sums), sum((s * s for s in sums), Fraction(0)), tuple(-cut for cut in cuts)

    best = min(combinations(range(1, len(costs)), n_stages - 1), key=rank)
    return list(pairwise((0, *best, len(costs))))


# Few distinct values, so that ties are common; any float besides.
costs = st.one_of(st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.0]), st.floats(0, 1e6))


class TestPartitionByCost:
    @given(data=st.data(), layers=st.lists(costs, min_size=1, max_size=8), first=costs, last=costs)
    @examples(150)
    def test_is_the_best_of_all_splits(
        self, data: st.DataObject, layers: list[float], first: float, last: float
    ) -> None:
        n_stages = data.draw(st.integers(1, len(layers)))
        assert partition_by_cost(layers, n_stages, first, last) == best_by_trying_all(
            layers, n_stages, first, last
        )

    @pytest.mark.parametrize("cost", [0.1, 1, 1 / 3])
    def test_of_equal_costs_is_the_even_assignment(self, cost: float) -> None:
        for n_layers in range(1, 15):
            for n_stages in range(1, n_layers + 1):
                assert partition_by_cost([cost] * n_layers, n_stages) == compute_layer_assignment(
                    n_layers, n_stages
                )


class TestLayerCosts:
    @pytest.mark.parametrize("config", [UNTIED, replace(UNTIED, n_kv_heads=1, ffn_dim=48)])
    def test_count_two_operations_for_every_multiply_add(self, config: ModelConfig) -> None:
        seq = 12
        model = Transformer(config)
        matrices = sum(2 * seq * p.numel() for p in model.layers["0"].parameters() if p.dim() == 2)
        attention = sum(
            2 * 2 * config.head_dim * config.n_heads
            for query in range(seq)
            for _ in range(query + 1)
        )
        flops = layer_costs(config, seq)
        assert flops.layers == (matrices + attention,) * config.n_layers
        assert flops.head == 2 * seq * model.head.weight.numel()
        assert flops.embed == 0
        assert flops.total == flops.head + config.n_layers * flops.layers[0]

    @pytest.mark.parametrize(
        "more", [{}, {"gated_ffn": False, "n_shared_experts": 2, "top_k": 3}, {"head_width": 6}]
    )
    def test_are_those_of_the_experts_that_tokens_go_to_and_cuts_even_them_out(
        self, more: dict[str, Any]
    ) -> None:
        config, seq = (
            replace(UNTIED, n_layers=6, n_experts=4, expert_dim=160, moe_every=2, **more),
            12,
        )
        flops, model = layer_costs(config, seq), Transformer(config).double()
        attention = 2 * config.n_heads * config.head_dim * seq * (seq + 1)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, seq, dtype=torch.int64))
        # On a CPU torch's counter leaves attention out before 2.15; later ones count it as if it
        # were not causal.
        counted = counter.get_flop_counts()["Global"]
        products = sum(n for operator, n in counted.items() if "attention" not in str(operator))
        assert products == flops.total - 6 * attention
        assert flops.layers[1] > 1.5 * flops.layers[0]
        ranges = partition_by_cost(flops.layers, 3)
        assert {sum(flops.layers[start:end]) for start, end in ranges} == {
            flops.layers[0] + flops.layers[1]
        }
