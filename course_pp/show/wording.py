"""What figures, panel and terminal say in words: numbers, lists, what a timeline amounts to, how theory compares."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from course_pp.base.arguments import checked
from course_pp.schedule import (
    Costs,
    Gap,
    Schedule,
    Time,
    Timeline,
    build,
    format_time,
    simulate,
    theory,
)


def counted(number: int, thing: str, things: str = "") -> str:
    """Return ``1 rank``, ``2 ranks``; ``things`` for a plural that is not formed with an s."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def listed(things: list[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(things[:-1]), *things[-1:]]))


def listed_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 1 and 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in sorted(ranks)])}"


def named(name: str, text: str) -> str:
    """Return ``1f1b: what follows``; ``What follows`` without a name."""
    return f"{name}: {text[0].lower()}{text[1:]}" if name else text


def amount(value: Time) -> str:
    """Return ``4``, ``5.5``: four digits."""
    return f"{float(value):.4g}"


def percent(fraction: Time) -> str:
    """Return ``27.3 %``."""
    return f"{100 * float(fraction):.3g} %"


@checked
def format_bytes(n_bytes: Time) -> str:
    """Write a number of bytes for people, in powers of 1024: ``512 B``, ``1.5 KiB``, ``12.3 MiB``."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return (
                f"{value:.0f} B"
                if unit == "B"
                else f"{value:.3g} {unit}"
                if value < 1000
                else f"{value:.0f} {unit}"
            )
        value /= 1024
    return f"{value:.3g} TiB"


def axis_unit(longest: Time, unit: str) -> tuple[float, str]:
    """Return the factor from times of a ``unit`` to those of an axis of this length, and what to write under it."""
    if unit != "s":
        return 1.0, "relative cost"
    return (1.0, "s") if longest >= 1 else (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")


def sizes(of: Timeline | Schedule) -> str:
    """Return ``4 ranks, 8 microbatches``."""
    return (
        f"{counted(of.n_ranks, 'rank')}, {counted(of.n_microbatches, 'microbatch', 'microbatches')}"
    )


def finding(tl: Timeline) -> str:
    """Return the sizes, busy share and bubble in one line."""
    if not tl.spans:
        return f"{counted(tl.n_ranks, 'rank')}, nothing done"
    # An emulated run is off by a little: more digits than two would be noise.
    took = tl.makespan if tl.unit == "s" or tl.makespan < 10 else round(float(tl.makespan), 2)
    shares = (
        f"busy {percent(tl.utilisation)} of {format_time(took, tl.unit)}, bubble"
        f" {percent(tl.bubble_fraction)}"
    )
    # More work than time has been done by several at once; only otherwise is it worth a look.
    if tl.n_ranks > 1 and sum(tl.busy) <= 1.001 * tl.makespan and most_busy_at_once(tl) == 1:
        return f"One rank works at a time: {sizes(tl)}, {shares}"
    return f"{sizes(tl)}: {shares}"


def most_busy_at_once(tl: Timeline) -> int:
    """Return how many ranks work at the same time, at the most."""
    # At equal times an end sorts before a start: handing over is not working at the same time.
    changes = sorted(
        (time, step) for s in tl.spans if s.duration for time, step in ((s.start, 1), (s.end, -1))
    )
    busy = most = 0
    for _, step in changes:
        busy += step
        most = max(most, busy)
    return most


def has_several_stages_a_rank(tl: Timeline) -> bool:
    """Return whether a label needs the stage, because the row does not tell it."""
    return any(
        len({part.stage for span in row for part in span.action.parts}) > 1 for row in tl.by_rank
    )


def spelled_peaks(peaks: Sequence[Time], spell: Callable[[Time], str] = amount) -> str:
    """Return ``4, 3, 2 and 1 on ranks 0 to 3``, shorter where they are equal or many."""
    if len(set(peaks)) == 1:
        return f"{spell(peaks[0])} on every rank"
    if len(peaks) <= 8:
        return f"{listed([spell(peak) for peak in peaks])} on ranks 0 to {len(peaks) - 1}"
    if list(peaks) in (sorted(peaks), sorted(peaks, reverse=True)):
        return f"{spell(peaks[0])} on rank 0 to {spell(peaks[-1])} on rank {len(peaks) - 1}"
    most, least = (
        f"{spell(peak)}, on rank {peaks.index(peak)}" for peak in (max(peaks), min(peaks))
    )
    return f"at most {most}; at least {least}"


@dataclass(frozen=True)
class ScheduleReport:
    """A schedule built, simulated and compared with its closed form: what the terminal and the
    panel both tell.

    Every property raises ValueError for what the schedule or the costs do not allow.
    """

    name: str
    n_ranks: int
    n_microbatches: int
    n_chunks: int | None = None
    costs: Costs = field(default_factory=Costs)
    round_size: int | None = None

    @cached_property
    def schedule(self) -> Schedule:
        return build(
            self.name, self.n_ranks, self.n_microbatches, self.n_chunks, round_size=self.round_size
        )

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)

    @cached_property
    def _form_or_missing(self) -> theory.ClosedForm | theory.NoClosedForm:
        try:
            sizes = self.name, self.n_ranks, self.n_microbatches, self.costs, self.n_chunks
            return theory.predict(*sizes, round_size=self.round_size)
        except theory.NoClosedForm as missing:
            return missing

    @property
    def closed_form(self) -> theory.ClosedForm | None:
        """None where the sizes and costs are outside the conditions of the form."""
        return (
            self._form_or_missing if isinstance(self._form_or_missing, theory.ClosedForm) else None
        )

    @cached_property
    def longest_gap(self) -> Gap | None:
        return max(self.timeline.idle_gaps, key=lambda gap: gap.duration, default=None)

    @property
    def verdict(self) -> str:
        """How the closed form compares with the simulation, in a sentence."""
        tl, form = self.timeline, self._form_or_missing
        if isinstance(form, theory.NoClosedForm):
            return f"no closed form here: it holds only if {form.condition}"
        compared: list[tuple[str, Time, Time]] = [
            ("makespan", tl.makespan, form.makespan),
            ("bubble", tl.bubble_fraction, form.bubble_fraction),
            ("bubble within the longest span", tl.span_bubble_fraction, form.span_bubble_fraction),
        ]
        peaks = zip(tl.peak_activations, form.peak_activations, strict=True)
        compared += [
            (f"peak of rank {rank}", peak, predicted)
            for rank, (peak, predicted) in enumerate(peaks)
        ]
        differences = [
            f"{what} {format_time(predicted)} instead of {format_time(simulated)}"
            for what, simulated, predicted in compared
            if not math.isclose(simulated, predicted, rel_tol=1e-9, abs_tol=1e-12)
        ]
        if differences:
            return f"the closed form differs: {', '.join(differences)}"
        return "the closed form gives the same makespan, bubbles and peaks"
