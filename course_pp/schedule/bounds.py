"""A lower bound on the makespan of all schedules, so that a schedule can be scored."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import lcm

from course_pp.base.arguments import checked
from course_pp.schedule.action import Time
from course_pp.schedule.costs import Costs, divide, refuse_impossible_number
from course_pp.schedule.schedule import looped, normalised, refuse_impossible_placement


@checked
def bound(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs | None = None,
    memory_limit: Time | Sequence[Time | None] | None = None,
    *,
    placement: Sequence[int | Sequence[int]] | None = None,
) -> Time:
    """Return a time before which no order of the actions can finish.

    The share ``bound / makespan`` scores a schedule. The bound is the largest of several bounds.
    One comes from the pipeline: one microbatch must go down and up. The others come from each rank:

    * The rank waits for a first microbatch to come down to it, and then has all its work to do.
    * After the rank's last input gradient, a gradient still has to go up to stage 0 and through it.
    * With a memory limit, few microbatches can be under way at a time, because an activation is
      kept from its forward until the microbatch has been down and come back.
    * While the rank waits for room, it has to do the work that makes the room. The proof:

      Take a rank's first i stages, and let h of their activations fit. Number the forwards of a
      stage from 0 in the order in which they come, and likewise its input and its weight gradients.
      Count only activations of number j and above. When the n-th forward of stage i starts, these
      stages have begun i (n + 1 - j) of them, including this one. At most h are held, so at least
      x = i (n + 1 - j) - h were given back. A weight gradient gives an activation back, and it
      follows an input gradient that is no earlier than the j-th of stage i. Before the latter, all
      counted activations were held, so there were at most h counted forwards. Hence x input
      gradients, x weight gradients and x - 1 forwards lie between the start of that input gradient
      and the start of the n-th forward. That input gradient ends at least a round trip after the
      start of the j-th forward.

      Such intervals add up along a chain: the n of one is the j of the next.

    Qi et al. 2024, "Pipeline parallelism with controllable memory" (arXiv 2405.15362), section 3,
    has the argument on memory: activations held are the time under way over the interval between
    microbatches. Carlier 1982, "The one-machine sequencing problem" (EJOR 11, 42-47), adds up the
    work that one machine must do between two moments.

    No schedule need reach the bound. At f = b = w and without a limit, ZB-H1, ZB-H2 and ZB-V do.

    Args:
        costs: one unit for each of ``F``, ``I`` and ``W`` unless given. Updates are left out,
            because they come on top.
        memory_limit: the limit of each rank, or one for all, in the unit of ``costs.activation``
            and including the weights. It must hold one microbatch.
        placement: the rank of each stage, or its ranks as in ``Schedule``; one stage a rank unless
            given.
    """
    for what, value in (("n_ranks", n_ranks), ("n_microbatches", n_microbatches)):
        if value < 1:
            raise ValueError(f"{what} is {value!r}: give an integer of at least 1")
    if n_ranks > 1_000_000:
        raise ValueError(f"n_ranks is {n_ranks}: give at most 1,000,000")
    ranks_of = looped(n_ranks) if placement is None else normalised(placement)
    refuse_impossible_placement(ranks_of, n_ranks)
    pipeline = _LeastTimes(ranks_of, n_microbatches, Costs() if costs is None else costs)
    limits = limits_of(memory_limit, n_ranks)
    of_ranks = [time for rank, limit in enumerate(limits) for time in pipeline.of_rank(rank, limit)]
    one_microbatch = pipeline.down[-1] + pipeline.round_trip[-1] + pipeline.up[-1]
    return max(one_microbatch, *of_ranks)


class _LeastTimes:
    """The least times of all parts of a step, stage by stage.

    Attributes:
        loads: {rank: {stage: number of microbatches that the rank sees there}}, without stages
            where it sees none.
        forward, inputs, finish: the times of ``F``, of ``I``, and of ``W`` after it.
        paired: whether a forward and a backward may run as one.
        saved: the most time that pairing a forward of the stage with any backward can save.
        down: the time from the start of the step until a first ``F`` of the stage can start.
        round_trip: the time from the start of the stage's ``F`` to the end of its ``I`` of the same
            microbatch.
        up: the time from the end of the stage's ``I`` until stage 0 has finished the microbatch.
        kept, early: the memory that ``F`` keeps, and the part of it that ``I`` gives back.
    """

    def __init__(
        self, placement: Sequence[Sequence[int]], n_microbatches: int, costs: Costs
    ) -> None:
        n = len(placement)
        self.placement, self.n_microbatches = placement, n_microbatches
        self.loads: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for stage, ranks in enumerate(placement):
            for first, rank in enumerate(ranks[:n_microbatches]):
                self.loads[rank][stage] = len(range(first, n_microbatches, len(ranks)))
        memory = ("activation", "released_by_input_grad", "weights")
        self.kept, self.early, self.weights = (costs.each(name, n) for name in memory)
        self.times = costs.durations(n)
        times, transfers = self.times, costs.transfers(n)
        # If one rank holds replicas of neighbouring stages, the message between them may take no
        # time.
        hops = [
            t if set(placement[s]).isdisjoint(placement[s + 1]) else 0
            for s, t in enumerate(transfers)
        ]
        forward, inputs, whole = list(times["F"]), list(times["I"]), list(times["B"])
        self.finish: list[Time] = list(times["W"])
        self.saved: list[Time] = [0] * n
        self.paired = costs.overlapped is not None
        if self.paired:
            # A pair may end before its parts alone would, and its weight gradient may come with it.
            pairs = costs.each("overlapped", n)
            self.saved = [
                max(0, f + max(whole) - pair) for f, pair in zip(forward, pairs, strict=True)
            ]
            forward = [min(f, pair) for f, pair in zip(forward, pairs, strict=True)]
            inputs, whole = [min(t, *pairs) for t in inputs], [min(t, *pairs) for t in whole]
            self.finish = [0] * n
        self.forward, self.inputs = forward, inputs
        self.down: list[Time] = [0]
        self.up = [self.finish[0]]
        self.round_trip = [forward[-1] + inputs[-1]]
        for stage in range(1, n):
            self.down.append(self.down[-1] + forward[stage - 1] + hops[stage - 1])
            self.up.append(
                hops[stage - 1] + (whole[0] if stage == 1 else inputs[stage - 1] + self.up[-1])
            )
        for stage in reversed(range(n - 1)):
            self.round_trip.append(
                forward[stage] + 2 * hops[stage] + self.round_trip[-1] + inputs[stage]
            )
        self.round_trip.reverse()

    def of_rank(self, rank: int, limit: Time | None) -> Iterator[Time]:
        """Yield bounds from the work and the memory of one rank; none if it has no stage."""
        load = self.loads[rank]
        if not load:
            return
        start = min(self.down[stage] for stage in load)
        saved = sum(n * self.saved[stage] for stage, n in load.items())
        work = {
            kind: sum(n * self.times[kind][stage] for stage, n in load.items()) for kind in "FIW"
        }
        yield start + max(0, sum(work.values()) - saved)
        yield start + max(0, work["F"] + work["I"] - saved) + min(self.up[stage] for stage in load)
        if limit is None:
            return
        room = self._room(rank, limit)
        yield from (start + time for time in self._from_memory(load, room))
        # Replicas of different stages on one rank need not see the same microbatches, so the proof
        # holds only for one stage at a time.
        together = all(len(self.placement[stage]) == 1 for stage in load)
        for count, stage in enumerate(load, 1):
            yield self._making_room([*load][:count] if together else [stage], load[stage], room)

    def _room(self, rank: int, limit: Time) -> Time:
        """Return the memory that ``limit`` leaves for activations.

        Weights of a replica that sees no microbatch do not count, as the rank need not hold it.
        """
        load = self.loads[rank]
        # At its loss, a microbatch is held by every stage it passes on this rank.
        shared = lcm(*(len(self.placement[stage]) for stage in load))
        least = max(
            sum(self.kept[s] for s in load if self.placement[s][i % len(self.placement[s])] == rank)
            for i in range(min(shared, self.n_microbatches))
        )
        room = limit - sum(self.weights[stage] for stage in load)
        # The difference of two floats may fall short by a rounding error.
        slack = 1e-9 * float(limit) if isinstance(room - least, float) else 0
        if room < least - slack:
            raise ValueError(
                f"memory_limit is {limit} on rank {rank}: one microbatch and the weights need"
                f" {least + limit - room}; give at least that, or smaller stages"
            )
        return max(room, least)

    def _from_memory(self, load: dict[int, int], room: Time) -> Iterator[Time]:
        """Yield bounds on the time from the rank's first forward if memory is ``room`` at most."""
        held = sum(
            count
            * (self.kept[s] * self.round_trip[s] + (self.kept[s] - self.early[s]) * self.finish[s])
            for s, count in load.items()
        )
        if held:
            yield divide(held, room)
        smallest = min(self.kept[stage] for stage in load)
        if smallest:
            rounds = -(-sum(load.values()) // _how_many(room, smallest))
            stay = min(self.round_trip[s] + self._last_to_go(s) for s in load)
            last = min(self.round_trip[s] + max(self.up[s], self.finish[s]) for s in load)
            yield (rounds - 1) * stay + last

    def _last_to_go(self, stage: int) -> Time:
        """Return the least time after ``I`` for which the whole activation is still held."""
        return 0 if self.early[stage] else self.finish[stage]

    def _making_room(self, stages: Sequence[int], n: int, room: Time) -> Time:
        """Return the bound from a rank's first stages, the last of which sees ``n`` microbatches.

        The proof is in ``bound``.
        """
        last = stages[-1]
        smallest = min(self.kept[stage] for stage in stages)
        fits = _how_many(room, smallest) if smallest else len(stages) * n
        forward = min(self.forward[stage] for stage in stages)
        backward = min(self.inputs[stage] + self._last_to_go(stage) for stage in stages)

        def apart(d: int) -> Time:
            """Return the time between the starts of two forwards ``d`` microbatches apart."""
            x = len(stages) * (d + 1) - fits
            # A forward may run with a backward, as a pair.
            work = x * backward + (0 if self.paired else (x - 1) * forward)
            return self.round_trip[last] - self.inputs[last] + work

        chains: list[Time] = [(n - 1) * self.forward[last]]
        least = fits // len(stages)
        if least < n:
            steps, rest = divmod(n - 1, least)
            chains += [apart(n - 1), (steps - 1) * apart(least) + apart(least + rest)]
        return (
            self.down[last]
            + max(chains)
            + self.round_trip[last]
            + max(self.up[last], self.finish[last])
        )


def _how_many(room: Time, each: Time) -> int:
    # A sum of floats may fall short of a multiple by a rounding error.
    slack = 1e-9 if isinstance(room / each, float) else 0
    return int(divide(room, each) + slack)


def limits_of(limit: Time | Sequence[Time | None] | None, n_ranks: int) -> Sequence[Time | None]:
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * n_ranks
    if len(limits) != n_ranks:
        raise ValueError(
            f"memory_limit has {len(limits)} values for {n_ranks} ranks: give one number, or one"
            " for each"
        )
    for each in limits:
        if each is not None:
            refuse_impossible_number("memory_limit", each, "or None for no limit")
    return limits
