"""Cut a model that somebody else wrote into stages, without changing its code.

    record     run the model on an example, and see which unit's result goes where
      │
    partition  choose contiguous calls for each stage
      │
    carve      make each stage: the model's forward, in which other stages' units are absent

There is no export and no graph to compile: every stage runs the model's own Python. A cut carries
whatever later calls read, so skip connections and encoders' outputs cross as well.
"""

from course_pp.parallel.meta_device import weights_on_meta
from course_pp.parallel.split.cutting import (
    By,
    Crossing,
    CrossingTensor,
    auto_split,
    crossing,
    explain,
)
from course_pp.parallel.split.recording import Problem
from course_pp.parallel.split.split_stage import OtherWay, SplitStage

__all__ = [
    "By",
    "Crossing",
    "CrossingTensor",
    "OtherWay",
    "Problem",
    "SplitStage",
    "auto_split",
    "crossing",
    "explain",
    "weights_on_meta",
]
