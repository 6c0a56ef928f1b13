"""Orders without a class in torch go through its executor, or a sentence refuses them.

torch may lack a class of the name, or refuse the size.
"""

import pytest

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy
from course_pp.parallel import DistributedConfig, get_stage_indices, init_distributed
from course_pp.schedule import Action, Schedule, build
from tests.equality import (
    Trained,
    assert_equals_one_process,
    batches,
    snapshot_gradients,
    snapshot_parameters,
)
from tests.equality import train_in_one_process as in_one_process
from tests.parallel.small import N_MICROBATCHES, SEQ_LEN, model_config
from tests.parallel.small import build as build_pipeline


def last_in_first_out(n_ranks: int, n_microbatches: int) -> Schedule:
    gpipe = build("gpipe", n_ranks, n_microbatches)
    rows = [(*row[:n_microbatches], *reversed(row[n_microbatches:])) for row in gpipe.actions]
    return Schedule("last in, first out", gpipe.placement, tuple(rows))


def orders() -> dict[str, Schedule]:
    return {
        "last in, first out": last_in_first_out(2, N_MICROBATCHES),
        "rounds of three": build("interleaved_1f1b", 2, N_MICROBATCHES, 2, round_size=3),
        "two waves": build("hanayo", 2, N_MICROBATCHES, 4),
        "overlapped pairs": build("dualpipe_v", 2, N_MICROBATCHES),
    }


# {schedule: microbatches} that torch's own classes refuse on two ranks: fewer microbatches than
# stages, or rounds of unequal size.
TOO_ODD = {"1f1b": 1, "zb_h1": 5}
ROWS = 20


def step_on_rank(rank, config, data):
    mesh = init_distributed(DistributedConfig(pp=2), seed=0)
    [(inputs, target)] = data
    trained, refusals = {}, []
    for name, order in (orders() | {name: name for name in TOO_ODD}).items():
        sizes = TOO_ODD.get(name, N_MICROBATCHES), ROWS
        modules, pipeline = build_pipeline(config, mesh, 2, rank, order, CrossEntropy(), *sizes)
        losses = [pipeline.step(inputs, target=target).item()]
        trained[name] = Trained(losses, snapshot_gradients(modules), snapshot_parameters(modules))
    differing = last_in_first_out(2, 8) if rank else Schedule("last in, first out", *_gpipe())
    for order, n_microbatches in ((differing, 8), (last_in_first_out(2, 8), 4)):
        with pytest.raises(ValueError, match=r"schedule|n_microbatches") as refusal:
            build_pipeline(config, mesh, 2, rank, order, CrossEntropy(), n_microbatches)
        refusals.append(str(refusal.value))
    return trained, refusals


def _gpipe():
    gpipe = build("gpipe", 2, 8)
    return gpipe.placement, gpipe.actions


def test_an_order_of_ones_own_equals_one_process_and_must_be_the_same_on_all_ranks(subtests):
    config = model_config(True, n_layers=8)
    data = batches(config, ROWS, SEQ_LEN, 1)
    reference = in_one_process(config, data, CrossEntropy())
    ranks = on_ranks(2, step_on_rank, config, data)
    for name in (*orders(), *TOO_ODD):
        with subtests.test(name):
            gradients = [trained[name] for trained, _ in ranks]
            assert [one.losses for one in gradients] == [
                pytest.approx(reference.losses, rel=1e-12)
            ] * 2
            unchanged = [
                Trained(one.losses, one.gradients, reference.parameters) for one in gradients
            ]
            assert_equals_one_process(unchanged, reference, config)
    for _, (differing, microbatches) in ranks:
        assert "schedule" in differing
        assert "n_microbatches=8, or build it for these" in microbatches


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            build("chimera", 2, 4),
            "holds stage 0 on 2 ranks: use one of naive, .* or run it with course_pp.runtime",
        ),
        (build("pipedream", 2, 4), r"update their weights within the step \(U\): use one of naive"),
        (build("gpipe", 2, 4).forward_only(), "has forwards alone, and torch trains"),
        (
            Schedule("idle", ((0,),), ((Action(0, "F", 0), Action(0, "B", 0)), ())),
            "gives rank 1 nothing to do",
        ),
        (
            Schedule("less", ((0,), (1,)), (build("1f1b", 2, 1).actions[0], (Action(1, "F", 0),))),
            "1B0 is missing",
        ),
        (build("1f1b", 3, 4), "on 2 pipeline ranks: build it for 2, or start 3"),
    ],
)
def test_an_order_that_torch_cannot_run_is_refused_with_what_can(order, message):
    with pytest.raises(ValueError, match=message):
        get_stage_indices(order, 0, 2)
