"""Slides of each route, made of the notebooks' own headings, questions, figures and code: make slides

Each deck is one file in runs/slides that needs nothing else. Space, arrow keys and Page Down go on; print it for paper.
"""

import argparse
import re
import sys
from html import escape
from pathlib import Path

from as_html import figures, rendered
from routes import NOTEBOOKS, ROUTES, Route, Section, chosen, minutes_of, path_of

OUT = NOTEBOOKS.parent / "runs" / "slides"
STYLE = """
html { scroll-snap-type: y mandatory; font: 2.4vh/1.45 "DejaVu Sans", Verdana, sans-serif }
html { color: #000; background: #fff }
body { margin: 0 }
section { box-sizing: border-box; min-height: 100vh; padding: 5vh 7vw; scroll-snap-align: start; display: flex;
  flex-direction: column; justify-content: center }
h1 { font-size: 6vh; margin: 0 0 2vh } h2 { font-size: 3.4vh; margin: 0 0 3vh; color: #005a8c }
img { max-width: 100%; max-height: 72vh; object-fit: contain; align-self: flex-start }
pre { background: #f3f4f5; padding: 2vh; overflow-x: auto; margin: 0; font-size: min(2.2vh, 50vh / var(--lines)) }
pre { line-height: 1.35 }
p, li { max-width: 44em; font-size: 3.2vh }
.number { color: #555; font-size: 1.8vh; margin-top: auto; padding-top: 2vh }
@media print { section { min-height: auto; height: 100vh; break-after: page } }
"""
SCRIPT = """
const all = [...document.querySelectorAll("section")];
const now = () => all.findIndex(each => each.getBoundingClientRect().bottom > innerHeight / 2);
addEventListener("keydown", event => {
  const step = {" ": 1, ArrowRight: 1, ArrowDown: 1, PageDown: 1, ArrowLeft: -1, ArrowUp: -1, PageUp: -1}[event.key];
  if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  all[Math.min(all.length - 1, Math.max(0, now() + step))].scrollIntoView();
});
"""


def main() -> int:
    """Write one deck a route."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the decks")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for route in ROUTES:
        slides = slides_of(route)
        path = out / f"{route.name}.html"
        path.write_text(deck(route.title, slides), encoding="utf-8")
        print(f"{path}: {len(slides)} slides, {path.stat().st_size / 1e6:.1f} MB")
    return 0


def slides_of(route: Route) -> list[str]:
    """The slides of a route, each as HTML."""
    read, solve = (sum(each) for each in zip(*map(minutes_of, route.parts), strict=True))
    slides = [f"<h1>Pipeline parallelism</h1><p>{escape(route.title)}: {read:.0f} + {solve} minutes.</p>"]
    for part in route.parts:
        if (path := path_of(part.notebook)) is None:
            continue
        slides.append(f"<h1>{escape(path.stem.replace('_', ' '))}</h1>{_listed(chosen(part))}")
        for section in chosen(part):
            slides += _slides_of_section(section)
    return slides


def _listed(sections: list[Section]) -> str:
    return "<ul>" + "".join(f"<li>{escape(section.title)}</li>" for section in sections) + "</ul>"


def _slides_of_section(section: Section) -> list[str]:
    """A question, an exercise, a figure or code to read is a slide; the sentences between are the speaker's."""
    heading, slides = f"<h2>{escape(section.title)}</h2>", []
    for cell in section.cells:
        source = cell["source"]
        if cell["cell_type"] == "markdown":
            if section.title == "Recap":
                source = source.partition("\n")[2].partition("**References**")[0].partition("[**")[0]
                slides.append(heading + rendered(source))
                continue
            questions = re.findall(r"\*\*Predict\.\*\*.*?(?=\n\n|\Z)", source, re.S)
            exercises = re.findall(r"^### (Exercise .*?)(?=^##|\Z)", source, re.S | re.M)
            slides += [heading + rendered(each) for each in questions]
            slides += [heading + rendered(f"**{each}") for each in (e.replace("\n", "**\n", 1) for e in exercises)]
            continue
        if "read" in cell["metadata"].get("tags", ()):
            lines = source.count("\n") + 1  # so small that all of them are seen at once
            slides.append(f'{heading}<pre style="--lines: {lines}"><code>{escape(source)}</code></pre>')
        slides += [heading + figure for figure in figures(cell)]
    return slides


def deck(title: str, slides: list[str]) -> str:
    """A page of its own with all slides."""
    pages = "\n".join(
        f'<section aria-label="slide {i} of {len(slides)}">{slide}<p class="number">{i} / {len(slides)}</p></section>'
        for i, slide in enumerate(slides, start=1)
    )
    head = f'<meta charset="utf-8"><title>Pipeline parallelism: {escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body><main>\n{pages}\n</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


if __name__ == "__main__":
    sys.exit(main())
