"""Training around the model: the loop, its metrics and logs, data, checkpoints.

Begin reading in :mod:`course_pp.training.trainer`. :mod:`course_pp.training.data` turns text into
batches, and :mod:`course_pp.training.checkpoint` keeps a run that would be lost with its ranks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_pp.training.config import TrainConfig
    from course_pp.training.engines import stages_of_rank
    from course_pp.training.logs import Peak, Speed, StepResult
    from course_pp.training.trainer import Fitted, Trainer

__all__ = ["Fitted", "Peak", "Speed", "StepResult", "TrainConfig", "Trainer", "stages_of_rank"]

# Imported on first use, because the command line reads one line of help from here and must not wait
# for torch.
_MODULES = {
    "Fitted": "trainer",
    "Peak": "logs",
    "Speed": "logs",
    "StepResult": "logs",
    "TrainConfig": "config",
    "Trainer": "trainer",
    "stages_of_rank": "engines",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
