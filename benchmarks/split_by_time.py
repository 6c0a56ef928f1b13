"""The distance between the cut of `auto_split(by="time")` and the best contiguous cut.

    python benchmarks/split_by_time.py [repeats] [stages]

Each of five models is cut once, as a user would cut it. Then the processor time of each of its
calls, forward and backward, is measured several times, and the medians decide which contiguous cut
is best. The table has the slowest stage of the cut by time over the slowest stage of the best cut,
and the same for a cut by parameters. A cut is made from one measurement, and the next may differ,
so the last column counts the repeats whose cut by time is within 10 %.
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
WORDS = 16_000
ROWS = 2
SEQ_LEN = 128
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
    words = {}
    if name != "ViT":
        words = {"vocab_size": WORDS, "use_cache": False, "bos_token_id": 0, "eos_token_id": 1}
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
    """Return the numbers of the calls with which stages begin."""
    return tuple(stage._segment.first for stage in stages[1:])


def row(name: str, repeats: int, n_stages: int) -> str:
    model = build(name)
    given = example(name)
    recording = record(model, as_call(given))
    chosen = ends_of(auto_split(model, given, n_stages, "time"))
    by_parameters = ends_of(auto_split(model, given, n_stages, "parameters"))
    samples = []
    for _ in range(repeats):
        samples.append([cost.nanoseconds for cost in cutting._measured(model, recording)])
    costs = [median(of_call) for of_call in zip(*samples, strict=True)]
    every = combinations(range(1, len(costs)), n_stages - 1)
    best = min(slowest(costs, ends) for ends in every)
    within = 0
    for sample in samples:
        cut = cutting.split_by_cost(len(costs), n_stages, lambda _, a, b, s=sample: sum(s[a:b]))
        ends = tuple(first for first, _ in cut[1:])
        within += slowest(costs, ends) <= 1.1 * best
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
    titles = f"{'best ms':>10}{'by time':>10}{'by parameters':>14}{'within 10 %':>15}"
    print(f"{'model':<8}{'calls':>6}{'cuts':>8}{titles}")
    for name in MODELS:
        print(row(name, repeats, n_stages), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
