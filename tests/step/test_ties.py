"""A tie that nobody declared is refused; weights that only look alike are not."""

import ast
import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    auto_split,
    build_pipeline_schedule,
    build_pipeline_stage,
    init_distributed,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.step.ties import (
    copies_in,
    looks_of,
    problem_of_broken_ties,
    problem_of_forgotten_ties,
    problem_of_left_out_copies,
    problem_of_two_ties,
    set_apart,
)

WORDS, WIDTH = 11, 6


def embedding(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH))


def head(like: nn.Module | None = None) -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WORDS, bias=False))
    if like is not None:
        module[0].weight.data.copy_(like[0].weight.data)
    return module


def encoder() -> list[nn.Module]:
    """Layers that are copies of one another, as torch makes them."""
    torch.manual_seed(7)
    return list(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 1, 8), 4, enable_nested_tensor=False
        ).layers
    )


def seeded(seed: int, *sizes: tuple[int, int]) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(taken, given) for taken, given in sizes))


def with_hidden(module: nn.Module, place: int, seed: int = 9) -> nn.Sequential:
    """Return a stage with a hidden matrix as other stages have it, and a bias of its own."""
    hidden = nn.Linear(WIDTH, WIDTH)
    hidden.weight.data.copy_(seeded(seed, (WIDTH, WIDTH))[0].weight.data)
    layers = list(module)  # type: ignore[call-overload]
    layers.insert(place, hidden)
    return nn.Sequential(*layers)


def tower(seed: int, words: nn.Module, shape: int = WIDTH) -> nn.Module:
    """An encoder or a decoder."""
    torch.manual_seed(seed)
    return nn.Sequential(words[0], nn.Linear(WIDTH, shape))  # type: ignore[index]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Hidden(torch.Tensor):
    """A weight of a class that computes, and does not let its values be looked at."""

    def flatten(self) -> torch.Tensor:  # type: ignore[override]
        raise TypeError("nobody looks at me")


def quantised(module: nn.Module) -> nn.Module:
    module[0].weight = nn.Parameter(
        module[0].weight.detach().as_subclass(Hidden), requires_grad=False
    )
    return module


def filled(module: nn.Module) -> nn.Module:
    module[0].weight.data.fill_(0.5)
    return module


TIED = embedding()
SHARED = nn.Sequential(nn.Linear(WIDTH, WORDS, bias=False))
SHARED[0].weight = TIED[0].weight
NOT_TIED: dict[str, Mapping[int, nn.Module | None]] = {
    "other values": {0: embedding(), 1: head()},
    "layers copied by torch": dict(enumerate(encoder()[:2])),
    "layers copied by torch, between two ends": {
        0: nn.Sequential(*embedding(), *encoder()[:2]),
        1: nn.Sequential(*encoder()[2:], *head()),
    },
    "layers seeded alike, before ends of two shapes": {
        0: seeded(5, (WIDTH, WIDTH), (WIDTH, WIDTH)),
        1: seeded(5, (WIDTH, WIDTH), (WIDTH, 2)),
    },
    "a hidden matrix and its frozen copy, all frozen": {
        0: frozen(nn.Sequential(*seeded(5, (2, WIDTH)), *seeded(6, (WIDTH, WIDTH)))),
        1: frozen(seeded(6, (WIDTH, WIDTH), (WIDTH, 2))),
    },
    "embeddings seeded alike": {0: embedding(3), 1: embedding(3)},
    "towers seeded alike": {0: tower(4, embedding(3)), 1: tower(4, embedding(3))},
    "towers that have nothing to compare": {
        0: tower(4, embedding(3)),
        1: tower(5, embedding(3), 2),
    },
    "frozen in two towers": {0: tower(4, frozen(embedding(3))), 1: tower(5, frozen(embedding(3)))},
    "one tensor in two stages of a rank": {0: TIED, 3: SHARED},
    "frozen": {0: frozen(embedding()), 1: frozen(head(embedding()))},
    "frozen, in 8 bits": {
        0: frozen(embedding()).to(torch.float8_e4m3fn),
        1: frozen(head(embedding())).to(torch.float8_e4m3fn),
    },
    "frozen, of a class of its own": {0: embedding(), 1: quantised(head(embedding()))},
    "all one value": {0: filled(embedding()), 1: head(filled(embedding()))},
    "on meta": {0: embedding().to("meta"), 1: head().to("meta")},
    "an empty stage": {0: embedding(), 1: None},
    "sparse": {0: embedding(), 1: nn.ParameterList([TIED[0].weight.detach().to_sparse()])},
    "another dtype": {0: embedding(), 1: head(embedding()).double()},
}


