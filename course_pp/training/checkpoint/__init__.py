"""Checkpoints that any layout writes and any other loads, on ``torch.distributed.checkpoint``.

    extra = {"scheduler": scheduler.state_dict()}
    saved = save("checkpoints", step, modules, optimizer, device_mesh=mesh, extra=extra)

    loaded = load("checkpoints", modules, optimizer, device_mesh=mesh)  # the newest whole one
    scheduler.load_state_dict(loaded.extra["scheduler"])

A checkpoint is one directory::

    step_00000100/
        __0_0.distcp …   tensors, one file a rank
        .metadata        place of each piece of each tensor
        state.json       step, sizes of the model, layout, options of the optimizer, extra
        manifest.json    size and checksum of every file, written last

It is written under another name and renamed when complete, so it is there whole or not at all.
Loading runs no code from a checkpoint: ``.metadata`` may name only the classes that describe
tensors, tensors are read with ``weights_only=True``, and the rest is JSON.
"""

from course_pp.training.checkpoint.huggingface import export_hf, import_hf, load_stage
from course_pp.training.checkpoint.loading import Loaded, load, resume
from course_pp.training.checkpoint.manifest import CheckpointError, verify
from course_pp.training.checkpoint.opening import Difference, contents, diff, find_latest
from course_pp.training.checkpoint.saving import AsyncSaver, Saved, Saving, save
from course_pp.training.checkpoint.tensors import Piece, TensorEntry

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "Difference",
    "Loaded",
    "Piece",
    "Saved",
    "Saving",
    "TensorEntry",
    "contents",
    "diff",
    "export_hf",
    "find_latest",
    "import_hf",
    "load",
    "load_stage",
    "resume",
    "save",
    "verify",
]
