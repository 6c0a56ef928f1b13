"""Exercises of notebook 06: weight stashing, versions, replicas, plans, and a bug clinic."""

from __future__ import annotations

from course_pp.exercises.exercise import Exercise
from course_pp.exercises.pipedream_orders import (
    grade_order,
    grade_slowest,
    grade_version,
    order_pipedream,
    slowest_part,
    version_used,
)
from course_pp.exercises.pipedream_steps import (
    grade_healed_step,
    grade_stashed_step,
    healed_versions_step,
    stashed_step,
)

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "stashed_step",
        "06",
        "weight stashing by hand",
        2,
        9,
        (
            "What must not change between a forward and its backward? The optimizer changes `stage`'s parameters in "
            "place.",
            "Let each forward run through a copy of the stage of its own, `copy.deepcopy(stage)`, and keep it with x "
            "and y until the backward. Its gradients then arrive at the copy.",
            "Before `optimizer.step()` give each parameter of `stage` the `.grad` of the same parameter of the copy.",
        ),
        stashed_step,
        grade_stashed_step,
        limit_s=10.0,
    ),
    Exercise(
        "version_used",
        "06",
        "which version does this backward use",
        2,
        7,
        (
            "`none` first: when the backward of microbatch i runs, its stage has had the updates of microbatches 0 to "
            "i - 1.",
            "`stash` asks for the same count at the forward: p - 1 - stage of those microbatches are not back yet. "
            "`vertical` asks it of stage 0.",
            "`2bw`: microbatch i is in group `i // group`, and its version has the updates of all groups but the last "
            "one before it. No version is below 0.",
        ),
        version_used,
        grade_version,
    ),
    Exercise(
        "order_pipedream",
        "06",
        "NOAM, and the order of a replica",
        2,
        8,
        (
            "Which microbatches are this replica's? `replica`, and then every `replicas[stage]`-th.",
            "In flight are `sum(replicas[stage:])` over `replicas[stage]`; `-(-a // b)` divides and rounds up.",
            "So many forwards are in flight at most, the last one included: do one fewer, then F, B, U in turn, then "
            "what is left.",
        ),
        order_pipedream,
        grade_order,
    ),
    Exercise(
        "slowest_part",
        "06",
        "the slowest part of a plan",
        2,
        7,
        (
            "One number for each stage and one for each boundary between two stages; the largest is the answer.",
            "A stage's work is `sum(times[start:end])`, and its weights are added up likewise.",
            "A boundary: the output of the stage's last layer, `outputs[end - 1]`, twice, over the bandwidth; none "
            "behind the last stage.",
        ),
        slowest_part,
        grade_slowest,
    ),
    Exercise(
        "healed_versions_step",
        "06",
        "bug clinic",
        3,
        9,
        (
            "Two faults. Which version is put away for microbatch 1 on rank 2: the one that its forward used?",
            "The stash belongs to a forward, not to an update. And what does `optimizer.load_state_dict` bring back "
            "that weight stashing does not ask for?",
            "Put `stage.state_dict()` away inside `forward`, take it in every `backward`, and never set the optimizer "
            "back.",
        ),
        healed_versions_step,
        grade_healed_step,
        limit_s=10.0,
    ),
)
