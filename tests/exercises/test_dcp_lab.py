"""What notebook 09 runs is what its text says of it."""

from pathlib import Path

import pytest

from course_pp.exercises.dcp_lab import Trainee, die_before_writing, pieces_read, save_meanwhile, saves_in_a_hurry
from course_pp.launch import RankDied, on_ranks
from course_pp.parallel import DistributedConfig
from course_pp.training.checkpoint import Piece, find_latest, resume, save


def _losses(rank: int, layout: DistributedConfig, root: Path, until: int, die_in: int | None = None) -> list[float]:
    trainee = Trainee(layout)
    parts = trainee.module, trainee.optimizer
    loaded = resume(root, *parts, device_mesh=trainee.mesh)
    losses = []
    for step in range(loaded.step if loaded else 0, until):
        losses.append(trainee.step(step, die=rank == 2 and step + 1 == die_in))
        if step == 1:
            save(root, 2, *parts, device_mesh=trainee.mesh)
        elif step == 3:
            if rank == 1:
                die_before_writing()
            save(root, 4, *parts, device_mesh=trainee.mesh)
    return losses


@pytest.mark.long
def test_a_rank_dies_in_a_step_and_in_a_save_and_another_layout_goes_on(tmp_path: Path) -> None:
    four = DistributedConfig(pp=4)
    with pytest.raises(RankDied, match=r"^rank 2 was ended by SIGKILL"):
        on_ranks(4, _losses, four, tmp_path, 3, 3)
    with pytest.raises(RankDied, match=r"^rank 1 was ended by SIGKILL"):
        on_ranks(4, _losses, four, tmp_path, 4)
    latest = find_latest(tmp_path)
    assert latest is not None
    assert latest.name == "step_00000002"
    resumed = on_ranks(4, _losses, DistributedConfig(pp=2, tp=2), tmp_path, 3)[0]
    alone = on_ranks(1, _losses, DistributedConfig(), tmp_path / "alone", 3)[0]
    assert resumed == pytest.approx(alone[2:], rel=1e-12)


def test_a_rank_reads_of_each_piece_what_it_wants() -> None:
    pieces = [Piece((24 * i, 0), (24, 8), f"__{i}_0.distcp", 100) for i in range(3)]
    assert pieces_read(pieces, (20, 0), (8, 8)) == [
        Piece((20, 0), (4, 8), "__0_0.distcp", 0),
        Piece((24, 0), (4, 8), "__1_0.distcp", 0),
    ]


def test_without_barriers_half_is_published_or_the_old_one_found(tmp_path: Path) -> None:
    assert saves_in_a_hurry(tmp_path).splitlines() == [
        "rank 1 writes late: back with step_2 (rank 0), step_2 (rank 1)",
        "    draft_2/piece of rank 1",
        "    step_2/piece of rank 0",
        "rank 0 renames late: back with step_2 (rank 0), step_1 (rank 1)",
        "    step_2/piece of rank 0",
        "    step_2/piece of rank 1",
    ]


@pytest.mark.long
def test_an_asynchronous_save_copies_weights_and_both_moments(tmp_path: Path) -> None:
    saved = save_meanwhile(tmp_path)
    assert saved.copied == pytest.approx(3, rel=1e-3)
    assert len(saved.stalls) == 6
    assert str(saved).startswith("training stood still for ")
