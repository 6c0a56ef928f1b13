"""The closed forms: makespan, bubble and peak activations of each schedule without simulating it.

Notation, as in the papers: p ranks, m microbatches, v chunks a rank; f, b and w the times of ``F``,
``I`` and ``W`` in one stage, B = b + w that of a whole backward, u that of ``U``; L the time of one
message. Each form is exact under the conditions in its docstring. Outside of them it raises a
:class:`NoClosedForm` that names them; :func:`course_pp.schedule.simulate` has no such conditions.

Papers mean three things by bubble: GPipe idle time over all time (``bubble_fraction``), Megatron
idle time over useful time (``bubble_overhead``), the zero-bubble papers idle time between a rank's
first action and its last (``span_bubble_fraction``).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from course_pp.base.arguments import checked
from course_pp.schedule.action import Time
from course_pp.schedule.catalogue import build
from course_pp.schedule.costs import Costs, divide
from course_pp.schedule.families import microbatches_a_round

__all__ = ["ClosedForm", "NoClosedForm", "noam", "predict"]


@dataclass(frozen=True)
class ClosedForm:
    """The numbers that a closed form gives for a schedule.

    Attributes:
        formula: the makespan, in the letters of the papers.
        longest_span: the longest time that any rank takes from its first action to its last.
        work: for each rank, the time it is busy.
        peak_activations: the same as in :class:`Timeline`.
    """

    formula: str
    makespan: Time
    longest_span: Time
    work: tuple[Time, ...]
    peak_activations: tuple[int, ...]

    @property
    def bubble_fraction(self) -> Time:
        """Idle time over all rank time."""
        total = len(self.work) * self.makespan
        return _ratio(total - sum(self.work), total)

    @property
    def bubble_overhead(self) -> Time:
        """Idle time over useful rank time.

        Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
        Megatron-LM", section 2.2.
        """
        idle = len(self.work) * self.makespan - sum(self.work)
        return _ratio(idle, sum(self.work))

    @property
    def span_bubble_fraction(self) -> Time:
        """The share of the longest span in which even the busiest rank is idle."""
        return _ratio(self.longest_span - max(self.work), self.longest_span)


class NoClosedForm(ValueError):
    """The closed form does not hold for these sizes and costs; ``condition`` says when it does."""

    def __init__(self, case: str, condition: str) -> None:
        super().__init__(case, condition)
        self._case = case
        self.condition = condition

    def __str__(self) -> str:
        return (
            f"{self._case}: the closed form holds only if {self.condition}; simulate the schedule"
            " instead"
        )


@dataclass(frozen=True)
class Case:
    """Sizes, in the letters of the papers, and the costs of an action."""

    p: int
    m: int
    v: int
    costs: Costs
    round_size: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """p, m and v."""
        return self.p, self.m, self.v

    def equal_stages(self) -> tuple[Time, Time, Time, Time]:
        """Return f, b, w and L; require that all stages, and all messages, cost the same.

        L is 0 on one rank, which sends no message.
        """
        n_stages = self.p * self.v
        times = self.costs.durations(n_stages)
        transfers = self.costs.transfers(n_stages)
        is_equal = all(len(set(times[kind])) == 1 for kind in "FIWU")
        self.require(
            is_equal and len(set(transfers)) <= 1, "all stages, and all messages, cost the same"
        )
        latency = transfers[0] if self.p > 1 else 0
        return times["F"][0], times["I"][0], times["W"][0], latency

    def require(self, holds: bool, condition: str) -> None:
        """Raise :class:`NoClosedForm` unless the condition holds."""
        if not holds:
            raise NoClosedForm(f"p={self.p}, m={self.m}, v={self.v} with {self.costs}", condition)


def predicted(
    case: Case,
    formula: str,
    makespan: Time,
    peaks: Iterable[int],
    span: Time | None = None,
    work: Iterable[Time] | None = None,
) -> ClosedForm:
    """Return the closed form of these numbers.

    By default the stages are looped, and the longest span is the whole makespan.
    """
    if work is None:
        times = case.costs.durations(case.p * case.v)
        work = []
        for rank in range(case.p):
            forward = sum(times["F"][rank :: case.p])
            backward = sum(times["B"][rank :: case.p])
            work.append(case.m * (forward + backward))
    if span is None:
        span = makespan
    return ClosedForm(formula, makespan, span, tuple(work), tuple(peaks))


def _ratio(part: Time, whole: Time) -> Time:
    return divide(part, whole) if whole else 0


@checked
def predict(
    name: str,
    n_ranks: int,
    n_microbatches: int,
    costs: Costs | None = None,
    n_chunks: int | None = None,
    *,
    round_size: int | None = None,
) -> ClosedForm:
    """Return the closed form of a schedule, given by name and sizes as in ``build``.

    Raises:
        NoClosedForm: where the conditions of the form do not hold, or none is known.
    """
    schedule = build(name, n_ranks, n_microbatches, n_chunks, round_size=round_size)
    form = _FORMS.get(schedule.name)
    if form is None:
        raise NoClosedForm(schedule.name, f"a schedule whose form is known: {', '.join(_FORMS)}")
    costs = Costs() if costs is None else costs
    return form(Case(n_ranks, n_microbatches, schedule.n_stages // n_ranks, costs, round_size))


def naive(case: Case) -> ClosedForm:
    """One rank works at a time: the bubble is 1 - 1/p, whatever m. Stages and messages may differ.

    Huang et al. 2019, "GPipe", figure 2b. Every message adds its latency, for every microbatch.
    """
    times = case.costs.durations(case.p)
    messages = 2 * sum(case.costs.transfers(case.p))
    makespan = case.m * (sum(times["F"]) + sum(times["B"]) + messages)
    return predicted(case, "m (p (f + B) + 2 (p - 1) L)", makespan, [1] * case.p)


def gpipe(case: Case) -> ClosedForm:
    """(m + p - 1)(f + B), hence a bubble of (p - 1) / (m + p - 1); all m microbatches are kept.

    Huang et al. 2019, "GPipe", section 2.3. Exact for unequal stages too: the slowest one sets the
    pace. Latency adds 2 (p - 1) L, once down and once up, **however many microbatches there are**.
    """
    times = case.costs.durations(case.p)
    messages = 2 * sum(case.costs.transfers(case.p))
    passes = (sum(times[kind]) + (case.m - 1) * max(times[kind]) for kind in "FB")
    formula = "Σf + (m - 1) max f + ΣB + (m - 1) max B + 2 (p - 1) L"
    return predicted(case, formula, sum(passes) + messages, [case.m] * case.p)


def one_f_one_b(case: Case) -> ClosedForm:
    """(m + p - 1)(f + B), as GPipe; rank r keeps min(m, p - r) activations. Equal stages.

    Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.2
    (PipeDream-Flush).

    Latency adds 2 (p - 1 + ⌊(m - 1)(p - 1) / p⌋) L, **which grows with m**: the first rank may have
    p microbatches in flight, and a round trip of 2 (p - 1) messages stands between each p of them
    and the next. Exact for every L.
    """
    f, b, w, latency = case.equal_stages()
    p, m, _ = case.sizes
    makespan = (m + p - 1) * (f + b + w) + 2 * (p - 1 + (m - 1) * (p - 1) // p) * latency
    formula = "(m + p - 1)(f + B) + 2 (p - 1 + ⌊(m - 1)(p - 1) / p⌋) L"
    return predicted(case, formula, makespan, [min(m, p - rank) for rank in range(p)])


def eager_1f1b(case: Case) -> ClosedForm:
    """(m + p - 1)(f + B) + 2 (p - 1) L, as GPipe, while 2 L <= f + B. Equal stages and links.

    Zhuang et al. 2023, "On optimizing the communication of model parallelism", section 4
    (eager-1F1B); rank r keeps min(m, 2 (p - 1 - r) + 1) activations. Exact for every L.
    """
    f, b, w, latency = case.equal_stages()
    p, m, _ = case.sizes
    both = f + b + w
    round_trips = (m - 1) * (p - 1) // (2 * p - 1)
    makespan = (m + p - 1) * both + 2 * (p - 1) * latency + round_trips * max(0, 2 * latency - both)
    formula = "(m + p - 1)(f + B) + 2 (p - 1) L + ⌊(m - 1)(p - 1) / (2p - 1)⌋ max(0, 2 L - f - B)"
    return predicted(case, formula, makespan, [min(m, 2 * (p - 1 - rank) + 1) for rank in range(p)])


def interleaved_1f1b(case: Case) -> ClosedForm:
    """(m v + p - 1)(f + B): the bubble is that of 1F1B over v, as f and B are those of a chunk.

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", section 2.2, for rounds of p microbatches. Holds for equal stages and any rounds
    of at least p, the last included; rank r keeps min(m v, (v - 1) n + 2 (p - 1 - r) + 1)
    activations with n a round.

    Latency up to f and up to B adds 2 (p - 1) L on the way in and out. Each further chunk waits for
    the message that comes round by p links, less the work that the rank does meanwhile; backward
    that is the work of the last round, with q microbatches. For n = p the waits are 2 (v p - 1) L
    in all. A latency above f or B costs more with every microbatch, and there is no form here.
    """
    f, b, w, latency = case.equal_stages()
    p, m, v = case.sizes
    n = case.round_size or microbatches_a_round(p, m, v)
    last = m % n or n
    case.require(
        v == 1 or min(n, last) >= p, "rounds have at least p microbatches, the last included"
    )
    case.require(latency <= min(f, b + w), "the latency is at most f and at most B")
    makespan = (m * v + p - 1) * (f + b + w) + 2 * (p - 1) * latency
    if v > 1 and p > 1:
        wait_forward = max(0, p * latency - (n - p) * f)
        wait_backward = max(0, p * latency - (last - p) * (b + w))
        makespan += (v - 1) * (wait_forward + wait_backward)
    formula = (
        "(m v + p - 1)(f + B) + 2 (p - 1) L"
        " + (v - 1)(max(0, p L - (n - p) f) + max(0, p L - (q - p) B))"
    )
    warm_up = [(v - 1) * n + 2 * (p - 1 - rank) for rank in range(p)]
    return predicted(case, formula, makespan, [min(m * v, ahead + 1) for ahead in warm_up])


def looped_bfs(case: Case) -> ClosedForm:
    """(m v + p - 1)(f + B), as interleaved, without latency and for m >= p; all m v are kept.

    Lamy-Poirier 2023, "Breadth-first pipeline parallelism", arXiv:2211.05953. Exact for all sizes
    and latencies with equal stages: a rank turns to its next chunk once it has sent all
    microbatches of this one and the first of them has come round. So latency up to (m / p - 1) f
    costs 2 (p - 1) L alone.
    """
    f, b, w, latency = case.equal_stages()
    p, m, v = case.sizes
    makespan: Time = 0
    for t in (f, b + w):
        makespan += (v - 1) * max(m * t, p * (t + latency)) + (p - 1) * (t + latency) + m * t
    formula = "Σ over t in (f, B) of (v - 1) max(m t, p (t + L)) + (p - 1)(t + L) + m t"
    return predicted(case, formula, makespan, [m * v] * p)


def hanayo(case: Case) -> ClosedForm:
    """m v (f + B) + 2 (p - 1)(max(f, B) + (m / p - 1)|B - f|): as much idle time for any v.

    Liu et al. 2023, "Hanayo", section 3, for m = p, where the bubble is 2 (p - 1) max(f, B), two
    ranks' way in and out. More microbatches are units of p one after the other, which fit into one
    another without a gap only if f = B. Rank r keeps p v - (p - 1 - r) activations. Holds for equal
    stages, m a multiple of p and no latency.
    """
    f, b, w, latency = case.equal_stages()
    p, m, v = case.sizes
    case.require(m % p == 0 and not latency, "m is a multiple of p and there is no latency")
    makespan = m * v * (f + b + w) + 2 * (p - 1) * _between_units(case)
    formula = "m v (f + B) + 2 (p - 1)(max(f, B) + (m / p - 1)|B - f|)"
    return predicted(case, formula, makespan, [p * v - (p - 1 - rank) for rank in range(p)])


def chimera(case: Case) -> ClosedForm:
    """m (f + B) + (p - 2)(max(f, B) + (m / p - 1)|B - f|); up to p activations.

    Rank r keeps p / 2 + 1 + min(r, p - 1 - r) activations. Li and Hoefler 2021, "Chimera", section
    3.1 and table 2: for f = B a bubble of (p - 2) / (2m + p - 2); for B = 2f and m = p one of (p -
    2) / (3m / 2 + p - 2). Holds for equal stages, m a multiple of p and no latency.
    """
    f, b, w, latency = case.equal_stages()
    p, m, _ = case.sizes
    case.require(m % p == 0 and not latency, "m is a multiple of p and there is no latency")
    work = m * (f + b + w)
    makespan = work + (p - 2) * _between_units(case)
    peaks = [p // 2 + 1 + min(rank, p - 1 - rank) for rank in range(p)]
    formula = "m (f + B) + (p - 2)(max(f, B) + (m / p - 1)|B - f|)"
    return predicted(case, formula, makespan, peaks, work=[work] * p)


def _between_units(case: Case) -> Time:
    """Return the cost, under Chimera and Hanayo, of a rank's distance of one from the end.

    It is paid on the way in, on the way out and between units.
    """
    f, b, w, _ = case.equal_stages()
    longer = max(f, b + w)
    shorter = min(f, b + w)
    return longer + (case.m // case.p - 1) * (longer - shorter)


def zb_h1(case: Case) -> ClosedForm:
    """m (f + B) + (p - 1) max(f, b, f + b - w); every rank keeps min(m, p) activations.

    Qi et al. 2024, "Zero bubble pipeline parallelism", section 2.3, gives a bubble of (p - 1)(f + b
    - w): the case w <= f and w <= b, which includes f = b = w, a third of 1F1B's. Holds for one
    chunk, equal stages and m >= p.

    Latency adds 4 (p - 1) L while 2 L <= w, w <= f, w <= b and m > p: it delays the first rank
    twice by a round trip, then deferred weight gradients hide it. Above, it grows with m as for
    1F1B.
    """
    f, b, w, latency = case.equal_stages()
    p, m, v = case.sizes
    case.require(v == 1, "there is one chunk a rank")
    case.require(m >= p, "m is at least p")
    if latency:
        case.require(
            m > p and w <= min(f, b) and 2 * latency <= w,
            "m > p, w <= f, w <= b and, for latency, 2 L <= w",
        )
    work_and_wait = m * (f + b + w) + 4 * (p - 1) * latency
    makespan = work_and_wait + (p - 1) * max(f, b, f + b - w)
    span = work_and_wait + (p - 1) * max(b, f + b - w)
    formula = "m (f + B) + (p - 1) max(f, b, f + b - w) + 4 (p - 1) L"
    return predicted(case, formula, makespan, [min(m, p)] * p, span)


def zb_h2(case: Case) -> ClosedForm:
    """m (f + B) + (p - 1) max(f, f + b - 2w, b - f, b - w); every rank keeps 2p - 1 activations.

    Qi et al. 2024, "Zero bubble pipeline parallelism", section 2.3, gives a bubble of (p - 1)(f + b
    - 2w) within the longest span: the case of f + b >= 2w and b at most 2f and 2w. The makespan is
    longer than the span because the last rank starts (p - 1) f late. Holds for equal stages, m >=
    2p - 1 and no latency.
    """
    f, b, w, latency = case.equal_stages()
    p, m, _ = case.sizes
    case.require(m >= 2 * p - 1 and not latency, "m is at least 2p - 1 and there is no latency")
    late = max(b - f, b - w, f + b - 2 * w)
    work = m * (f + b + w)
    makespan = work + (p - 1) * max(f, late)
    span = work + (p - 1) * max(0, late)
    formula = "m (f + B) + (p - 1) max(f, f + b - 2w, b - f, b - w)"
    return predicted(case, formula, makespan, [2 * p - 1] * p, span)


def zb_v(case: Case) -> ClosedForm:
    """2m (f + B) + (p - 1) f; every rank keeps 2p activations of half-size stages.

    That is as much as 1F1B's first rank. Qi et al. 2024, "Zero bubble pipeline parallelism" (arXiv
    2401.10241), section 6, for f = b = w. Holds for equal stages, f = b, f / 2 <= w <= f, m >= 2p -
    1 and no latency; the longest span then has a bubble of (p - 1)(f + b - 2w).
    """
    f, b, w, latency = case.equal_stages()
    p, m, _ = case.sizes
    case.require(m >= 2 * p - 1 and not latency, "m is at least 2p - 1 and there is no latency")
    case.require(f == b and w <= f <= 2 * w, "f = b and f / 2 <= w <= f")
    work = 2 * m * (f + b + w)
    makespan = work + (p - 1) * f
    span = work + (p - 1) * (f + b - 2 * w)
    return predicted(case, "2 m (f + B) + (p - 1) f", makespan, [2 * p] * p, span)


def v_half(case: Case) -> ClosedForm:
    """2m (f + B) + (3p - 4) f for odd p, (3p - 7) f for even p > 2; half of 1F1B's memory.

    Each rank keeps p + 1 half-size activations for an odd p and p + 2 for an even one. Qi et al.
    2024, "Pipeline parallelism with controllable memory" (arXiv 2405.15362), section 3.2 and table
    1, has the memory, half of 1F1B's 2p. Holds for f = b = w, equal stages, m >= 2p and no latency.
    """
    f = _equal_halves(case)
    p, m, _ = case.sizes
    small = {1: 0, 2: 1}
    late = small.get(p, 3 * p - (4 if p % 2 else 7))
    makespan = 6 * m * f + late * f
    peaks = [p + 1 + (p + 1) % 2] * p
    return predicted(case, "2 m (f + B) + (3p - 4) f, or (3p - 7) f for an even p", makespan, peaks)


def v_min(case: Case) -> ClosedForm:
    """2m (f + B) + (4p - 5) f, or (4p - 7) f if 3 divides p; a third of 1F1B's memory.

    Each rank keeps 2 ⌊(p + 1) / 3⌋ + 2 half-size activations; the first rank keeps one less where p
    is one less than a multiple of 3. Qi et al. 2024, "Pipeline parallelism with controllable
    memory" (arXiv 2405.15362), section 3.2 and table 1, has the memory, a third of 1F1B's 2p. Holds
    for f = b = w, equal stages, m >= 2p and no latency.
    """
    f = _equal_halves(case)
    p, m, _ = case.sizes
    late = 4 * p - (5 if p % 3 else 7)
    if p == 1:
        late = 0
    makespan = 6 * m * f + late * f
    most = 2 * ((p + 1) // 3) + 2
    first = most - 1 if p % 3 == 2 else most
    formula = "2 m (f + B) + (4p - 5) f, or (4p - 7) f if 3 divides p"
    return predicted(case, formula, makespan, [first, *[most] * (p - 1)])


def _equal_halves(case: Case) -> Time:
    f, b, w, latency = case.equal_stages()
    case.require(f == b == w and not latency, "f = b = w and there is no latency")
    case.require(case.m >= 2 * case.p, "m is at least 2p")
    return f


def dualpipe(case: Case) -> ClosedForm:
    """As DualPipeV for p / 2 ranks and m / 2 microbatches; every rank keeps p + 1 activations.

    DeepSeek's DualPipe repository, table of bubbles: (PP/2 - 1)(F&B + B - 3W) with PP = p, under
    the conditions of DualPipeV. Ranks r and p - 1 - r do the same, each for the other's direction.
    """
    *_, latency = case.equal_stages()
    case.require(not latency, "there is no latency")
    half = dualpipe_v(replace(case, p=case.p // 2, m=case.m // 2, v=2))
    return replace(
        half,
        work=(*half.work, *half.work[::-1]),
        peak_activations=(*half.peak_activations, *half.peak_activations[::-1]),
    )


def dualpipe_v(case: Case) -> ClosedForm:
    """The last rank's work + (p - 1)(o + B - 3w), with o the time of a pair; 2p + 1 activations.

    DeepSeek's DualPipe repository, table of bubbles, for DualPipeV; with PP = 2p stages it is there
    written (PP/2 - 1)(F&B + B - 3W), with PP + 1 activations. The last rank runs n = 2 (m - p) - 1
    overlapped pairs; a rank k before it runs n + 1 - k. Holds for equal stages, f = b, w <= f, o >=
    f, o >= B and no latency.
    """
    f, b, w, latency = case.equal_stages()
    p, m, _ = case.sizes
    case.require(f == b and w <= f and not latency, "f = b, w <= f and there is no latency")
    if case.costs.overlapped is None:
        pair_times: tuple[Time, ...] = (f + b + w,)
    else:
        pair_times = case.costs.each("overlapped", 2 * p)
    pair = pair_times[0]
    case.require(pair >= max(f, b + w), "an overlapped pair takes at least as long as either part")
    case.require(len(set(pair_times)) == 1, "all overlapped pairs cost the same")
    work = []
    for rank in range(p):
        n = 2 * (m - p) - max(1, p - 1 - rank)
        work.append((2 * m - n) * (f + b + w) + n * pair)
    formula = "(2m - n)(f + B) + n o + (p - 1)(o + B - 3w), n = 2 (m - p) - 1"
    makespan = work[-1] + (p - 1) * (pair + b - 2 * w)
    return predicted(case, formula, makespan, [2 * p + 1] * p, work=work)


def pipedream(case: Case) -> ClosedForm:
    """(m + p - 1)(f + B) + m u: 1F1B with an update after each backward, and no flush.

    One microbatch takes f + B + u. Narayanan et al. 2019, "PipeDream", section 3.2; rank r keeps
    min(m, p - r) activations, and as many versions of its weights. Holds for one rank a stage,
    equal stages and either no latency or no time for updates.
    """
    *_, latency = case.equal_stages()
    update = case.costs.each("update", case.p)[0]
    case.require(not latency or not update, "there is no latency, or updates take no time")
    flushed = one_f_one_b(case)
    updates = case.m * update
    work = [busy + updates for busy in flushed.work]
    formula = "(m + p - 1)(f + B) + m u + 2 (p - 1 + ⌊(m - 1)(p - 1) / p⌋) L"
    makespan = flushed.makespan + updates
    return predicted(case, formula, makespan, flushed.peak_activations, work=work)


def noam(replicas: Sequence[int]) -> int:
    """Return how many microbatches a replica of the first stage admits before its first backward.

    PipeDream's number of optimal active mini-batches, ⌈ranks / ranks of the first stage⌉ (Narayanan
    et al. 2019, section 3.2); ``replicas`` says how many ranks share each stage. Replicas that
    update together can want more; see :meth:`Partition.pace`.
    """
    if not replicas or min(replicas) < 1:
        raise ValueError(f"replicas {tuple(replicas)}: give each stage at least one rank")
    return -(-sum(replicas) // replicas[0])


_FORMS: dict[str, Callable[[Case], ClosedForm]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b_eager": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "hanayo": hanayo,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "chimera": chimera,
    "dualpipe": dualpipe,
    "dualpipe_v": dualpipe_v,
    "pipedream": pipedream,
}
