"""Models of other packages are cut without a change of their code, and compute the same."""

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from course_pp import runtime
from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    auto_split,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    destroy_distributed,
    explain,
    find_blocks,
    find_ties,
    get_dp_rank,
    get_pp_rank,
    init_distributed,
)
from course_pp.parallel.meta_device import meta_copy
from course_pp.parallel.split import crossing
from course_pp.schedule import build as build_schedule
from source_code.hf_pp.families import FAMILIES, LAYERS, Example, build, called, example, tensor_of
from tests.equality import Trained, assert_same_training, sharded_adamw, train
from tests.parallel.foreign import freeze_gradients

RANKS_IMPORT = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "t5", "llama")]


def loss_of(output: Any, target: Tensor) -> Tensor:
    return (tensor_of(output) - target).square().mean()


def target_of(name: str) -> Tensor:
    """Return a target of the shape of the model's result."""
    with torch.no_grad():
        like = tensor_of(called(build(name).eval(), example(name)))
    return torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(3))


def in_turn(stages: list[nn.Module], given: Example) -> Any:
    value = called(stages[0], given)
    for stage in stages[1:]:
        value = stage(**value)
    return value


@pytest.mark.parametrize("n_stages", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_stages_called_one_after_another_are_the_model(name: str, n_stages: int) -> None:
    """In training, dropout included, the stages have the same result to the last bit.

    They also have the same gradients under the same names.
    """
    model, cut, batch = build(name), build(name), example(name, seed=1)
    stages = auto_split(cut, example(name), n_stages)
    assert set().union(*(stage.state_dict() for stage in stages)) == model.state_dict().keys()
    held = [p for stage in stages for p in {id(p): p for p in stage.parameters()}.values()]
    assert len(held) == len(list(model.parameters())) + sum(len(tie) - 1 for tie in stages[0].ties)
    results = []
    for run in (lambda: called(model, batch), lambda: in_turn(stages, batch)):
        torch.manual_seed(7)
        result = tensor_of(run())
        result.square().mean().backward()
        results.append(result)
    assert torch.equal(*results)
    gradients = {parameter_name: p.grad for parameter_name, p in cut.named_parameters()}
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(
            gradients[parameter_name], parameter.grad, rtol=1e-12, atol=1e-12
        )


def trained_in_one_process(name: str) -> Trained:
    model, batch, target = build(name).eval(), example(name), target_of(name)

    def step(_: int) -> Tensor:
        loss = loss_of(called(model, batch), target)
        loss.backward()
        return loss

    return train([model], 2, step)


def shorter(name: str, batch: Example) -> Example:
    """Return the batch without its last columns, where the model takes sequences of any length."""
    if name in ("ViT", "U-Net", "one block, repeated"):
        return batch
    return {k: v[:, :-2] for k, v in batch.items()} if isinstance(batch, dict) else batch[:, :-2]


def train_on_rank(
    rank: int, name: str, engine: str, schedule: str, n_ranks: int, m: int
) -> Trained:
    model, batch, target = build(name).eval(), example(name), target_of(name)
    one = {k: v[:1] for k, v in batch.items()} if isinstance(batch, dict) else batch[:1]
    placement = build_schedule(schedule, n_ranks, m).placement
    stages = auto_split(model, shorter(name, one), len(placement))
    mine = {stage: stages[stage] for stage, ranks in enumerate(placement) if ranks == (rank,)}
    if engine == "runtime":
        pipeline = runtime.Pipeline(
            build_schedule(schedule, n_ranks, m), mine, loss_of, tied=stages[0].ties
        )
        return train(mine.values(), 2, lambda _: pipeline.step(batch, target=target))
    mesh = init_distributed(DistributedConfig(pp=n_ranks))
    sizes = {"device_mesh": mesh, "device": "cpu", "n_stages": len(placement), "inputs": one}
    built = [build_pipeline_stage(module, stage=i, **sizes) for i, module in mine.items()]
    of_torch = build_pipeline_schedule(built, m, loss_of, schedule)
    trained = train(mine.values(), 2, lambda _: of_torch.step(batch, target=target))
    destroy_distributed()
    return trained


ON_RANKS = [
    (name, engine, schedule, n_ranks)
    for name in FAMILIES
    for engine, schedule in (
        ("runtime", "1f1b"),
        ("parallel", "gpipe"),
        ("runtime", "zb_v"),
        ("parallel", "zb_v"),
    )
    for n_ranks in ((1, 2) if schedule == "zb_v" else (2, 4))
]
SAMPLE = [("GPT-2, classification", "runtime", "1f1b", 4), ("T5", "parallel", "zb_v", 2)]
# their masks ask for values
ASKING = ("Llama", "GPT-2, language model", "Mistral, sliding window", "BERT")
SAMPLE += [(name, "parallel", "zb_v", 1) for name in ASKING]


@pytest.mark.parametrize(
    ("name", "engine", "schedule", "n_ranks"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.full) for case in ON_RANKS],
)
def test_stages_train_on_ranks_as_in_one_process_at_any_length(
    name: str, engine: str, schedule: str, n_ranks: int
) -> None:
    ranks = on_ranks(n_ranks, train_on_rank, name, engine, schedule, n_ranks, 4, timeout_s=100)
    # transformers' norms round to float32, which can make more of a difference in the last digit.
    assert_same_training(ranks, trained_in_one_process(name), find_ties(build(name)), (1e-9, 1e-8))


