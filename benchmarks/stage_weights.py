"""How much memory a rank needs to get its stage from files: the whole model on each, or only what
the stage needs.

    python benchmarks/stage_weights.py [ranks] [layers] [width]

A GPT-2 with random weights is saved in shards; the default is the 124M configuration. Each way then
runs on fresh ranks. Printed is the most memory resident on a rank above what it had before, in MB,
pages of the files it reads included, and what it holds in the end.
"""

import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from course_pp.launch import on_ranks
from course_pp.parallel import auto_split, weights_on_meta
from course_pp.training.checkpoint import load_stage

MB = 1e6


def main(n_ranks: int = 4, layers: int = 12, width: int = 768) -> None:
    with tempfile.TemporaryDirectory() as folder:
        n_parameters = on_ranks(1, save, folder, layers, width, timeout_s=500.0)[0]
        print(
            f"GPT-2 of {n_parameters / MB:.1f}M parameters, {4 * n_parameters / MB:.0f} MB in"
            f" {count(folder)} files"
        )
        print(f"{'MB on rank':<52}" + "".join(f"{rank:>8}" for rank in range(n_ranks)))
        rows = {
            way: on_ranks(n_ranks, way, folder, layers, width, n_ranks, timeout_s=500.0)
            for way in (whole, parts)
        }
    for way, ranks in rows.items():
        for what in ranks[0]:
            print(
                f"{f'{way.__doc__}: {what}':<52}"
                + "".join(f"{rank[what] / MB:>8.0f}" for rank in ranks)
            )


def count(folder: str) -> int:
    return len(list(Path(folder).glob("*.safetensors")))


def gpt2(layers: int, width: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, use_cache=False)
    ).eval()


def save(rank: int, folder: str, layers: int, width: int) -> int:
    model = gpt2(layers, width)
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(parameter.numel() for parameter in model.parameters())


def whole(rank: int, folder: str, layers: int, width: int, n_ranks: int) -> dict[str, float]:
    """whole model on each rank"""
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    before = start()
    disable_progress_bar()
    model = GPT2LMHeadModel.from_pretrained(folder, use_cache=False).eval()
    stage = auto_split(model, torch.zeros(1, 8, dtype=torch.int64), n_ranks)[rank]
    return {"peak": peak() - before, "held": held(stage)}


def parts(rank: int, folder: str, layers: int, width: int, n_ranks: int) -> dict[str, float]:
    """stage by load_stage"""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401 -- not to be counted

    before = start()
    with weights_on_meta():
        model = gpt2(layers, width)
    stage = auto_split(model, torch.zeros(1, 8, dtype=torch.int64), n_ranks)[rank]
    del model
    n_bytes = load_stage(stage, folder)
    return {"peak": peak() - before, "held": held(stage), "read": n_bytes}


def held(stage: nn.Module) -> float:
    return float(sum(parameter.nbytes for parameter in stage.parameters()))


def start() -> float:
    """Forget the peak so far; bytes that are resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> float:
    return status("VmHWM")


def status(name: str) -> Any:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return float(line.split()[1]) * 1024


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
