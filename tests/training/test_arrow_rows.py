"""Rows that `datasets` has saved are those of the same ids in memory, mapped; what is no such rows is refused."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from course_pp.training.data import Batches, Sequences, open_arrow
from course_pp.training.data.sequences import Rows, read_ahead

IDS = torch.arange(60).view(12, 5) % 23


def saved(folder: Path, **columns: Any) -> str:
    from datasets import Dataset  # here: it takes a second

    Dataset.from_dict(columns).save_to_disk(folder)
    return str(folder)


def equal(one: Sequences, other: Sequences) -> bool:
    return torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)


def test_rows_are_those_in_memory_and_a_worker_gets_no_copy(tmp_path: Path) -> None:
    memory = Sequences(IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous())
    rows: Rows = open_arrow(saved(tmp_path / "rows", input_ids=IDS.tolist(), text=["x"] * 12))
    assert (len(rows), rows.seq_len, rows.is_padded) == (12, 4, False)
    assert equal(rows[:], memory)
    assert equal(rows[torch.tensor([5, 0])], memory[torch.tensor([5, 0])])
    assert equal(rows[3:3], memory[3:3])
    batches = Batches(rows, 4, seed=3)
    assert equal(next(iter(read_ahead(batches, 2, 4, 1))), Batches(memory, 4, seed=3)[2])
    assert len(pickle.dumps(rows)) < 1000
    assert open_arrow(tmp_path / "rows").digest == rows.digest
    assert open_arrow(saved(tmp_path / "others", input_ids=IDS.flip(0).tolist())).digest != rows.digest


def test_what_holds_no_rows_of_one_length_is_refused(tmp_path: Path) -> None:
    refused = {
        "folder .*nothing.* cannot be opened": tmp_path / "nothing",
        "holds rows of 2 to 3 values of int64: pack token ids": saved(
            tmp_path / "uneven", input_ids=[[1, 2], [1, 2, 3]]
        ),
        "holds rows of 3 to 3 values of double": saved(tmp_path / "numbers", input_ids=[[0.5, 1.0, 2.0]]),
        "cannot be opened .*with lists of token ids": saved(tmp_path / "text", input_ids=["a"]),
        "cannot be opened .*in column 'input_ids'": saved(tmp_path / "other", ids=[[1, 2, 3]]),
        "a sequence has at least 2 tokens": saved(tmp_path / "short", input_ids=[[1, 2]]),
        "cannot be opened": tmp_path,
    }
    for words, folder in refused.items():
        with pytest.raises(ValueError, match=words):
            open_arrow(folder)
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_dict({"input_ids": [[1, 2, 3]]})}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"cannot be opened .*of one split"):
        open_arrow(tmp_path / "splits")
    whole = next((tmp_path / "short").glob("*.arrow"))
    whole.write_bytes(whole.read_bytes()[:40])
    with pytest.raises(ValueError, match="cannot be opened"):
        open_arrow(tmp_path / "short")
