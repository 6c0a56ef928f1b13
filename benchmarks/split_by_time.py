"""How far the cut of `auto_split(by="time")` is from the best contiguous cut, on five models.

    python benchmarks/split_by_time.py [repeats] [stages]

Each model is cut once, as a user would. Then what each of its calls costs, forward and backward, is
measured again and again, in processor time; by the medians, all contiguous cuts are compared.
Printed is the slowest stage of the cut that was made over the slowest stage of the best one, and
the same for a cut by parameters, and of how many repeats the cut by time was within 10 %: a cut is
made from one measurement, and the next may differ.
"""

import sys
from importlib import import_module
from itertools import combinations, pairwise
from math import comb
from statistics import median

import torch
from torch import Tensor, nn

from course_pp.parallel import auto_split
from course_pp.parallel.split import cutting
from course_pp.parallel.split.recording import as_call, record

NAMES = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
WORDS, ROWS, SEQ_LEN = 16_000, 2, 128
MODELS = {
    "GPT-2": ("gpt2", "GPT2LMHeadModel", {"n_layer": 8, "n_embd": 256, "n_head": 4}),
    "Llama": ("llama", "LlamaForCausalLM", NAMES | {"num_key_value_heads": 2}),
    "BERT": ("bert", "BertForMaskedLM", NAMES),
    "T5": (
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 256, "num_layers": 4, "num_heads": 4, "d_ff": 1024},
    ),
    "ViT": ("vit", "ViTForImageClassification", NAMES | {"image_size": 96, "patch_size": 8}),
}


def build(name: str) -> nn.Module:
    folder, model, sizes = MODELS[name]
    kind = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), model)
    words = (
        {}
        if name == "ViT"
        else {"vocab_size": WORDS, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
    )
    torch.manual_seed(0)
    return kind(kind.config_class(**sizes, **words)).eval()


def example(name: str) -> dict[str, Tensor] | Tensor:
    if name == "ViT":
        return torch.randn(ROWS, 3, 96, 96)
    ids = torch.randint(3, WORDS, (ROWS, SEQ_LEN))
    return {"input_ids": ids, "decoder_input_ids": ids[:, : SEQ_LEN // 2]} if name == "T5" else ids


def slowest(costs: list[float], ends: tuple[int, ...]) -> float:
    return max(sum(costs[a:b]) for a, b in pairwise((0, *ends, len(costs))))


def ends_of(stages: list[nn.Module]) -> tuple[int, ...]:
    """The numbers of the calls that stages begin with."""
    return tuple(stage._board.first for stage in stages[1:])


def row(name: str, repeats: int, n_stages: int) -> str:
    model, given = build(name), example(name)
    recording = record(model, as_call(given))
    chosen, by_parameters = (
        ends_of(auto_split(model, given, n_stages, by)) for by in ("time", "parameters")
    )
    samples = [
        [cost.nanoseconds for cost in cutting._measured(model, recording)] for _ in range(repeats)
    ]
    costs = [median(of_call) for of_call in zip(*samples, strict=True)]
    every = list(combinations(range(1, len(costs)), n_stages - 1))
    best = min(slowest(costs, ends) for ends in every)
    cuts = [
        cutting.split_by_cost(len(costs), n_stages, lambda _, a, b, s=sample: sum(s[a:b]))
        for sample in samples
    ]
    over = [slowest(costs, tuple(first for first, _ in cut[1:])) / best for cut in cuts]
    within = sum(ratio <= 1.1 for ratio in over)
    n_cuts = comb(len(costs) - 1, n_stages - 1)
    by_time = slowest(costs, chosen) / best
    by_size = slowest(costs, by_parameters) / best
    return (
        f"{name:<8}{len(costs):>6}{n_cuts:>8}{best / 1e6:>10.1f}{by_time:>10.3f}{by_size:>14.3f}"
        f"{within:>10} of {repeats}"
    )


def main(repeats: int = 11, n_stages: int = 4) -> None:
    print(
        f"torch {torch.__version__}, {n_stages} stages, one thread, medians of {repeats}; ratios to"
        " the best cut"
    )
    print(
        f"{'model':<8}{'calls':>6}{'cuts':>8}{'best ms':>10}{'by time':>10}{'by parameters':>14}{'within 10 %':>15}"
    )
    for name in MODELS:
        print(row(name, repeats, n_stages), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
