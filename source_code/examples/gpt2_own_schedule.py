"""Train the same GPT-2 with a schedule of your own: check it, predict it, run it, measure it.

    torchrun --standalone --nproc-per-node=2 source_code/examples/gpt2_own_schedule.py

A schedule is data: the actions of each rank in order. This one is GPipe, but the backward of the
last microbatch comes first. `course_pp.runtime` runs any schedule that passes the check.
"""

import torch
import torch.distributed as dist
from gpt2 import N_MICROBATCHES, Stage, batch, build_model

from course_pp.model import CrossEntropy
from course_pp.parallel import compute_layer_assignment, find_ties, get_world_info
from course_pp.runtime import Pipeline, Recorder
from course_pp.schedule import Schedule, build, check, simulate


def last_in_first_out(n_ranks: int, n_microbatches: int) -> Schedule:
    """Return all forwards, then all backwards from the last microbatch to the first."""
    gpipe = build("gpipe", n_ranks, n_microbatches)
    actions = []
    for row in gpipe.actions:
        forwards, backwards = row[:n_microbatches], row[n_microbatches:]
        actions.append((*forwards, *reversed(backwards)))
    return Schedule("last in, first out", gpipe.placement, tuple(actions))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, _, n_ranks = get_world_info()
    schedule = last_in_first_out(n_ranks, N_MICROBATCHES)
    assert not check(schedule), check(schedule)

    model = build_model()
    ties = []
    if n_ranks > 1:
        # A tie says which parameter of which stage is the same weight.
        ties = [{0: wte, n_ranks - 1: head} for wte, head in find_ties(model)]
    stage = Stage(model, *compute_layer_assignment(model.config.n_layer, n_ranks)[rank])
    recorder = Recorder()
    pipeline = Pipeline(schedule, stage, CrossEntropy(), tied=ties, recorder=recorder)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)

    for step in range(5):
        recorder.clear()  # the picture is of the last step
        optimizer.zero_grad()
        inputs, target = batch(step, None)
        loss = pipeline.step(inputs, target=target)
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    timeline = recorder.timeline()  # a collective: every rank takes part
    if rank == 0:
        predicted = simulate(schedule).bubble_fraction
        print(f"bubble: predicted {predicted:.0%}, measured {timeline.bubble_fraction:.0%}")
    dist.destroy_process_group()
