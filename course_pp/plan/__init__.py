"""A run on paper: model × cluster × layout → time, memory, what bounds it. Pure Python.

    model = model_named("llama3-405b")
    cluster = cluster_of("2048x8xH100")
    prediction = predict(model, layout, cluster, global_batch=2048, seq_len=8192)
    best = plan(model, cluster, global_batch=2048, seq_len=8192)[0]

Times follow from operations, bytes and links, and two fitted constants (:class:`Constants`); the
pipeline between them is simulated (:func:`course_pp.schedule.simulate`). Memory follows from what
:mod:`course_pp.parallel` holds.
"""

from course_pp.base.sizes import ModelConfig
from course_pp.plan.calibration import TimedStep, calibrate
from course_pp.plan.cluster import (
    Cluster,
    Gpu,
    cluster_of,
    gpu_named,
    gpu_names,
    model_named,
    model_names,
)
from course_pp.plan.layout import Layout
from course_pp.plan.prediction import Prediction, explain, predict
from course_pp.plan.run import Constants
from course_pp.plan.search import plan

__all__ = [
    "Cluster",
    "Constants",
    "Gpu",
    "Layout",
    "ModelConfig",
    "Prediction",
    "TimedStep",
    "calibrate",
    "cluster_of",
    "explain",
    "gpu_named",
    "gpu_names",
    "model_named",
    "model_names",
    "plan",
    "predict",
]
