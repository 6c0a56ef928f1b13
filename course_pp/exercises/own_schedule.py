"""The exercises of notebook 11: a bound, a rule, a repair, and a clinic of orders that need buffers."""

from __future__ import annotations

from course_pp.exercises.exercise import Exercise
from course_pp.exercises.own_schedule_clinic import grade_untangled, untangled
from course_pp.exercises.own_schedule_repair import grade_repair, repair
from course_pp.exercises.own_schedule_rules import grade_choose, grade_lower_bound, lower_bound, next_action

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "lower_bound",
        "11",
        "a bound of your own",
        2,
        10,
        (
            "Take one rank. Before its first forward a microbatch comes down `rank` stages. Then it has m times F, I "
            "and W to do: that gives one bound for each rank.",
            "Look at the end, too: after a rank's last I, a gradient goes up `rank` stages, and stage 0 has its W.",
            "The second bound of a rank is `rank * F + m * (F + I) + rank * I + W`. Return the latest of all.",
        ),
        lower_bound,
        grade_lower_bound,
    ),
    Exercise(
        "next_action",
        "11",
        "a greedy rule",
        1,
        6,
        (
            "Whoever waits for this rank waits for one kind of action. Which?",
            "The rank above waits for I, the rank below for F, and nobody for W.",
            "I before F before W: `min` with a key that says so.",
        ),
        next_action,
        grade_choose,
    ),
    Exercise(
        "repair",
        "11",
        "a repair",
        3,
        12,
        (
            "Try every swap of two neighbours on a rank. `problems_of(schedule)` says whether the order can still run.",
            "Keep a swap if `simulate(…).makespan` falls, and `max(….peak_activations)` is at most `cap`. Otherwise "
            "swap back.",
            "Some swaps leave the makespan and prepare the next one. Compare pairs: the makespan, then the sum of all "
            "ends. Go round until nothing helps.",
        ),
        repair,
        grade_repair,
        limit_s=30.0,
    ),
    Exercise(
        "untangled",
        "11",
        "bug clinic",
        3,
        10,
        (
            "Walk through all programs at once. A send and its receive happen together.",
            "Where a rank stands at a send, and its receiver at a send of its own, neither can go on.",
            "Let the receiver take the message at once: its `recv` moves to where it stands. Write each event "
            "down as it happens: these lists are the answer.",
        ),
        untangled,
        grade_untangled,
    ),
)
