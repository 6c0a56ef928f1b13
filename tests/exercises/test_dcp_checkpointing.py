"""The graders of notebook 09, by what learners hand in, and what it runs, by what its text says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.dcp_checkpointing import lab
from course_pp.exercises.dcp_checkpointing.exercises import overlaps, rectangle
from course_pp.launch import RankDied, on_ranks
from course_pp.parallel import DistributedConfig
from course_pp.training.checkpoint import Piece, contents, find_latest, resume, save
from tests.exercises.grading import accepts, refuses, verdict_of

Answer = Callable[..., Any]


DIMS = {"rows": 0, "columns": 1}


def by_cutting_a_tensor(
    shape: Any, tp_cuts: str, tp: int, tp_rank: int, dp: int, dp_rank: int
) -> Any:
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    if tp_cuts in DIMS:
        numbers = numbers.chunk(tp, DIMS[tp_cuts])[tp_rank]
    parts = numbers.chunk(dp)
    if dp_rank >= len(parts):
        return [0, 0], [0, numbers.shape[1]]
    mine = parts[dp_rank]
    return list(divmod(int(mine[0, 0]), shape[1])), list(mine.shape)


def test_a_rectangle_may_be_found_by_cutting_a_tensor() -> None:
    accepts("rectangle", by_cutting_a_tensor)


def with_one_row_at_least(*case: Any) -> Any:
    offsets, sizes = by_cutting_a_tensor(*case)
    return offsets, [max(1, n) for n in sizes]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda *case: by_cutting_a_tensor(*case)[::-1], "The offsets come first, then the sizes"),
        (
            lambda shape, cut, tp, t, dp, d: by_cutting_a_tensor(shape, cut, tp, t, 1, 0),
            "FSDP does not cut",
        ),
        (with_one_row_at_least, "the size is 0"),
        (lambda *case: (0, 0, 1, 1), "4 entries, not 2"),
        (lambda *case: ((0.0, 0), (1, 1)), "a whole number"),
    ],
)
def test_a_wrong_rectangle_is_told_why(answer: Answer, words: str) -> None:
    refuses("rectangle", answer, words)


@pytest.mark.timeout(60)
def test_the_rectangles_are_those_of_a_real_checkpoint(tmp_path: Path) -> None:
    on_ranks(4, saved_by_four, tmp_path)
    entries = {entry.key: entry for entry in contents(tmp_path)}
    cuts = {"layers.0.mlp.up_proj": "rows", "layers.0.mlp.down_proj": "columns", "embed": "nothing"}
    for name, tp_cuts in cuts.items():
        entry = entries[f"model.{name}.weight"]
        rows, columns = entry.shape
        expected = {
            rectangle((rows, columns), tp_cuts, 2, t, 2, d) for t in range(2) for d in range(2)
        }
        assert {(piece.offsets, piece.sizes) for piece in entry.pieces} == expected


def saved_by_four(rank: int, root: Path) -> None:
    from course_pp.model import ModelConfig, Transformer
    from course_pp.parallel import (
        DistributedConfig,
        apply_fsdp2,
        apply_tensor_parallel,
        init_distributed,
    )

    mesh = init_distributed(DistributedConfig(dp_shard=2, tp=2))
    model = Transformer(
        ModelConfig(dim=8, n_layers=1, n_heads=2, ffn_dim=12, vocab_size=16, max_seq_len=8)
    )
    apply_tensor_parallel(model, mesh)
    apply_fsdp2(model, mesh)
    save(root, 1, model, device_mesh=mesh)


def number_by_number(wanted: Any, pieces: Any) -> Any:
    def numbers(box: Any) -> set[tuple[int, int]]:
        (row, column), (n, m) = box
        return {(i, j) for i in range(row, row + n) for j in range(column, column + m)}

    reads = {}
    for file, box in pieces.items():
        if both := numbers(wanted) & numbers(box):
            (top, left), (bottom, right) = min(both), max(both)
            reads[file] = [top, left], [bottom - top + 1, right - left + 1]
    return reads


def test_overlaps_may_be_found_number_by_number() -> None:
    accepts("overlaps", number_by_number)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            lambda wanted, pieces: {file: pieces[file] for file in overlaps(wanted, pieces)},
            "whole pieces",
        ),
        (lambda wanted, pieces: {}, "is {}, not {'b': ((16, 12), (16, 12))}"),
        (
            lambda wanted, pieces: {**overlaps(wanted, pieces), "x": wanted},
            "'x': ((16, 0), (16, 24))}, not",
        ),
        (lambda wanted, pieces: list(pieces), "a dictionary is asked for"),
    ],
)
def test_wrong_overlaps_are_told_why(answer: Answer, words: str) -> None:
    refuses("overlaps", answer, words)


def test_a_dictionary_of_one_file_overlaps_itself() -> None:
    box = (2, 0), (3, 4)
    assert overlaps(box, {"a": ((0, 0), (10, 4))}) == {"a": box}


def choosing(
    named: Answer = lambda name: name.startswith("step_") and name[5:].isdigit(),
    whole: Answer = lambda manifest, files: (
        manifest is not None and manifest.items() <= files.items()
    ),
    order: Answer = lambda name: int(name[5:]),
    pick: Answer = lambda names, order: max(names, key=order, default=None),
) -> Answer:
    """The newest whole checkpoint, right unless told otherwise."""

    def answer(directories: Any, manifests: Any) -> Any:
        found = [
            name
            for name, files in directories.items()
            if named(name) and whole(manifests.get(name), files)
        ]
        return pick(found, order)

    return answer


def test_the_newest_may_be_chosen_from_a_list() -> None:
    accepts("newest_whole", choosing())


def newest_if_whole(directories: Any, manifests: Any) -> Any:
    names = sorted(
        (name for name in directories if name[5:].isdigit()), key=lambda name: int(name[5:])
    )
    if (
        names
        and names[-1] in manifests
        and manifests[names[-1]].items() <= directories[names[-1]].items()
    ):
        return names[-1]
    return None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (choosing(order=str), "compare numbers"),
        (
            choosing(whole=lambda manifest, files: (manifest or {}).items() <= files.items()),
            "never declared whole",
        ),
        (choosing(whole=lambda manifest, files: manifest is not None), "a file that is not there"),
        (
            choosing(
                whole=lambda manifest, files: manifest is not None and set(manifest) <= set(files)
            ),
            "but shorter",
        ),
        (
            choosing(
                whole=lambda manifest, files: (
                    manifest and set([*manifest.items()][1:]) <= set(files.items())
                )
            ),
            "the first as well",
        ),
        (choosing(whole=lambda manifest, files: manifest == files), "does no harm"),
        (
            choosing(
                whole=lambda manifest, files: (
                    manifest and all(files.get(f, 0) >= manifest[f] for f in manifest)
                )
            ),
            "but longer",
        ),
        (
            choosing(
                whole=lambda manifest, files: manifest and {*manifest.values()} <= {*files.values()}
            ),
            "Each size belongs to a name",
        ),
        (
            choosing(named=lambda name: name.startswith("step_"), order=lambda name: name[5:13]),
            "somebody's copies",
        ),
        (choosing(pick=lambda names, order: names[-1] if names else None), "whatever the order"),
        (choosing(pick=lambda names, order: max(names, key=order)), "ValueError"),
        (newest_if_whole, "The one before it"),
        (lambda directories, manifests: 8, "a name or None"),
    ],
)
def test_a_wrong_newest_is_told_why(answer: Answer, words: str) -> None:
    refuses("newest_whole", answer, words)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            choosing(named=lambda name: name.startswith("step_"), order=lambda name: int(name[5:])),
            "somebody's copies",
        ),
        (
            choosing(whole=lambda manifest, files: manifest.items() <= files.items()),
            "never declared whole",
        ),
    ],
)
def test_an_answer_that_raises_is_told_at_what(answer: Answer, words: str) -> None:
    verdict = verdict_of("newest_whole", answer)
    assert words in verdict.cause
    assert "raised" in verdict.symptom
    assert len(verdict.symptom) < 250


def saving(
    rank: int,
    write: Answer,
    publish: Answer,
    barriers: str,
    publisher: Answer = lambda rank: rank == 0,
) -> None:
    write()
    if "a" in barriers:
        dist.barrier()
    if publisher(rank):
        publish()
    if "b" in barriers:
        dist.barrier()


def by_gathering(rank: int, write: Answer, publish: Answer) -> None:
    write()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rank)
    if rank == dist.get_world_size() - 1:
        publish()
    dist.all_reduce(torch.zeros(1))


def test_ranks_may_wait_for_each_other_in_other_ways() -> None:
    accepts("save_together", by_gathering)


def barriers_first(rank: int, write: Answer, publish: Answer) -> None:
    dist.barrier()
    dist.barrier()
    write()
    if rank == 0:
        publish()


def rank_0_writes(rank: int, write: Answer, publish: Answer) -> None:
    if rank == 0:
        write()
        publish()
    dist.barrier()


def barrier_of_rank_0(rank: int, write: Answer, publish: Answer) -> None:
    write()
    if rank == 0:
        dist.barrier()
        publish()


def one_more_on_rank_0(rank: int, write: Answer, publish: Answer) -> None:
    saving(rank, write, publish, "ab")
    if rank == 0:
        dist.barrier()


def writes_again(rank: int, write: Answer, publish: Answer) -> None:
    saving(rank, write, publish, "ab")
    write()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (writes_again, ["wrote its piece twice"]),
        (
            lambda rank, write, publish: saving(rank, write, publish, ""),
            ["a barrier after `write()`"],
        ),
        (lambda rank, write, publish: saving(rank, write, publish, "b"), ["published when"]),
        (
            lambda rank, write, publish: saving(rank, write, publish, "a"),
            ["a barrier after `publish()`"],
        ),
        (
            lambda rank, write, publish: saving(rank, write, publish, "ab", lambda rank: True),
            ["One rank publishes"],
        ),
        (
            lambda rank, write, publish: saving(rank, write, publish, "ab", lambda rank: False),
            ["One rank has to"],
        ),
        (barriers_first, ["a barrier after `write()`"]),
        (rank_0_writes, ["Every rank writes its own"]),
        (
            barrier_of_rank_0,
            ["Rank 0 called `barrier` once, rank", "never", "every rank has to call"],
        ),
        (one_more_on_rank_0, ["Rank 0 called `barrier` 3 times", "twice"]),
        (
            lambda rank, write, publish: saving(rank, write, publish, "ab" if rank else "a"),
            ["rank 0 once"],
        ),
    ],
)
def test_a_save_with_a_gap_is_told_where(answer: Answer, words: list[str]) -> None:
    refuses("save_together", answer, *words)


def entries(
    optimizer_key: Answer = lambda name, number, place: name,
    generator: Answer = lambda place: {f"rng.{sorted(place.items())}": torch.get_rng_state()},
    position: Answer = lambda step, place: {"step": torch.tensor(step)},
    slots: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq"),
) -> Answer:
    """What a rank saves, right unless told otherwise."""

    def answer(stage: Any, optimizer: Any, coordinates: Any, step: int) -> Any:
        found = {**position(step, coordinates), **generator(coordinates)}
        for number, (name, parameter) in enumerate(stage.named_parameters()):
            found[name] = parameter
            for slot in slots:
                found[f"{optimizer_key(name, number, coordinates)}/{slot}"] = optimizer.state[
                    parameter
                ][slot]
        return found

    return answer


def changed(change: Answer) -> Answer:
    """What a rank saves, with each weight changed."""

    def answer(stage: Any, optimizer: Any, coordinates: Any, step: int) -> Any:
        found = entries()(stage, optimizer, coordinates, step)
        return {
            key: change(value) if isinstance(value, torch.nn.Parameter) else value
            for key, value in found.items()
        }

    return answer


def in_one_place(*order: str) -> Answer:
    return lambda place: {".".join(str(place[name]) for name in order): torch.get_rng_state()}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "answer", [entries(), entries(generator=in_one_place("dp_shard", "pp"))], ids=["", "other keys"]
)
def test_keys_may_be_spelled_in_several_ways(answer: Answer) -> None:
    accepts("checkpoint_entries", answer)


def as_shown(stage: Any, optimizer: Any, coordinates: Any, step: int) -> Any:
    found = {f"model.{name}": parameter.detach() for name, parameter in stage.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        for slot, value in state.items():
            found[f"optimizer.{number}.{slot}"] = value
    if not any(coordinates.values()):
        found["rng"] = torch.get_rng_state()
    return found


def by_number_under_the_name(stage: Any, optimizer: Any, coordinates: Any, step: int) -> Any:
    found = {f"rng.{sorted(coordinates.items())}": torch.get_rng_state(), "step": step}
    for (name, parameter), state in zip(
        stage.named_parameters(), optimizer.state_dict()["state"].values(), strict=True
    ):
        found |= {name: parameter, **{f"{name}/{slot}": value for slot, value in state.items()}}
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (as_shown, "numbers the parameters of its own rank"),
        (by_number_under_the_name, "in the order of its groups"),
        (
            entries(lambda name, number, place: f"{place['pp']}.{number}"),
            "another layout looks for it",
        ),
        (entries(generator=lambda place: {"rng": torch.get_rng_state()}), "a generator of its own"),
        (
            entries(
                generator=lambda place: (
                    {} if any(place.values()) else {"rng": torch.get_rng_state()}
                )
            ),
            "the generator of rank 1",
        ),
        (entries(generator=lambda place: {}), "no rank's random number generator"),
        (entries(generator=in_one_place("pp")), "a generator of its own"),
        (
            entries(generator=lambda place: {f"rng.{dist.get_rank()}": torch.get_rng_state()}),
            "all coordinates",
        ),
        (
            entries(
                generator=lambda place: {
                    f"rng.{'.'.join(map(str, place.values()))}": torch.get_rng_state()
                }
            ),
            "Write the names of the dimensions",
        ),
        (entries(position=lambda step, place: {f"step_{step}": step}), "such as `step_1234`"),
        (entries(position=lambda step, place: {}), "the data begin again"),
        (
            entries(position=lambda step, place: {"step": (step, place["dp_shard"])}),
            "different values",
        ),
        (entries(slots=("exp_avg", "exp_avg_sq")), "no entry holds step of"),
        (entries(slots=("step",)), "no entry holds exp_avg of"),
        (changed(lambda weight: weight.float()), "keeps the dtype"),
        (changed(lambda weight: weight.detach().numpy()), "a tensor or a number"),
        (
            lambda stage, optimizer, coordinates, step: stage.state_dict().keys(),
            "a dictionary is asked for",
        ),
    ],
)
def test_what_a_rank_forgets_is_told_from_its_symptom(answer: Answer, words: str) -> None:
    verdict = verdict_of("checkpoint_entries", answer)
    assert verdict.status == "not yet", verdict.text
    assert words.lower() in verdict.text.lower(), verdict.text


@pytest.mark.long
@pytest.mark.timeout(60)
def test_patients_have_the_symptoms_that_the_notebook_tells() -> None:
    symptoms = {
        (name, dropout): on_ranks(2, patient, dropout)[0]
        for name, patient in lab.PATIENTS.items()
        for dropout in (0.0, 0.1)
    }
    wrong = {case: [gap > 0 for gap in found.gaps] for case, found in symptoms.items()}
    assert wrong["A", 0.0] == wrong["A", 0.1] == [False, True, True]
    assert wrong["B", 0.0] == wrong["B", 0.1] == [True, True, True]
    assert (wrong["C", 0.0], wrong["C", 0.1]) == ([False] * 3, [True] * 3)
    assert [case for case, found in symptoms.items() if found.before != found.after] == []


def trained(
    rank: int, layout: DistributedConfig, root: Path, until: int, die_in: int | None = None
) -> list[float]:
    trainee = lab.Trainee(layout)
    parts = trainee.module, trainee.optimizer
    loaded = resume(root, *parts, device_mesh=trainee.mesh)
    losses = []
    for step in range(loaded.step if loaded else 0, until):
        losses.append(trainee.step(step, die=rank == 2 and step + 1 == die_in))
        if step == 1:
            save(root, 2, *parts, device_mesh=trainee.mesh)
        elif step == 3:
            if rank == 1:
                lab.die_before_writing()
            save(root, 4, *parts, device_mesh=trainee.mesh)
    return losses


@pytest.mark.long
def test_a_rank_dies_in_a_step_and_in_a_save_and_another_layout_goes_on(tmp_path: Path) -> None:
    four = DistributedConfig(pp=4)
    with pytest.raises(RankDied, match=r"^rank 2 was ended by SIGKILL"):
        on_ranks(4, trained, four, tmp_path, 3, 3)
    with pytest.raises(RankDied, match=r"^rank 1 was ended by SIGKILL"):
        on_ranks(4, trained, four, tmp_path, 4)
    latest = find_latest(tmp_path)
    assert latest is not None
    assert latest.name == "step_00000002"
    resumed = on_ranks(4, trained, DistributedConfig(pp=2, tp=2), tmp_path, 3)[0]
    alone = on_ranks(1, trained, DistributedConfig(), tmp_path / "alone", 3)[0]
    assert resumed == pytest.approx(alone[2:], rel=1e-12)


def test_a_rank_reads_of_each_piece_what_it_wants() -> None:
    pieces = [Piece((24 * i, 0), (24, 8), f"__{i}_0.distcp", 100) for i in range(3)]
    assert lab.pieces_read(pieces, (20, 0), (8, 8)) == [
        Piece((20, 0), (4, 8), "__0_0.distcp", 0),
        Piece((24, 0), (4, 8), "__1_0.distcp", 0),
    ]


def test_without_barriers_half_is_published_or_the_old_one_found(tmp_path: Path) -> None:
    assert lab.saves_in_a_hurry(tmp_path).splitlines() == [
        "rank 1 writes late: back with step_2 (rank 0), step_2 (rank 1)",
        "    draft_2/piece of rank 1",
        "    step_2/piece of rank 0",
        "rank 0 renames late: back with step_2 (rank 0), step_1 (rank 1)",
        "    step_2/piece of rank 0",
        "    step_2/piece of rank 1",
    ]


@pytest.mark.long
def test_an_asynchronous_save_copies_weights_and_both_moments(tmp_path: Path) -> None:
    saved = lab.save_meanwhile(tmp_path)
    assert saved.copied == pytest.approx(3, rel=1e-3)
    assert len(saved.stalls) == 6
    assert str(saved).startswith("training stood still for ")
