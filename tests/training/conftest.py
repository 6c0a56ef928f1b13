from pathlib import Path

import pytest

from course_pp.training.data import Corpus, Tokenizer, load_corpus, train_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """A little of the default corpus: real text, encoded in a moment."""
    return load_corpus(max_bytes=100_000)


@pytest.fixture(scope="session")
def tokenizer(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(corpus, vocab_size=400, cache_dir=tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"
