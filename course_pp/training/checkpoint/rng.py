"""Random number generators, torch's, Python's and NumPy's, kept for each rank by its coordinates in the mesh.

A rank whose coordinates were there when the checkpoint was written continues its own sequence. Others begin a new one:

    a new tensor-parallel rank   takes that of its neighbour with tp=0: both see the same activations
    any other                    is seeded by (seed of the run, step, its coordinates without tp)
"""

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["mesh_coordinates", "restore_rng", "rng_keys", "rng_tensors"]

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
_KINDS = ("cpu", "cuda", "python", "numpy")


def mesh_coordinates(device_mesh: DeviceMesh | None, rank: int) -> dict[str, int]:
    """Return where this rank is in the mesh; ranks without a mesh form a pipeline, as in ``course_pp.runtime``."""
    if device_mesh is None:
        return {**dict.fromkeys(DIMENSIONS, 0), "pp": rank}
    found = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.get_coordinate() or (), strict=True))
    return {name: found.get(name, 0) for name in DIMENSIONS}


def rng_tensors(coordinates: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the states of this rank's generators, uint8, by the keys of a checkpoint."""
    states = {
        "cpu": torch.get_rng_state(),
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor(np.random.get_state(legacy=False)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"{_prefix(coordinates)}.{kind}": state for kind, state in states.items()}


def rng_keys(coordinates: Mapping[str, int], saved: Mapping[str, object]) -> dict[str, str]:
    """Return which of the saved keys are for this rank: kind -> key; empty if none are."""
    for candidate in (coordinates, {**coordinates, "tp": 0}):
        found = {kind: key for kind in _KINDS if (key := f"{_prefix(candidate)}.{kind}") in saved}
        if found:
            return found
    return {}


def restore_rng(states: Mapping[str, Tensor], seed: int, step: int, coordinates: Mapping[str, int]) -> None:
    """Continue from ``states`` (kind -> uint8); a generator without one is seeded anew."""
    place = [coordinates[name] for name in DIMENSIONS if name != "tp"]
    fresh = int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{place}".encode(), digest_size=4).digest(), "little")
    if "cpu" not in states:
        torch.manual_seed(fresh)  # CUDA too
        random.seed(fresh)
        np.random.seed(fresh)
        return
    torch.set_rng_state(states["cpu"])
    if "python" in states:
        version, internal, gauss = json.loads(bytes(states["python"].tolist()))
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        np.random.set_state(json.loads(bytes(states["numpy"].tolist())))
    else:  # a checkpoint of version 1
        np.random.seed(fresh)
    if torch.cuda.is_available():
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
        else:
            torch.cuda.manual_seed(fresh)


def _as_tensor(state: object) -> Tensor:
    """Return a generator's state as JSON in uint8; arrays as lists."""
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _prefix(coordinates: Mapping[str, int]) -> str:
    return "rng." + ".".join(f"{name}{coordinates[name]}" for name in DIMENSIONS)