@pytest.mark.parametrize("what", NOT_TIED)
def test_weights_that_are_not_tied_pass(what: str) -> None:
    assert problem_of_forgotten_ties(looks_of(NOT_TIED[what])) is None


@pytest.mark.parametrize("first", [0, 2])
def test_an_embedding_whose_values_come_again_is_named_with_the_remedy(first: int) -> None:
    ends = {first: embedding(), 1: head(embedding())}
    said = problem_of_forgotten_ties(looks_of(ends))
    assert f"{{{min(ends)}: '0.weight', {max(ends)}: '0.weight'}}" in str(said)


class Masked(nn.Module):
    """A wrapper as other libraries have them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


LOOK_TIED: dict[str, tuple[Mapping[int, nn.Module], str]] = {
    "a hidden matrix": (
        {0: with_hidden(seeded(1, (2, WIDTH)), 1), 1: with_hidden(seeded(2, (WIDTH, 2)), 0)},
        "give tied=[{0: '1.weight', 1: '0.weight'}]",
    ),
    "a hidden matrix that both stages begin with": (
        {stage: with_hidden(seeded(1 + stage, (WIDTH, WIDTH)), 0) for stage in (0, 2)},
        "give tied=[{0: '0.weight', 2: '0.weight'}]",
    ),
    "a whole layer": (
        {0: nn.Sequential(*seeded(1, (2, WIDTH)), *encoder()[:1]), 1: encoder()[0]},
        "{0: '1.linear1.bias', 1: 'linear1.bias'}",
    ),
    "a hidden matrix in three stages, and two ends": (
        {
            0: with_hidden(embedding(), 1),
            1: with_hidden(seeded(2), 0),
            2: with_hidden(head(embedding()), 0),
        },
        "give tied=[{0: '0.weight', 2: '1.weight'}, {0: '1.weight', 1: '0.weight', 2: '0.weight'}]",
    ),
    "an encoder's embedding and a decoder's": (
        {0: tower(4, embedding()), 2: tower(5, embedding())},
        "give tied=[{0: '0.weight', 2: '0.weight'}]",
    ),
    "one end frozen": (
        {0: frozen(embedding()), 1: head(embedding())},
        "freeze or train both, and give tied=[{0: '0.weight', 1: '0.weight'}]",
    ),
    "one end in a wrapper": (
        {0: embedding(), 1: Masked(head(embedding()))},
        "give tied=[{0: '0.weight', 1: 'module.0.weight'}]",
    ),
    "one end compiled": (
        {0: torch.compile(embedding(), backend="eager"), 1: head(embedding())},
        "give tied=[{0: '_orig_mod.0.weight', 1",
    ),
    "one end checkpointed": (
        {0: embedding(), 1: checkpoint_wrapper(head(embedding()))},
        "give tied=[{0: '0.weight', 1: '0.weight'}]",
    ),
}


ONE_BLOCK_A_STAGE = {
    0: nn.Sequential(*embedding(), *encoder()[:1]),
    1: nn.Sequential(*encoder()[1:2], *head()),
}


def test_one_copied_block_a_stage_is_asked_about_as_a_layer_and_may_be_a_copy() -> None:
    said = str(problem_of_forgotten_ties(looks_of(ONE_BLOCK_A_STAGE)))
    assert "layer '1' of stage 0 and layer '0' of stage 1" in said
    assert said.index("tied=[]") < said.index("tied=[{")
    assert problem_of_left_out_copies(looks_of(ONE_BLOCK_A_STAGE), []) is None


def test_of_several_weights_that_look_tied_a_matrix_is_named_and_no_bias() -> None:
    first, second = (seeded(6, (WIDTH, WIDTH)) for _ in range(2))
    stages = {
        0: nn.ModuleList([nn.Linear(2, 3), nn.ParameterList([first[0].bias, first[0].weight])]),
        1: nn.ModuleList(
            [nn.Linear(3, 2), nn.ParameterDict({"b": second[0].bias, "w": second[0].weight})]
        ),
    }
    said = str(problem_of_forgotten_ties(looks_of(stages)))
    assert said.startswith("'1.1' of stage 0 and '1.w' of stage 1")


@pytest.mark.parametrize("what", LOOK_TIED)
def test_what_looks_tied_is_named_by_names_that_can_be_declared(what: str) -> None:
    stages, remedy = LOOK_TIED[what]
    said = problem_of_forgotten_ties(looks_of(stages))
    assert remedy in str(said)
    found = re.search(r"tied=(\[\{.*?\}\])", str(said))
    assert found is not None
    ties = ast.literal_eval(found.group(1))
    for tie in ties:
        assert (
            copies_in(stages, ((stage, stage, name) for stage, name in tie.items())).keys()
            == tie.keys()
        )
        for stage, name in tie.items():
            assert name in dict(stages[stage].named_parameters())
    assert problem_of_left_out_copies(looks_of(stages), ties) is None


def engines(mine: nn.Module, n: int) -> list[Callable[[Any], object]]:
    """Builds this rank's part of a pipeline of ``n`` ranks by either engine, given what is tied."""
    mesh = init_distributed(DistributedConfig(pp=n))
    ids = torch.zeros(1, dtype=torch.int64)

    def in_parallel(tied: Any) -> None:
        stage = build_pipeline_stage(mine, mesh, "cpu", inputs=ids)
        build_pipeline_schedule(stage, n, nn.CrossEntropyLoss(), tied=tied)

    return [
        lambda tied: Pipeline(build("1f1b", n, n), mine, F.cross_entropy, tied=tied),
        in_parallel,
    ]


