"""Any schedule on real ranks, spelled out; and the recorder that measures any pipeline.

``by_hand`` is one step of the two first schedules, to be read. :class:`Pipeline` runs any legal
schedule, and :class:`Recorder` says when each rank computed and waited, as the same timeline that a
simulation gives.
"""

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
from course_pp.runtime.generating import generate
from course_pp.runtime.memory import Hold, Meter, RankMemory
from course_pp.runtime.pipeline import Pipeline, run_step
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.stage import profile_layers
from course_pp.step.failure import StepFailed
from course_pp.step.loss import TokenLoss, attach_loss
from course_pp.step.scaler import MeshGradScaler
from course_pp.step.step import AnyPipeline

__all__ = [
    "Alignment",
    "AnyPipeline",
    "EmulatedCluster",
    "EmulatedLink",
    "EmulatedTimeline",
    "Hold",
    "Link",
    "MeshGradScaler",
    "Meter",
    "Overrun",
    "Pipeline",
    "RankMemory",
    "Recorder",
    "StepFailed",
    "TokenLoss",
    "align",
    "attach_loss",
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