def recomputing(reentrant: bool) -> nn.Module:
    """Return a Llama as fine-tuning scripts prepare it.

    Layers are recomputed, and the embedding is frozen and then hooked.
    """
    model: Any = build("Llama").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.get_input_embeddings().requires_grad_(False)
    model.enable_input_require_grads()
    return model  # type: ignore[no-any-return]


def recomputing_on_rank(
    rank: int, engine: str, n_ranks: int, m: int
) -> dict[tuple[bool, str], Trained]:
    """Return the result of training by the kind of recomputation and the schedule.

    No stage is told its number.
    """
    batch, target, found = example("Llama"), target_of("Llama"), {}
    mesh = init_distributed(DistributedConfig(pp=n_ranks))
    for reentrant, schedule in product((False, True), ("1f1b", "zb_v")):
        placement = build_schedule(schedule, n_ranks, m).placement
        stages = auto_split(recomputing(reentrant), batch[:1], len(placement))
        mine = [stage for stage, ranks in zip(stages, placement, strict=True) if ranks == (rank,)]
        if engine == "runtime":
            numbered = {stages.index(stage): stage for stage in mine}
            of_ours = runtime.Pipeline(build_schedule(schedule, n_ranks, m), numbered, loss_of)
            run = lambda: of_ours.step(batch, target=target)  # noqa: B023, E731
        else:
            built = [build_pipeline_stage(stage, mesh, "cpu", inputs=batch[:1]) for stage in mine]
            of_torch = build_pipeline_schedule(built, m, loss_of, schedule)
            run = lambda: of_torch.step(batch, target=target)  # noqa: B023, E731

        def step(_: int) -> Any:
            loss = run()  # noqa: B023
            for module in mine:  # noqa: B023
                freeze_gradients(module)
            return loss

        found[reentrant, schedule] = train(mine, 2, step)
    return found


@pytest.mark.parametrize("engine", ["runtime", "parallel"])
def test_a_model_that_recomputes_its_layers_is_cut(engine: str) -> None:
    model, batch, target = recomputing(False), example("Llama"), target_of("Llama")

    def step(_: int) -> Tensor:
        loss = loss_of(called(model, batch), target)
        loss.backward()
        freeze_gradients(model)
        return loss

    one = train([model], 2, step)
    ranks = on_ranks(2, recomputing_on_rank, engine, 2, 4, timeout_s=100)
    for case in ranks[0]:
        assert_same_training([found[case] for found in ranks], one, (), (1e-9, 1e-8))


class Recomputing(nn.Module):
    """A model that recomputes the result of one module and the argument of another."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(first + checkpoint(self.middle, first, use_reentrant=self.reentrant))


def test_a_received_value_is_not_recomputed() -> None:
    """A reentrant checkpoint would not pass on the gradient of a received value that it returns."""
    for reentrant in (False, True):
        model, x = Recomputing(reentrant), torch.ones(3, 4)
        first, last = auto_split(model, x, at=["last"])
        value = first(x)
        received = tuple(tensor.detach().requires_grad_() for tensor in value["values"])
        given = {**value, "values": received}
        if reentrant:
            with pytest.raises(ValueError, match="use_reentrant=False"):
                last(**given)
            continue
        gradients = torch.autograd.grad(last(**given).sum(), received)
        torch.autograd.backward(value["values"], gradients)
        expected = torch.autograd.grad(model(x).sum(), list(model.first.parameters()))
        assert all(
            torch.equal(p.grad, each)
            for p, each in zip(model.first.parameters(), expected, strict=True)
        )


class Hooked(nn.Sequential):
    """A module with lists and dicts of its own beside torch's hooks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        self.my_hooks, self._seen = [lambda x: x + 1], self[1].__dict__.setdefault("_seen", {})
        self.register_load_state_dict_pre_hook(
            lambda module, *_: module._seen.update(loaded=type(module))
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.my_hooks[0](x))


