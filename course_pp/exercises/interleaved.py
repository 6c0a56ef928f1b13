"""Exercises of notebook 04: the warm-up with chunks, how many chunks, rounds, where stages live, and a bug clinic."""

from __future__ import annotations

from course_pp.exercises.exercise import Exercise
from course_pp.exercises.interleaved_orders import grade_order, grade_warm_up, order_in_rounds, warm_up_forwards
from course_pp.exercises.interleaved_places import best_chunks, grade_best_chunks, grade_stages, stages_of_rank
from course_pp.exercises.interleaved_steps import grade_healed_step, healed_chunks_step

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "warm_up_forwards",
        "04",
        "the warm-up with chunks",
        2,
        6,
        (
            "Begin with v = 1: that is 1F1B, and 03 has its warm-up. What must happen before the *first* backward if v "
            "is 2?",
            "The first backward is in the last chunk. Before it, a round of p microbatches goes through each chunk "
            "before the last: p forwards for each of those.",
            "In the last chunk it is as in 1F1B: one forward for each of the `p - 1 - rank` ranks behind this one.",
        ),
        warm_up_forwards,
        grade_warm_up,
    ),
    Exercise(
        "best_chunks",
        "04",
        "the best number of chunks for a latency",
        2,
        7,
        (
            "Try every v that divides `layers`, and keep the one with the shortest step. `simulate` gives a makespan, "
            "or use the formula of the text.",
            "A chunk takes a v-th of the time of a rank's layers: `Costs(forward / v, backward / v, 0, latency)`. The "
            "third number, the weight gradients' time, is already in `backward`.",
            '`simulate(build("interleaved_1f1b", p, m, v), costs).makespan` for each v, then the least; of equal ones '
            "the smallest v.",
        ),
        best_chunks,
        grade_best_chunks,
    ),
    Exercise(
        "order_in_rounds",
        "04",
        "an order in rounds",
        3,
        10,
        (
            "First make the list of all forwards: for each round, for each chunk, for each microbatch of the round. "
            "Then that of all backwards, which begin in the last chunk.",
            "The warm-up takes the first so many forwards. Then the next forward and the next backward take turns, and "
            "the backwards that are left come last.",
            "How many? One round in every chunk but the last, which is now `(v - 1) * n`, and 2 for each of the "
            "`p - 1 - rank` ranks behind; never more than there are.",
        ),
        order_in_rounds,
        grade_order,
    ),
    Exercise(
        "stages_of_rank",
        "04",
        "a loop and a V",
        1,
        4,
        (
            "Chunk c has the stages `c * p` to `c * p + p - 1`, one on each rank. In a loop, which is on rank r?",
            "In a V the second chunk begins where the first one ended: it runs from rank p - 1 back to rank 0.",
            "So in chunks 1, 3 and so on rank r stands at place `p - 1 - rank`, else at place `rank`; its stage is "
            "`c * p + place`.",
        ),
        stages_of_rank,
        grade_stages,
    ),
    Exercise(
        "healed_chunks_step",
        "04",
        "bug clinic",
        3,
        8,
        (
            "Four ranks with two chunks: rank 1 holds stages 1 and 5. Which of its two modules does the step take for "
            "stage 1, and which for stage 5?",
            "Now follow a gradient from stage 4, on rank 0, to stage 3, on the last rank. Who sends, who receives it?",
            "The chunk of stage s is `s // p`. A step begins and ends at a *stage*: compare `stage` with 0 and with "
            "`ring.last_stage`, and no rank with anything.",
        ),
        healed_chunks_step,
        grade_healed_step,
    ),
)
