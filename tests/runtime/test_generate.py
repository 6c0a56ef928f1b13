"""Text from a pipeline is the whole model's, and prompts in turns keep ranks at work."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer, build_stage_module
from course_pp.parallel import auto_split
from course_pp.runtime import (
    EmulatedCluster,
    EmulatedLink,
    Pipeline,
    Recorder,
    StepFailed,
    generate,
)
from course_pp.schedule import Costs, Timeline, build, check, generation, simulate
from tests.processes import no_process_left

CONFIG = ModelConfig(dim=16, n_layers=4, n_heads=2, n_kv_heads=1, vocab_size=23, max_seq_len=24)
N_TOKENS = 8
LIMIT_S = 60.0


def prompts_of(n: int, lengths: Sequence[int] = (3, 4, 5, 9)) -> list[list[int]]:
    rng = random.Random(0)
    prompts = []
    for _ in range(n):
        prompts.append([rng.randrange(CONFIG.vocab_size) for _ in range(rng.choice(lengths))])
    return prompts


def sharpened(model: nn.Module) -> nn.Module:
    """With weights so large that texts differ, which those of a fresh model hardly do."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.double()


def of_one_process(prompts: list[list[int]], n_tokens: int = N_TOKENS) -> list[list[int]]:
    """The whole model, without a cache."""
    torch.manual_seed(0)
    model = sharpened(Transformer(CONFIG))
    found = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(n_tokens):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found


def stages_on(rank: int, placement: Sequence[int]) -> dict[int, nn.Module]:
    torch.manual_seed(0)
    n = len(placement)
    return {
        s: sharpened(build_stage_module(CONFIG, s, n)) for s in range(n) if placement[s] == rank
    }


def generated(
    rank: int, placement: Sequence[int], prompts: list[list[int]], options: dict[str, Any]
) -> Any:
    return generate(stages_on(rank, placement), prompts, N_TOKENS, timeout_s=30, **options)


CASES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "20 prompts on 4 ranks": ((0, 1, 2, 3), 20, {}),
    "in a V": ((0, 1, 1, 0), 5, {}),
    "in a loop": ((0, 1, 0, 1), 3, {}),
    "without a cache": ((0, 1), 5, {"cache": False}),
    "one rank": ((0,), 3, {}),
}


@pytest.mark.parametrize(("placement", "n_prompts", "options"), CASES.values(), ids=CASES)
def test_tokens_are_those_of_the_whole_model(
    placement: tuple[int, ...], n_prompts: int, options: dict[str, Any]
) -> None:
    prompts = prompts_of(n_prompts)
    expected = of_one_process(prompts)
    assert len({*map(tuple, expected)}) > n_prompts / 2, "the texts hardly differ"
    with no_process_left():
        for found in on_ranks(
            1 + max(placement), generated, placement, prompts, options, timeout_s=LIMIT_S
        ):
            assert found == expected


def test_a_prompt_is_done_after_the_end() -> None:
    prompts = prompts_of(6)
    whole = of_one_process(prompts)
    end = whole[0][2]
    expected = [text[: text.index(end) + 1] if end in text else text for text in whole]
    for found in on_ranks(2, generated, (0, 1), prompts, {"end": end}, timeout_s=LIMIT_S):
        assert found == expected