def built_on_rank(rank: int) -> list[str]:
    """Return each engine's answers to ends that look tied, without ``tied`` and with ``[]``."""
    mine = head(embedding()) if rank else embedding()
    said = []
    for engine in engines(mine, 2):
        with pytest.raises(ValueError, match="nothing says whether they are one weight") as refusal:
            engine(None)
        said.append(str(refusal.value))
        engine([])
        engine([{0: "0.weight", 1: "0.weight"}])
    if rank:  # what one rank alone cannot look at keeps no rank waiting
        mine[0].weight = nn.Parameter(mine[0].weight.detach().as_subclass(Hidden))
    for engine in engines(mine, 2):
        with pytest.raises((ValueError, RuntimeError), match="nobody looks at me"):
            engine(None)
    return said


def test_both_engines_refuse_it_on_every_rank_until_something_is_said() -> None:
    first, second = on_ranks(2, built_on_rank, timeout_s=60)
    assert first == second
    assert all(
        "tied=[{0: '0.weight', 1: '0.weight'}]" in said and said.endswith("if not, tied=[]")
        for said in first
    )


def two_ties(rank: int) -> nn.Module:
    """A stage that shares an end and a hidden matrix with the other."""
    return with_hidden(head(embedding()), 0) if rank else with_hidden(embedding(), 1)


ALL_TIES = [{0: "0.weight", 1: "1.weight"}, {0: "1.weight", 1: "0.weight"}]


def two_ties_on_rank(rank: int) -> list[list[dict[int, str]]]:
    """Return the ties that each engine's refusals name when none, or one of two, is declared."""
    named = []
    for engine in engines(two_ties(rank), 2):
        for tied in (None, ALL_TIES[:1], ALL_TIES[1:]):
            with pytest.raises(ValueError, match="tied=") as refusal:
                engine(tied)
            said = re.search(r"tied=(\[\{.*?\}\])", str(refusal.value))
            assert said is not None
            named.append(sorted(ast.literal_eval(said.group(1)), key=str))
        engine([])
        engine(ALL_TIES)
    return named


def test_both_engines_name_all_ties_and_refuse_a_list_that_leaves_one_out() -> None:
    assert on_ranks(2, two_ties_on_rank, timeout_s=60) == [[ALL_TIES] * 6] * 2


