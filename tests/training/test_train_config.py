"""A run that cannot be is refused when it is written down."""

import json
import math
from typing import Any

import pytest

from course_pp.training import TrainConfig


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"accumulation": True}, "accumulation=True must be a whole number"),
        ({"lr": 0.0}, "lr=0.0 must be a number above 0, and finite"),
        ({"min_lr": 1.5}, "min_lr=1.5 must lie between 0 and 1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be a number of 0 or more"),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be a number above 0: use inf"),
        ({"warmup_steps": 300}, "warmup_steps=300 and decay_steps=None are more than steps=200"),
        ({"log_folder": ""}, "log_folder='' must be a folder to write into"),
        ({"profile": 2}, "profile=2 writes a trace, but log_folder=None"),
        (
            {"profile": 2, "log_folder": "logs", "steps": 3},
            "profile=2 steps are traced after 2 that warm up, but steps",
        ),
        (
            {"batch": 20},
            "batch=20 does not divide into 8 microbatches = 8 parts: use a multiple, such as 24",
        ),
        ({"optimizer": "adamw"}, "did you mean 'AdamW'?"),
        (
            {"decay_steps": 5},
            "decay_steps=5 belongs to lr_schedule='wsd', not to lr_schedule='cosine'",
        ),
        ({"lr_schedule": "wsd", "decay_steps": 181}, "decay_steps=181 are more than steps=200"),
        ({"epochs": 2, "steps": 9}, "epochs=2 and steps=9 both say how long to train"),
        ({"loss_scale": 1000.0}, "loss_scale=1000.0 must be a power of two"),
        ({"step_timeout": math.inf}, "step_timeout=inf must be a number of seconds"),
        ({"accumulation": 3}, "3 accumulation × 8 microbatches = 24 parts"),
    ],
)
def test_the_refusal_names_value_rule_and_remedy(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as refusal:
        TrainConfig(**arguments)
    assert words in str(refusal.value)


def test_data_parallel_ranks_share_the_batch() -> None:
    with pytest.raises(
        ValueError, match="2 accumulation × 4 microbatches × 5 data-parallel ranks = 40 parts"
    ):
        TrainConfig(batch=48, microbatches=4, accumulation=2).rows_of_a_microbatch(5)


def test_the_warm_up_is_a_tenth_of_the_run_unless_given() -> None:
    assert [TrainConfig(steps=n).warmup for n in (3, 200, 5000)] == [0, 20, 100]
    assert TrainConfig(warmup_steps=0).warmup == 0


def test_as_dict_is_json_without_infinities() -> None:
    fields = TrainConfig(clip_norm=math.inf).as_dict()
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields
    assert fields["clip_norm"] == "inf"