class Caching(nn.Module):
    """A stage that counts its caches alive at each call."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.kept = list[int]()
        self._made: WeakSet[Any] = WeakSet()

    def new_cache(self) -> Any:
        self._made.add(cache := self.stage.new_cache())
        return cache

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        self.kept.append(len(self._made))
        return self.stage(x, cache=cache)


def caches_kept(rank: int, prompts: list[list[int]], end: int | None) -> list[int]:
    (stage,) = stages_on(rank, (0, 1)).values()
    generate(watched := Caching(stage), prompts, N_TOKENS, end=end, timeout_s=30)
    return watched.kept


def caches_needed(texts: list[list[int]], end: int | None, is_last: bool) -> list[int]:
    """Return the number of prompts that still need a cache at each call."""
    alive: set[int] = set()
    found = []
    for at in range(N_TOKENS):
        for prompt, text in enumerate(texts):
            if end in text[:at]:
                alive.discard(prompt)
                continue
            alive.add(prompt)
            found.append(len(alive))
            if at == N_TOKENS - 1 or (is_last and text[at] == end):
                alive.discard(prompt)
    return found


@pytest.mark.parametrize("stops", [False, True])
def test_the_cache_of_a_prompt_goes_when_the_prompt_is_done(stops: bool) -> None:
    prompts = prompts_of(4)
    texts = of_one_process(prompts)
    end = texts[0][2] if stops else None
    for rank, kept in enumerate(on_ranks(2, caches_kept, prompts, end, timeout_s=LIMIT_S)):
        assert kept == caches_needed(texts, end, rank == 1)


def emulated(rank: int, prompts: list[list[int]], cluster: EmulatedCluster) -> Timeline:
    recorder = Recorder()
    generate(
        stages_on(rank, range(4)),
        prompts,
        N_TOKENS,
        cluster=cluster,
        recorder=recorder,
        timeout_s=30,
    )
    return recorder.timeline(name="generation")


def test_eight_prompts_use_the_ranks_three_times_as_well_as_one() -> None:
    cluster = EmulatedCluster(Costs(forward=0.012, latency=0.001, message_bytes=10, bandwidth=5000))
    used = {}
    for n in (1, 8):
        timeline = on_ranks(4, emulated, prompts_of(n), cluster, timeout_s=LIMIT_S)[0]
        predicted = cluster.predict(generation(4, n, N_TOKENS))
        assert (
            float(timeline.makespan) == pytest.approx(float(predicted.makespan), abs=1e-6)
            or timeline.overruns
        )
        assert timeline.feedback == n
        used[n] = predicted.utilisation if timeline.trouble else timeline.utilisation
    assert used[8] >= 3 * used[1]


def test_a_token_takes_the_link_from_the_last_rank_to_the_first() -> None:
    """Around a ring of four that is one link, and what an activation weighs does not count."""
    links = tuple(EmulatedLink(latency, 1.0) for latency in (1.0, 2.0, 3.0, 9.0))
    cluster = EmulatedCluster(Costs(forward=10.0, message_bytes=4), links=links)
    assert cluster.predict(generation(4, 1, 2)).makespan == 2 * (4 * 10 + 1 + 2 + 3 + 3 * 4) + 9


def refused(rank: int, given: list[dict[str, Any]]) -> str:
    arguments = {
        "stages": stages_on(rank, (0, 1)),
        "prompts": [[1, 2]],
        "n_tokens": 2,
        **given[rank],
    }
    try:
        generate(timeout_s=20, **arguments)
    except (ValueError, StepFailed) as error:
        return str(error)
    return "taken"


class Headless(nn.Module):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": torch.zeros(*ids.shape, 4)}


class Skipping(nn.Linear):
    reads = ("mask",)


NO_CACHE: dict[str, Any] = {"stages": nn.Linear(4, 4)}
BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "other prompts": ([{}, {"prompts": [[1, 3]]}], r"rank 1 was given prompts=[[1, 3]]"),
    "an empty prompt": ([{"prompts": [[1], []]}] * 2, "prompt 1 has no tokens: begin it with one"),
    "no tokens": ([{}, {"n_tokens": 0}], "generate: n_tokens is 0 (an int): give at least 1"),
    "no cache": (
        [{}, NO_CACHE],
        "stage here is a Linear without new_cache(): pass cache=False, or a module whose",
    ),
    "values": (
        [{}, {"stages": Skipping(4, 4)}],
        (
            "stage here reads or writes 'mask' beyond its neighbours, which generate does not"
            " carry: pass it along"
        ),
    ),
    "twice": (
        [{}, {"stages": {0: None}}],
        "ranks 0 and 1 both hold stage 0: give it to one of them",
    ),
    "too long": (
        [{"n_tokens": 30}] * 2,
        "with what the cache holds the sequence has 25 tokens, more than max_seq_len=24",
    ),
    "no logits": (
        [{"cache": False}, {"cache": False, "stages": Headless()}],
        (
            "the last stage returned ['last_hidden_state'], no logits (batch, seq, vocabulary):"
            " give it the head"
        ),
    ),
    "choice": (
        [{"choose": lambda logits: torch.tensor([0, 0])}] * 2,
        "choose returned tensor([0, 0]) for logits (1, vocabulary): return one token id, (1,)",
    ),
}


@pytest.mark.parametrize(("given", "says"), BAD.values(), ids=BAD)
def test_misuse_is_refused_by_name_on_every_rank(given: list[dict[str, Any]], says: str) -> None:
    for found in on_ranks(2, refused, given, timeout_s=LIMIT_S):
        assert says in found


def outside(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return str(len(generate(stages_on(0, (0,)), [[1]], 1, group=group)[0]))
    with pytest.raises(ValueError, match="is not in the") as caught:
        generate(None, [[1]], 1, group=group)
    return str(caught.value)


def test_a_rank_outside_the_group_is_sent_away() -> None:
    assert on_ranks(2, outside, timeout_s=LIMIT_S) == [
        "1",
        "rank 1 is not in the pipeline's group: call it on the group's ranks only",
    ]


def test_the_order_of_generation_is_legal_and_as_busy_as_prompts_allow() -> None:
    for n_prompts in range(1, 9):
        schedule = generation(4, n_prompts, 50)
        assert check(schedule) == []
        assert simulate(schedule).utilisation == pytest.approx(min(1, n_prompts / 4), rel=0.02)
    stuck = schedule.actions[0][::-1]
    backwards = replace(schedule, actions=(stuck, *schedule.actions[1:]))
    assert "deadlock" in check(backwards)[0]
    trained = replace(build("1f1b", 4, 8), feedback=2)
    assert check(trained) == [
        "tokens feed back to the first stage, yet there are backwards: generation is forward only"
    ]


def test_what_is_no_generation_or_too_much_of_it_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="feeds tokens back",
    ):
        Pipeline(generation(1, 1, 2), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="8,000,000"):
        generation(2, 1000, 1000, placement=[0, 1] * 4)


def of_transformers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.LlamaConfig(vocab_size=29, max_position_embeddings=64, **sizes)
    return sharpened(transformers.LlamaForCausalLM(config)).eval()


def generated_by_cut(rank: int, prompts: list[list[int]]) -> list[list[int]]:
    stages = auto_split(of_transformers(), torch.ones(1, 4, dtype=torch.int64), 2)
    return generate({rank: stages[rank]}, prompts, N_TOKENS, cache=False, timeout_s=60)


@pytest.mark.long
def test_a_model_of_transformers_that_was_cut_generates_what_it_does_whole() -> None:
    prompts = prompts_of(5)
    model = of_transformers()
    expected = []
    for prompt in prompts:
        options = {
            "max_new_tokens": N_TOKENS,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        expected.append(
            model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        )
    for found in on_ranks(2, generated_by_cut, prompts, timeout_s=LIMIT_S):
        assert found == expected
