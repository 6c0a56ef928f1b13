"""A timeline as a trace that https://ui.perfetto.dev and chrome://tracing open, and what happens between its spans."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from course_pp.base.arguments import checked
from course_pp.schedule import KINDS, Gap, Product, Span, Time, Timeline

_PROCESS = 1  # both viewers take process 0 and thread 0 for the idle task


@checked
def to_trace(tl: Timeline, name: str = "pipeline") -> str:
    """Return the timeline in the Trace Event Format, as JSON: a thread per rank, an arrow per
    message.

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
        events.append(_event("M", rank, name="thread_sort_index", args={"sort_index": rank}))
    events += [*_slices(tl), *_arrows(tl), *_counters(tl)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False)


def _event(phase: str, rank: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": _PROCESS, "tid": rank + 1, **fields}


def _slices(tl: Timeline) -> Iterator[dict[str, Any]]:
    def slice_of(of: Span | Gap, name: str, category: str, args: dict[str, Any]) -> dict[str, Any]:
        begin = _microseconds(tl, of.start)
        return _event(
            "X",
            of.rank,
            name=name,
            cat=category,
            ts=begin,
            dur=_microseconds(tl, of.end) - begin,
            args=args,
        )

    for span in tl.spans:
        kinds = " and ".join(KINDS[part.kind] for part in span.action.parts)
        args = {
            name: [getattr(part, name) for part in span.action.parts]
            for name in ("stage", "microbatch")
        }
        yield slice_of(span, str(span.action), kinds, args)
    for gap in tl.idle_gaps:
        yield slice_of(gap, "idle", "idle", {"cause": gap.cause})


def _arrows(tl: Timeline) -> Iterator[dict[str, Any]]:
    """From the action that makes an activation or gradient to the one on another rank that takes it."""
    for number, message in enumerate(messages(tl), start=1):
        maker, taker, what = message.maker, message.taker, message.product.what
        sent, taken = (
            _microseconds(tl, (maker.start + maker.end) / 2),
            _microseconds(tl, taker.start),
        )
        yield _event("s", maker.rank, id=number, name=what, cat="message", ts=sent)
        yield _event("f", taker.rank, id=number, name=what, cat="message", ts=taken, bp="e")


def _counters(tl: Timeline) -> Iterator[dict[str, Any]]:
    what = "activations and values" if any(tl.peak_values) else "activations"
    for rank, curve in enumerate(tl.memory_curve()):
        for time, held in dict(curve).items():  # of several changes at one time the last counts
            ts = _microseconds(tl, time)
            yield _event(
                "C", rank, name=f"{what} held by rank {rank}", ts=ts, args={"held": float(held)}
            )


def _microseconds(tl: Timeline, time: Time) -> float:
    return round(float(time) * (1e6 if tl.unit == "s" else 1e3), 3)


@dataclass(frozen=True)
class Transfer:
    """What one rank sent to another when its maker ended."""

    product: Product
    maker: Span
    arrival: Time  # as far as the timeline knows how long messages take
    taker: Span


@dataclass(frozen=True)
class HeldActivation:
    """The activations of one microbatch in one stage, from the start of its forward until the end of its backward."""

    rank: int
    stage: int
    microbatch: int
    start: Time
    end: Time


def messages(tl: Timeline) -> Iterator[Transfer]:
    """Yield every message between two ranks that the timeline shows made and taken, in the order of taking ends."""
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
    """Yield every interval in which a rank holds activations; until the makespan if their backward is not there."""
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
