"""Exercises of notebook 09: a rank's rectangle, what a load reads, the newest whole one, two barriers, a bug clinic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.dcp_clinic import checkpoint_entries, grade_checkpoint_entries
from course_pp.exercises.exercise import Exercise, Mistake, Stopped
from course_pp.exercises.expect import expect_dict, expect_int, expect_list
from course_pp.exercises.two_barriers import grade_save_together, save_together

__all__ = ["EXERCISES"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle in a tensor."""


def rectangle(shape: tuple[int, int], tp_cuts: str, tp: int, tp_rank: int, dp: int, dp_rank: int) -> Box:
    """(offsets, sizes) of what this rank holds of a matrix."""
    offsets, sizes = [0, 0], list(shape)
    if tp_cuts != "nothing":
        dim = 0 if tp_cuts == "rows" else 1
        sizes[dim] //= tp
        offsets[dim] = tp_rank * sizes[dim]
    rows = sizes[0]
    most = -(-rows // dp)  # rounded up, as torch.chunk does
    first = min(dp_rank * most, rows)
    offsets[0] += first
    sizes[0] = min(most, rows - first)
    return tuple(offsets), tuple(sizes)


_Formula = Callable[..., Any]


def _cut(rows: int, parts: int, part: int) -> tuple[int, int]:
    most = -(-rows // parts)
    first = min(part * most, rows)
    return first, min(most, rows - first)


def _fsdp_first(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    if cut != "rows":
        return rectangle(shape, cut, tp, t, dp, d)
    first, rows = _cut(shape[0], dp, d)
    return (first + t * (rows // tp), 0), (rows // tp, shape[1])


def _without_offset_of_tp(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    (first, start), sizes = rectangle(shape, cut, tp, t, dp, d)
    return (first - (t * (shape[0] // tp) if cut == "rows" else 0), start), sizes


def _rounded_down(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    (first, start), (rows, numbers) = rectangle(shape, cut, tp, t, 1, 0)
    return (first + d * (rows // dp), start), (rows // dp, numbers)


def _rest_to_the_last(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    (first, start), (rows, numbers) = rectangle(shape, cut, tp, t, 1, 0)
    each = rows // dp
    return (first + d * each, start), (rows - d * each if d == dp - 1 else each, numbers)


def _not_shortened(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    (first, start), (rows, numbers) = rectangle(shape, cut, tp, t, 1, 0)
    most = -(-rows // dp)
    return (first + d * most, start), (most, numbers)


def _may_be_negative(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    (first, start), (rows, numbers) = rectangle(shape, cut, tp, t, 1, 0)
    most = -(-rows // dp)
    return (first + d * most, start), (min(most, rows - d * most), numbers)


def _with_ends(*case: Any) -> Box:
    offsets, sizes = rectangle(*case)
    return offsets, tuple(a + n for a, n in zip(offsets, sizes, strict=True))


def _nothing_as_rows(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    return rectangle(shape, "rows" if cut == "nothing" else cut, tp, t, dp, d)


def _other_dimension(shape: Any, cut: str, *rest: int) -> Box:
    return rectangle(shape, {"rows": "columns", "columns": "rows"}.get(cut, cut), *rest)


def _as_numpy_splits(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    (first, start), (rows, numbers) = rectangle(shape, cut, tp, t, 1, 0)
    each, rest = divmod(rows, dp)
    return (first + d * each + min(d, rest), start), (each + (d < rest), numbers)


_WRONG_RECTANGLES: Sequence[tuple[_Formula, str]] = (
    (_fsdp_first, "Tensor parallelism cuts first; FSDP cuts the rows of what is left (08). Here it is reversed."),
    (_without_offset_of_tp, "Offsets count from the corner of the whole matrix: those of both cuts add up."),
    (_rounded_down, "Where dp does not divide the rows, rounding down leaves some of them to nobody."),
    (_rest_to_the_last, "torch.chunk rounds up: all parts are equally large but the last ones, which may be empty."),
    (_as_numpy_splits, "torch.chunk rounds up: all parts but the last ones are equally large. Yours even them out."),
    (_not_shortened, "The last parts end where the matrix ends: take the smaller of the part and what is left."),
    (_may_be_negative, "Where nothing is left, the size is 0 and not less."),
    (_with_ends, "The second entry is the size, not the end."),
    (lambda *case: rectangle(*case)[::-1], "The offsets come first, then the sizes."),
    (_other_dimension,
     'With `"rows"` each rank gets some of the rows, dimension 0, and all columns; with `"columns"` the reverse.'),
    (_nothing_as_rows, "Where tensor parallelism cuts nothing, each of its ranks has the matrix whole."),
    (lambda shape, cut, tp, t, dp, d: rectangle(shape, cut, tp, t, 1, 0), "FSDP does not cut anything in your answer."),
    (lambda shape, cut, tp, t, dp, d: rectangle(shape, "nothing", tp, t, dp, d),
     "Tensor parallelism does not cut anything in your answer."),
)  # fmt: skip


def _grade_rectangle(answer: Answer) -> None:
    cuts = [((96, 32), "rows", 2, 2), ((32, 96), "columns", 2, 2), ((32, 32), "nothing", 2, 4)]
    cuts += [((10, 6), "rows", 2, 3), ((9, 4), "columns", 4, 4), ((8, 8), "nothing", 1, 1), ((6, 8), "rows", 3, 4)]
    cases = [(shape, cut, tp, t, dp, d) for shape, cut, tp, dp in cuts for t in range(tp) for d in range(dp)]
    found = [
        _as_box(got, written_call(answer.name, *case)) for case, got in zip(cases, answer.calls(cases), strict=True)
    ]
    if (index := _first_difference(found, [rectangle(*case) for case in cases])) is None:
        return
    causes = [why for wrong, why in _WRONG_RECTANGLES if _first_difference(found, [wrong(*c) for c in cases]) is None]
    if not causes:
        # Where nothing is left, one mistake has many faces.
        held = [(case, got) for case, got in zip(cases, found, strict=True) if 0 not in rectangle(*case)[1]]
        causes = [why for wrong, why in _WRONG_RECTANGLES if all(got == wrong(*case) for case, got in held)]
    call = written_call(answer.name, *cases[index])
    symptom = f"`{call}` gave {found[index]}, which should be {rectangle(*cases[index])}."
    raise Mistake(symptom, causes[0] if causes else "")


def _first_difference(found: Sequence[Box], right: Sequence[Box]) -> int | None:
    for i, (a, b) in enumerate(zip(found, right, strict=True)):
        # Where something empty lies makes no difference.
        if a != b and not (a[1] == b[1] and 0 in a[1]):
            return i
    return None


def _as_box(value: Any, call: str) -> Box:
    offsets, sizes = expect_list(value, call, 2)
    return _integers(offsets, f"{call}[0]"), _integers(sizes, f"{call}[1]")


def _integers(value: Any, what: str) -> tuple[int, ...]:
    return tuple(expect_int(each, f"{what}[{i}]") for i, each in enumerate(expect_list(value, what, 2)))


def overlaps(wanted: Box, pieces: dict[str, Box]) -> dict[str, Box]:
    """What to read from which file: file -> (offsets, sizes), in the coordinates of the whole tensor."""
    reads = {}
    for file, (offsets, sizes) in pieces.items():
        first = tuple(max(a, b) for a, b in zip(offsets, wanted[0], strict=True))
        ends = tuple(min(a + n, b + k) for a, n, b, k in zip(offsets, sizes, *wanted, strict=True))
        if all(a < b for a, b in zip(first, ends, strict=True)):
            reads[file] = first, tuple(b - a for a, b in zip(first, ends, strict=True))
    return reads


def _overlaps_with(
    counts: Callable[[tuple[int, ...]], bool] = lambda sizes: min(sizes) > 0,
    told: Callable[[tuple[int, ...], tuple[int, ...], Box, Box], Box] = lambda first, sizes, piece, wanted: (
        first, sizes),
) -> _Formula:  # fmt: skip
    """``overlaps``, but for what is given."""

    def formula(wanted: Box, pieces: Mapping[str, Box]) -> dict[str, Box]:
        reads = {}
        for file, piece in pieces.items():
            first = tuple(map(max, piece[0], wanted[0]))
            ends = [min(a + n, b + k) for a, n, b, k in zip(*piece, *wanted, strict=True)]
            sizes = tuple(b - a for a, b in zip(first, ends, strict=True))
            if counts(sizes):
                reads[file] = told(first, sizes, piece, wanted)
        return reads

    return formula


def _minus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


_NOT_ROWS_ALONE = "They have to overlap in every dimension, not in the rows alone."


def _all_columns(first: Any, sizes: Any, piece: Box, wanted: Box) -> Box:
    return (first[0], piece[0][1]), (sizes[0], piece[1][1])


def _whole_pieces_alone(wanted: Box, pieces: dict[str, Box]) -> dict[str, Box]:
    return {file: box for file, box in overlaps(wanted, pieces).items() if box == pieces[file]}


_WRONG_OVERLAPS: Sequence[tuple[_Formula, str]] = (
    (_overlaps_with(lambda sizes: min(sizes) >= 0),
     "Rectangles that only touch share nothing: an overlap has more than 0 rows and columns."),
    (_overlaps_with(lambda sizes: max(sizes) > 0),
     "They have to overlap in every dimension, not in one of them."),
    (_overlaps_with(lambda sizes: sizes[0] > 0), _NOT_ROWS_ALONE),
    (_overlaps_with(lambda sizes: sizes[0] > 0, _all_columns), _NOT_ROWS_ALONE),
    (_overlaps_with(told=_all_columns), _NOT_ROWS_ALONE),
    (_whole_pieces_alone, "A piece of which only a part is wanted is read, too: that part of it."),
    (_overlaps_with(lambda sizes: True), "A file that has nothing of what is wanted is not read: leave it out."),
    (_overlaps_with(told=lambda first, sizes, piece, wanted: (first, _plus(first, sizes))),
     "The second entry is the size, not the end."),
    (_overlaps_with(told=lambda first, sizes, piece, wanted: piece),
     "Those are the whole pieces. Only the part of each that is wanted is read."),
    (_overlaps_with(told=lambda first, sizes, piece, wanted: (_minus(first, piece[0]), sizes)),
     "Those offsets count from the corner of the piece; the whole tensor's is asked for."),
    (_overlaps_with(told=lambda first, sizes, piece, wanted: (_minus(first, wanted[0]), sizes)),
     "Those offsets count from the corner of what is wanted; the whole tensor's is asked for."),
)  # fmt: skip


def _grade_overlaps(answer: Answer) -> None:
    rows: dict[str, Box] = {f"__{i}_0.distcp": ((8 * i, 0), (8, 24)) for i in range(4)}
    columns: dict[str, Box] = {f"__{i}_0.distcp": ((0, 12 * i), (32, 12)) for i in range(2)}
    quarters: dict[str, Box] = {
        f"__{2 * i + j}_0.distcp": ((16 * i, 12 * j), (16, 12)) for i in range(2) for j in range(2)
    }
    wanted: list[Box] = [
        ((0, 0), (32, 24)),
        ((16, 0), (16, 24)),
        ((0, 12), (32, 12)),
        ((4, 6), (8, 10)),
        ((31, 23), (1, 1)),
    ]
    cases = [(each, pieces) for pieces in (quarters, rows, columns) for each in wanted]
    found = []
    for case, got in zip(cases, answer.calls(cases), strict=True):
        call = written_call(answer.name, *case)
        found.append({file: _as_box(box, f"{call}[{file!r}]") for file, box in expect_dict(got, call).items()})
    if found == [overlaps(*case) for case in cases]:
        return
    causes = [why for wrong, why in _WRONG_OVERLAPS if found == [wrong(*case) for case in cases]]
    raise _misread(found, cases, causes[0] if causes else "")


def _misread(found: list[dict[str, Box]], cases: list[tuple[Box, dict[str, Box]]], cause: str) -> Mistake:
    """What is wrong with the first file that is."""
    for reads, (wanted, pieces) in zip(found, cases, strict=True):
        right = overlaps(wanted, pieces)
        for file in (*pieces, *reads):
            if reads.get(file) != right.get(file):
                symptom = f"Wanted is {wanted}. Of {file} your answer reads {reads.get(file, 'nothing')}."
                holds = f"{file} has {pieces[file]}" if file in pieces else f"{file} is not among `pieces`"
                return Mistake(symptom, cause, f"{holds}; to be read: {right.get(file, 'nothing')}.")
    raise AssertionError("there is a wrong answer, but no wrong file")


Sizes = dict[str, int]
"""Bytes by file."""


def newest_whole(directories: dict[str, Sizes], manifests: dict[str, Sizes]) -> str | None:
    """The name of the newest whole checkpoint, None if there is none."""
    steps = {}
    for name, files in directories.items():
        prefix, _, number = name.partition("_")
        if prefix != "step" or not number.isdigit() or name not in manifests:
            continue
        if all(files.get(file) == size for file, size in manifests[name].items()):
            steps[int(number)] = name
    return steps[max(steps)] if steps else None


_SIZES = {"__0_0.distcp": 100, "__1_0.distcp": 101, "state.json": 102}


def _whole(cut: str = "", lost: str = "", extra: str = "", sealed: bool = True) -> tuple[Sizes, Sizes | None]:
    """Files and manifest of a checkpoint, whole unless told otherwise."""
    files = {name: size - 7 * (name == cut) for name, size in _SIZES.items() if name != lost}
    return files | ({extra: 5} if extra else {}), (_SIZES if sealed else None)


_LISTINGS: tuple[tuple[dict[str, tuple[Sizes, Sizes | None]], str | None, str], ...] = (
    ({"step_00000004": _whole(), "step_00000008": _whole(), "step_00000006": _whole()}, "step_00000008",
     "It is the highest step that counts, whatever the order of the listing."),
    ({"step_00000004": _whole(), "step_00000008": _whole(sealed=False)}, "step_00000004",
     "A directory without a manifest was never declared whole, although all files may be there. The one before it "
     "is to be used."),
    ({"step_00000004": _whole(), "step_00000008": _whole(lost="__1_0.distcp")}, "step_00000004",
     "The manifest names a file that is not there."),
    ({"step_00000004": _whole(), "step_00000008": _whole(cut="__1_0.distcp")}, "step_00000004",
     "A file is there, but shorter than the manifest says."),
    ({"step_00000004": _whole(), "step_00000008": _whole(cut="__0_0.distcp")}, "step_00000004",
     "Each file that the manifest names counts, the first as well."),
    ({"step_00000004": _whole(), ".step_00000008.tmp-3f2a": _whole(), "step_00000008.bak": _whole()}, "step_00000004",
     "Only `step_` and a number is the name of a checkpoint: the others are being written, or somebody's copies."),
    ({".step_00000008.tmp-3f2a": _whole(), "step_00000004": _whole()}, "step_00000004",
     "What is no checkpoint is passed over, and the search goes on after it."),
    ({"step_00000004": _whole(), "copy_00000008": _whole()}, "step_00000004",
     "Only `step_` and a number is the name of a checkpoint: the others are being written, or somebody's copies."),
    ({"step_99999999": _whole(), "step_100000000": _whole()}, "step_100000000",
     "As text, 9 comes after 1: compare numbers."),
    ({"step_00000004": _whole(), "step_00000008": _whole(extra="tokenizer.json")}, "step_00000008",
     "A file more than the manifest names does no harm."),
    ({"step_00000004": _whole(lost="state.json")}, None, "If none is whole, the answer is None."),
    ({}, None, "If there is none, the answer is None."),
)  # fmt: skip


def _grade_newest_whole(answer: Answer) -> None:
    cases = [
        (
            {name: files for name, (files, _) in listing.items()},
            {name: manifest for name, (_, manifest) in listing.items() if manifest is not None},
        )
        for listing, _, _ in _LISTINGS
    ]
    examples = ["directories = {}\nmanifests = {}".format(*case) for case in cases]
    try:
        found = answer.calls(cases, call=answer.name)
    except Stopped as e:
        # The first listing has nothing in it that an answer could stumble over in particular.
        cause = e.cause or (_LISTINGS[e.row][2] if e.row else "")
        raise Mistake(e.symptom, cause, examples[e.row]) from None
    for i, (got, (_, right, why)) in enumerate(zip(found, _LISTINGS, strict=True)):
        if got == right:
            continue
        if got is not None and not isinstance(got, str):
            raise Mistake(f"`newest_whole` gave {got!r:.60}; a name or None is asked for.")
        if got is None and i == 0:
            why = f"`{right}` is whole: it has a manifest, and every file in that is there with its size."
        raise Mistake(f"`newest_whole` gave {got!r}, which should be {right!r}.", why, examples[i])


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "rectangle", "09", "what a rank holds", 2, 7,
        (
            "First the cut of tensor parallelism, if there is one: it says how many rows are left.",
            "FSDP cuts those rows into parts of rows / dp, rounded up. With which row does part `dp_rank` begin?",
            "FSDP's part begins at `min(dp_rank * most, rows)` and has `min(most, rows - begin)` rows; the offset of "
            "tensor parallelism comes on top.",
        ),
        rectangle, _grade_rectangle,
    ),
    Exercise(
        "overlaps", "09", "which old files a new rank reads", 2, 7,
        (
            "In one dimension: where do two intervals begin to overlap, and where do they end?",
            "The overlap begins at the larger of the beginnings and ends at the smaller of the ends.",
            "Do it in each dimension. Leave the file out unless the end is beyond the beginning in all of them.",
        ),
        overlaps, _grade_overlaps,
    ),
    Exercise(
        "newest_whole", "09", "latest, by looking", 1, 5,
        (
            "Three questions to each directory: is it named as a checkpoint, is there a manifest, does it agree?",
            "`files.get(file) == size` for every file of the manifest.",
            "Of those that are whole take the highest number, compared as an int: `max(…, default=None)`.",
        ),
        newest_whole, _grade_newest_whole,
    ),
    Exercise(
        "save_together", "09", "two barriers", 2, 5,
        (
            "What must rank 0 know before it publishes? And what must the others know before they go on?",
            "`dist.barrier()` returns when all ranks have called it, so every rank has to call it.",
            "Write, barrier, publish on rank 0 alone, barrier.",
        ),
        save_together, grade_save_together, limit_s=8.0,
    ),
    Exercise(
        "checkpoint_entries", "09", "bug clinic", 3, 9,
        (
            "Which key would a rank of another layout look for? It knows the names of its parameters and where it is.",
            "`stage.named_parameters()` gives the name, `optimizer.state[parameter]` the moments that belong to it.",
            "Keys: `model.NAME`, `optimizer.NAME.SLOT`, `rng.COORDINATES` with every rank's own state, and the step.",
        ),
        checkpoint_entries, grade_checkpoint_entries, limit_s=20.0,
    ),
)  # fmt: skip
