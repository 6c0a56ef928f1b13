import argparse
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_pp.training.data import Corpus, load_corpus
from course_pp.training.data.corpus import STDLIB_MAX_BYTES

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_the_default_corpus_is_a_few_megabytes_of_the_standard_library() -> None:
    corpus = load_corpus()
    size = sum(len(document.encode()) for document in corpus.documents)
    assert STDLIB_MAX_BYTES <= size < 1.2 * STDLIB_MAX_BYTES
    assert Path(argparse.__file__).read_bytes().decode() in corpus.documents
    assert load_corpus().digest == corpus.digest


def test_the_default_corpus_takes_modules_and_packages_and_leaves_out_the_rest(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json/decoder.py", "abc.py", "json/__init__.py", "heapq.py"):
        write(f"lib/{name}", name)
    for name in (
        "json/tests/a.py",
        "unittest/test/b.py",
        "encodings/c.py",
        "site-packages/d.py",
        "mine.py",
    ):
        write(f"lib/{name}", "not wanted")
    write("lib/sched.py", b"caf\xe9 in Latin-1")
    write("lib/numbers.py", "\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    assert load_corpus().documents == ("abc.py", "heapq.py", "json/__init__.py", "json/decoder.py")


def test_files_and_directories_become_one_document_a_file_in_the_order_named(write: Write) -> None:
    last = write("z.txt", "z\r\n")
    first = write("dir/b/1.md", "one ü")
    second = write("dir/c.txt", "two")
    write("dir/.git/config", "hidden")
    write("dir/picture.png", b"\x89PNG\xff")
    write("dir/blank.txt", " \n")
    corpus = load_corpus([last, str(first.parent.parent)])
    assert corpus.documents == ("z\r\n", "one ü", "two")
    assert load_corpus(second).documents == ("two",)
    assert load_corpus(str(second)).name == str(second)


def test_reading_stops_with_the_document_that_reaches_the_limit(write: Write) -> None:
    files = [write(f"{i}.txt", "ä" * 5) for i in range(4)]
    assert len(load_corpus(files, max_bytes=10).documents) == 1
    assert len(load_corpus(files, max_bytes=11).documents) == 2
    assert len(load_corpus(files).documents) == 4


def test_a_corpus_without_text_is_refused_by_name(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="empty list of texts"):
        load_corpus([])
    with pytest.raises(ValueError, match=r"empty corpus: .*nothing\.txt"):
        load_corpus(write("nothing.txt", " \n\t"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="standard library"):
        load_corpus()


def test_a_missing_file_is_named_even_when_others_exist(write: Write, tmp_path: Path) -> None:
    there = write("there.txt", "text")
    with pytest.raises(ValueError, match=r"missing\.txt' does not exist"):
        load_corpus([there, tmp_path / "missing.txt"], max_bytes=1)
    with pytest.raises(ValueError, match="names nothing"):
        load_corpus([there, ""])


def test_a_named_file_that_is_not_utf8_is_refused(write: Write) -> None:
    with pytest.raises(ValueError, match=r"latin\.txt' is not UTF-8"):
        load_corpus(write("latin.txt", b"caf\xe9"))


def test_two_sources_and_impossible_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"texts='a\.txt' and dataset='b'"):
        load_corpus("a.txt", "b")
    with pytest.raises(ValueError, match="max_bytes=0"):
        load_corpus(max_bytes=0)


class TestDataset:
    @pytest.fixture(autouse=True)
    def _offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets  # here: it takes a second

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        datasets.disable_progress_bars()

    def test_each_line_of_a_text_file_is_a_document(self, write: Write) -> None:
        path = write("poems/train.txt", "roses are red\n\nviolets are blue\n")
        assert load_corpus(dataset=str(path.parent)).documents == (
            "roses are red",
            "violets are blue",
        )

    def test_each_row_of_a_jsonl_column_is_a_document(self, write: Write) -> None:
        rows = [{"body": "one", "id": 1}, {"body": None, "id": 2}, {"body": "three", "id": 3}]
        path = write("rows/train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        directory = str(path.parent)
        assert load_corpus(dataset=directory, text_column="body").documents == ("one", "three")
        assert load_corpus(dataset=directory, text_column="body", max_bytes=1).documents == ("one",)
        with pytest.raises(ValueError, match=r"text_column='text' .*'body', 'id'"):
            load_corpus(dataset=directory)

    def test_a_dataset_or_split_that_is_not_there_is_named(
        self, write: Write, tmp_path: Path
    ) -> None:
        directory = str(write("poems/train.txt", "text").parent)
        with pytest.raises(ValueError, match=r"split='test'.*train"):
            load_corpus(dataset=directory, split="test")
        with pytest.raises(ValueError, match=r"dataset='.*absent'"):
            load_corpus(dataset=str(tmp_path / "absent"))


def test_the_digest_depends_on_contents_and_on_where_documents_end() -> None:
    assert Corpus("a", ("x", "y")).digest == Corpus("b", ("x", "y")).digest
    digests = {
        Corpus("a", d).digest for d in (("x", "y"), ("xy",), ("y", "x"), ("x", "y", ""), ("", "xy"))
    }
    assert len(digests) == 5


blank = st.text(" \n", max_size=3)
written = st.builds(lambda a, b, c: a + b + c, blank, st.text("abc", min_size=1), blank)


@given(st.lists(st.one_of(written, blank)), st.floats(0.01, 0.99))
def test_a_split_by_document_loses_nothing_and_leaves_neither_part_empty(
    documents: list[str], share: float
) -> None:
    documents = [*documents, "always", "two"]
    train, validation = Corpus("any", tuple(documents)).split(share)
    kept = [document for document in documents if document.strip()]
    assert sorted(train.documents + validation.documents) == sorted(kept)
    assert not set(train.documents) & set(validation.documents), (
        "a copy of a text was on both sides"
    )
    if len(set(validation.documents)) > 1:
        assert validation.n_characters <= share * sum(map(len, kept))


@given(written.filter(lambda text: len(text.strip()) > 1), st.floats(0.01, 0.99))
def test_a_single_document_is_split_by_position(text: str, share: float) -> None:
    train, validation = Corpus("one", ("", text)).split(share)
    assert train.documents[0] + validation.documents[0] == text


def test_the_split_is_near_the_share_whatever_the_order_of_the_documents(corpus: Corpus) -> None:
    _, validation = corpus.split(0.2)
    assert 0.1 < validation.n_characters / corpus.n_characters <= 0.2
    reverse = Corpus("reverse", corpus.documents[::-1]).split(0.2)
    assert set(reverse[1].documents) == set(validation.documents)


@pytest.mark.parametrize("share", [0, 1.5, float("nan")])
def test_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=f"validation={share}"):
        Corpus("any", ("a", "b")).split(share)


def test_a_single_character_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"empty corpus: tiny \(train\)"):
        Corpus("tiny", (" x\n",)).split()
