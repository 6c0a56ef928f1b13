"""Training through the pipeline equals one process: loss, every gradient, every parameter."""

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy
from course_pp.parallel import DistributedConfig, init_distributed, schedule_names
from tests.equality import assert_equals_one_process, batches, train, train_in_one_process
from tests.parallel.small import SEQ_LEN, build, model_config

STEPS = 2
SCHEDULES = (*schedule_names(), "interleaved_zb")


def train_on_rank(rank, pp, config, data, n_microbatches):
    """Take two AdamW steps under each schedule, from the same initial weights."""
    torch.set_num_threads(1)
    results = {}
    for schedule in SCHEDULES:
        mesh = init_distributed(DistributedConfig(pp=pp), seed=0)
        modules, pipeline = build(
            config, mesh, pp, rank, schedule, CrossEntropy(), n_microbatches, len(data[0][0])
        )
        evaluated = pipeline.eval(data[0][0], target=data[0][1]).item()
        trained = train(
            modules, len(data), lambda i, p=pipeline: p.step(data[i][0], target=data[i][1])
        )
        results[schedule] = trained, evaluated, pipeline.eval(data[0][0], target=data[0][1]).item()
    return results


MARKS = {(2, True): (), (3, True): pytest.mark.long, (4, False): pytest.mark.long}


@pytest.mark.parametrize(
    ("pp", "tied"),
    [
        pytest.param(pp, tied, marks=MARKS.get((pp, tied), pytest.mark.full))
        for pp in (1, 2, 3, 4)
        for tied in (False, True)
    ],
)
def test_every_schedule_equals_one_process_and_evaluates_before_and_after_on_every_rank(
    pp, tied, subtests
):
    config, n_microbatches = model_config(tied, 2 * pp + 1), max(4, 2 * pp)
    data = batches(config, 2 * n_microbatches, SEQ_LEN, STEPS)
    reference = train_in_one_process(config, data, CrossEntropy())
    # All schedules use one set of ranks: to start ranks costs more than to train this model.
    ranks = on_ranks(pp, train_on_rank, pp, config, data, n_microbatches)
    for schedule in SCHEDULES:
        with subtests.test(schedule):
            trained, before, after = zip(*(rank[schedule] for rank in ranks), strict=True)
            assert_equals_one_process(list(trained), reference, config)
            assert before == pytest.approx([reference.losses[0]] * pp, rel=1e-12)
            assert len(set(after)) == 1, "evaluation after training differs between ranks"
            assert after[0] < reference.losses[0], (
                "training on a batch must lower its evaluated loss"
            )