class TwoEnds(nn.Module):
    """Embedding and head of one matrix around layers, which share a matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.layers[2][0].weight = self.layers[0][0].weight  # type: ignore[index]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_cut_knows_its_ties_whatever_the_values_say() -> None:
    torch.manual_seed(0)
    stages = auto_split(TwoEnds(), torch.zeros(1, 2, dtype=torch.int64), at=["layers.1"])
    schedule = build("interleaved_1f1b", 1, 2, n_chunks=2)
    both = [dict(tie) for tie in stages[0].ties]
    assert len(both) == 2
    for stage in stages:
        for parameter in stage.parameters():
            nn.init.ones_(parameter)
    for index, stage in enumerate(stages):  # as each rank has them, which no longer share a tensor
        stages[index] = copy.deepcopy(stage)
    for tied in (None, both[:1], both[1:]):
        with pytest.raises(ValueError, match="tied=") as refusal:
            Pipeline(schedule, dict(enumerate(stages)), F.cross_entropy, tied=tied)
        assert str(both[0]) in str(refusal.value) or tied == both[:1]
        assert str(both[1]) in str(refusal.value)
    Pipeline(schedule, dict(enumerate(stages)), F.cross_entropy, tied=both)


def broken(module: nn.Module) -> nn.Module:
    """A module with its values, after it went to another device by way of meta."""
    values = {name: value.clone() for name, value in module.state_dict().items()}
    module = module.to("meta").to_empty(device="cpu")
    module.load_state_dict(values)
    return module


def with_one_matrix() -> nn.Module:
    module = nn.Sequential(*embedding(), *head())
    module[1].weight = module[0].weight
    return module


def broken_on_rank(rank: int) -> None:
    """Check that a stage is refused while its embedding and head are two parameters."""
    names = [("0.weight", "1.weight")]
    mine = nn.Sequential(nn.Tanh()) if rank else broken(with_one_matrix())
    of_runtime, of_parallel = engines(mine, 2)
    for engine, tied in ((of_runtime, None), (of_parallel, None), (of_parallel, names)):
        with pytest.raises(ValueError, match="to_empty"):
            engine(tied)
    of_runtime([])
    of_parallel([])
    if rank == 0:
        mine[1].weight = mine[0].weight
    of_runtime(None)
    of_parallel(None)
    of_parallel(names)


def test_both_engines_refuse_a_tie_that_to_empty_has_broken_within_a_stage() -> None:
    on_ranks(2, broken_on_rank, timeout_s=60)


def test_a_broken_tie_of_a_cut_stage_is_refused_whatever_is_declared() -> None:
    model = TwoEnds()
    stages = auto_split(model, torch.zeros(1, 2, dtype=torch.int64), at=["layers.3"])
    first, _ = stages
    assert ("layers.0.0.weight", "layers.2.0.weight") in first.names_of_one
    assert problem_of_broken_ties(0, first) is None
    assert "layers.2.0.weight" in str(problem_of_broken_ties(0, broken(first)))


def twice(again: bool) -> nn.Module:
    """A head under two names, or two heads that are equal."""
    module = nn.ModuleDict({"one": head(embedding()), "other": head(embedding())})
    if again:
        module["other"] = module["one"]
    return module


ENDS = {0: embedding(), 2: head(embedding())}
TIE = {0: "0.weight", 2: "0.weight"}
COPIES: dict[str, tuple[Mapping[int, nn.Module], Mapping[int, str], str | None]] = {
    "in a third stage": (
        {**ENDS, 1: head(embedding())},
        TIE,
        "add 1: '0.weight' to it; or, if that is meant, fill it",
    ),
    "frozen in a third stage": ({**ENDS, 1: frozen(head(embedding()))}, TIE, None),
    "frozen in the stage of an end": (
        {**ENDS, 2: nn.ModuleList([*head(embedding()), frozen(head(embedding()))])},
        TIE,
        None,
    ),
    "in the stage of an end": (
        {**ENDS, 2: twice(False)},
        {0: "0.weight", 2: "one.0.weight"},
        "the parameter 'one.0.w",
    ),
    "all frozen": (
        {0: frozen(embedding()), 1: frozen(head(embedding())), 2: frozen(head(embedding()))},
        TIE,
        None,
    ),
    "another name of an end": (
        {**ENDS, 2: twice(True)},
        {0: "0.weight", 2: "other.0.weight"},
        None,
    ),
    "other values": ({**ENDS, 1: head()}, TIE, None),
}


@pytest.mark.parametrize("where", COPIES)
def test_a_copy_that_a_declared_tie_leaves_out_is_named(where: str) -> None:
    stages, tie, remedy = COPIES[where]
    said = problem_of_left_out_copies(looks_of(stages), [tie])
    assert remedy in str(said) if remedy else said is None


def test_two_ties_may_begin_with_equal_values() -> None:
    ends = {0: embedding(), 1: head(embedding()), 2: embedding(), 3: head(embedding())}
    ties = [{0: "0.weight", 1: "0.weight"}, {2: "0.weight", 3: "0.weight"}]
    assert problem_of_left_out_copies(looks_of(ends), ties) is None


class Predicting(nn.Sequential):
    """A stage with a head beside it, whose output it keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def left_out_on_rank(rank: int) -> list[str]:
    """Return each engine's refusal of a tie of two ends with a third copy between them."""
    mine = [embedding(), Predicting(*head(embedding())), head(embedding())][rank]
    said = []
    for engine in engines(mine, 3):
        with pytest.raises(ValueError, match="would be trained apart") as refusal:
            engine([TIE])
        said.append(str(refusal.value))
        engine([{**TIE, 1: "0.weight"}])
    return said


