"""A timeline that moves: a time cursor, held activations, messages under way.

Where scripts do not run there is a still picture.
"""

import json
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from course_pp.base.arguments import checked
from course_pp.schedule import Timeline
from course_pp.show.chart import ChartFigure
from course_pp.show.timelines import LOOKS, timeline
from course_pp.show.trace import held_activations, messages
from course_pp.show.wording import (
    axis_unit,
    finding,
    has_several_stages_a_rank,
    name_of_part,
    named,
)

_MOST_SPANS = 5000


class Player:
    """A timeline with a cursor that plays, pauses and steps, in a notebook or on a page of its own.

    Nothing is loaded from elsewhere. Where scripts do not run there is the still picture,
    :attr:`figure`.
    """

    def __init__(self, tl: Timeline, title: str | None = None) -> None:
        self.figure: ChartFigure = timeline(tl, title)
        self._data = _data(tl, title or named(tl.name, finding(tl)), self.figure.alt_text)

    def html(self) -> str:
        """Return a piece of a page: the still picture, and a script that replaces it.

        The script's picture moves.
        """
        data = json.dumps(self._data, ensure_ascii=False, separators=(",", ":"))
        data = data.replace("</", "<\\/")  # or it could end the script's own tag
        name = f"cpp-{sha256(data.encode()).hexdigest()[:12]}"
        picture = b64encode(self.figure.png()).decode("ascii")
        alt = escape(self.figure.alt_text)
        still = f'<img src="data:image/png;base64,{picture}" alt="{alt}" style="max-width:100%">'
        # The attribute keeps JupyterLab's shortcuts away from the arrow keys.
        root = (
            f'<div class="cpp-player" data-player="{name}" data-lm-suppress-shortcuts="true"'
            ' role="group"'
        )
        label = f'aria-label="timeline that moves: {escape(self._data["title"])}"'
        return (
            f"<style>{asset('player.css')}</style>{root} {label}>{still}</div>"
            f"<script>{asset('player.js').strip()}({json.dumps(name)}, {data});</script>"
        )

    def save(self, path: str | Path) -> Path:
        """Write a page of its own, ``.html``, which needs nothing else."""
        path = Path(path)
        if path.suffix.lower() != ".html":
            raise ValueError(
                f"cannot save a timeline that moves as {path.name!r}: end the name in .html"
            )
        head = f'<meta charset="utf-8"><title>{escape(self._data["title"])}</title>'
        body = f"<head>{head}</head><body>{self.html()}</body>"
        page = f'<!DOCTYPE html>\n<html lang="en">{body}</html>\n'
        path.write_text(page, encoding="utf-8")
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        data, metadata = self.figure._repr_mimebundle_()
        return {**data, "text/html": self.html()}, metadata


@checked
def play(tl: Timeline, title: str | None = None) -> Player:
    """Show a timeline of up to 5000 spans that moves: play, pause and step with buttons or keys.

    Left of the cursor is what has happened; each rank says which microbatches' activations it
    holds; messages under way go from row to row. Space plays and pauses, the arrow keys step from
    event to event.
    """
    if not 0 < len(tl.spans) <= _MOST_SPANS or not tl.makespan:
        raise ValueError(
            f"{len(tl.spans)} spans, makespan {tl.makespan}: give 1 to {_MOST_SPANS} that take time"
        )
    return Player(tl, title)


def asset(name: str) -> str:
    return files("course_pp.show").joinpath(name).read_text(encoding="utf-8")


def _data(tl: Timeline, title: str, alt: str) -> dict[str, Any]:
    """Return the data of the script, with times as numbers."""
    scale, unit = axis_unit(tl.makespan, tl.unit)
    with_stage = has_several_stages_a_rank(tl)
    events = {0.0}
    spans = []
    for span in tl.spans:
        parts = []
        for part in span.action.parts:
            name = name_of_part(part, with_stage)
            parts.append({"kind": part.kind, "name": name, "short": str(part.microbatch)})
        start = float(span.start)
        end = float(span.end)
        events |= {start, end}
        spans.append({"rank": span.rank, "start": start, "end": end, "parts": parts})

    held = []
    in_order = sorted(
        held_activations(tl), key=lambda each: (each.rank, each.stage, each.microbatch)
    )
    for each in in_order:
        name = f"{each.stage}·{each.microbatch}" if with_stage else str(each.microbatch)
        start = float(each.start)
        end = float(each.end)
        held.append({"rank": each.rank, "start": start, "end": end, "name": name})

    knows_transfers = tl.transfers or not tl.unit
    sent = []
    for message in messages(tl):
        # In a measured timeline without transfer times, a message is there when it is taken.
        arrival = message.arrival if knows_transfers else message.taker.start
        sent.append(
            {
                "from": message.maker.rank,
                "to": message.taker.rank,
                "sent": float(message.maker.end),
                "there": float(arrival),
                "taken": float(message.taker.start),
                "what": message.product.what,
                "forward": message.product.what == "activation",
                "microbatch": message.product.microbatch,
            }
        )

    looks = {}
    for kind, look in LOOKS.items():
        looks[kind] = {"colour": look.colour, "hatch": look.hatch[:1]}
    longest = float(tl.makespan) * scale
    return {
        "title": title,
        "alt": alt,
        "ranks": tl.n_ranks,
        "end": float(tl.makespan),
        "scale": scale,
        "unit": unit if tl.unit else "",
        "digits": 1 if longest >= 10 else 2,
        "looks": looks,
        "events": sorted(events),
        "spans": spans,
        "held": held,
        "messages": sent,
    }
