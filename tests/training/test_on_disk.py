"""Tokens on disk give the rows of tokens in memory, and damaged files are refused."""

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from course_pp.__main__ import main
from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig
from course_pp.training.data import (
    Batches,
    Corpus,
    PackedTokens,
    PaddedTokens,
    Sequences,
    TokenFile,
    Tokenizer,
    encode,
    on_disk,
    open_arrow,
    open_tokens,
    packed,
    padded,
    write_tokens,
)
from course_pp.training.data.sequences import Rows, read_ahead
from course_pp.training.flags import DataOptions
from tests.processes import no_process_left
from tests.source_code.scripts import TRAIN_IMPORTS, labelled_lines, run_script
from tests.training.small import RUN, trainer

ROOT = Path(__file__).parents[2]
RANKS_IMPORT = TRAIN_IMPORTS


@pytest.fixture
def file(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> TokenFile:
    return write_tokens(tmp_path / "data.bin", corpus.documents, tokenizer)


def equal(one: Sequences, other: Sequences) -> bool:
    return torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)


def test_rows_and_batches_are_those_of_the_same_tokens_in_memory(
    file: TokenFile, corpus: Corpus, tokenizer: Tokenizer
) -> None:
    memory, disk = packed(encode(corpus, tokenizer), 32), PackedTokens(open_tokens(file.path), 32)
    assert len(disk) == len(memory)
    assert equal(disk[:], memory)
    assert equal(disk[torch.tensor([5, 0])], memory[torch.tensor([5, 0])])
    assert equal(Batches(disk, 8, seed=3)[40], Batches(memory, 8, seed=3)[40])
    assert isinstance(file.tokens, np.memmap)
    assert len(pickle.dumps(open_tokens(file.path))) < 2 * len(tokenizer.definition), (
        "a data worker gets no copy"
    )


def test_padded_rows_are_those_of_the_same_documents_in_memory(
    file: TokenFile, corpus: Corpus, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "_CHUNK", 1000)
    documents = encode(corpus, tokenizer)
    memory, disk = padded(documents, 32), PaddedTokens(open_tokens(file.path), 32)
    assert len(disk) == len(memory)
    assert disk.is_padded
    for rows in (slice(None), slice(-7, None), torch.tensor([5, 0])):
        assert disk[rows].digest == memory[rows].digest
    train, validation = disk.split(0.3)
    assert train.last == validation.first
    assert validation[:].digest == padded(documents[validation.first :], 32).digest
    assert len({train.digest, validation.digest, disk.digest, PackedTokens(file, 32).digest}) == 4
    one = PaddedTokens(file, 32, last=1)
    with pytest.raises(ValueError, match="first=0, last=0"):
        one.split()


def test_a_split_shares_no_token_and_digests_tell_its_parts_apart(file: TokenFile) -> None:
    train, validation = PackedTokens(file, 32).split(0.1)
    assert train.last == validation.first
    assert len(validation) == pytest.approx(0.1 * (len(train) + len(validation)), abs=2)
    again = PackedTokens(open_tokens(file.path), 32).split(0.1)
    assert [part.digest for part in again] == [train.digest, validation.digest]
    assert (
        len(
            {
                train.digest,
                validation.digest,
                PackedTokens(file, 32).digest,
                PackedTokens(file, 16).digest,
            }
        )
        == 4
    )


def _pipe_for_a_description(path: Path) -> None:
    described(path).unlink()
    os.mkfifo(described(path))


