"""Damaged and foreign checkpoints are refused by name; resuming takes the one before."""

import contextlib
import errno
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from course_pp.launch import on_ranks
from course_pp.training.checkpoint import (
    CheckpointError,
    find_latest,
    load,
    opening,
    resume,
    save,
    saving,
    verify,
)
from tests.training.checkpoint.small import CONFIG, SHARD, Small, flip_byte, reseal


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def flip(name: str) -> Callable[[Path], None]:
    return lambda path: flip_byte(path / name)


def truncate(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def make_foreign(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / "notes.txt").write_text("not a checkpoint")


def take_another_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_00000001"), path)


def replace_by(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return damage


def link_to_itself_elsewhere(path: Path) -> None:
    copy = path.parents[1] / f"copy of {path.name}"
    copy.write_bytes((path.with_name("..") / "step_00000001" / path.name).read_bytes())
    path.symlink_to(copy)


def rewrite_name(path: Path) -> None:
    path.write_text(path.read_text().replace(SHARD, "\\ud800\\u0000"))


DAMAGE = {
    "pipe for a manifest": (
        replace_by("manifest.json", os.mkfifo),
        "manifest.json is not a plain file",
    ),
    "device for a manifest": (
        replace_by("manifest.json", lambda path: path.symlink_to("/dev/zero")),
        "manifest.json is a link: put the file itself in its place",
    ),
    "brackets for a manifest": (
        replace_by("manifest.json", lambda path: path.write_text("[" * 400_000)),
        "manifest.json is damaged: it is not JSON",
    ),
    "name that is none": (
        lambda path: rewrite_name(path / "manifest.json"),
        "manifest.json is damaged: entries",
    ),
    "pipe for a shard": (replace_by(SHARD, os.mkfifo), f"{SHARD} is not a plain file"),
    "link for the state": (
        replace_by("state.json", link_to_itself_elsewhere),
        "state.json is a link",
    ),
    "pipe for the description": (
        replace_by(".metadata", os.mkfifo),
        ".metadata is not a plain file",
    ),
    "truncated shard": (truncate(SHARD), f"{SHARD} has .* bytes instead of"),
    "flipped byte": (flip(SHARD), f"{SHARD} is damaged"),
    "missing shard": (remove(SHARD), f"{SHARD} is missing"),
    "missing manifest": (remove("manifest.json"), "manifest.json is missing"),
    "truncated manifest": (truncate("manifest.json"), "manifest.json is damaged"),
    "foreign directory": (make_foreign, "manifest.json is missing"),
    "copy under another name": (take_another_step, "renamed: it holds step 1"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_older_one_used(
    damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    run = Small()
    path = run.saved(tmp_path, 1, 2)
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    damage(path)
    assert verify(path)
    with pytest.raises(CheckpointError, match=f"step_00000002.*{said}"):
        load(path, run.model, run.optimizer, device_mesh=None)
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    with pytest.warns(UserWarning, match=f"step_00000001.*{said}"):
        assert load(tmp_path, run.model, run.optimizer, device_mesh=None).step == 1
    with pytest.warns(UserWarning, match="step_00000002"):
        assert find_latest(tmp_path) == path.with_name("step_00000001")


@pytest.mark.parametrize("name", [SHARD, ".metadata", "state.json", "manifest.json"])
def test_every_byte_is_verified(name: str, tmp_path: Path) -> None:
    path = Small().saved(tmp_path, 1)
    assert verify(path) == []
    n_bytes = (path / name).stat().st_size
    # JSON's blanks are the only bytes without a meaning, and only the manifest is not itself in a
    # manifest.
    blanks = {32, 10} if name == "manifest.json" else set()
    for at in range(0, n_bytes, max(1, n_bytes // 50)):
        if (path / name).read_bytes()[at] not in blanks:
            flip_byte(path / name, at)
            assert verify(path), f"byte {at} of {name}"
            flip_byte(path / name, at)
    assert verify(path) == []


def test_a_run_without_checkpoints_begins_and_one_with_only_damaged_ones_stops(
    tmp_path: Path,
) -> None:
    run = Small()
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None
    assert resume(tmp_path, run.model, run.optimizer, device_mesh=None) is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(tmp_path, run.model, device_mesh=None)
    (run.saved(tmp_path, 1) / SHARD).unlink()
    with pytest.raises(CheckpointError, match=r"none .* whole .*missing"):
        find_latest(tmp_path)
    with pytest.raises(CheckpointError, match=r"none .* whole"):
        resume(tmp_path, run.model, run.optimizer, device_mesh=None)


def test_checkpoints_are_listed_again_if_one_is_deleted_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Small()
    old = run.saved(tmp_path, 1)

    def replaced(path: Path, **options: Any) -> list[str]:
        if path == old and path.exists():
            save(tmp_path, 2, run.model, run.optimizer, device_mesh=None, keep_last=1)
        return real(path, **options)

    real = opening.problems
    monkeypatch.setattr(opening, "problems", replaced)
    assert load(tmp_path, run.model, run.optimizer, device_mesh=None).step == 2


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.witness,)


@pytest.mark.parametrize("name", [SHARD, ".metadata", "state.json", "manifest.json"])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    run, witness = Small(), tmp_path / "witness"
    path = run.saved(tmp_path / "run", 1)
    payload = pickle.dumps(Evil(witness))
    (path / name).write_bytes(payload * (1 + (path / name).stat().st_size // len(payload)))
    if name != "manifest.json":
        reseal(path)
    with pytest.raises(CheckpointError, match=r"refused|damaged|other than a tensor"):
        load(path, run.model, run.optimizer, device_mesh=None)
    assert not witness.exists()
    pickle.loads(payload)
    assert witness.exists()


def test_an_archive_with_a_pickle_in_place_of_a_tensor_is_refused_and_not_run(
    tmp_path: Path,
) -> None:
    run, witness = Small(), tmp_path / "witness"
    path = run.saved(tmp_path / "run", 1)
    metadata = dcp.FileSystemReader(path).read_metadata()
    torch.save((Evil(witness), b"0" * 10_000), path / SHARD)
    for record in metadata.storage_data.values():
        record.offset = 0
        record.length = (path / SHARD).stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    with pytest.raises(CheckpointError, match="other than a tensor"):
        load(path, run.model, run.optimizer, device_mesh=None)
    assert not witness.exists()


TORCHS = b"ctorch.distributed.checkpoint.metadata\n"
NAMED = {
    "class": TORCHS + b"MetadataIndex\n",
    "function": b"ctorch.serialization\n_get_layout\n",
    "member of an enumeration": TORCHS + b"_MEM_FORMAT_ENCODING\nK\x00\x85R",
}


def changed() -> list[object]:
    """Those of the process that a pickle has set an attribute of."""
    member = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING(0)
    return [
        each
        for each in (MetadataIndex, torch.serialization._get_layout, member)
        if hasattr(each, "witness")
    ]


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_a_description_cannot_change_what_belongs_to_the_process(
    named: bytes, tmp_path: Path
) -> None:
    run = Small()
    path = run.saved(tmp_path, 1)
    honest = (path / ".metadata").read_bytes()
    # BUILD with a second state sets attributes; the description follows as it was.
    (path / ".metadata").write_bytes(
        honest[:2] + named + b"N}\x8c\x07witnessK\x01s\x86b0" + honest[2:]
    )
    reseal(path)
    with contextlib.suppress(CheckpointError):
        load(path, run.model, run.optimizer, device_mesh=None)
    assert changed() == []


WEIGHT = "model.embed.weight"
MOMENT = "optimizer.embed.weight.exp_avg"


def shorten_a_piece(metadata: Any) -> None:
    metadata.state_dict_metadata[WEIGHT].chunks[0].sizes = torch.Size((5, 16))


def enlarge_a_tensor(metadata: Any) -> None:
    metadata.state_dict_metadata[MOMENT].size = torch.Size((10**15,))


def enlarge_a_tensor_and_its_piece(metadata: Any) -> None:
    entry = metadata.state_dict_metadata[WEIGHT]
    entry.size = entry.chunks[0].sizes = torch.Size((10**15, 16))


def lose_a_record(metadata: Any) -> None:
    del metadata.storage_data[MetadataIndex(WEIGHT, (0, 0))]


HOLES = {
    shorten_a_piece: f"the pieces of {WEIGHT} do not make up its shape \\(11, 16\\)",
    enlarge_a_tensor: f"the pieces of {MOMENT} do not make up its shape",
    enlarge_a_tensor_and_its_piece: f"no file holds the 128,000,000,000,000,000 bytes of {WEIGHT}",
    lose_a_record: f"no file holds the 1,408 bytes of {WEIGHT}",
}


@pytest.mark.parametrize(("make", "said"), HOLES.items(), ids=[make.__name__ for make in HOLES])
def test_a_description_with_a_hole_is_refused_and_nothing_changed(
    make: Callable[[Any], None], said: str, tmp_path: Path
) -> None:
    run = Small()
    path = run.saved(tmp_path, 1)
    metadata = dcp.FileSystemReader(path).read_metadata()
    make(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    run.step(2)
    before = [p.clone() for p in run.model.parameters()]
    with pytest.raises(CheckpointError, match=said):
        load(path, run.model, run.optimizer, device_mesh=None)
    assert all(map(torch.equal, run.model.parameters(), before))


def test_a_description_of_the_run_that_is_not_json_is_refused_with_its_checkpoint(
    tmp_path: Path,
) -> None:
    run = Small()
    path = run.saved(tmp_path, 1)
    (path / "state.json").write_text("[" * 400_000)
    reseal(path)
    with pytest.raises(CheckpointError, match=r"step_00000001: state\.json"):
        load(tmp_path, run.model, run.optimizer, device_mesh=None)


def test_an_object_among_the_tensors_is_refused(tmp_path: Path) -> None:
    run = Small()
    path = run.saved(tmp_path / "run", 1)
    dcp.save({"model.extra": {"an": object}}, checkpoint_id=tmp_path / "other", no_dist=True)
    shutil.copy(tmp_path / "other" / ".metadata", path)
    reseal(path)
    with pytest.raises(CheckpointError, match=r"refused: .*BytesStorageMetadata"):
        load(path, run.model, device_mesh=None)


@pytest.mark.parametrize("elsewhere", ["../other/file", "/etc/hostname"])
def test_a_file_elsewhere_is_refused(elsewhere: str, tmp_path: Path) -> None:
    run = Small()
    path = run.saved(tmp_path / "run", 1)
    metadata = dcp.FileSystemReader(path).read_metadata()
    for record in metadata.storage_data.values():
        record.relative_path = elsewhere
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(path)
    with pytest.raises(CheckpointError, match="refused"):
        load(path, run.model, device_mesh=None)


@pytest.mark.parametrize("name", ["../state.json", ".."])
def test_a_manifest_that_lists_a_file_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    run = Small()
    manifest = run.saved(tmp_path, 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(SHARD, name))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        load(manifest.parent, run.model, device_mesh=None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_layers": 3}, "n_layers=2, not 3"),
        ({"rope_theta": 5.0}, "rope_theta=10000.0, not 5.0"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_what_differs(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    path = Small().saved(tmp_path, 1)
    other = Small(replace(CONFIG, **change))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=f"another model: it has {said}"):
        load(path, other.model, other.optimizer, device_mesh=None)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (torch.nn.Linear(3, 4), r"weight is \(2, 3\) there and \(4, 3\) here"),
        (torch.nn.Linear(3, 2, bias=False), "it has bias, which no rank's modules have"),
        (torch.nn.BatchNorm1d(2), r"weight is \(2, 3\) there"),
        (
            torch.nn.Linear(3, 2).bfloat16(),
            r"weight as torch.float32, here it is torch.bfloat16",
        ),
    ],
)
def test_a_module_without_a_configuration_is_told_apart_by_keys_shapes_and_dtypes(
    other: torch.nn.Module, said: str, tmp_path: Path
) -> None:
    path = save(tmp_path, 1, torch.nn.Linear(3, 2), device_mesh=None).path
    with pytest.raises(CheckpointError, match=said):
        load(path, other, device_mesh=None)


class Counting(torch.nn.Linear):
    """A layer with a buffer, as the bias of an experts' router is one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(3, 2)
        self.register_buffer("count", torch.arange(3).to(dtype))


def test_a_buffer_is_widened_but_not_narrowed_on_loading(tmp_path: Path) -> None:
    narrow, wide = Counting(torch.bfloat16), Counting(torch.float32)
    wide.count.zero_()
    load(save(tmp_path / "narrow", 1, narrow, device_mesh=None).path, wide, device_mesh=None)
    assert wide.count.dtype == torch.float32
    assert wide.count.tolist() == [0.0, 1.0, 2.0]
    path = save(tmp_path / "wide", 1, wide, device_mesh=None).path
    with pytest.raises(CheckpointError, match="count"):
        load(path, narrow, device_mesh=None)


def test_every_rank_says_the_same_sentence(tmp_path: Path) -> None:
    path = Small().saved(tmp_path, 1)
    flip_byte(path / SHARD)
    said = on_ranks(2, _refusal_of_loading, path)
    assert said[0] == said[1]
    assert f"{SHARD} is damaged" in said[0]


def _refusal_of_loading(rank, path):
    run = Small()
    with pytest.raises(CheckpointError) as refusal:
        load(path, run.model, device_mesh=None)
    return str(refusal.value)


def test_a_full_disk_leaves_the_checkpoint_before_and_says_so_on_every_rank(tmp_path: Path) -> None:
    said = on_ranks(2, _save_on_a_full_disk, tmp_path)
    assert said[0] == said[1]
    assert f"cannot be written to {tmp_path}: {os.strerror(errno.EFBIG)}" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert verify(tmp_path / "step_00000001") == []


def _save_on_a_full_disk(rank, root):
    module = torch.nn.ModuleDict({f"part{rank}": torch.nn.Linear(100, 1000)})
    save(root, 1, module, device_mesh=None)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as refusal:
        save(root, 2, module, device_mesh=None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(refusal.value)


def test_ranks_that_do_not_share_the_directory_are_told_so(tmp_path: Path) -> None:
    said = on_ranks(2, _save_elsewhere_on_one_rank, tmp_path)
    assert said[0] == said[1]
    assert f"__1_0.distcp, written by rank 1, is not in {tmp_path} as rank 0 sees it" in said[0]
    assert not list(tmp_path.iterdir())


def _save_elsewhere_on_one_rank(rank, root):
    def write(directory, *arguments):
        written = real(directory, *arguments)
        for name in written if rank == 1 else ():
            (directory / name).unlink()
        return written

    real = saving.write_tensors
    saving.write_tensors = write
    try:
        with pytest.raises(CheckpointError) as refusal:
            save(
                root,
                1,
                torch.nn.ModuleDict({f"part{rank}": torch.nn.Linear(1, 1)}),
                device_mesh=None,
            )
    finally:
        saving.write_tensors = real
    return str(refusal.value)


def test_a_directory_that_cannot_be_read_is_no_run_without_checkpoints(tmp_path: Path) -> None:
    tmp_path.chmod(0o000)
    [said] = on_ranks(1, _refused_as_nobody, find_latest, tmp_path)
    assert os.strerror(errno.EACCES) in said


def test_a_directory_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    said = on_ranks(2, _refused_as_nobody, _save_part, tmp_path)
    assert said[0] == said[1]
    assert f"{tmp_path} cannot hold checkpoints" in said[0]
    assert os.strerror(errno.EACCES) in said[0]


def _refused_as_nobody(rank, work, root):
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may read and write anywhere
    with pytest.raises((CheckpointError, PermissionError)) as refusal:
        work(root)
    return str(refusal.value)


def _save_part(root):
    module = torch.nn.ModuleDict({f"part{dist.get_rank()}": torch.nn.Linear(1, 1)})
    save(root, 1, module, device_mesh=None)
