"""Any schedule on real ranks, spelled out; and the recorder that measures any pipeline.

* :func:`train_step_pipeline_gpipe`, :func:`train_step_pipeline_1f1b`: one step of the two first schedules, written out
  by hand from :func:`forward_stage`, :func:`backward_stage` and four functions that send and receive; to be read.
* :class:`Pipeline`, :func:`run_step`: execute any legal :class:`~course_pp.schedule.Schedule`.
* :func:`generate`: text from a pipeline, the prompts taking turns.
* :class:`Recorder`: when each rank computed, waited, and what it kept; as the same timeline a simulation gives.
* :class:`EmulatedCluster`: the times of a cluster of your choice, on the machine at hand.
* :func:`profile_layers`: what layers cost on this machine, for the planner :func:`course_pp.schedule.partition`.
* :class:`PipelineError`: what every rank raises when something goes wrong on one of them.
"""

from course_pp.loss import TokenLoss
from course_pp.runtime.by_hand import (
    Link,
    backward_stage,
    forward_stage,
    get_stage_layers,
    partition_model,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
    train_step_pipeline_1f1b,
    train_step_pipeline_gpipe,
)
from course_pp.runtime.clocks import Alignment, align
from course_pp.runtime.emulation import EmulatedCluster, EmulatedLink, EmulatedTimeline, Overrun
from course_pp.runtime.errors import LossNotFinite, PipelineError
from course_pp.runtime.generating import generate
from course_pp.runtime.memory import Hold, Meter, RankMemory
from course_pp.runtime.pipeline import Pipeline, run_step
from course_pp.runtime.profiling import profile_layers
from course_pp.runtime.recorder import Recorder

__all__ = [
    "Alignment",
    "EmulatedCluster",
    "EmulatedLink",
    "EmulatedTimeline",
    "Hold",
    "Link",
    "LossNotFinite",
    "Meter",
    "Overrun",
    "Pipeline",
    "PipelineError",
    "RankMemory",
    "Recorder",
    "TokenLoss",
    "align",
    "backward_stage",
    "forward_stage",
    "generate",
    "get_stage_layers",
    "partition_model",
    "profile_layers",
    "recv_activation",
    "recv_gradient",
    "run_step",
    "send_activation",
    "send_gradient",
    "train_step_pipeline_1f1b",
    "train_step_pipeline_gpipe",
]
