"""What the planner would have done with the runs of table 1 of Narayanan et al. 2021,
arXiv:2104.04473.

For each of the ten models at its size: the step as it was published, as the planner predicts the
published layout, and as it predicts its own best one, with the same kernels and the same precision.
Where that is another layout, the reason is made from the two predictions. Everything is on paper.

    python benchmarks/plan_published.py
"""

from course_pp.plan import Prediction, plan
from course_pp.plan.calibration import MEGATRON, PublishedRun
from course_pp.plan.prediction import reason


def planned(run: PublishedRun) -> tuple[Prediction, Prediction]:
    """Compare the published layout with the planner's best one.

    Both have the same cluster and model; sizes, schedule and checkpointing may differ.
    """
    best = plan(run.model, run.cluster, run.global_batch, run.seq_len, n_best=5, like=run.layout)[0]
    return run.predicted(), best


def why(published: Prediction, best: Prediction) -> str:
    """One sentence."""
    return (
        reason(best, published)
        if best.step_s < published.step_s
        else "none is faster than the published one."
    )


def main() -> None:
    print(f"{'row':<10}{'timed s':>9}{'predicted s':>12}{'best s':>8}{'GB':>6}  why")
    for run in MEGATRON:
        published, best = planned(run)
        held = max(best.total_memory) / 1e9
        row = (
            f"{run.name:<10}{run.seconds:9.2f}{published.step_s:12.2f}{best.step_s:8.2f}{held:6.1f}"
        )
        print(f"{row}  {why(published, best)}")


if __name__ == "__main__":
    main()
