import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from course_pp.training.data import (
    BOT_ID,
    EOT_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    Corpus,
    Tokenizer,
    check_vocabulary,
    encode,
    load_tokenizer,
    packed,
    padded,
    train_tokenizer,
)
from course_pp.training.data import (
    tokenizer as module,
)
from tests.training.small import foreign_tokenizer

SMALL = Corpus("small", ("the cat sat on the mat", "the dog sat on the cat", "naïve café"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.one_of(st.text(), st.text(st.sampled_from("[PAD]BOT \n\r\t\u00a0\u200d👩é\0"))))
def test_decoding_gives_back_exactly_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {PAD_ID, BOT_ID, EOT_ID} & set(ids)


def test_special_tokens_have_fixed_ids_and_are_never_encoded_from_text(
    tokenizer: Tokenizer,
) -> None:
    assert (PAD_ID, BOT_ID, EOT_ID) == (0, 1, 2)
    assert tokenizer.decode(range(3)) == "".join(SPECIAL_TOKENS)
    assert (
        tokenizer.decode([BOT_ID, *tokenizer.encode("[EOT] if x"), EOT_ID])
        == "[BOT][EOT] if x[EOT]"
    )
    for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        assert min(copy.encode("[PAD][BOT][EOT]")) >= len(SPECIAL_TOKENS)


def test_a_tokenizer_of_others_marks_texts_with_its_own_ids(
    cache_dir: Path, tmp_path: Path
) -> None:
    path, text = tmp_path / "tokenizer.json", "[BOT] the cat " * 9
    path.write_text(foreign_tokenizer().to_str())
    with pytest.raises(ValueError, match=r"\[BOT\].* add_special_tokens"):
        load_tokenizer(path)
    mended = tokenizers.Tokenizer.from_file(str(path))
    mended.add_special_tokens(list(SPECIAL_TOKENS))
    mended.save(str(path))
    tokenizer = load_tokenizer(path)
    pad, bot, eot = tokenizer.special_ids
    assert (
        (pad, bot, eot) == tuple(mended.token_to_id(token) for token in SPECIAL_TOKENS) != (0, 1, 2)
    )
    assert tokenizer.vocab_size == 1 + max(mended.get_vocab().values())
    assert tokenizer.decode(tokenizer.encode(text)) == text, "neither cut nor padded"
    [document] = encode(Corpus("one", (text,)), tokenizer, cache_dir)
    assert document.tolist() == [bot, *tokenizer.encode(text), eot]
    assert packed([document], 8).inputs[0, 0] == bot
    assert padded([document], 1000, pad).inputs[0, len(document) :].unique().tolist() == [pad]


def test_a_small_corpus_gives_fewer_tokens_than_asked(cache_dir: Path) -> None:
    assert 259 < train_tokenizer(SMALL, 1024, cache_dir).vocab_size < 300
    assert train_tokenizer(SMALL, 259, cache_dir).vocab_size == 259


def test_training_is_deterministic(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path) -> None:
    assert train_tokenizer(corpus, 400, cache_dir) == tokenizer


def test_a_vocabulary_without_room_for_every_byte_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ValueError, match=r"vocab_size=258: .* 259"):
        train_tokenizer(corpus, 258)


def test_a_model_needs_an_embedding_for_every_token(tokenizer: Tokenizer) -> None:
    check_vocabulary(400, tokenizer)
    check_vocabulary(512, tokenizer)
    with pytest.raises(ValueError, match=r"vocab_size=399 .* 400"):
        check_vocabulary(399, tokenizer)


def test_documents_are_encoded_one_by_one(tokenizer: Tokenizer, cache_dir: Path) -> None:
    corpus = Corpus("three", ("one", "", "[EOT] two"))
    for _ in ("encoded", "remembered"):
        documents = encode(corpus, tokenizer, cache_dir)
        assert [d.dtype for d in documents] == [torch.int64] * 3
        assert [d.tolist() for d in documents] == [
            tokenizer.encode_document(d) for d in corpus.documents
        ]
        assert tokenizer.decode(documents[2]) == "[BOT][EOT] two[EOT]"


