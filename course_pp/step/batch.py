"""The batch of a step: ready-made microbatches, or tensors and keyword arguments that are cut."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from torch import Tensor

from course_pp.base.arguments import shown
from course_pp.step.values import map_tensors, tensors_of

ChunkSpec = Mapping[str, Literal["rows", "same"]]
"""For a keyword argument, ``"rows"`` to cut its tensors by rows, ``"same"`` to give it to every
microbatch untouched."""

_LISTS = {"arg_mbs": tuple, "kwarg_mbs": dict, "target_mbs": object}
_READY = (
    "give ready-made microbatches instead of the whole batch (arg_mbs=, kwarg_mbs=, target_mbs=)"
)
_ENTRIES = {
    "arg_mbs": "the tuple of the first stage's arguments, as in (x,)",
    "kwarg_mbs": "a dict of arguments",
}


@dataclass(frozen=True)
class Given:
    """The arguments of one call of ``step``, ``eval`` or ``evaluate`` on one rank.

    :meth:`course_pp.step.step.AnyPipeline.step` says what each of them is.
    """

    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kwargs_chunk_spec: ChunkSpec | None
    arg_mbs: list[tuple[Any, ...]] | None
    kwarg_mbs: list[dict[str, Any]] | None
    target: Any = None
    target_mbs: list[Any] | None = None
    divisor: float | None = None

    @property
    def lists(self) -> dict[str, Any]:
        """The lists of ready-made microbatches that were given, by name."""
        lists = {name: getattr(self, name) for name in _LISTS}
        return {name: entries for name, entries in lists.items() if entries is not None}

    @property
    def whole(self) -> list[str]:
        """The names of those given arguments that belong to a whole batch."""
        names = []
        if any(value is not None for value in self.inputs):
            names.append("inputs")
        if self.target is not None:
            names.append("target")
        if self.kwargs_chunk_spec is not None:
            names.append("kwargs_chunk_spec")
        return [*names, *self.kwargs]

    def is_ready(self, n_microbatches: int) -> bool:
        """Return whether this rank was given ready-made microbatches.

        Raises:
            ValueError: if one of the lists is no list of ``n_microbatches`` entries of its kind, or
                stands beside an argument of a whole batch.
        """
        # Every entry is looked at now: a stage would fail on a wrong one in the middle of the step.
        lists = self.lists
        whole = self.whole
        for name, entries in lists.items():
            if not isinstance(entries, list):
                raise ValueError(
                    f"{name} is a {type(entries).__name__}: give a list, one entry for each"
                    " microbatch"
                )
            if len(entries) != n_microbatches:
                raise ValueError(
                    f"{name} has {len(entries)} entries, but the schedule has {n_microbatches}"
                    f" microbatches: give {n_microbatches}"
                )
            for i, entry in enumerate(entries):
                if not isinstance(entry, _LISTS[name]):
                    raise ValueError(
                        f"{name}[{i}] is a {type(entry).__name__}: give {_ENTRIES[name]}"
                    )
        if lists and whole:
            raise ValueError(
                f"{whole[0]} is of a whole batch, and {', '.join(lists)} of ready-made"
                " microbatches: give all of them by microbatch, or all whole"
            )
        return bool(lists)

    def problem_of_divisor(self) -> str | None:
        """Return why the loss cannot be divided by ``divisor``, or None."""
        divisor = self.divisor
        if divisor is None or (isinstance(divisor, Real) and 0 < divisor < math.inf):
            return None
        return (
            f"divisor is {shown(divisor)}: give the number of tokens that the mean is over, above 0"
        )


def cut_keywords(
    kwargs: Mapping[str, Any], spec: ChunkSpec | None, rows: int, n_microbatches: int
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each microbatch.

    Without a word in ``spec``, a tensor is cut if it has two dimensions or more and the first is
    the batch. A number, a string or None is the same for all. Any other argument needs a word.

    Args:
        spec: ``"rows"`` cuts a tensor, also inside tuples, lists and dicts; ``"same"`` passes any
            object untouched.
        rows: number of rows of the whole batch; 0 where it is not known.

    Raises:
        ValueError: for an argument that needs a word in ``spec``, or cannot be cut; for a ``spec``
            that names no argument, or has other words.
    """
    said = dict(spec or {})
    for name, word in said.items():
        if name not in kwargs:
            given = ", ".join(kwargs) or "none"
            raise ValueError(
                f"kwargs_chunk_spec names {name!r}, but the keyword arguments are {given}: leave"
                " it out"
            )
        if word not in ("rows", "same"):
            raise ValueError(f"kwargs_chunk_spec[{name!r}] is {word!r}: give 'rows' or 'same'")
    microbatches: list[dict[str, Any]] = [{} for _ in range(n_microbatches)]
    for name, value in kwargs.items():
        parts = _cut(name, value, word=said.get(name), rows=rows, n=n_microbatches)
        for microbatch, part in zip(microbatches, parts, strict=True):
            microbatch[name] = part
    return microbatches