def test_hooks_of_a_model_are_its_stages_and_its_own_lists_stay_as_they_are() -> None:
    first, last = auto_split(model := Hooked(), torch.ones(3, 4), 2)
    seen = model._seen
    assert meta_copy(first).my_hooks == model.my_hooks
    del model
    first.load_state_dict(first.state_dict())
    assert seen == {"loaded": type(first)}
    assert last._seen is seen


class AddsInPlace(nn.Module):
    """A model in which ``same`` returns its argument, and that is changed between the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.last = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.same(self.first(x))
        x += 1
        return self.last(x)


def in_place() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "at"), [(AddsInPlace, "same"), (AddsInPlace, "last"), (in_place, "1")]
)
def test_what_a_stage_receives_may_be_changed_in_place(
    model: Callable[[], nn.Module], at: str
) -> None:
    torch.manual_seed(0)
    whole, x = model(), torch.ones(3, 4)
    first, last = auto_split(whole, x, at=[at])
    value = first(x)
    # leaves, as messages are
    received = tuple(tensor.detach().requires_grad_() for tensor in value["values"])
    result = last(**{**value, "values": received})
    assert torch.equal(result, whole(x))
    gradients = torch.autograd.grad(result.sum(), received)
    torch.autograd.backward(value["values"], gradients)
    parts = {
        name: parameter.grad
        for name, parameter in whole.named_parameters()
        if "first" in name or name[0] == "0"
    }
    whole.zero_grad()
    whole(x).sum().backward()
    for name, gradient in parts.items():
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad)


class Counts(nn.Linear):
    """A module that looks for numbers other than zero, which the meta device cannot do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(x.nonzero())


def test_a_size_for_which_a_module_does_not_say_what_it_returns_is_refused_with_the_remedy() -> (
    None
):
    first, second = auto_split(nn.Sequential(Counts(4, 4), nn.Linear(4, 4)), torch.ones(3, 4), 2)
    with pytest.raises(
        RuntimeError, match=r"'0' is of another stage, .*: give auto_split an example of this size"
    ):
        second(**first(torch.ones(5, 4)))


def test_noise_on_the_input_is_drawn_by_one_stage() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = auto_split(model, x := torch.ones(3, 4), 2)
    results = []
    for run in (lambda: model(x), lambda: second(**first(x))):
        torch.manual_seed(0)
        results.append(run())
    assert torch.equal(*results)


def test_an_image_that_no_later_stage_looks_into_does_not_travel() -> None:
    for stage in auto_split(build("ViT"), example("ViT"), 4)[:-1]:
        assert [tensor.numel() for tensor in stage.sent_for_example()[1]["inputs"]] == [0]


SHARDED = ("Llama", "GPT-2, language model")


def sharded_on_rank(rank: int, name: str) -> tuple[Trained, float]:
    model, batch, target = build(name).eval(), example(name), target_of(name)
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2))
    rows = slice(2 * get_dp_rank(mesh), 2 * get_dp_rank(mesh) + 2)
    module = auto_split(model, batch[:1], 2)[get_pp_rank(mesh)]
    apply_ac(module, "full")
    apply_fsdp2(module, mesh, MixedPrecisionPolicy())
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=batch[:1])
    pipeline = build_pipeline_schedule(stage, 2, loss_of, "1f1b")
    step = lambda _: pipeline.step(batch[rows], target=target[rows])  # noqa: E731
    trained = train([module], 2, step, sharded_adamw([module]))
    norm = clip_grad_norm_(stage, 1e9, device_mesh=mesh).item()
    destroy_distributed()
    return trained, norm


@pytest.mark.parametrize("name", [SHARDED[0], pytest.param(SHARDED[1], marks=pytest.mark.full)])
def test_stages_are_sharded_and_recomputed_as_any_others(name: str) -> None:
    ranks = on_ranks(4, sharded_on_rank, name, timeout_s=100)
    assert_same_training(
        [trained for trained, _ in ranks],
        trained_in_one_process(name),
        find_ties(build(name)),
        (1e-9, 1e-8),
    )
    assert len({norm for _, norm in ranks}) == 1


