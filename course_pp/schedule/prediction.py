"""What a closed form is asked and what it answers: :mod:`course_pp.schedule.theory` has the forms."""

from collections.abc import Iterable
from dataclasses import dataclass

from course_pp.schedule.costs import Costs, divide
from course_pp.schedule.span import Time

__all__ = ["Case", "NoClosedForm", "Prediction", "predicted"]


@dataclass(frozen=True)
class Prediction:
    """What a closed form says of a schedule.

    Attributes:
        formula: the makespan, in the letters of the papers.
        makespan: when the last rank finishes.
        longest_span: the longest that any rank takes from its first action to its last.
        work: for each rank, the time it is busy.
        peak_activations: for each rank, the most (stage, microbatch) activations held at once.
    """

    formula: str
    makespan: Time
    longest_span: Time
    work: tuple[Time, ...]
    peak_activations: tuple[int, ...]

    @property
    def bubble_fraction(self) -> Time:
        """Idle over all rank time."""
        total = len(self.work) * self.makespan
        return _ratio(total - sum(self.work), total)

    @property
    def bubble_overhead(self) -> Time:
        """Idle over useful rank time (Narayanan et al. 2021, "Efficient large-scale training", section 2.2)."""
        return _ratio(len(self.work) * self.makespan - sum(self.work), sum(self.work))

    @property
    def span_bubble_fraction(self) -> Time:
        """The share of the longest span in which even the busiest rank is idle."""
        return _ratio(self.longest_span - max(self.work), self.longest_span)


class NoClosedForm(ValueError):
    """The closed form does not hold for these sizes and costs.

    Attributes:
        condition: under which it does.
    """

    def __init__(self, case: str, condition: str) -> None:
        super().__init__(case, condition)
        self._case = case
        self.condition = condition

    def __str__(self) -> str:
        return f"{self._case}: the closed form holds only if {self.condition}; simulate the schedule instead"


@dataclass(frozen=True)
class Case:
    """p ranks, m microbatches, v chunks a rank, what an action costs, and a chosen number of microbatches a round."""

    p: int
    m: int
    v: int
    costs: Costs
    round_size: int | None = None

    def equal_stages(self) -> tuple[Time, Time, Time, Time]:
        """f, b, w and L, for the forms that hold only if all stages and messages cost the same. One rank sends none."""
        times, transfers = self.costs.durations(self.p * self.v), self.costs.transfers(self.p * self.v)
        unequal = [kind for kind in "FIWU" if len(set(times[kind])) > 1]
        self.require(not unequal and len(set(transfers)) <= 1, "all stages, and all messages, cost the same")
        return times["F"][0], times["I"][0], times["W"][0], transfers[0] if self.p > 1 else 0

    def require(self, holds: bool, condition: str) -> None:
        """Raise NoClosedForm unless ``condition`` holds."""
        if not holds:
            raise NoClosedForm(f"p={self.p}, m={self.m}, v={self.v} with {self.costs}", condition)


def predicted(
    case: Case,
    formula: str,
    makespan: Time,
    peaks: Iterable[int],
    span: Time | None = None,
    work: Iterable[Time] | None = None,
) -> Prediction:
    """Make a prediction. By default stages are looped, and the longest span is the whole makespan."""
    if work is None:
        times = case.costs.durations(case.p * case.v)
        work = (case.m * sum(sum(times[kind][rank :: case.p]) for kind in "FB") for rank in range(case.p))
    return Prediction(formula, makespan, makespan if span is None else span, tuple(work), tuple(peaks))


def _ratio(part: Time, whole: Time) -> Time:
    return divide(part, whole) if whole else 0
