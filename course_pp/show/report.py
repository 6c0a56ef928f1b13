"""One schedule built, simulated and compared with its closed form: what the terminal and the panel both tell."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from course_pp.schedule import Costs, Gap, Schedule, Time, Timeline, build, format_time, simulate, theory


@dataclass(frozen=True)
class Report:
    """What the schedule called ``name`` does with these sizes and costs.

    Raises:
        ValueError: from every property, for what the schedule or the costs do not allow.
    """

    name: str
    n_ranks: int
    n_microbatches: int
    n_chunks: int | None = None
    costs: Costs = field(default_factory=Costs)
    round_size: int | None = None

    @cached_property
    def schedule(self) -> Schedule:
        return build(self.name, self.n_ranks, self.n_microbatches, self.n_chunks, round_size=self.round_size)

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)

    @cached_property
    def _form_or_missing(self) -> theory.Prediction | theory.NoClosedForm:
        try:
            sizes = self.name, self.n_ranks, self.n_microbatches, self.costs, self.n_chunks
            return theory.predict(*sizes, round_size=self.round_size)
        except theory.NoClosedForm as missing:
            return missing

    @property
    def closed_form(self) -> theory.Prediction | None:
        """None where the sizes and costs are outside the conditions of the form."""
        return self._form_or_missing if isinstance(self._form_or_missing, theory.Prediction) else None

    @cached_property
    def longest_gap(self) -> Gap | None:
        """The longest time a rank does nothing, the first of several."""
        gaps = self.timeline.idle_gaps
        return max(gaps, key=lambda gap: gap.duration) if gaps else None

    @property
    def verdict(self) -> str:
        """How the closed form compares with the simulation, in a sentence."""
        if isinstance(self._form_or_missing, theory.NoClosedForm):
            return f"no closed form here: it holds only if {self._form_or_missing.condition}"
        differences = [
            f"{what} {format_time(predicted)} instead of {format_time(simulated)}"
            for what, simulated, predicted in _compared(self.timeline, self._form_or_missing)
            if not math.isclose(simulated, predicted, rel_tol=1e-9, abs_tol=1e-12)
        ]
        if differences:
            return f"the closed form differs: {', '.join(differences)}"
        return "the closed form gives the same makespan, bubbles and peaks"


def _compared(tl: Timeline, form: theory.Prediction) -> Iterator[tuple[str, Time, Time]]:
    """Yield what is compared, the simulated value, and that of the closed form."""
    yield "makespan", tl.makespan, form.makespan
    yield "bubble", tl.bubble_fraction, form.bubble_fraction
    yield "bubble within the longest span", tl.span_bubble_fraction, form.span_bubble_fraction
    for rank, (peak, predicted) in enumerate(zip(tl.peak_activations, form.peak_activations, strict=True)):
        yield f"peak of rank {rank}", peak, predicted