def test_one_parameter_in_two_ties_by_two_of_its_names_is_refused() -> None:
    table = embedding()
    both = nn.Sequential(*table, head())
    both[1][0].weight = both[0].weight
    stages = {0: both, 1: head(table), 2: head(table)}
    apart = [{0: "0.weight", 1: "0.weight"}, {0: "1.0.weight", 2: "0.weight"}]
    problem = problem_of_two_ties(stages, apart)
    assert problem is not None
    assert "two ties" in problem
    together = [{0: "0.weight", 1: "0.weight", 2: "0.weight"}]
    assert problem_of_two_ties(stages, together) is None


def one_tensor_on_rank(rank: int) -> int:
    """Count the engines that refuse two ties of one tensor, which two stages of rank 0 hold.

    All its values are equal, so no look tells it from others.
    """
    stages = {rank: line(), rank + 2: line()}
    if rank == 0:
        stages[2][0].weight = stages[0][0].weight
    ties = [{0: "0.weight", 1: "0.weight"}, {2: "0.weight", 3: "0.weight"}]
    schedule = build("interleaved_1f1b", 2, 2, 2)
    mesh = init_distributed(DistributedConfig(pp=2))
    x = torch.zeros(1, WIDTH)
    built = [
        build_pipeline_stage(module, mesh, "cpu", stage=stage, n_stages=4, inputs=x)
        for stage, module in stages.items()
    ]
    refused = 0
    for make in (
        lambda: Pipeline(schedule, stages, F.mse_loss, tied=ties),
        lambda: build_pipeline_schedule(built, 2, F.mse_loss, "interleaved_1f1b", tied=ties),
    ):
        with pytest.raises(ValueError, match="two ties"):
            make()
        refused += 1
    return refused


def line() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    nn.init.constant_(module[0].weight, 0.5)
    return module


def test_both_engines_refuse_two_ties_of_one_tensor_on_every_rank() -> None:
    assert on_ranks(2, one_tensor_on_rank, timeout_s=60) == [2, 2]


def test_both_engines_refuse_a_left_out_copy_on_every_rank() -> None:
    for said in on_ranks(3, left_out_on_rank, timeout_s=60):
        for sentence in said:
            assert sentence.startswith(
                f"'0.weight' of stage 1 has the values of the tied weight {TIE} and is not in it"
            )
            assert "add 1: '0.weight' to it" in sentence


@pytest.mark.parametrize(
    "new", [torch.ones(2, 3), torch.ones(2, 3).to_sparse(), None], ids=["dense", "sparse", "none"]
)
def test_a_sum_is_added_to_an_earlier_gradient_in_place_as_autograd_does(
    new: torch.Tensor | None,
) -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    buffer = torch.full((10,), 2.0)
    weight.grad = part = buffer[4:].view(2, 3)
    with set_apart([weight]):
        assert weight.grad is None
        weight.grad = new
    assert weight.grad is part
    assert buffer.tolist() == [2.0] * 4 + [2.0 if new is None else 3.0] * 6


def test_a_dense_gradient_after_a_sparse_one_is_their_sum() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.grad = torch.ones(2, 3).to_sparse()
    with set_apart([weight]):
        weight.grad = torch.ones(2, 3)
    assert weight.grad.tolist() == [[2.0] * 3] * 2


def test_earlier_gradients_survive_a_failure() -> None:
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.grad = before = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="boom"), set_apart([weight]):
        raise RuntimeError("boom")
    assert weight.grad is before
