"""Notebook 09: a rank's rectangle, a load's reads, the newest save, two barriers, a clinic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import expect_dict, expect_int, expect_list
from course_pp.exercises.formula import Formula
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped, why

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangle in a tensor."""


def rectangle(
    shape: tuple[int, int], tp_cuts: str, tp: int, tp_rank: int, dp: int, dp_rank: int
) -> Box:
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


def _fsdp_first(shape: Any, cut: str, tp: int, t: int, dp: int, d: int) -> Box:
    if cut != "rows":
        return rectangle(shape, cut, tp, t, dp, d)
    (first, _), (rows, _) = rectangle(shape, "nothing", 1, 0, dp, d)
    return (first + t * (rows // tp), 0), (rows // tp, shape[1])


_FIRST = "min(dp_rank * most, rows)"
_ROWS = "min(most, rows - first)"
_NO_END = "The second entry is the size, not the end."

_WRONG_RECTANGLES = (
    (_fsdp_first,
     "Tensor parallelism cuts first; FSDP cuts the rows of what is left (08). Here it is"
     " reversed."),
    (("offsets[0] += first", "offsets[0] = first"),
     "Offsets count from the corner of the whole matrix: those of both cuts add up."),
    (("-(-rows // dp)", "rows // dp"),
     "Where dp does not divide the rows, rounding down leaves some of them to nobody."),
    (("-(-rows // dp)", "rows // dp"), (_ROWS, "rows - first if dp_rank == dp - 1 else most"),
     "torch.chunk rounds up: all parts are equally large but the last ones, which may be empty."),
    ((_FIRST, "dp_rank * (rows // dp) + min(dp_rank, rows % dp)"),
     (_ROWS, "rows // dp + (dp_rank < rows % dp)"),
     "torch.chunk rounds up: all parts but the last ones are equally large. Yours even them out."),
    ((_ROWS, "most"),
     "The last parts end where the matrix ends: take the smaller of the part and what is left."),
    (("tuple(sizes)", "tuple(map(sum, zip(offsets, sizes)))"), _NO_END),
    (("tuple(offsets), tuple(sizes)", "tuple(sizes), tuple(offsets)"),
     "The offsets come first, then the sizes."),
    (('0 if tp_cuts == "rows" else 1', '1 if tp_cuts == "rows" else 0'),
     'With `"rows"` each rank gets some of the rows, dimension 0, and all columns; with `"columns"`'
     ' the reverse.'),
    (('tp_cuts != "nothing"', "True"), ('0 if tp_cuts == "rows" else 1', 'tp_cuts == "columns"'),
     "Where tensor parallelism cuts nothing, each of its ranks has the matrix whole."),
    ((_FIRST, "0"), (_ROWS, "rows"), "FSDP does not cut anything in your answer."),
    (('tp_cuts != "nothing"', "False"), "Tensor parallelism does not cut anything in your answer."),
)  # fmt: skip

_CUTS = (
    ((96, 32),
     "rows", 2, 2), ((32, 96),
         "columns", 2, 2), ((32, 32), "nothing", 2, 4), ((10, 6), "rows", 2, 3),
    ((9, 4), "columns", 4, 4), ((8, 8), "nothing", 1, 1), ((6, 8), "rows", 3, 4),
)  # fmt: skip


def _read_box(value: Any, call: str) -> Box:
    pairs = []
    for i, row in enumerate(expect_list(value, call, 2)):
        first, second = expect_list(row, f"{call}[{i}]", 2)
        pair = expect_int(first, f"{call}[{i}][0]"), expect_int(second, f"{call}[{i}][1]")
        pairs.append(pair)
    offsets, sizes = pairs
    return offsets, sizes


_CASES = [
    (shape, cut, tp, t, dp, d) for shape, cut, tp, dp in _CUTS for t in range(tp) for d in range(dp)
]
_HELD = Formula(
    rectangle,
    [case for case in _CASES if 0 not in rectangle(*case)[1]],
    _WRONG_RECTANGLES,
    read=_read_box,
)
# The offsets of an empty rectangle make no difference.
_EMPTY = Formula(
    lambda *case: rectangle(*case)[1],
    [case for case in _CASES if 0 in rectangle(*case)[1]],
    otherwise="Where nothing is left, the size is 0 and not less.",
    read=lambda value, call: _read_box(value, call.removesuffix("[1]"))[1],
    call=lambda *case: f"{written_call('rectangle', *case)}[1]",
)


def _grade_rectangle(answer: Answer) -> None:
    values = answer.calls(_HELD.cases + _EMPTY.cases)
    _HELD.judge(answer.name, values[: len(_HELD.cases)])
    _EMPTY.judge(answer.name, values[len(_HELD.cases) :])


def overlaps(wanted: Box, pieces: dict[str, Box]) -> dict[str, Box]:
    """What to read from which file: file -> (offsets, sizes), in the coordinates of the whole tensor."""
    reads = {}
    for file, (offsets, sizes) in pieces.items():
        first = tuple(max(a, b) for a, b in zip(offsets, wanted[0], strict=True))
        ends = tuple(min(a + n, b + k) for a, n, b, k in zip(offsets, sizes, *wanted, strict=True))
        if all(a < b for a, b in zip(first, ends, strict=True)):
            reads[file] = first, tuple(b - a for a, b in zip(first, ends, strict=True))
    return reads


_IF = "all(a < b for a, b in zip(first, ends, strict=True))"
_ADD = "reads[file] = first, tuple(b - a for a, b in zip(first, ends, strict=True))"
_ALL_COLUMNS = (_ADD, "reads[file] = (first[0], offsets[1]), (ends[0] - first[0], sizes[1])")
_NOT_ROWS_ALONE = "They have to overlap in every dimension, not in the rows alone."

_WRONG_OVERLAPS = (
    (("all(a < b", "all(a <= b"),
     "Rectangles that only touch share nothing: an overlap has more than 0 rows and columns."),
    (("all(a < b", "any(a < b"), "They have to overlap in every dimension, not in one of them."),
    ((_IF, "first[0] < ends[0]"), _NOT_ROWS_ALONE),
    ((_IF, "first[0] < ends[0]"), _ALL_COLUMNS, _NOT_ROWS_ALONE),
    (_ALL_COLUMNS, _NOT_ROWS_ALONE),
    (lambda wanted, pieces: {file: box for file, box in overlaps(wanted, pieces).items() if box == pieces[file]},
     "A piece of which only a part is wanted is read, too: that part of it."),
    ((_IF, "True"), "A file that has nothing of what is wanted is not read: leave it out."),
    ((_ADD, "reads[file] = first, ends"), _NO_END),
    ((_ADD, "reads[file] = offsets, sizes"),
     "Those are the whole pieces. Read only the wanted part of each."),
    (("reads[file] = first", "reads[file] = tuple(a - b for a, b in zip(first, offsets))"),
     "Those offsets count from the corner of the piece. Count from the corner of the whole"
     " tensor."),
    (("reads[file] = first", "reads[file] = tuple(a - b for a, b in zip(first, wanted[0]))"),
     "Those offsets count from the corner of the wanted part. Count from the corner of the whole"
     " tensor."),
)  # fmt: skip

# Each case has two files, so that a message can show both.
_PIECES: tuple[dict[str, Box], ...] = (
    {"a": ((0, 0), (16, 12)), "b": ((16, 12), (16, 12))},
    {"a": ((0, 12), (16, 12)), "b": ((16, 0), (16, 12))},
    {"a": ((0, 0), (16, 24)), "b": ((16, 0), (16, 24))},
    {"a": ((0, 0), (32, 12)), "b": ((0, 12), (32, 12))},
)
_WANTED: tuple[Box, ...] = (
    ((16, 0), (16, 24)), ((0, 12), (32, 12)), ((4, 6), (8, 10)), ((0, 0), (32, 24)), ((31, 23), (1, 1)),
)  # fmt: skip


def _read_boxes(value: Any, call: str) -> dict[Any, Box]:
    return {
        file: _read_box(box, f"{call}[{file!r}]") for file, box in expect_dict(value, call).items()
    }


_grade_overlaps = Formula(
    overlaps,
    [(each, pieces) for pieces in _PIECES for each in _WANTED],
    _WRONG_OVERLAPS,
    read=_read_boxes,
)


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


_SIZES = {"0.distcp": 100, "1.distcp": 101, "state.json": 102}
_UNSEALED = dict(_SIZES)
_NO_NAME = (
    "Only `step_` and a number is the name of a checkpoint: the others are being written, or"
    " somebody's copies."
)

_LISTINGS: tuple[tuple[dict[str, Sizes], str | None, str], ...] = (
    ({"step_4": _SIZES, "step_8": _SIZES, "step_6": _SIZES}, "step_8",
     "It is the highest step that counts, whatever the order of the listing."),
    ({"step_4": _SIZES, "step_8": _UNSEALED}, "step_4",
     "A directory without a manifest was never declared whole, although all files may be there. The"
     " one before it is to be used."),
    ({"step_4": _SIZES, "step_8": {"0.distcp": 100, "state.json": 102}}, "step_4",
     "The manifest names a file that is not there."),
    ({"step_4": _SIZES, "step_8": _SIZES | {"1.distcp": 94}}, "step_4",
     "A file is there, but shorter than the manifest says."),
    ({"step_4": _SIZES, "step_8": _SIZES | {"1.distcp": 108}}, "step_4",
     "A file is there, but longer than the manifest says: it is not the one that was sealed."),
    ({"step_4": _SIZES, "step_8": _SIZES | {"0.distcp": 101, "1.distcp": 100}}, "step_4",
     "Each size belongs to a name: here two files have changed theirs."),
    ({"step_4": _SIZES, "step_8": _SIZES | {"0.distcp": 93}}, "step_4",
     "Each file that the manifest names counts, the first as well."),
    ({"step_4": _SIZES, ".step_8.tmp-3f2a": _SIZES, "step_8.bak": _SIZES}, "step_4", _NO_NAME),
    ({".step_8.tmp-3f2a": _SIZES, "step_4": _SIZES}, "step_4",
     "Pass over a file that is no checkpoint, and go on with the search."),
    ({"step_4": _SIZES, "copy_8": _SIZES}, "step_4", _NO_NAME),
    ({
        "step_9": _SIZES,
            "step_10": _SIZES}, "step_10", "As text, 9 comes after 1: compare numbers."),
    ({"step_4": _SIZES, "step_8": _SIZES | {"tokenizer.json": 5}}, "step_8",
     "A file more than the manifest names does no harm."),
    ({"step_4": {"0.distcp": 100, "1.distcp": 101}}, None, "If none is whole, the answer is None."),
    ({}, None, "If there is none, the answer is None."),
)  # fmt: skip


def _grade_newest_whole(answer: Answer) -> None:
    cases = []
    for files, _, _ in _LISTINGS:
        sealed = [name for name in files if files[name] is not _UNSEALED]
        cases.append((files, dict.fromkeys(sealed, _SIZES)))
    examples = ["directories = {}\nmanifests = {}".format(*case) for case in cases]
    try:
        found = answer.calls(cases, call=answer.name)
    except Stopped as e:
        # An error in the first listing has no special cause: it holds no trap.
        cause = _LISTINGS[e.row][2] if e.row and e.error else e.cause
        raise Mistake(e.symptom, cause, examples[e.row]) from None
    for i, (got, (_, right, cause)) in enumerate(zip(found, _LISTINGS, strict=True)):
        if got is not None and not isinstance(got, str):
            raise Mistake(f"`newest_whole` gave {got!r:.60}; a name or None is asked for.")
        if got != right:
            if got is None and i == 0:
                cause = (
                    f"`{right}` is whole: it has a manifest, and every file in that is there with"
                    " its size."
                )
            raise Mistake(
                f"`newest_whole` gave {got!r}, which should be {right!r}.", cause, examples[i]
            )


def save_together(rank: int, write: Callable[[], None], publish: Callable[[], None]) -> None:
    """Write this rank's piece; publish once, when all pieces are there; return when it is published."""
    write()
    dist.barrier()
    if rank == 0:
        publish()
    dist.barrier()


_N_SAVERS = 3
_SLOW_S = 0.3
_Event = tuple[str, int]
"""An event of a rank, and its time by the machine's clock."""


def _saved_on_rank(rank: int, fn: Callable[..., Any]) -> list[list[_Event]]:
    """Return what this rank did in each of four saves.

    In three saves each rank in turn is slow to write; in the last one publishing is slow.
    """
    return [_saved_once(rank, fn, slow) for slow in (*range(_N_SAVERS), None)]


def _saved_once(rank: int, fn: Callable[..., Any], slow: int | None) -> list[_Event]:
    events: list[_Event] = []
    n_barriers = 0

    def note(what: str) -> None:
        events.append((what, time.monotonic_ns()))

    def write() -> None:
        time.sleep(_SLOW_S * (rank == slow))
        note("written")

    def publish() -> None:
        note("begun")
        time.sleep(_SLOW_S * (slow is None))
        note("published")

    def barrier(*_: Any, **__: Any) -> None:
        nonlocal n_barriers
        n_barriers += 1
        meet()

    def meet() -> None:
        """Wait for all ranks, in a barrier or after the answer.

        A rank that is past the answer has called fewer barriers.
        """
        ranks: list[Any] = [None] * _N_SAVERS
        dist.all_gather_object(ranks, n_barriers)
        if (most := max(ranks)) > (fewest := min(ranks)):
            raise Mistake(
                f"Rank {ranks.index(most)} called `barrier` {_times(most)}, rank"
                f" {ranks.index(fewest)} {_times(fewest)}.",
                "A barrier returns when all ranks have called it: every rank has to call each.",
            )

    meet()
    with mock.patch.object(dist, "barrier", barrier):
        fn(rank, write, publish)
    note("returned")
    meet()
    return events


def _times(n: int) -> str:
    return ("never", "once", "twice")[n] if n < 3 else f"{n} times"


def _complaints(ranks: Sequence[list[_Event]]) -> Iterator[tuple[int, str, str]]:
    """Yield the complaints about one save, each as (priority, symptom, cause).

    The learner is told the complaint with the lowest priority.
    """

    def when(wanted: str) -> list[tuple[int, int]]:
        found = []
        for rank, events in enumerate(ranks):
            found += [(at, rank) for what, at in events if what == wanted]
        return sorted(found)

    written = when("written")
    begun = when("begun")
    published = when("published")
    writers = [rank for _, rank in written]
    for rank in range(_N_SAVERS):
        if writers.count(rank) > 1:
            told = f"Rank {rank} wrote its piece {_times(writers.count(rank))}."
            yield (
                2,
                told,
                "Write once, before the barrier: the rank that publishes relies on all pieces.",
            )
    for rank in {*range(_N_SAVERS)}.difference(writers):
        yield 0, f"Rank {rank} never wrote its piece.", "Every rank writes its own piece."
    if not begun:
        yield 1, "Nobody called `publish()`.", "One rank has to publish."
        return
    if len(begun) > 1:
        by = sorted({str(rank) for _, rank in begun})
        told = (
            f"`publish()` was called {_times(len(begun))}, by rank{'s' * (len(by) > 1)}"
            f" {', '.join(by)}."
        )
        yield 2, told, "One rank publishes, once; the others wait for it."
    first, publisher = begun[0]
    if (pieces := len({rank for at, rank in written if at < first})) < _N_SAVERS:
        told = f"Rank {publisher} published when {pieces} of {_N_SAVERS} pieces were there."
        yield (
            3,
            told,
            "The rank that publishes must know that all others have written: a barrier after"
            " `write()`.",
        )
    if (back := when("returned")[0]) < published[0]:
        told = f"Rank {back[1]} returned before the checkpoint was published."
        cause = (
            "A rank that returns takes the checkpoint for granted, and may load it or delete the"
            " one before: a barrier after `publish()`, on all ranks."
        )
        yield 4, told, cause


def _grade_save_together(answer: Answer) -> None:
    saves = zip(*answer.on_ranks(_N_SAVERS, _saved_on_rank), strict=True)
    if complaints := [complaint for ranks in saves for complaint in _complaints(ranks)]:
        _, symptom, cause = min(complaints)
        raise Mistake(symptom, cause)


def checkpoint_entries(
    stage: nn.Module, optimizer: torch.optim.Optimizer, coordinates: dict[str, int], step: int
) -> dict[str, Any]:
    """What this rank adds to the checkpoint: key -> tensor or number."""
    entries: dict[str, Any] = {"step": step}
    for name, parameter in stage.named_parameters():
        entries[f"model.{name}"] = parameter.detach()
        for slot, value in optimizer.state[parameter].items():
            entries[f"optimizer.{name}.{slot}"] = value
    place = ".".join(f"{dimension}{index}" for dimension, index in coordinates.items())
    entries[f"rng.{place}"] = torch.get_rng_state()
    return entries


_N_RANKS = 4
_N_LAYERS = 4
_STEP = 1234
# In the first, each key that is too short has two meanings. In the last, what has no order of its
# own has another.
_RUNS = (
    ("pp × dp_shard = 2 ×"
     " 2", 2, False), ("pp × dp_shard = 4 × 1", 4, False), ("pp × dp_shard = 1 × 4", 1, False),
    ("the optimizer's groups, biases first, and the mesh's dimensions in another order,", 2, True),
)  # fmt: skip


class _Given(NamedTuple):
    """The entries of the answer on one rank, with copies of its tensors.

    Also the keys that the answer gives after one more step.
    """

    place: dict[str, int]
    generator: Tensor
    entries: dict[Any, Any]
    later: list[Any]


def _trained(pp: int, index: int, regrouped: bool = False) -> tuple[nn.Module, torch.optim.AdamW]:
    """Return a stage after one step, with its optimizer.

    If ``regrouped``, the optimizer has the same parameters in two groups, biases first.
    """
    layers = nn.ModuleDict()
    each = _N_LAYERS // pp
    for number in range(index * each, (index + 1) * each):
        torch.manual_seed(number)
        layers[str(number)] = nn.Linear(3, 3, dtype=torch.float64)
    stage = nn.ModuleDict({"layers": layers})
    parameters = list(stage.parameters())
    groups = [{"params": parameters}]
    if regrouped:
        biases = [each for each in parameters if each.dim() == 1]
        weights = [each for each in parameters if each.dim() == 2]
        groups = [{"params": biases}, {"params": weights}]
    optimizer = torch.optim.AdamW(groups)
    for parameter in stage.parameters():
        parameter.grad = parameter.detach() ** 2
    optimizer.step()
    return stage, optimizer


def _entries_on_rank(rank: int, fn: Callable[..., Any]) -> list[_Given]:
    what = f"checkpoint_entries on rank {rank}"
    found = []
    for _, pp, reordered in _RUNS:
        stage_index, shard = divmod(rank, _N_RANKS // pp)
        stage, optimizer = _trained(pp, stage_index, reordered)
        generator = torch.manual_seed(1000 * pp + rank).get_state()
        place = {"pp": stage_index, "dp_shard": shard}
        if reordered:
            place = {"dp_shard": shard, "pp": stage_index}
        given = expect_dict(fn(stage, optimizer, dict(place), _STEP), what)
        # The next step changes the tensors.
        entries = dict(given)
        for key, value in given.items():
            if isinstance(value, Tensor):
                entries[key] = value.detach().clone()
        optimizer.step()
        later = expect_dict(fn(stage, optimizer, dict(place), _STEP + 1), what)
        found.append(_Given(place, generator, entries, list(later)))
    return found


def _grade_checkpoint_entries(answer: Answer) -> None:
    runs = list(zip(*answer.on_ranks(_N_RANKS, _entries_on_rank), strict=True))
    merged = [
        _judge_run(f"With {where}", ranks) for (where, _, _), ranks in zip(_RUNS, runs, strict=True)
    ]
    first = merged[0]
    for (where, _, reordered), other in zip(_RUNS, merged, strict=True):
        for key in {**first, **other}:
            alone = key not in first or key not in other
            if _is_generator(first.get(key, other.get(key))) or (
                not alone and _equal(first[key], other[key])
            ):
                continue
            cause = (
                "Another layout looks for it by a key that it makes itself: names of the whole"
                " model work, numbers of stages and ranks do not."
            )
            if reordered:
                cause = (
                    "`optimizer.state_dict()` numbers parameters in the order of its groups, which"
                    " need not be that of `named_parameters()`. `optimizer.state[parameter]` needs"
                    " no number."
                )
            what = (
                "is written with one of the two alone"
                if alone
                else "means something else with each"
            )
            raise Mistake(f"`{key}` {what}: {_RUNS[0][0]}, and {where}.", cause)
    _compare_places([given for ranks in runs for given in ranks])


def _judge_run(where: str, ranks: Sequence[_Given]) -> dict[Any, Any]:
    """Join all ranks' entries; refuse a key of two meanings, or a missing entry."""
    merged: dict[Any, Any] = {}
    writer: dict[Any, int] = {}
    for rank, given in enumerate(ranks):
        for key, value in given.entries.items():
            if hasattr(value, "ndim") and not isinstance(value, Tensor):
                symptom = f"{where} `{key}` on rank {rank} is of class {type(value).__name__}."
                raise Mistake(
                    symptom, "An entry is a tensor or a number: leave tensors as they are."
                )
            if key in merged and not _equal(merged[key], value):
                symptom = (
                    f"{where} ranks {writer[key]} and {rank} both write `{key}`, with different"
                    " values"
                )
                cause = why(_TWO_MEANINGS, str(key), value)
                raise Mistake(f"{symptom}: the last one to write wins.", cause)
            merged[key], writer[key] = value, rank
    stage, optimizer = _trained(1, 0)
    needed = {
        f"the weight {name}": parameter.detach() for name, parameter in stage.named_parameters()
    }
    for name, parameter in stage.named_parameters():
        needed |= {f"{slot} of {name}": value for slot, value in optimizer.state[parameter].items()}
    for name, value in needed.items():
        if not _keys_of(value, merged):
            raise Mistake(f"{where} no entry holds {name}.", _why_missing(value, merged))
    if not _keys_of(_STEP, merged):
        cause = "A run that resumes has to know how many steps are done, or its data begin again."
        raise Mistake(f"{where} no entry holds the step, {_STEP}.", cause)
    missing = [rank for rank, given in enumerate(ranks) if not _keys_of(given.generator, merged)]
    if len(missing) == len(ranks):
        raise Mistake(
            f"{where} no rank's random number generator is saved.",
            "`torch.get_rng_state()` is its state.",
        )
    if missing:
        raise Mistake(
            f"{where} the generator of rank {missing[0]} is not saved.",
            "After resuming, it would draw what another rank draws: the same dropout masks twice."
            " Every rank saves its own.",
        )
    for rank, given in enumerate(ranks):
        if changed := sorted(map(str, set(given.entries) ^ set(given.later))):
            key = " ".join(changed[0].split())
            raise Mistake(
                f"After one more step, rank {rank} writes other keys, such as `{key:.60}`.",
                "A rank that loads knows names and coordinates, and no values: make the keys of"
                " names and coordinates.",
            )
    return merged


def _why_missing(wanted: Any, entries: dict[Any, Any]) -> str:
    for key, each in entries.items():
        if _is_in_another_dtype(each, wanted):
            return (
                f"`{key}` has it in {each.dtype}: a checkpoint keeps the dtype, {wanted.dtype}, and"
                " all digits."
            )
    return "Weights and every slot of the optimizer's state are needed."


def _is_in_another_dtype(found: Any, wanted: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
        return False
    if found.shape != wanted.shape or found.dtype == wanted.dtype:
        return False
    return torch.allclose(found.to(wanted.dtype), wanted, rtol=1e-2)


def _is_by_number(key: str, value: Any) -> bool:
    """Whether the key names a parameter by its place in an optimizer."""
    return any(part.isdigit() for part in key.split(".")) and "layers" not in key


_TWO_MEANINGS: Cause = (
    (
        lambda key, value: not isinstance(value, Tensor | int | float),
        lambda key, value: (
            f"An entry is a tensor or a number, not an object of class {type(value).__name__}."
        ),
    ),
    (
        lambda key, value: _is_generator(value),
        "Every rank has a generator of its own: its key needs the rank's coordinates.",
    ),
    (
        _is_by_number,
        "An optimizer numbers the parameters of its own rank: 0 is another one on each stage."
        " Take the parameter's name.",
    ),
    (
        OTHERWISE,
        "The key does not say of which parameter it is: two ranks mean different things by it.",
    ),
)


def _compare_places(everyone: Sequence[_Given]) -> None:
    """Refuse generators' keys that differ at equal coordinates, or agree at different ones."""
    keys: list[tuple[dict[str, int], Any]] = []
    for given in everyone:
        key = next(iter(_keys_of(given.generator, given.entries)), None)
        for place, other in keys:
            if key == other and place != given.place and [*place] != [*given.place]:
                raise Mistake(
                    f"`{key}` has two meanings: {place}, and, where a mesh has its dimensions in"
                    f" another order, {given.place}.",
                    "Numbers alone do not say of which dimension. Write the names of the dimensions"
                    " in, too.",
                )
            if (key == other) != (place == given.place) and [*place] == [*given.place]:
                raise Mistake(
                    f"`{key}` does not follow from the coordinates: other layouts have another rank"
                    " there.",
                    "Rank 1 of 4 × 1 and rank 1 of 2 × 2 are in different places. Write all"
                    " coordinates into the key.",
                )
        keys.append((given.place, key))


def _keys_of(value: Any, entries: dict[Any, Any]) -> list[Any]:
    return [key for key, each in entries.items() if _equal(value, each)]


def _is_generator(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim():
        return a.dtype == b.dtype and torch.equal(a, b)
    if any(isinstance(value, Tensor) and value.dim() for value in (a, b)):
        return False
    try:
        return float(a) == float(b)
    except (TypeError, ValueError):
        return bool(a == b)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(rectangle, _grade_rectangle, "09", "what a rank holds", 2, 7, (
        "First the cut of tensor parallelism, if there is one: it says how many rows are left.",
        "FSDP cuts those rows into parts of rows / dp, rounded up. With which row does part"
        " `dp_rank` begin?",
        "FSDP's part begins at `min(dp_rank * most, rows)` and has `min(most, rows - begin)` rows;"
        " the offset of tensor parallelism comes on top.",
    )),
    Exercise(overlaps, _grade_overlaps, "09", "which old files a new rank reads", 2, 7, (
        "In one dimension: where do two intervals begin to overlap, and where do they end?",
        "The overlap begins at the larger of the beginnings and ends at the smaller of the ends.",
        "Do it in each dimension. Leave the file out unless the end is beyond the beginning in all"
        " of them.",
    )),
    Exercise(newest_whole, _grade_newest_whole, "09", "latest, by looking", 1, 5, (
        "Three questions to each directory: is it named as a checkpoint, is there a manifest, does"
        " it agree?",
        "`files.get(file) == size` for every file of the manifest.",
        "Of those that are whole take the highest number, compared as an int: `max(…,"
        " default=None)`.",
    )),
    Exercise(save_together, _grade_save_together, "09", "two barriers", 2, 5, (
        "What must rank 0 know before it publishes? And what must the others know before they go"
        " on?",
        "`dist.barrier()` returns when all ranks have called it, so every rank has to call it.",
        "Write, barrier, publish on rank 0 alone, barrier.",
    ), limit_s=8.0),
    Exercise(checkpoint_entries, _grade_checkpoint_entries, "09", "bug clinic", 3, 9, (
        "Which key would a rank of another layout look for? It knows the names of its parameters"
        " and where it is.",
        "`stage.named_parameters()` gives the name, `optimizer.state[parameter]` the moments that"
        " belong to it.",
        "Keys: `model.NAME`, `optimizer.NAME.SLOT`, `rng.COORDINATES` with every rank's own state,"
        " and the step.",
    ), limit_s=20.0),
)  # fmt: skip
