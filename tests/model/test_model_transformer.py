"""The decoder: construction, initial values, masks and positions, refusals."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_pp.model import ModelConfig, Transformer
from course_pp.model.transformer import causal_mask, parameter_seed

CONFIG = ModelConfig(dim=32, n_layers=3, n_heads=4, vocab_size=61, n_kv_heads=2, max_seq_len=16)
TIED = replace(CONFIG, tie_embeddings=True)
BATCH, SEQ = 2, 9


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(
        CONFIG.vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(3)
    )


@pytest.fixture
def process_group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seeded(config: ModelConfig, seed: int) -> Transformer:
    model = Transformer(config)
    model.init_weights_and_freqs(seed=seed)
    return model


def same(a: Transformer, b: Transformer) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


class TestConstruction:
    def test_leaves_the_global_generator_alone(self) -> None:
        before = torch.get_rng_state()
        Transformer(TIED).init_weights_and_freqs(seed=5)
        assert torch.equal(before, torch.get_rng_state())

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_follows_the_default_dtype_with_the_same_numbers(self, dtype: torch.dtype) -> None:
        torch.manual_seed(1)
        reference = Transformer(CONFIG).state_dict()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = Transformer(CONFIG)
        finally:
            torch.set_default_dtype(before)
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert model.rope_cos.dtype == torch.float32
        assert all(
            torch.equal(tensor, reference[name].to(dtype))
            for name, tensor in model.state_dict().items()
        )

    def test_under_the_meta_device_allocates_nothing_and_refuses_to_initialise(self) -> None:
        with torch.device("meta"):
            model = Transformer(CONFIG)
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert model(torch.zeros(BATCH, SEQ, dtype=torch.int64, device="meta")).shape == (
            BATCH,
            SEQ,
            61,
        )
        for initialise in (model.init_weights_and_freqs, model.init_freqs_and_ties):
            with pytest.raises(
                RuntimeError, match=r"meta device.*call \.to_empty\(device=\.\.\.\) first"
            ):
                initialise()

    @pytest.mark.parametrize("layer_range", [(0, 0), (2, 1), (-1, 2), (0, 4)])
    def test_layers_that_do_not_exist_are_refused(self, layer_range: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="must be non-empty and lie within"):
            Transformer(CONFIG, layer_range=layer_range)


class TestInitialValues:
    def test_depend_on_the_seed_alone(self) -> None:
        assert same(seeded(CONFIG, 1), seeded(CONFIG, 1))
        first, second = seeded(CONFIG, 1).state_dict(), seeded(CONFIG, 2).state_dict()
        matrices = [name for name, tensor in first.items() if tensor.dim() == 2]
        assert not any(torch.equal(first[name], second[name]) for name in matrices)
        torch.manual_seed(5)
        torch.rand(3)
        assert same(Transformer(CONFIG), seeded(CONFIG, 5)), (
            "torch.manual_seed decides unless a seed is given"
        )

    def test_are_those_of_every_earlier_version(self) -> None:
        """A published seed must keep giving the same model.

        A change of these numbers changes every result.
        """
        assert parameter_seed(42, "layers.0.attn.q_proj.weight") == 2259395683
        first = seeded(CONFIG, 42).layers["0"].attn.q_proj.weight[0, :3]
        torch.testing.assert_close(first, torch.tensor([0.005489925, -0.024751632, 0.011130323]))

    def test_no_two_parameters_of_a_large_model_share_a_seed(self) -> None:
        with torch.device("meta"):
            names = [
                name for name, _ in Transformer(replace(CONFIG, n_layers=100)).named_parameters()
            ]
        assert len({parameter_seed(0, name) for name in names}) == len(names) == 903

    def test_have_the_documented_spread(self) -> None:
        model = seeded(replace(CONFIG, dim=256, n_layers=8, n_heads=4), 0)
        layer = model.layers["7"]
        for weight in (
            model.embed.weight,
            model.head.weight,
            layer.attn.q_proj.weight,
            layer.mlp.up_proj.weight,
        ):
            assert weight.std().item() == pytest.approx(0.02, rel=0.03)
        for weight in (layer.attn.o_proj.weight, layer.mlp.down_proj.weight):
            assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
        for norm in (model.norm, layer.attn_norm, layer.mlp_norm):
            assert torch.equal(norm.weight, torch.ones(256))

    @pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
    def test_are_the_same_when_parameters_are_sharded(
        self, config: ModelConfig, process_group_of_one: None
    ) -> None:
        with torch.device("meta"):
            model = Transformer(config)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        model.init_weights_and_freqs(seed=3)
        expected = seeded(config, 3).state_dict()
        assert all(
            torch.equal(tensor.full_tensor(), expected[n])
            for n, tensor in model.state_dict().items()
        )

    def test_ignore_the_path_parts_that_wrappers_insert(self) -> None:
        model = seeded(CONFIG, 3)
        wrapper = torch.nn.Module()
        wrapper._wrapped_module = model.layers["1"]
        model.layers["1"] = wrapper
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.init_weights_and_freqs(seed=3)
        assert same_values(model, seeded(CONFIG, 3))


def same_values(a: Transformer, b: Transformer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


class TestTiedEnds:
    def test_share_one_parameter_also_after_to_empty(self) -> None:
        assert (direct := Transformer(TIED)).head.weight is direct.embed.weight
        with torch.device("meta"):
            model = Transformer(TIED)
        model.to_empty(device="cpu")
        assert model.head.weight is not model.embed.weight
        model.init_weights_and_freqs()
        assert model.head.weight is model.embed.weight

    def test_start_equal_when_they_live_on_two_stages(self) -> None:
        first = Transformer(TIED, (0, 1), has_head=False)
        last = Transformer(TIED, (1, 3), has_embedding=False)
        assert first.tied_weight is first.embed.weight
        assert last.tied_weight is last.head.weight
        assert torch.equal(first.tied_weight, last.tied_weight)

    def test_leave_nothing_to_synchronise_where_no_other_end_exists(self) -> None:
        assert Transformer(TIED).tied_weight is None
        assert Transformer(TIED, (1, 2), has_embedding=False, has_head=False).tied_weight is None
        assert Transformer(CONFIG, (0, 1), has_head=False).tied_weight is None


class TestForward:
    def test_never_looks_ahead(self, tokens: Tensor) -> None:
        model = Transformer(CONFIG).double()
        changed = tokens.clone()
        changed[:, 5] = (changed[:, 5] + 1) % CONFIG.vocab_size
        everything = torch.ones(BATCH, 1, SEQ, SEQ, dtype=torch.bool)
        for options in (
            {},
            {"attention_mask": torch.ones_like(tokens)},
            {"attention_mask": everything},
        ):
            before, after = model(tokens, **options), model(changed, **options)
            assert torch.equal(before[:, :5], after[:, :5])
            assert (before[:, 5:] != after[:, 5:]).any(dim=-1).all()

    @pytest.mark.parametrize(
        "mask",
        [
            torch.ones(BATCH, SEQ, dtype=torch.int64),
            torch.ones(BATCH, SEQ, dtype=torch.bool),
            torch.ones(BATCH, 1, SEQ, SEQ, dtype=torch.bool),
            torch.ones(BATCH, CONFIG.n_heads, SEQ, SEQ, dtype=torch.bool).tril(),
        ],
    )
    def test_a_mask_that_hides_nothing_and_positions_from_zero_change_nothing(
        self, mask: Tensor, tokens: Tensor
    ) -> None:
        model = Transformer(CONFIG).double()
        assert torch.equal(
            model(tokens, position_ids=torch.arange(SEQ).expand(BATCH, SEQ)), model(tokens)
        )
        torch.testing.assert_close(model(tokens, mask), model(tokens), atol=1e-14, rtol=0)

    @pytest.mark.parametrize("shape", [(BATCH, SEQ), (BATCH, 1, SEQ, SEQ)])
    def test_a_position_with_nothing_else_to_attend_to_sees_itself(
        self, shape: tuple[int, ...]
    ) -> None:
        allowed = causal_mask(torch.zeros(shape, dtype=torch.bool), BATCH, SEQ)
        assert torch.equal(allowed, torch.eye(SEQ, dtype=torch.bool).expand(BATCH, 1, SEQ, SEQ))

    def test_documents_packed_into_one_row_do_not_see_each_other(self, tokens: Tensor) -> None:
        model = Transformer(CONFIG).double()
        document = torch.tensor([0] * 4 + [1] * (SEQ - 4))
        mask = (document[:, None] == document)[None, None].expand(BATCH, 1, SEQ, SEQ)
        positions = torch.cat((torch.arange(4), torch.arange(SEQ - 4))).expand(BATCH, SEQ)
        packed = model(tokens, mask, positions)
        alone = torch.cat((model(tokens[:, :4]), model(tokens[:, 4:])), dim=1)
        torch.testing.assert_close(packed, alone, atol=1e-14, rtol=0)


TOKENS = torch.zeros(BATCH, SEQ, dtype=torch.int64)
WHOLE, MIDDLE = (
    Transformer(CONFIG),
    Transformer(CONFIG, (1, 2), has_embedding=False, has_head=False),
)
A_MASK = r"attention_mask is .* it must be bool or integer \(batch, seq\)"
HIDDEN = r"takes hidden states \(batch, seq, 32\).*previous stage's output"


@pytest.mark.parametrize(
    ("part", "x", "more", "message"),
    [
        (
            WHOLE,
            torch.zeros(SEQ, dtype=torch.int64),
            {},
            r"token ids \(batch, seq\), not torch.int64 of shape \(9,\)",
        ),
        (WHOLE, torch.zeros(BATCH, SEQ, 32), {}, r"token ids .* shape \(2, 9, 32\)"),
        (
            WHOLE,
            torch.zeros(BATCH, 17, dtype=torch.int64),
            {},
            "sequence length 17 exceeds max_seq_len=16",
        ),
        (
            WHOLE,
            torch.tensor([[0, 61]]),
            {},
            r"token ids from 0 to 61 must lie in \[0, vocab_size\) = \[0, 61\)",
        ),
        (WHOLE, torch.tensor([[-1, 3]]), {}, "token ids from -1 to 3"),
        (MIDDLE, TOKENS, {}, HIDDEN),
        (MIDDLE, torch.zeros(BATCH, SEQ, 31), {}, HIDDEN),
        (WHOLE, TOKENS, {"attention_mask": torch.ones(BATCH, SEQ)}, A_MASK),
        (WHOLE, TOKENS, {"attention_mask": torch.ones(BATCH, SEQ + 1, dtype=torch.bool)}, A_MASK),
        (
            WHOLE,
            TOKENS,
            {"attention_mask": torch.ones(BATCH, 1, SEQ, SEQ, dtype=torch.int64)},
            A_MASK,
        ),
        (WHOLE, TOKENS, {"attention_mask": torch.ones(BATCH, 1, SEQ, 1, dtype=torch.bool)}, A_MASK),
        (
            WHOLE,
            TOKENS,
            {"position_ids": torch.arange(SEQ)},
            r"integers of shape \(batch, seq\) = \(2, 9\)",
        ),
        (WHOLE, TOKENS, {"position_ids": torch.zeros(BATCH, SEQ)}, "integers of shape"),
        (
            WHOLE,
            TOKENS,
            {"position_ids": torch.full((BATCH, SEQ), 16)},
            r"from 16 to 16 must lie in .* \[0, 16\)",
        ),
        (WHOLE, TOKENS, {"position_ids": torch.full((BATCH, SEQ), -1)}, "positions from -1"),
    ],
)
def test_an_input_that_has_no_meaning_is_refused(
    part: Transformer, x: Tensor, more: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        part(x, **more)
