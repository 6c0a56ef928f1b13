"""Draw every figure used in prose, timelines from real runs, and write its alt text beside it in the README.

make images
"""

import re
from pathlib import Path

import torch

from course_pp import show
from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    init_distributed,
)
from course_pp.runtime import Recorder
from course_pp.schedule import Timeline

IMAGES = Path(__file__).parent
README = IMAGES.parent / "README.md"


def measure_pipeline(rank: int, n_ranks: int, n_microbatches: int) -> Timeline:
    """One recorded 1F1B step of a model large enough to hide the messages, after two steps of warm-up."""
    config = ModelConfig(dim=256, n_layers=8, n_heads=4, vocab_size=512, max_seq_len=128)
    mesh = init_distributed(DistributedConfig(pp=n_ranks))
    module = build_stage_module(config, rank, n_ranks)
    stage = build_pipeline_stage(module, mesh, "cpu", batch_size=4, seq_len=128, param_dtype=torch.float32)
    pipeline = build_pipeline_schedule(stage, n_microbatches, CrossEntropy(), "1f1b")
    tokens = torch.randint(config.vocab_size, (4 * n_microbatches, 128))
    recorder = Recorder()
    for _ in range(3):
        recorder.clear()
        with recorder.attach(stage):
            pipeline.step(tokens, target=tokens)
    return recorder.timeline()


def put(name: str, figure: show.ChartFigure) -> None:
    """Save a figure, and its alt text where the README shows it."""
    figure.save(IMAGES / name)
    shown = re.compile(rf"!\[[^\]]*\]\(images/{re.escape(name)}\)")
    text = README.read_text()
    if not shown.search(text):
        raise RuntimeError(f"README.md does not show images/{name}: remove it from images/make.py, or show it")
    README.write_text(shown.sub(f"![{figure.alt_text}](images/{name})", text))
    print(f"images/{name}: {figure.alt_text}")


def main() -> None:
    put("course_map.svg", show.course_map())
    timeline = on_ranks(2, measure_pipeline, 2, 8)[0]
    put("1f1b_on_two_ranks.svg", show.timeline(timeline))


if __name__ == "__main__":
    main()
