"""A timeline as a trace for https://ui.perfetto.dev and chrome://tracing.

:func:`messages` and :func:`held_activations` tell what happens between the spans of a timeline.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from course_pp.base.arguments import checked
from course_pp.schedule import KINDS, Gap, Product, Span, Time, Timeline

_PROCESS = 1  # both viewers take process 0 and thread 0 for the idle task


@checked
def to_trace(tl: Timeline, name: str = "pipeline") -> str:
    """Return the timeline in the Trace Event Format, as JSON: a thread a rank, an arrow a message.

    A slice is an action, or an idle gap with its cause; a counter per rank has the activations
    held. A second stays a second; a unit of relative cost becomes a millisecond. Source of the
    format: the Chromium project's document "Trace Event Format", whose times are in microseconds.
    ``name`` is the process under which the ranks are listed.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": name}}
    ]
    for rank in range(tl.n_ranks):
        events.append(_event("M", rank, name="thread_name", args={"name": f"rank {rank}"}))
        # Without an index, viewers sort threads by when they first do something.
        events.append(_event("M", rank, name="thread_sort_index", args={"sort_index": rank}))
    events += [*_slices(tl), *_arrows(tl), *_counters(tl)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False)


def _event(phase: str, rank: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": _PROCESS, "tid": rank + 1, **fields}


def _slices(tl: Timeline) -> Iterator[dict[str, Any]]:
    def slice_of(of: Span | Gap, name: str, category: str, args: dict[str, Any]) -> dict[str, Any]:
        begin = _microseconds(tl, of.start)
        duration = _microseconds(tl, of.end) - begin
        return _event("X", of.rank, name=name, cat=category, ts=begin, dur=duration, args=args)

    for span in tl.spans:
        parts = span.action.parts
        kinds = " and ".join(KINDS[part.kind] for part in parts)
        args = {
            "stage": [part.stage for part in parts],
            "microbatch": [part.microbatch for part in parts],
        }
        yield slice_of(span, str(span.action), category=kinds, args=args)
    for gap in tl.idle_gaps:
        yield slice_of(gap, "idle", category="idle", args={"cause": gap.cause})


def _arrows(tl: Timeline) -> Iterator[dict[str, Any]]:
    """Yield two events a message: one in its maker's slice, one where its taker's slice begins."""
    for number, message in enumerate(messages(tl), start=1):
        maker = message.maker
        taker = message.taker
        fields = {"id": number, "name": message.product.what, "cat": "message"}
        # A viewer ties an arrow to the slice around its time; the end of a slice belongs to none.
        sent = _microseconds(tl, (maker.start + maker.end) / 2)
        taken = _microseconds(tl, taker.start)
        yield _event("s", maker.rank, **fields, ts=sent)
        yield _event("f", taker.rank, **fields, ts=taken, bp="e")


def _counters(tl: Timeline) -> Iterator[dict[str, Any]]:
    what = "activations and values" if any(tl.peak_values) else "activations"
    for rank, curve in enumerate(tl.memory_curve()):
        name = f"{what} held by rank {rank}"
        # Of several changes at one time the last counts.
        for time, held in dict(curve).items():
            ts = _microseconds(tl, time)
            yield _event("C", rank, name=name, ts=ts, args={"held": float(held)})


def _microseconds(tl: Timeline, time: Time) -> float:
    factor = 1e6 if tl.unit == "s" else 1e3
    return round(float(time) * factor, 3)


@dataclass(frozen=True)
class Transfer:
    """A message from one rank to another, sent when its maker ended.

    Attributes:
        product: the activation or gradient in it.
        maker: the span that made it.
        arrival: the time of its arrival, as far as the timeline knows the times of messages.
        taker: the span that took it.
    """

    product: Product
    maker: Span
    arrival: Time
    taker: Span


@dataclass(frozen=True)
class HeldActivation:
    """The activations of one microbatch in one stage, held until its backward ends."""

    rank: int
    stage: int
    microbatch: int
    start: Time
    end: Time


def messages(tl: Timeline) -> Iterator[Transfer]:
    """Yield every message between two ranks whose maker and taker are in the timeline.

    They come in the order in which their takers end.
    """
    makers: dict[Product, Span] = {}
    for span in sorted(tl.spans, key=lambda each: (each.end, each.start)):
        for part in span.action.parts:
            for product in part.needs(tl.n_stages):
                maker = makers.get(product)
                if maker is None or maker.rank == span.rank or maker.end > span.start:
                    continue
                boundary = product.stage - (product.what == "gradient")
                takes = tl.transfers[boundary] if tl.transfers else 0
                yield Transfer(product, maker, min(maker.end + takes, span.start), span)
        for part in span.action.parts:
            makers.update(dict.fromkeys(part.provides, span))


def held_activations(tl: Timeline) -> Iterator[HeldActivation]:
    """Yield every interval in which a rank holds activations.

    Without a backward, the interval lasts until the makespan.
    """
    for rank, row in enumerate(tl.by_rank):
        begun: dict[tuple[int, int], Time] = {}
        for span in row:
            for part in span.action.parts:
                place = (part.stage, part.microbatch)
                if part.kind == "F":
                    begun.setdefault(place, span.start)
                elif part.kind in "BW" and place in begun:
                    yield HeldActivation(rank, *place, begun.pop(place), span.end)
        for place, start in begun.items():
            yield HeldActivation(rank, *place, start, tl.makespan)
