"""The versions of weights that an asynchronous schedule uses, and the updates of its gradients.

Version v of a stage is its weights after v updates; update u makes version u + 1. A gradient that
was computed with version v and enters update u is u - v updates late: its *staleness*.

    stage 0   F0 F1 F2 F3 B0 U0 F4 B1 U1 F5 …
              v0 v0 v0 v0 v0    v1 v0    v2

Update 1 takes the gradient of microbatch 1, which was computed with version 0: one update late.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Literal, get_args

from course_pp.base.arguments import checked
from course_pp.schedule.schedule import Schedule

Versions = Literal["none", "stash", "vertical", "2bw"]
VERSIONS: tuple[Versions, ...] = get_args(Versions)


@dataclass(frozen=True, slots=True)
class Use:
    """The versions that one microbatch used in one stage, and the update of its gradient.

    Attributes:
        forward, backward: the version of the stage's weights that each used.
        update: the update of the stage that its gradient entered.
    """

    stage: int
    microbatch: int
    forward: int
    backward: int
    update: int

    @property
    def staleness(self) -> int:
        """The number of updates between the backward and the update of its gradient."""
        return self.update - self.backward


@dataclass(frozen=True, repr=False)
class Ledger:
    """Every use of a version under one rule of :func:`ledger`, in order of stage and microbatch."""

    versions: Versions
    uses: tuple[Use, ...]

    def __post_init__(self) -> None:
        ordered = sorted(self.uses, key=lambda use: (use.stage, use.microbatch))
        object.__setattr__(self, "uses", tuple(ordered))

    def of(self, stage: int, microbatch: int) -> Use:
        """Return the use of one microbatch in one stage."""
        use = self._by_work.get((stage, microbatch))
        if use is None:
            raise ValueError(
                f"the ledger holds no microbatch {microbatch} of stage {stage}: it has {self!r}"
            )
        return use

    def staleness(self, stage: int) -> tuple[int, ...]:
        """Return the staleness of each microbatch's gradient in ``stage``, in order."""
        return tuple(use.staleness for use in self.uses if use.stage == stage)

    def updates(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """Return for each update of ``stage`` the microbatches whose gradients entered it."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for use in self.uses:
            if use.stage == stage:
                found[use.update].append(use.microbatch)
        return tuple(tuple(found[update]) for update in sorted(found))

    @cached_property
    def _by_work(self) -> dict[tuple[int, int], Use]:
        return {(use.stage, use.microbatch): use for use in self.uses}

    def __or__(self, other: "Ledger") -> "Ledger":
        return Ledger(self.versions, tuple({*self.uses, *other.uses}))

    def __repr__(self) -> str:
        n_stages = len({use.stage for use in self.uses})
        n_microbatches = len({use.microbatch for use in self.uses})
        return f"Ledger({self.versions!r}, {n_stages} stages, {n_microbatches} microbatches)"

    def __str__(self) -> str:
        """Return a row a stage, an entry a microbatch: its versions, and its update."""
        rows = [f"versions={self.versions!r}: forward/backward→update of each microbatch"]
        for stage, uses in groupby(self.uses, key=lambda use: use.stage):
            entries = [f"{use.forward}/{use.backward}→{use.update}" for use in uses]
            rows.append(f"stage {stage}: {' '.join(entries)}")
        return "\n".join(rows)


@checked
def ledger(schedule: Schedule, versions: Versions) -> Ledger:
    """Return the versions that ``schedule`` uses under a rule. Nothing is run.

    The rules are:

    - ``none``: forward and backward each take the newest weights. The two may differ, and the
      gradient is then the gradient of no function at all.
    - ``stash``: the forward takes the newest weights, and the backward takes the same (weight
      stashing).
    - ``vertical``: every stage takes the version of the first stage: the number of updates that the
      first stage had when the microbatch entered (vertical sync). Where stages are replicated
      unequally, it takes its newest version that saw no later microbatch.
    - ``2bw``: microbatches of group g take the version from the beginning of group g - 1, so each
      gradient is one update late, and two versions are enough (PipeDream-2BW).

    Narayanan et al. 2019, "PipeDream", section 3.3, for the first three; Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), section 3.1, for the last.

    Raises:
        ValueError: for a schedule that leaves a gradient without an update, as schedules that flush
            do, in which replicas update unequally often, or that needs a version before it exists.
    """
    return Ledger(versions, tuple(_Reading(schedule, versions).uses()))


class _Reading:
    """One schedule, read under one rule."""

    def __init__(self, schedule: Schedule, versions: Versions) -> None:
        self._schedule = schedule
        self._versions = versions
        self._rows = [[part for action in row for part in action.parts] for row in schedule.actions]
        self._update_of = dict(self._entered())
        for stage, ranks in enumerate(schedule.placement):
            each = []
            for rank in ranks:
                kinds = [part.kind for part in self._rows[rank] if part.stage == stage]
                each.append(kinds.count("U"))
            if len(set(each)) > 1:
                raise ValueError(
                    f"{schedule!r}: the {len(ranks)} replicas of stage {stage} update {each} times,"
                    f" but their updates are one: give a number of microbatches that {len(ranks)}"
                    " divides"
                )
        if versions == "2bw":
            self._refuse_unequal_groups()

    def uses(self) -> Iterator[Use]:
        """Yield the uses, rank by rank."""
        entered: dict[int, int] = {}
        if self._versions == "vertical":
            entered = {use.microbatch: use.forward for use in self._walk({}) if use.stage == 0}
        yield from self._walk(entered)

    def _entered(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield each stage and microbatch, and the number of the update its gradient enters."""
        for rank, row in enumerate(self._rows):
            done: defaultdict[int, int] = defaultdict(int)
            waiting: defaultdict[int, list[int]] = defaultdict(list)
            for part in row:
                if part.kind in "BW":
                    waiting[part.stage].append(part.microbatch)
                elif part.kind == "U":
                    for microbatch in waiting.pop(part.stage, ()):
                        yield (part.stage, microbatch), done[part.stage]
                    done[part.stage] += 1
            for stage, microbatches in waiting.items():
                raise ValueError(
                    f"{self._schedule!r}: no update of stage {stage} on rank {rank} takes the"
                    f" gradient of microbatch {microbatches[0]}: end the order with an update (U),"
                    " or run a schedule that flushes without versions="
                )

    def _walk(self, entered: dict[int, int]) -> Iterator[Use]:
        """Yield the uses, rank by rank.

        Args:
            entered: for each microbatch the version that the first stage took of it; empty if that
                version does not matter.
        """
        for row in self._rows:
            done: defaultdict[int, int] = defaultdict(int)
            taken: dict[tuple[int, int], int] = {}
            for part in row:
                work = (part.stage, part.microbatch)
                newest = done[part.stage]
                if part.kind == "F":
                    taken[work] = self._version(work, newest, entered)
                    if taken[work] > newest:
                        remedy = "let every replica take part in the same rounds"
                        if self._versions == "2bw":
                            remedy = (
                                "give groups of at least as many microbatches as there are ranks"
                                " from stage 0 on"
                            )
                        raise ValueError(
                            f"{self._schedule!r}: {part} needs version {taken[work]} of its stage,"
                            f" which has had {newest} updates by then: {remedy}"
                        )
                elif part.kind in "BI":
                    backward = newest if self._versions == "none" else taken[work]
                    yield Use(*work, taken[work], backward, self._update_of[work])
                elif part.kind == "U":
                    done[part.stage] += 1

    def _version(self, work: tuple[int, int], newest: int, entered: dict[int, int]) -> int:
        """Return the version that the forward of a stage and microbatch takes."""
        if self._versions == "2bw":
            return max(self._update_of[work] - 1, 0)
        if not entered:
            return newest
        # The first stage had seen a number of microbatches. This stage takes the most whole updates
        # that together hold no more.
        stage, microbatch = work
        seen = self._sizes[0][entered[microbatch]]
        return sum(size <= seen for size in self._sizes[stage][1:])

    @cached_property
    def _sizes(self) -> dict[int, list[int]]:
        """For each stage, the number of microbatches in its first 0, 1, 2, … updates."""
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for (stage, _), update in self._update_of.items():
            counts[stage][update] += 1
        sizes = {}
        for stage, count in counts.items():
            each = [count[update] for update in sorted(count)]
            sizes[stage] = list(accumulate(each, initial=0))
        return sizes

    def _refuse_unequal_groups(self) -> None:
        for (stage, microbatch), update in self._update_of.items():
            first = self._update_of[0, microbatch]
            if update != first:
                raise ValueError(
                    f"{self._schedule!r}: microbatch {microbatch} is in update {first} of stage 0,"
                    f" but in {update} of stage {stage}: versions='2bw' needs the same groups"
                    " everywhere, build('pipedream', …, group=…)"
                )
