"""The models of notebook 10, written by others, small and with random weights, and their steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer, build_stage_module
from course_pp.parallel import auto_split, count_collectives
from course_pp.parallel.split import crossing
from course_pp.runtime import EmulatedCluster, Pipeline, Recorder, generate
from course_pp.schedule import Costs, Timeline, build

ARTICLE = ModelConfig(768, 12, 12, 50_000, n_kv_heads=3, ffn_dim=3072, max_seq_len=512)
"""The model of 179.4 million parameters that a widely read article trains."""
WORDS = 96
WIDTH = 32
LAYERS = 6
IDS = torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(0))
"""Four rows of tokens."""


def gpt2() -> nn.Module:
    """GPT-2 with a head for language modelling, tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "n_layer": LAYERS,
        "n_embd": WIDTH,
        "n_head": 4,
        "vocab_size": WORDS,
        "n_positions": 64,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=1))
    return model.double().eval()


def t5() -> nn.Module:
    """Return an encoder and a decoder, each of three blocks."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 3,
        "num_heads": 4,
        "vocab_size": WORDS,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, use_cache=False)).double().eval()


class UNet(nn.Module):
    """A model that goes down and up again, with a skip connection on each level."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 4 * width, 2, stride=2)
        self.down3 = nn.Conv2d(4 * width, 8 * width, 2, stride=2)
        self.middle = nn.Conv2d(8 * width, 8 * width, 1)
        self.up3 = nn.ConvTranspose2d(8 * width, 4 * width, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(8 * width, width, 2, stride=2)
        self.up1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down1(images).relu()
        second = self.down2(first).relu()
        x = self.middle(self.down3(second).relu()).relu()
        x = torch.cat([self.up3(x), second], 1)
        x = torch.cat([self.up2(x), first], 1)
        return self.head(self.up1(x).relu())


class Remembers(nn.Module):
    """A block that hands something on without returning it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Keeping(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) * self.first.gate


class _Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.gate = x.sigmoid()
        return self.linear(x)


class Noisy(nn.Module):
    """A model that adds noise between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x + 0.1 * torch.randn_like(x))


def in_turn(stages: Sequence[nn.Module], *inputs: Any) -> Any:
    """Call stages one after another: each returns the arguments of the next."""
    value = stages[0](*inputs)
    for stage in stages[1:]:
        value = stage(**value)
    return value


def scaled_down(config: ModelConfig, by: int = 4) -> Transformer:
    """Return a model of the same proportions and as many layers, ``by`` times as narrow."""
    small = ModelConfig(
        dim=config.dim // by,
        n_layers=config.n_layers,
        n_heads=config.n_heads // 3,
        n_kv_heads=1,
        vocab_size=config.vocab_size // by,
        ffn_dim=config.hidden_dim // by,
        max_seq_len=128,
    )
    torch.manual_seed(0)
    return Transformer(small)


def layers_of(stages: Sequence[nn.Module]) -> list[int]:
    """Return the number of a decoder's layers that each stage calls."""
    cut = crossing(stages)
    bounds = (0, *cut.begins, len(cut.calls))
    return [sum(name.startswith("layers.") for name in cut.calls[a:b]) for a, b in pairwise(bounds)]


def time_stages(stages: Sequence[nn.Module], *inputs: Any, repeats: int = 3) -> list[float]:
    """Return each stage's processor time for forward and backward in ms, medians of ``repeats``."""
    rows: list[list[float]] = [[] for _ in stages]
    for _ in range(repeats + 1):
        value: Any = None
        for row, stage in zip(rows, stages, strict=True):
            start = time.process_time()
            result = stage(*inputs) if value is None else stage(**_leaves(value))
            made = result["values"] if isinstance(result, dict) else (result,)
            sum(each.sum() for each in made).backward()
            row.append(1e3 * (time.process_time() - start))
            value = result
    for stage in stages:
        stage.zero_grad()
    return [statistics.median(row[1:]) for row in rows]


def _leaves(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "inputs": value["inputs"],
        "values": tuple(each.detach().requires_grad_() for each in value["values"]),
    }


def ends_apart(n_ranks: int = 2, n_steps: int = 3) -> dict[bool, float]:
    """Train GPT-2 on real ranks, without and with ``tied=``.

    Returns:
        The largest difference between head and embedding in the end, for each of the two.
    """
    ranks = on_ranks(n_ranks, _train, n_steps)
    return {tied: (ranks[0][tied] - ranks[-1][tied]).abs().max().item() for tied in (False, True)}


def _train(rank: int, n_steps: int) -> dict[bool, Tensor]:
    n_ranks = torch.distributed.get_world_size()
    ends = {}
    for tied in (False, True):
        stages = auto_split(gpt2(), IDS[:1, :-1], n_ranks)
        mine = stages[rank]
        ties = vars(stages[0])["ties"]
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        pipeline = Pipeline(build("1f1b", n_ranks, 4), mine, _loss, tied=ties if tied else ())
        for _ in range(n_steps):
            optimizer.zero_grad()
            pipeline.step(IDS[:, :-1], target=IDS[:, 1:])
            optimizer.step()
        ends[tied] = mine.get_parameter(ties[0].get(rank, "")).detach()
    return ends


