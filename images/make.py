"""Draw every figure used in prose, and write its alt text beside it; write the tables of schedules.

make images              all of it
make images ARGS=tables  the tables only: nothing is measured, and no picture changes
"""

import argparse
import re
import sys
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
ROOT = IMAGES.parent
sys.path.insert(0, str(ROOT / "docs"))
import cheat_sheet  # noqa: E402
import comparison  # noqa: E402
import lives  # noqa: E402
import schedule_table  # noqa: E402

# Three times and no more: what moves for longer needs a switch.
MOVING = """
 <style>
  .cover {{ transform: scaleX(0); transform-origin: {right:.2f}px 0; animation: uncover 8s linear 3; }}
  .cursor {{ visibility: hidden; animation: go 8s linear 3; }}
  @keyframes uncover {{ from {{ transform: scaleX(1); }} }}
  @keyframes go {{
    from {{ visibility: visible; }}
    to {{ visibility: visible; transform: translateX({width:.2f}px); }}
  }}
  @media (prefers-reduced-motion: reduce) {{ .cover, .cursor {{ animation: none; }} }}
 </style>
 <rect class="cover" x="{left:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}" fill="white"/>
 <line class="cursor" x1="{left:.2f}" x2="{left:.2f}" y1="{top:.2f}" y2="{bottom:.2f}" stroke="black"/>
</svg>
"""


def measure_pipeline(rank: int, n_ranks: int, n_microbatches: int) -> Timeline:
    """Record one 1F1B step, after two to warm up, of a model large enough to hide the messages."""
    config = ModelConfig(dim=256, n_layers=8, n_heads=4, vocab_size=512, max_seq_len=128)
    mesh = init_distributed(DistributedConfig(pp=n_ranks))
    module = build_stage_module(config, rank, n_ranks)
    stage = build_pipeline_stage(
        module, mesh, "cpu", batch_size=4, seq_len=128, param_dtype=torch.float32
    )
    pipeline = build_pipeline_schedule(stage, n_microbatches, CrossEntropy(), "1f1b")
    tokens = torch.randint(config.vocab_size, (4 * n_microbatches, 128))
    recorder = Recorder()
    for _ in range(3):
        recorder.clear()
        with recorder.attach(stage):
            pipeline.step(tokens, target=tokens)
    return recorder.timeline()


def moving(figure: show.ChartFigure) -> str:
    """Return a timeline as SVG that uncovers itself from left to right.

    A reader that shows no animations shows the whole picture.
    """
    wide, high = (inches * 72 for inches in figure.get_size_inches())
    x0, y0, x1, y1 = figure.axes[0].get_position().extents
    # SVG counts from the top, matplotlib from the bottom.
    place = {
        "left": x0 * wide,
        "right": x1 * wide,
        "top": (1 - y1) * high,
        "bottom": (1 - y0) * high,
        "width": (x1 - x0) * wide,
        "height": (y1 - y0) * high,
    }
    return figure.svg().rstrip().removesuffix("</svg>").rstrip() + MOVING.format(**place)


def put(name: str, figure: show.ChartFigure, page: str, moves: bool = False) -> None:
    """Save a figure, and its alt text where a page shows it."""
    (IMAGES / name).write_text(moving(figure) if moves else figure.svg(), encoding="utf-8")
    path = ROOT / page
    shown = re.compile(rf"!\[[^\]]*\]\(((?:\.\./)?images/{re.escape(name)})\)")
    text = path.read_text(encoding="utf-8")
    if not shown.search(text):
        raise RuntimeError(
            f"{page} does not show images/{name}: remove it from images/make.py, or show it"
        )
    path.write_text(
        shown.sub(lambda found: f"![{figure.alt_text}]({found[1]})", text), encoding="utf-8"
    )
    print(f"images/{name}: {figure.alt_text}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("all", "tables"), default="all")
    what = parser.parse_args().what
    schedule_table.write()
    comparison.PAGE.write_text(comparison.page(), encoding="utf-8")
    if what == "tables":
        return
    sheet = cheat_sheet.draw()
    put("cheat_sheet.svg", sheet, "docs/cheat_sheet.md")
    sheet.savefig(IMAGES / "cheat_sheet.pdf", metadata={"CreationDate": None})
    put("rooms.svg", lives.rooms(), "ARCHITECTURE.md")
    for of in lives.LIVES:
        put(f"life_of_a_{of}.svg", lives.life(of), "ARCHITECTURE.md")
    put("course_map.svg", show.course_map(), "README.md")
    timeline = on_ranks(2, measure_pipeline, 2, 8)[0]
    put("1f1b_on_two_ranks.svg", show.timeline(timeline), "README.md", moves=True)


if __name__ == "__main__":
    main()
