"""Check ``.metadata``: what it says of the tensors must agree with itself and with the files.

DCP reads exactly the pieces that are described. If a piece is missing, the run that loads would keep its own numbers
there. If the description claims more than the files hold, DCP would first allocate all of it.
"""

import pickle
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

from course_pp.training.checkpoint._torch import Metadata, TensorStorageMetadata, files_of, read_metadata, record_of
from course_pp.training.checkpoint.manifest import METADATA, Digest, read_plain
from course_pp.training.checkpoint.ranks import CheckpointError

__all__ = ["fills", "open_metadata"]

Box = tuple[tuple[int, ...], tuple[int, ...]]

_MOST_CUT = 8  # dimensions along which a tensor is in pieces


def open_metadata(directory: Path, files: Mapping[str, Digest]) -> Metadata:
    """Return what the files hold.

    Raises:
        CheckpointError: if ``.metadata`` is more than a description of tensors in ``files``, or less.
    """
    try:
        metadata = read_metadata(read_plain(directory / METADATA))
        strange = sorted(set(files_of(metadata)) - set(files))
        problem = f"it refers to {strange[0]!r}, not in the manifest" if strange else None
    except (CheckpointError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory}: {METADATA} is refused: {error}") from error
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)  # read_metadata makes no other
        problem = problem or _problem_of(key, entry, metadata, files)
    if problem:
        raise CheckpointError(f"{directory}: {METADATA} is refused: {problem}")
    return metadata


def _problem_of(key: str, entry: TensorStorageMetadata, metadata: Metadata, files: Mapping[str, Digest]) -> str | None:
    if any(len(chunk.offsets) != len(chunk.sizes) for chunk in entry.chunks):
        return f"a piece of {key} has more dimensions than its place"
    boxes = [
        (tuple(chunk.offsets), tuple(a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)))
        for chunk in entry.chunks
    ]
    if not fills(boxes, tuple(entry.size)):
        return f"the pieces of {key} do not make up its shape {tuple(entry.size)}"
    for chunk in entry.chunks:
        record = record_of(metadata, key, chunk.offsets)
        n_bytes = prod(chunk.sizes) * entry.properties.dtype.itemsize
        if record is None or record.n_bytes < n_bytes or record.begin + record.n_bytes > files[record.file].bytes:
            return f"no file holds the {n_bytes:,} bytes of {key} from {tuple(chunk.offsets)} on"
    return None


def fills(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether ``boxes``, each as (begin, end), lie inside ``shape``, overlap nowhere and leave nothing out.

    It takes linear time. The corners that occur an odd number of times determine which points lie in an odd number of
    boxes. If they are the corners of ``shape``, every point of it lies in at least one box. If the boxes' volumes add
    up to no more than that of ``shape``, no point lies in a second one. Boxes cut along more than eight dimensions are
    refused: a mesh has four.
    """
    if not all(len(end) == len(shape) and all(e <= n for e, n in zip(end, shape, strict=True)) for _, end in boxes):
        return False
    solid = [box for box in boxes if _volume(box)]
    if not solid:
        return prod(shape) == 0
    cut = [i for i, n in enumerate(shape) if any(begin[i] > 0 or end[i] < n for begin, end in solid)]
    if sum(map(_volume, solid)) != prod(shape) or len(cut) > _MOST_CUT:
        return False
    odd: set[tuple[int, ...]] = set()
    for begin, end in solid:
        for corner in product(*((begin[i], end[i]) for i in cut)):
            odd ^= {corner}
    return odd == set(product(*((0, shape[i]) for i in cut)))


def _volume(box: Box) -> int:
    begin, end = box
    return prod(e - b for b, e in zip(begin, end, strict=True))