def _loss(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(output.logits.flatten(0, 1), target.flatten())


class Down(nn.Module):
    """A stage on the way down, whose result a stage on the way up reads as well."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.writes = (f"level {level}",)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.linear(x).relu()
        return y, {self.writes[0]: y}


class Up(nn.Module):
    """A stage on the way up."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)
        self.reads = (f"level {level}",)

    def forward(self, x: Tensor, **skips: Tensor) -> Tensor:
        return self.linear(torch.cat([x, *skips.values()], -1)).relu()


def ladder(n_stages: int = 4) -> list[nn.Module]:
    """Return stages down and up again; the last reads a value of the first."""
    torch.manual_seed(0)
    half = n_stages // 2
    return [
        *(Down(level).double() for level in range(half)),
        *(Up(level).double() for level in reversed(range(half))),
    ]


def skip_step(schedule: str, n_ranks: int, m: int = 4) -> tuple[float, int]:
    """Run one step of `ladder` on real ranks.

    Returns:
        The largest difference of its gradients from one process, and the bytes that ranks sent.
    """
    ranks = on_ranks(n_ranks, _skip_step, schedule, n_ranks, m)
    expected = _ladder_in_one_process(m)
    apart = max(
        (gradient - expected[key]).abs().max().item()
        for found, _ in ranks
        for key, gradient in found.items()
    )
    return apart, sum(n_bytes for _, n_bytes in ranks)


def _batch(m: int) -> Tensor:
    return torch.randn(
        8 * m, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def _skip_step(rank: int, name: str, n_ranks: int, m: int) -> tuple[dict[str, Tensor], int]:
    schedule = build(name, n_ranks, m)
    stages = ladder()
    mine = {stage: stages[stage] for stage, ranks in enumerate(schedule.placement) if rank in ranks}
    pipeline = Pipeline(schedule, mine, mse_loss)
    pipeline.step(_batch(m), target=_batch(m))  # the first step also agrees on shapes
    for module in mine.values():
        module.zero_grad()
    counts = count_collectives(lambda: pipeline.step(_batch(m), target=_batch(m)))
    sent = sum(tally.n_bytes for (_, kind), tally in counts.tallies.items() if kind == "send")
    return _gradients(mine.items()), sent


def generate_text(n_prompts: Sequence[int], n_tokens: int = 6) -> dict[int, tuple[bool, Timeline]]:
    """Continue prompts on four emulated ranks.

    A stage takes 20 ms for a forward, or 40 or 80 ms on a busy machine.

    Returns:
        {number of prompts: (whether one process writes the same tokens, timeline of the ranks)}.
    """
    for forward_s in _FORWARDS_S:
        found = on_ranks(4, _generate, tuple(n_prompts), n_tokens, forward_s)[0]
        if all(
            tl.makespan <= _LATE * _forwards_in_a_row(n, n_tokens) * forward_s
            for n, (_, tl) in found.items()
        ):
            break
    return {n: (texts == _written_by_one(n, n_tokens), tl) for n, (texts, tl) in found.items()}


_FORWARDS_S = (0.02, 0.04, 0.08)
_LATE = 1.02


def _forwards_in_a_row(n_prompts: int, n_tokens: int, n_ranks: int = 4) -> int:
    """Return the length of the writing in forwards.

    That is a round of all prompts for each token but the last, and then the way out.
    """
    return max(n_prompts, n_ranks) * (n_tokens - 1) + n_prompts + n_ranks - 1


_WRITER = ModelConfig(dim=16, n_layers=4, n_heads=2, vocab_size=WORDS, max_seq_len=32)


def _prompts(n: int) -> list[list[int]]:
    return [[7 * i % WORDS, 1 + i, 2] for i in range(n)]


def _generate(
    rank: int, n_prompts: Sequence[int], n_tokens: int, forward_s: float
) -> dict[int, tuple[list[list[int]], Timeline]]:
    torch.manual_seed(0)
    stage = build_stage_module(_WRITER, rank, 4)
    cluster = EmulatedCluster(Costs(forward=forward_s))
    found = {}
    generate({rank: stage}, _prompts(1), 1)  # the first forward does much that is done once
    for n in n_prompts:
        recorder = Recorder()
        texts = generate({rank: stage}, _prompts(n), n_tokens, cluster=cluster, recorder=recorder)
        found[n] = texts, recorder.timeline(name=f"{n} prompts")
    return found


def _written_by_one(n: int, n_tokens: int) -> list[list[int]]:
    torch.manual_seed(0)
    model = Transformer(_WRITER)
    texts = []
    for prompt in _prompts(n):
        text = list(prompt)
        for _ in range(n_tokens):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        texts.append(text[len(prompt) :])
    return texts


def _ladder_in_one_process(m: int) -> dict[str, Tensor]:
    stages = ladder()
    x = _batch(m)
    skips = []
    for stage in stages:
        if isinstance(stage, Down):
            x, written = stage(x)
            skips.append(written)
        else:
            x = stage(x, **skips.pop())
    mse_loss(x, _batch(m)).backward()
    return _gradients(enumerate(stages))


def _gradients(stages: Iterable[tuple[int, nn.Module]]) -> dict[str, Tensor]:
    """Return every parameter's gradient by the stage's number and the parameter's name."""
    gradients: dict[str, Tensor] = {}
    for stage, module in stages:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            gradients[f"{stage}.{name}"] = parameter.grad
    return gradients