def test_a_model_is_cut_before_the_modules_that_are_named() -> None:
    stages = auto_split(build("Llama"), example("Llama"), at=["model.layers.1", "model.norm"])
    found = [list(find_blocks(stage)) for stage in stages[:2]]
    assert found == [["model.layers.0"], ["model.layers.1", "model.layers.2", "model.layers.3"]]
    assert [name for name, _ in stages[2].named_parameters()] == [
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert torch.equal(
        tensor_of(in_turn(stages, example("Llama"))), tensor_of(build("Llama")(example("Llama")))
    )


AS_A_WHOLE = "it is no module that one stage holds as a whole: name another, such as "
NO_PLACES = [
    ("Llama", ["model.layer.2"], f"{AS_A_WHOLE}'model.layers.2' or 'model.layers.3'"),
    ("Llama", ["model.layers.2.mlp"], f"{AS_A_WHOLE}'model.layers.2' or"),
    ("Llama", ["model.rotary_emb"], AS_A_WHOLE),
    ("Llama", ["model.embed_tokens"], "in the order of their calls, and not the first"),
    (
        "Llama",
        ["model.layers.2", "model.layers.1"],
        "'model.layers.1' (a str): name each module once, in the order",
    ),
    ("T5", ["decoder.dropout"], "it is called 2 times: name one that is called once, or"),
]


@pytest.mark.parametrize(("family", "at", "said"), NO_PLACES)
def test_a_name_that_is_no_place_to_cut_is_refused_with_one_that_is(
    family: str, at: list[str], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        auto_split(build(family), example(family), at=at)


def test_as_many_stages_as_names_say_or_a_refusal() -> None:
    n = LAYERS + 3
    for given, said in (
        ({"n_stages": 3, "at": ["2"]}, "make 2 stages, so give 2"),
        ({}, "give a number, or names in"),
        (
            {"n_stages": n},
            f"n_stages is {n} .*: the example makes {n - 1} calls of Sequential's modules",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            auto_split(build("Sequential"), example("Sequential"), **given)
    with pytest.raises(ValueError, match="it is called 0 times: name one that is called once"):
        auto_split(Skipping(), torch.ones(2, 4), at=["never"])


def hooked(model: nn.Module) -> None:
    model.forward = partial(model.forward)


@pytest.mark.parametrize("replace", [hooked, nn.Module.compile])
@pytest.mark.parametrize("at", ["", "model"])
@pytest.mark.slow
def test_a_model_whose_forward_was_replaced_is_refused_and_its_blocks_are_not(
    replace: Any, at: str
) -> None:
    model = build("Llama")
    replace(model.get_submodule(at))
    (problem,) = explain(model, example("Llama"))
    assert problem.kind == "replaced forward"
    with pytest.raises(
        ValueError, match=f"the forward of '{at or 'the model'}' was replaced .*cut the model first"
    ):
        auto_split(model, example("Llama"), 2)
    model = build("Sequential")
    hooked(model[0])
    assert len(auto_split(model, example("Sequential"), 2)) == 2


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class SameTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.first(x)))


def test_the_second_name_of_a_module_leads_to_its_calls() -> None:
    with pytest.raises(
        ValueError, match=r"'again' .*it is called 2 times, as 'first' is the same module: name one"
    ):
        auto_split(SameTwice(), torch.ones(2, 4), at=["again"])


def test_what_crosses_is_told_once_with_all_who_read_it() -> None:
    found = crossing(auto_split(build("U-Net"), example("U-Net"), 3))
    assert [found.calls[begin] for begin in found.begins] == ["middle", "up2"]
    told = [(found.calls[v.made], [found.calls[number] for number in v.read]) for v in found.values]
    assert told[:2] == [("into", ["down1", "join1"]), ("down1", ["down2", "join2"])]
    assert [sum(v.n_bytes for v in found.over(cut)) for cut in range(2)] == [
        sum(tensor.nbytes for tensor in stage.sent_for_example()[1]["values"])
        for stage in auto_split(build("U-Net"), example("U-Net"), 3)[:2]
    ]
    with pytest.raises(ValueError, match="give the list that auto_split returns"):
        crossing([nn.Linear(1, 1)])