def described(path: Path) -> Path:
    return path.with_name("data.bin.json")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-2]), "is cut off: it has"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), "is too long: it has"),
    "another": (
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "is not the one that its description",
    ),
    "no description": (lambda path: described(path).unlink(), "cannot be opened"),
    "a pipe": (_pipe_for_a_description, "cannot be opened .*is no plain file"),
    "brackets": (lambda path: described(path).write_text("[" * 400_000), "cannot be opened"),
    "half": (
        lambda path: described(path).write_text('{"format": "course_pp tokens 1"}'),
        "cannot be opened",
    ),
    "of tomorrow": (
        lambda path: described(path).write_text(
            described(path).read_text().replace("tokens 1", "tokens 2")
        ),
        "does not describe a token file of this format",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(
    damage: Callable[[Path], object], words: str, file: TokenFile
) -> None:
    damage(file.path)
    with pytest.raises(ValueError, match=words):
        open_tokens(file.path)


def test_a_file_that_fails_to_be_written_leaves_nothing(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no documents"):
        write_tokens(tmp_path / "none.bin", [], tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_a_file_is_replaced_and_what_cannot_be_written_is_named(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for make in (os.mkfifo, Path.mkdir):
        make(taken := tmp_path / "taken")
        with pytest.raises(ValueError, match="plain file"):
            write_tokens(taken, ["a"], tokenizer)
        assert list(tmp_path.iterdir()) == [taken]
        taken.rename(tmp_path.with_name(f"{tmp_path.name} {make.__name__}"))
    with pytest.raises(OSError, match=r"No such file .*none/\.data\.bin"):
        write_tokens(tmp_path / "none" / "data.bin", ["a"], tokenizer)


def test_too_few_tokens_are_refused(file: TokenFile) -> None:
    with pytest.raises(ValueError, match="seq_len=1000000"):
        PackedTokens(file, 1_000_000)


IDS = torch.arange(60).view(12, 5) % 23


def saved(folder: Path, **columns: Any) -> str:
    from datasets import Dataset  # here: it takes a second

    Dataset.from_dict(columns).save_to_disk(folder)
    return str(folder)


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
    assert (
        open_arrow(saved(tmp_path / "others", input_ids=IDS.flip(0).tolist())).digest != rows.digest
    )


def test_what_holds_no_rows_of_one_length_is_refused(tmp_path: Path) -> None:
    refused = {
        "folder .*nothing.* cannot be opened": tmp_path / "nothing",
        "holds rows of 2 to 3 values of int": saved(
            tmp_path / "uneven", input_ids=[[1, 2], [1, 2, 3]]
        ),
        "holds rows of 3 to 3 values of double": saved(
            tmp_path / "numbers", input_ids=[[0.5, 1.0, 2.0]]
        ),
        "cannot be opened .*with lists of token ids": saved(tmp_path / "text", input_ids=["a"]),
        "cannot be opened .*in column 'input_ids'": saved(tmp_path / "other", ids=[[1, 2, 3]]),
        "a sequence has at least 2 tokens": saved(tmp_path / "short", input_ids=[[1, 2]]),
        "cannot be opened": tmp_path,
    }
    for words, folder in refused.items():
        with pytest.raises(ValueError, match=words):
            open_arrow(folder)
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_dict({"input_ids": [[1, 2, 3]]})}).save_to_disk(
        tmp_path / "splits"
    )
    with pytest.raises(ValueError, match="one split"):
        open_arrow(tmp_path / "splits")
    whole = next((tmp_path / "short").glob("*.arrow"))
    whole.write_bytes(whole.read_bytes()[:40])
    with pytest.raises(ValueError, match="cannot be opened"):
        open_arrow(tmp_path / "short")


def read_by_workers(rank: int) -> tuple[list[float], list[float], list[float]]:
    """Losses of three steps: read without workers, by two, and by two from step two on."""
    config = replace(RUN, workers=2)
    ahead, alone = (trainer(c, layout=DistributedConfig()) for c in (config, RUN))
    seen: list[float] = []
    ahead.fit(lambda _, result: seen.append(result.loss))
    later: list[float] = []
    behind = trainer(config, layout=DistributedConfig())
    first = behind.train_step().loss
    behind.fit(lambda _, result: later.append(result.loss))
    return [alone.train_step().loss for _ in range(3)], seen, [first, *later]


def test_data_workers_change_no_batch_wherever_they_begin_and_end_with_the_run() -> None:
    with no_process_left():
        [(expected, seen, later)] = on_ranks(1, read_by_workers, timeout_s=60)
    assert seen == later == expected


def test_the_command_writes_a_file_that_ranks_train_on_or_refuse_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 200)
    path = tmp_path / "data.bin"
    assert main(["tokens", str(path), f"--text={tmp_path}/a.txt", "--tokenizer-size=270"]) == 0
    assert "tokens (uint16) of" in capsys.readouterr().out
    command = [
        "source_code/train.py",
        "--model=tiny",
        "--steps=2",
        "--global-batch-size=4",
        "--microbatches=2",
    ]
    (tmp_path / "b.txt").write_text("so are they all, all honourable men. " * 20)
    assert (
        main(["tokens", f"{tmp_path}/two.bin", f"--text={tmp_path}", "--tokenizer-size=270"]) == 0
    )
    for options in (
        [f"--tokens={path}", "--workers=1"],
        [f"--tokens={tmp_path}/two.bin", "--padded"],
    ):
        assert any("validation loss" in line for line in labelled_lines(2, [*command, *options]))
    with pytest.raises(ValueError, match="--tokenizer"):
        DataOptions(tokens=str(path), tokenizer="a.json").load(32, 8)
    DAMAGES["cut"][0](path)
    ranks = run_script(2, [*command, f"--tokens={path}", f"--checkpoint-dir={tmp_path}/run"])
    assert [rank.code for rank in ranks] == [2, 2]
    said = "".join(rank.err for rank in ranks)
    assert said.count("error: ") == 1
    assert "is cut off" in said
    assert not (tmp_path / "run").exists()
