"""What ``.metadata`` says of the tensors, believed only as far as it agrees with itself and with the files.

DCP reads the pieces that are described. A description with a hole would leave numbers of the run that loads as they
are, and one that claims more than the files hold would have it ask for all of that memory first.
"""

import pickle
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from course_pp.training.checkpoint._torch import Metadata, TensorStorageMetadata, files_of, read_metadata, record_of
from course_pp.training.checkpoint.manifest import METADATA, Digest
from course_pp.training.checkpoint.ranks import CheckpointError, sentence

__all__ = ["fills", "open_metadata"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def open_metadata(directory: Path, files: Mapping[str, Digest]) -> Metadata:
    """What the files hold.

    Raises:
        CheckpointError: if ``.metadata`` is more than a description of tensors in ``files``, or less.
    """
    try:
        metadata = read_metadata((directory / METADATA).read_bytes())
        strange = sorted(set(files_of(metadata)) - set(files))
        problem = f"it refers to {strange[0]!r}, not in the manifest" if strange else None
    except (OSError, pickle.UnpicklingError) as error:
        problem = str(error) if isinstance(error, pickle.UnpicklingError) else sentence(error)
        raise CheckpointError(f"{directory}: {METADATA} is refused: {problem}") from error
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)  # read_metadata makes no other
        problem = problem or _problem_of(key, entry, metadata, files)
    if problem:
        raise CheckpointError(f"{directory}: {METADATA} is refused: {problem}")
    return metadata


def _problem_of(key: str, entry: TensorStorageMetadata, metadata: Metadata, files: Mapping[str, Digest]) -> str | None:
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
    """Whether ``boxes``, each as (begin, end), lie inside ``shape``, overlap nowhere and leave nothing out."""
    if not all(len(end) == len(shape) and all(e <= n for e, n in zip(end, shape, strict=True)) for _, end in boxes):
        return False
    solid = sorted(box for box in boxes if _volume(box))
    for i, (begin, end) in enumerate(solid):
        for other_begin, other_end in solid[i + 1 :]:
            if other_begin[:1] >= end[:1]:
                break  # sorted: so does every later one
            if all(map(int.__lt__, other_begin, end)) and all(map(int.__lt__, begin, other_end)):
                return False
    return sum(map(_volume, solid)) == prod(shape)


def _volume(box: Box) -> int:
    begin, end = box
    return prod(e - b for b, e in zip(begin, end, strict=True))
