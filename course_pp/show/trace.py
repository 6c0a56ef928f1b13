"""A timeline as a trace that https://ui.perfetto.dev and chrome://tracing open."""

import json
from collections.abc import Iterator
from typing import Any

from course_pp.arguments import checked
from course_pp.schedule import KINDS, Time, Timeline
from course_pp.show.intervals import messages

_PROCESS = 1  # both viewers take process 0 and thread 0 for the idle task


@checked
def to_trace(tl: Timeline, name: str = "pipeline") -> str:
    """Return the timeline in the Trace Event Format, as JSON: a thread per rank, an arrow per message.

    A slice is an action, or an idle gap with its cause; a counter per rank has the activations held. A second stays a
    second; a unit of relative cost becomes a millisecond. Source of the format: the Chromium project's document "Trace
    Event Format", whose times are in microseconds.

    Args:
        name: what to call the process under which the ranks are listed.
    """
    events = [*_names(tl, name), *_slices(tl), *_arrows(tl), *_counters(tl)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, ensure_ascii=False)


def _event(phase: str, rank: int, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": _PROCESS, "tid": rank + 1, **fields}


def _names(tl: Timeline, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": name}}
    for rank in range(tl.n_ranks):
        yield _event("M", rank, name="thread_name", args={"name": f"rank {rank}"})
        yield _event("M", rank, name="thread_sort_index", args={"sort_index": rank})


def _slices(tl: Timeline) -> Iterator[dict[str, Any]]:
    for span in tl.spans:
        kinds = " and ".join(KINDS[part.kind] for part in span.action.parts)
        args = {
            "stage": [part.stage for part in span.action.parts],
            "microbatch": [part.microbatch for part in span.action.parts],
        }
        yield _slice(tl, span.rank, span.start, span.end, str(span.action), kinds, args)
    for gap in tl.idle_gaps:
        yield _slice(tl, gap.rank, gap.start, gap.end, "idle", "idle", {"cause": gap.cause})


def _slice(
    tl: Timeline, rank: int, start: Time, end: Time, name: str, category: str, args: dict[str, Any]
) -> dict[str, Any]:
    begin = _microseconds(tl, start)
    return _event("X", rank, name=name, cat=category, ts=begin, dur=_microseconds(tl, end) - begin, args=args)


def _arrows(tl: Timeline) -> Iterator[dict[str, Any]]:
    """From the action that makes an activation or gradient to the one on another rank that takes it."""
    for number, message in enumerate(messages(tl), start=1):
        maker, taker, what = message.maker, message.taker, message.product.what
        sent, taken = _microseconds(tl, (maker.start + maker.end) / 2), _microseconds(tl, taker.start)
        yield _event("s", maker.rank, id=number, name=what, cat="message", ts=sent)
        yield _event("f", taker.rank, id=number, name=what, cat="message", ts=taken, bp="e")


def _counters(tl: Timeline) -> Iterator[dict[str, Any]]:
    what = "activations and values" if any(tl.peak_values) else "activations"
    for rank, curve in enumerate(tl.memory_curve()):
        for time, held in dict(curve).items():  # of several changes at one time the last counts
            ts = _microseconds(tl, time)
            yield _event("C", rank, name=f"{what} held by rank {rank}", ts=ts, args={"held": float(held)})


def _microseconds(tl: Timeline, time: Time) -> float:
    return round(float(time) * (1e6 if tl.unit == "s" else 1e3), 3)