class TestCache:
    @pytest.fixture
    def forbid_work(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
        """Once called, everything must come from the cache."""

        def refuse(*args: object) -> bytes:
            raise AssertionError("computed again")

        def forbid() -> None:
            monkeypatch.setattr(module, "_train", refuse)
            monkeypatch.setattr(module, "_encode", refuse)

        return forbid

    def test_the_second_call_computes_nothing(
        self, cache_dir: Path, forbid_work: Callable[[], None]
    ) -> None:
        tokenizer = train_tokenizer(SMALL, 300, cache_dir)
        documents = encode(SMALL, tokenizer, cache_dir)
        forbid_work()
        assert train_tokenizer(SMALL, 300, cache_dir) == tokenizer
        assert all(map(torch.equal, encode(SMALL, tokenizer, cache_dir), documents))

    @pytest.mark.parametrize(("other", "size"), [(SMALL, 262), (Corpus("other", ("text",)), 300)])
    def test_another_corpus_or_size_has_another_key(
        self, cache_dir: Path, forbid_work: Callable[[], None], other: Corpus, size: int
    ) -> None:
        train_tokenizer(SMALL, 300, cache_dir)
        forbid_work()
        with pytest.raises(AssertionError, match="computed again"):
            train_tokenizer(other, size, cache_dir)

    def test_it_lies_under_the_users_cache_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        train_tokenizer(SMALL, 300)
        assert len(list((tmp_path / "xdg" / "course_pp").iterdir())) == 1
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
        train_tokenizer(SMALL, 300)
        assert len(list((tmp_path / ".cache" / "course_pp").iterdir())) == 1

    @pytest.mark.parametrize(
        "damage", [lambda whole: b"", lambda whole: whole[:-5], lambda whole: whole[:-1] + b"?"]
    )
    def test_a_damaged_file_is_rebuilt(
        self, cache_dir: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        tokenizer = train_tokenizer(SMALL, 300, cache_dir)
        documents = encode(SMALL, tokenizer, cache_dir)
        whole = {path: path.read_bytes() for path in cache_dir.iterdir()}
        for path, content in whole.items():
            path.write_bytes(damage(content))
        assert train_tokenizer(SMALL, 300, cache_dir) == tokenizer
        assert all(map(torch.equal, encode(SMALL, tokenizer, cache_dir), documents))
        assert {path: path.read_bytes() for path in cache_dir.iterdir()} == whole

    def test_a_directory_that_cannot_be_written_costs_only_the_training_and_nothing_is_left(
        self, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def disk_full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        occupied = tmp_path / "file"
        occupied.write_text("not a directory")
        with pytest.warns(UserWarning, match="XDG_CACHE_HOME"):
            tokenizer = train_tokenizer(SMALL, 300, occupied)
        assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
        monkeypatch.setattr("os.replace", disk_full)
        with pytest.warns(UserWarning, match="No space left"):
            train_tokenizer(SMALL, 300, cache_dir)
        assert list(cache_dir.iterdir()) == []


@pytest.mark.long
def test_a_process_forked_after_training_encodes_without_a_warning(cache_dir: Path) -> None:
    program = (
        "import os, sys; from course_pp.training.data import *;"
        "tokenizer = train_tokenizer(Corpus('c', ('some text',) * 64), 300, sys.argv[1]);"
        "child = os.fork(); os.write(1, b'%r\\n' % tokenizer.encode('text'));"
        "child and sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(cache_dir)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(done.stdout.splitlines())) == 1


@pytest.mark.parametrize("definition", ["", "[]", '{"model": 3}', "[" * 100_000])
def test_a_definition_that_is_none_is_refused_in_one_sentence(definition: str) -> None:
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenizer(definition).encode("x")
