"""What notebook 12 trains: a text, by the course's script on the notebook's own ranks; and what it has saved."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from course_pp.launch import on_ranks
from course_pp.plan import Cluster, Layout, ModelConfig, gpu_named, predict

__all__ = [
    "MODEL",
    "SIZES",
    "TEXT",
    "calibrated",
    "continued",
    "planned_bytes",
    "saved_bytes",
    "step_seconds",
    "train_and_die",
]

TEXT = (
    "A plan is a guess until somebody measures it. "
    "Data parallelism needs tokens, tensor parallelism needs width, a pipeline needs microbatches. "
    "Ranks die, and the run goes on.\n"
)
SEQ_LEN, BATCH = 64, 16
MODEL = ModelConfig(dim=64, n_layers=4, n_heads=4, vocab_size=300, max_seq_len=SEQ_LEN)
SIZES = (
    f"--dim {MODEL.dim} --layers {MODEL.n_layers} --heads {MODEL.n_heads} --tokenizer-size {MODEL.vocab_size} "
    f"--seq-len {SEQ_LEN} --global-batch-size {BATCH} --eval-batches 1 --lr 0.01 --lr-schedule constant --warmup 4"
)
"""``MODEL`` as flags of ``train.py``, and how it is trained."""


def train_and_die(flags: str, n_ranks: int, rank: int, step: int) -> None:
    """Run ``train.py`` with ``flags`` on the notebook's own ranks; ``rank`` gets a SIGKILL when ``step`` begins.

    Raises:
        RankDied: once it has.
    """
    on_ranks(n_ranks, _run_script, str(_script()), shlex.split(flags), rank, step)


def _script() -> Path:
    """The course's script, here or above, as ``%torchrun`` looks for it."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (found := folder / "source_code" / "train.py").exists():
            return found
    raise FileNotFoundError(f"there is no source_code/train.py in {here} or above: open the notebook in its folder")


def _run_script(rank: int, script: str, flags: Sequence[str], dying: int, step: int) -> None:
    from course_pp.training import Trainer
    from course_pp.training.flags import parse

    if rank == dying:
        whole_step = Trainer.train_step

        def fatal_step(trainer: Trainer) -> Any:
            if trainer.step + 1 == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole_step(trainer)

        Trainer.train_step = fatal_step  # type: ignore[assignment,method-assign]
    runpy.run_path(script, run_name="train")["run"](parse(flags), None)


def step_seconds(log_folder: Path) -> float:
    """Seconds of a step, the median of the lines in ``metrics.jsonl`` but the first, whose steps also connect ranks."""
    lines = [json.loads(line) for line in (log_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds = [line["tokens_per_s"] for line in lines if line["event"] == "train"]
    return BATCH * SEQ_LEN / median(speeds[1:] or speeds)


_KINDS = {"model": "parameters", "optimizer": "moments"}


def saved_bytes(checkpoint: Path) -> list[dict[str, int]]:
    """For each rank, bytes of the parameters and of AdamW's two moments that it wrote."""
    from course_pp.training.checkpoint import contents

    held: dict[int, dict[str, int]] = {}
    for entry in contents(checkpoint):
        first, *_, last = entry.key.split(".")
        if first not in _KINDS or last == "step":  # of the counters, equal everywhere, one rank writes its own
            continue
        for piece in entry.pieces:
            mine = held.setdefault(piece.rank, dict.fromkeys(_KINDS.values(), 0))
            mine[_KINDS[first]] += entry.dtype.itemsize * prod(piece.sizes)
    return [held[rank] for rank in sorted(held)]


def planned_bytes(layout: Layout) -> list[dict[str, int]]:
    """Predict the same bytes on paper."""
    run = predict(MODEL, layout, Cluster(1, layout.n_ranks, gpu_named("laptop")), BATCH, SEQ_LEN)
    held = []
    for rank in range(layout.n_ranks):
        on_paper, stages = run.memory(rank), layout.stages(MODEL, layout.place(rank).pp)
        counters = 4 * sum(stage.total(len) for stage in stages)
        held.append({"parameters": on_paper["parameters"], "moments": on_paper["optimizer"] - counters})
    return held


def continued(folder: Path, prompt: str, n_tokens: int = 24) -> str:
    """Return how an exported model continues ``prompt`` in ``transformers``, always with the likeliest token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    words: Any = AutoTokenizer.from_pretrained(folder)
    asked = words(prompt, return_tensors="pt")
    said = model.generate(**asked, max_new_tokens=n_tokens, do_sample=False, pad_token_id=0)
    return str(words.decode(said[0], skip_special_tokens=True))


def calibrated(seconds: float, layout: Layout) -> Cluster:
    """A machine whose ranks are as fast as one timed step of ``MODEL`` says."""
    gpu = gpu_named("laptop")
    peak, memory = gpu.peak, gpu.memory_bandwidth
    for _ in range(4):  # links do not get faster with it
        cluster = Cluster(1, layout.n_ranks, replace(gpu, peak=peak, memory_bandwidth=memory))
        factor = predict(MODEL, layout, cluster, BATCH, SEQ_LEN).step_s / seconds
        peak, memory = peak * factor, memory * factor
    return cluster
