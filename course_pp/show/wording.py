"""The words of figures, panel and terminal: numbers, lists, the finding of a timeline, the verdict
on a closed form.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from course_pp.base.arguments import checked
from course_pp.schedule import (
    Action,
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


def counted(number: int, thing: str) -> str:
    """Return ``1 rank``, ``2 ranks``, ``2 microbatches``."""
    if number == 1:
        return f"1 {thing}"
    ending = "es" if thing.endswith(("ch", "s", "x")) else "s"
    return f"{number} {thing}{ending}"


def listed(things: Iterable[object]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``; an empty text for nothing."""
    words = [str(thing) for thing in things]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def listed_ranks(ranks: Collection[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 1 and 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(sorted(ranks))}"


def name_of_part(part: Action, with_stage: bool) -> str:
    """Return ``2F3``, or ``F3`` without the stage."""
    return str(part) if with_stage else f"{part.kind}{part.microbatch}"


def named(name: str, text: str) -> str:
    """Return ``1f1b: timeline``; ``Timeline`` without a name."""
    return f"{name}: {text[0].lower()}{text[1:]}" if name else text


def amount(value: Time) -> str:
    """Return ``4``, ``5.5``: four digits."""
    return f"{float(value):.4g}"


def percent(fraction: Time) -> str:
    """Return ``27.3 %``."""
    return f"{100 * float(fraction):.3g} %"


@checked
def format_bytes(n_bytes: Time) -> str:
    """Write a number of bytes for people, in powers of 1024: ``512 B``, ``1.5 KiB``."""
    value = float(n_bytes)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        # 1023.5 is written 1024, which is one of the next unit.
        if value < 1023.5:
            break
        value /= 1024
        unit = larger

    # Three digits would write 1001 to 1023 as 1e+03; bytes come whole.
    if unit == "B" or (value >= 1000 and unit != "TiB"):
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"


def axis_unit(longest: Time, unit: str) -> tuple[float, str]:
    """Return the factor from ``unit`` to the unit of an axis of this length, and that unit."""
    if unit != "s":
        return 1.0, "relative cost"
    if longest >= 1:
        return 1.0, "s"
    if longest >= 1e-3:
        return 1e3, "ms"
    return 1e6, "µs"


def sizes(of: Timeline | Schedule) -> str:
    """Return ``4 ranks, 8 microbatches``."""
    return f"{counted(of.n_ranks, 'rank')}, {counted(of.n_microbatches, 'microbatch')}"


def finding(tl: Timeline) -> str:
    """Return the sizes, busy share and bubble in one line."""
    if not tl.spans:
        return f"{counted(tl.n_ranks, 'rank')}, nothing done"

    # An emulated run is off by a little: more digits than two would be noise.
    took: Time = tl.makespan
    if tl.unit != "s" and took >= 10:
        took = round(float(took), 2)
    busy = f"busy {percent(tl.utilisation)} of {format_time(took, tl.unit)}"
    shares = f"{busy}, bubble {percent(tl.bubble_fraction)}"

    # Busy times that add up to more than the makespan overlap, and need no closer look.
    may_take_turns = tl.n_ranks > 1 and sum(tl.busy) <= 1.001 * tl.makespan
    if may_take_turns and most_busy_at_once(tl) == 1:
        return f"One rank works at a time: {sizes(tl)}, {shares}"
    return f"{sizes(tl)}: {shares}"


def most_busy_at_once(tl: Timeline) -> int:
    """Return the largest number of ranks that work at the same time."""
    changes = []
    for span in tl.spans:
        if span.duration:
            changes += [(span.start, 1), (span.end, -1)]

    # At equal times an end sorts before a start: handing over is not working at the same time.
    busy = 0
    most = 0
    for _, step in sorted(changes):
        busy += step
        most = max(most, busy)
    return most


def has_several_stages_a_rank(tl: Timeline) -> bool:
    """Return whether a label needs the stage, because the row does not tell it."""
    for row in tl.by_rank:
        stages = {part.stage for span in row for part in span.action.parts}
        if len(stages) > 1:
            return True
    return False


def spelled_peaks(peaks: Sequence[Time], spell: Callable[[Time], str] = amount) -> str:
    """Return ``4, 3, 2 and 1 on ranks 0 to 3``, shorter where they are equal or many."""
    last = len(peaks) - 1
    if len(set(peaks)) == 1:
        return f"{spell(peaks[0])} on every rank"
    if len(peaks) <= 8:
        return f"{listed(map(spell, peaks))} on ranks 0 to {last}"
    if list(peaks) in (sorted(peaks), sorted(peaks, reverse=True)):
        return f"{spell(peaks[0])} on rank 0 to {spell(peaks[-1])} on rank {last}"

    def with_rank(peak: Time) -> str:
        return f"{spell(peak)}, on rank {peaks.index(peak)}"

    return f"at most {with_rank(max(peaks))}; at least {with_rank(min(peaks))}"


@dataclass(frozen=True)
class ScheduleReport:
    """A schedule, its simulation and its closed form, for the terminal and the panel.

    Every property raises ValueError for sizes or costs that the schedule does not allow.
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
            return theory.predict(
                self.name,
                self.n_ranks,
                self.n_microbatches,
                self.costs,
                self.n_chunks,
                round_size=self.round_size,
            )
        except theory.NoClosedForm as missing:
            return missing

    @property
    def closed_form(self) -> theory.ClosedForm | None:
        """None where the sizes and costs are outside the conditions of the form."""
        form = self._form_or_missing
        return form if isinstance(form, theory.ClosedForm) else None

    @cached_property
    def longest_gap(self) -> Gap | None:
        return max(self.timeline.idle_gaps, key=lambda gap: gap.duration, default=None)

    @property
    def verdict(self) -> str:
        """How the closed form compares with the simulation, in a sentence."""
        form = self._form_or_missing
        if isinstance(form, theory.NoClosedForm):
            return f"no closed form here: it holds only if {form.condition}"

        tl = self.timeline
        compared: list[tuple[str, Time, Time]] = [
            ("makespan", tl.makespan, form.makespan),
            ("bubble", tl.bubble_fraction, form.bubble_fraction),
            ("bubble within the longest span", tl.span_bubble_fraction, form.span_bubble_fraction),
        ]
        for rank, peak in enumerate(tl.peak_activations):
            compared.append((f"peak of rank {rank}", peak, form.peak_activations[rank]))

        differences = []
        for what, simulated, predicted in compared:
            if not math.isclose(simulated, predicted, rel_tol=1e-9, abs_tol=1e-12):
                told = f"{what} {format_time(predicted)} instead of {format_time(simulated)}"
                differences.append(told)
        if differences:
            return f"the closed form differs: {', '.join(differences)}"
        return "the closed form gives the same makespan, bubbles and peaks"
