"""Which version of its weights each forward and backward of an asynchronous schedule uses, and
where gradients go.

Version v of a stage is its weights after v updates; update u makes version u + 1. A gradient that
was computed with version v and enters update u is u - v updates late: its *staleness*.

    stage 0   F0 F1 F2 F3 B0 U0 F4 B1 U1 F5 …        update 1 takes the gradient of microbatch 1, which
              v0 v0 v0 v0 v0    v1 v0    v2          was computed with version 0: one update late
"""

from collections import defaultdict
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
    """What became of one microbatch in one stage.

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
        """How many updates lie between the weights of its backward and those that its gradient changes."""
        return self.update - self.backward


@dataclass(frozen=True, repr=False)
class Ledger:
    """Every use of a version under one rule of :func:`ledger`, in order of stage and microbatch."""

    versions: Versions
    uses: tuple[Use, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "uses", tuple(sorted(self.uses, key=lambda use: (use.stage, use.microbatch)))
        )

    def of(self, stage: int, microbatch: int) -> Use:
        """Return what became of one microbatch in one stage."""
        use = self._by_work.get((stage, microbatch))
        if use is None:
            raise ValueError(
                f"the ledger holds no microbatch {microbatch} of stage {stage}: it has {self!r}"
            )
        return use

    def staleness(self, stage: int) -> tuple[int, ...]:
        """Of each microbatch's gradient in ``stage``, in order."""
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
        stages, microbatches = (
            {getattr(use, name) for use in self.uses} for name in ("stage", "microbatch")
        )
        return f"Ledger({self.versions!r}, {len(stages)} stages, {len(microbatches)} microbatches)"

    def __str__(self) -> str:
        """Return a row a stage, an entry a microbatch: the versions of its forward and backward, and its update."""
        rows = [f"versions={self.versions!r}: forward/backward→update of each microbatch"]
        for stage, uses in groupby(self.uses, key=lambda use: use.stage):
            rows.append(
                f"stage {stage}: " + " ".join(f"{u.forward}/{u.backward}→{u.update}" for u in uses)
            )
        return "\n".join(rows)


@checked
def ledger(schedule: Schedule, versions: Versions) -> Ledger:
    """Return which versions ``schedule`` uses under a rule; nothing is run.

    ============
    ======================================================================================================
    ``none``      forward and backward each take the newest weights: a gradient is then of no function at all
    ``stash``     a backward takes what its forward took, the newest then (weight stashing)
    ``vertical``  every stage takes what the first one took: as many updates as it had when the
    microbatch entered
                  (vertical sync). Where stages are replicated unequally, the newest that saw no
                  later microbatch
    ``2bw``       microbatches of group g take the version of group g - 1's beginning, so each gradient is one update
                  late, and two versions are enough (PipeDream-2BW)
    ============
    ======================================================================================================

    Narayanan et al. 2019, "PipeDream", section 3.3, for the first three; Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), section 3.1, for the last.

    Raises:
        ValueError: for a schedule that leaves a gradient without an update, as those that flush do,
            in which replicas update unequally often, or that needs a version before it exists.
    """
    return Ledger(versions, tuple(_Reading(schedule, versions).uses()))


class _Reading:
    def __init__(self, schedule: Schedule, versions: Versions) -> None:
        self._schedule, self._versions = schedule, versions
        self._rows = [[part for action in row for part in action.parts] for row in schedule.actions]
        self._update_of = dict(self._entered())
        for stage, ranks in enumerate(schedule.placement):
            each = [
                sum((part.stage, part.kind) == (stage, "U") for part in self._rows[rank])
                for rank in ranks
            ]
            if len(set(each)) > 1:
                raise ValueError(
                    f"{schedule!r}: the {len(ranks)} replicas of stage {stage} update {each} times,"
                    f" but their updates are one: give a number of microbatches that {len(ranks)}"
                    " divides"
                )
        for (stage, microbatch), update in self._update_of.items() if versions == "2bw" else ():
            first = self._update_of[0, microbatch]
            if update != first:
                raise ValueError(
                    f"{schedule!r}: microbatch {microbatch} is in update {first} of stage 0, but in"
                    f" {update} of stage {stage}: versions='2bw' needs the same groups everywhere,"
                    " build('pipedream', …, group=…)"
                )

    def uses(self) -> Iterator[Use]:
        entered: dict[int, int] = {}
        if self._versions == "vertical":
            entered = {use.microbatch: use.forward for use in self._walk({}) if use.stage == 0}
        yield from self._walk(entered)

    def _entered(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield for each stage and microbatch, the number of the update that its gradient enters."""
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
            left = next(((stage, m[0]) for stage, m in waiting.items() if m), None)
            if left is not None:
                raise ValueError(
                    f"{self._schedule!r}: no update of stage {left[0]} on rank {rank} takes the"
                    f" gradient of microbatch {left[1]}: end the order with an update (U), or run a"
                    " schedule that flushes without versions="
                )

    def _walk(self, entered: dict[int, int]) -> Iterator[Use]:
        """Yield the uses; ``entered`` has for each microbatch the version that the first stage took of it."""
        for row in self._rows:
            done: defaultdict[int, int] = defaultdict(int)
            of: dict[tuple[int, int], int] = {}
            for part in row:
                work = (part.stage, part.microbatch)
                if part.kind == "F":
                    of[work] = self._version(work, done[part.stage], entered)
                    if of[work] > done[part.stage]:
                        remedy = "let every replica take part in the same rounds"
                        if self._versions == "2bw":
                            remedy = (
                                "give groups of at least as many microbatches as there are ranks"
                                " from stage 0 on"
                            )
                        raise ValueError(
                            f"{self._schedule!r}: {part} needs version {of[work]} of its stage,"
                            f" which has had {done[part.stage]} updates by then: {remedy}"
                        )
                elif part.kind in "BI":
                    backward = done[part.stage] if self._versions == "none" else of[work]
                    yield Use(*work, of[work], backward, self._update_of[work])
                elif part.kind == "U":
                    done[part.stage] += 1

    def _version(self, work: tuple[int, int], newest: int, entered: dict[int, int]) -> int:
        if self._versions == "2bw":
            return max(self._update_of[work] - 1, 0)
        if not entered:
            return newest
        # The first stage has seen so many microbatches; this one the most whole updates of no more
        # than those.
        stage, microbatch = work
        seen = self._sizes[0][entered[microbatch]]
        return sum(size <= seen for size in self._sizes[stage][1:])

    @cached_property
    def _sizes(self) -> dict[int, list[int]]:
        """For each stage, how many microbatches its first 0, 1, 2, … updates take."""
        counts: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        for (stage, _), update in self._update_of.items():
            counts[stage][update] += 1
        return {
            stage: list(accumulate((each[update] for update in sorted(each)), initial=0))
            for stage, each in counts.items()
        }