def rows_to_cut(kwargs: Mapping[str, Any], spec: ChunkSpec | None) -> int:
    """Return the number of rows of the first tensor that :func:`cut_keywords` would cut, or 0.

    A rank that holds neither the first nor the last stage learns the batch's rows from it.
    """
    for name, value in kwargs.items():
        word = (spec or {}).get(name)
        if word == "rows" and (tensors := tensors_of(value)):
            return _length(tensors[0])
        if word is None and isinstance(value, Tensor) and value.dim() > 1:
            return len(value)
    return 0


def _cut(name: str, value: Any, word: str | None, rows: int, n: int) -> list[Any]:
    if word == "same":
        return [value] * n
    # No class tells whether its tensors are rows of the batch, so only plain containers are cut.
    tensors = tensors_of(value)
    if word is None:
        if value is None or isinstance(value, bool | int | float | str):
            return [value] * n
        # A vector may hold a number for each row, or offsets into the batch: only the caller knows.
        if isinstance(value, Tensor) and value.dim() > 1 and _has_rows([value], rows):
            return list(value.tensor_split(n))
        raise ValueError(_problem_without_a_word(name, value, tensors=tensors, rows=rows))
    if not tensors:
        raise ValueError(
            f"keyword argument {name} is of class {type(value).__name__}, which kwargs_chunk_spec"
            f" cannot cut by rows: say 'same' to give it whole to every microbatch, or {_READY}"
        )
    if not _has_rows(tensors, rows):
        unlike = [tensor for tensor in tensors if not _has_rows([tensor], rows)]
        # Without known rows each tensor alone is fine, and only together they are not.
        wrong = tuple((unlike or tensors)[0].shape)
        size = f", {rows}" if rows else ""
        raise ValueError(
            f"keyword argument {name} is, or holds, a tensor of shape {wrong}, and"
            " kwargs_chunk_spec cuts it by rows: its first dimension must be the whole"
            f" batch{size}; or say 'same', or {_READY}"
        )
    return cut_rows(value, tensors, n)


def _has_rows(tensors: Sequence[Tensor], rows: int) -> bool:
    """Return whether there are tensors and all have ``rows`` rows; if that is 0, equally many."""
    lengths = {_length(tensor) for tensor in tensors}
    if len(lengths) != 1 or lengths == {0}:
        return False
    return not rows or lengths == {rows}


def _length(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def _problem_without_a_word(name: str, value: Any, tensors: Sequence[Tensor], rows: int) -> str:
    """Return the refusal of an argument that needs a word, offering only the words that fit it."""
    can_be_cut = _has_rows(tensors, rows)
    if not isinstance(value, Tensor):
        what = f"of class {type(value).__name__}"
    elif can_be_cut:
        what = f"a tensor of shape {tuple(value.shape)}, a number for each row or offsets"
    else:
        size = f", {rows}" if rows else ""
        what = (
            f"a tensor of shape {tuple(value.shape)}, whose first dimension is not the whole"
            f" batch{size}"
        )
    whole = "to give it whole to every microbatch"
    said = f"{{{name!r}: 'same'}} {whole}"
    if can_be_cut:
        # A rank that sees no batch does not know its rows.
        if_it_fits = "" if rows else " if its first dimension is the whole batch"
        said = f"{{{name!r}: 'rows'}} to cut it by rows{if_it_fits}, or 'same' {whole}"
    return f"keyword argument {name} is {what}: say kwargs_chunk_spec={said}; or {_READY}"


def cut_rows(
    value: Any, tensors: Iterable[Tensor], n: int, mapping: Callable[..., Any] | None = None
) -> list[Any]:
    """Return ``value`` for each of ``n`` microbatches, with its ``tensors`` cut by rows.

    Args:
        mapping: a function ``mapping(change, value)`` that meets ``tensors`` in this order;
            :func:`map_tensors` unless given.
    """
    pieces = [tensor.tensor_split(n) for tensor in tensors]

    def microbatch(i: int) -> Any:
        numbered = iter(pieces)
        return (mapping or map_tensors)(lambda _: next(numbered)[i], value)

    return [microbatch(i) for i in range(n)]
