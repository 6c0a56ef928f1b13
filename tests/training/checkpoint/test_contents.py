"""Looking into checkpoints, comparing them, and the commands that do it."""

import json
import math
from math import prod
from pathlib import Path

import pytest
import torch

from course_pp.__main__ import main
from course_pp.launch import on_ranks
from course_pp.training.checkpoint import contents, diff, save
from tests.training.checkpoint.resuming import Case, config_of, data_of, train
from tests.training.checkpoint.small import SHARD, Small, flip_byte


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks."""
    root, config = tmp_path_factory.mktemp("sharded"), config_of(tied=True, n_layers=2)
    on_ranks(
        4,
        _save_at,
        Case(pp=2, schedule="1f1b", dp_shard=2, reshard=True),
        config,
        data_of(config, 1),
        root,
        timeout_s=110,
    )
    return root / "sync" / "step_00000001"


def _save_at(rank, layout, config, data, root):
    train(rank, layout, config, data, root, save_at=1)


def test_the_pieces_of_a_tensor_make_it_up_and_say_who_wrote_them(sharded: Path) -> None:
    entries = {entry.key: entry for entry in contents(sharded)}
    for entry in entries.values():
        assert sum(prod(piece.sizes) for piece in entry.pieces) == prod(entry.shape)
        assert all((sharded / piece.file).is_file() for piece in entry.pieces)
    first, last = (
        entries["model.layers.0.mlp.up_proj.weight"],
        entries["model.layers.1.mlp.up_proj.weight"],
    )
    assert [(piece.offsets, piece.sizes, piece.rank) for piece in first.pieces] == [
        ((0, 0), (24, 32), 0),
        ((24, 0), (24, 32), 1),
    ]
    assert [piece.rank for piece in last.pieces] == [2, 3]


def test_differences_are_measured_whatever_the_layout(sharded: Path, tmp_path: Path) -> None:
    config = config_of(tied=True, n_layers=2)
    on_ranks(1, _save_at, Case(), config, data_of(config, 1), tmp_path, timeout_s=110)
    found = {difference.key: difference for difference in diff(sharded, tmp_path / "sync")}
    numbers = [d.max_abs for key, d in found.items() if not key.startswith("rng.")]
    assert all(gap is not None and gap < 1e-11 for gap in numbers)
    assert {key.split(".")[1] for key in found if key.startswith("rng.")} == {"pp0", "pp1"}


def test_each_kind_of_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        one.weight.fill_(1)
        other.weight.fill_(1)[0, 0] = 1.5
        one.weight[1] = other.weight[1] = math.nan  # which is no difference where both have it
    first = save(tmp_path, 1, one, device_mesh=None, extra={"lr": 1}).path
    second = save(tmp_path, 2, other, device_mesh=None, extra={"lr": 2}).path
    found = {d.key: (d.what, d.max_abs) for d in diff(first, second)}
    assert found["model.bias"] == ("only in the first", None)
    assert found["model.weight"] == ("1 of 6 numbers", 0.5)
    assert found["extra.lr"] == ("1 and 2", None)
    assert found["step"] == ("1 and 2", None)
    assert diff(first, first) == []
    assert main(["checkpoint", "diff", str(second), str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["checkpoint", "diff", str(first), str(tmp_path)]) == 1
    assert "model.weight" in capsys.readouterr().out


def test_inspect_lists_tensors_with_shape_dtype_bytes_and_files(
    sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "inspect", str(sharded.parent)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{sharded}: step 1, written at pp=2 dp_shard=2\n")
    assert "\nmodel.layers.0.mlp.up_proj.weight" in out
    (row,) = [line for line in out.splitlines() if line.startswith("model.embed.weight")]
    assert row.split() == [
        "model.embed.weight",
        "61",
        "×",
        "32",
        "float64",
        "15,616",
        "__0_0.distcp,",
        "__1_0.distcp",
    ]
    assert main(["checkpoint", "inspect", "--json", str(sharded)]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["tensors"]["model.embed.weight"]["pieces"][1]["offsets"] == [31, 0]


def test_verify_says_which_are_whole_and_what_is_wrong_with_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Small().saved(tmp_path, 1, 2)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": whole\n") == 2
    flip_byte(path / SHARD)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'step_00000001'}: whole\n"
    assert f"{path}: {SHARD} is damaged" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["inspect", "nowhere"], ["verify", "nowhere"], ["import", "nowhere", "out"]]
)
def test_what_is_not_there_is_refused_in_one_line(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())
