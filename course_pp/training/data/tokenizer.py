"""Byte-level BPE, trained on the corpus and remembered between runs.

Every byte has a token, so any text can be encoded and comes back exactly (Radford et al. 2019,
section 2.2).
"""

import hashlib
import io
import os
import secrets
import tempfile
import warnings
from array import array
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from course_pp.base.arguments import checked
from course_pp.base.imports import imports_of_extra
from course_pp.training.data.corpus import Corpus

with imports_of_extra("train"):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("[PAD]", "[BOT]", "[EOT]")
PAD_ID, BOT_ID, EOT_ID = range(3)  # in the tokenizers that train_tokenizer makes
# The library reserves memory for the whole vocabulary, and ends the process if there is too little.
_MAX_VOCAB_SIZE = 2_000_000
_MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# Part of every cache key: raise it when the same corpus would give other tokens.
_FORMAT = 2

# A process forked after the library's threads have run may hang in them, and the library warns
# about it. Ranks occupy the cores already, so threads would gain nothing here.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True)
class Tokenizer:
    """Token ids for text and back.

    The special tokens are `[PAD]`, `[BOT]` (begin of text) and `[EOT]` (end of text). Text never
    encodes to a special token: the characters `[PAD]` in a document are ordinary characters.

    Attributes:
        definition: content of a `tokenizer.json`, read at the first use.
    """

    definition: str = field(repr=False)

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        try:
            backend = tokenizers.Tokenizer.from_str(self.definition)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(
                f"it is not a tokenizer of the tokenizers library ({error})"
            ) from error
        # The library does not save this switch, hence also __reduce__.
        backend.encode_special_tokens = True
        backend.no_truncation()  # a file may ask for both
        backend.no_padding()
        return backend

    def __reduce__(self) -> tuple[type["Tokenizer"], tuple[str]]:
        return Tokenizer, (self.definition,)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""
        return 1 + max(self._backend.get_vocab().values(), default=-1)

    @cached_property
    def special_ids(self) -> tuple[int, int, int]:
        """Ids of `[PAD]`, `[BOT]` and `[EOT]`; refuse a tokenizer without them."""
        added = self._backend.get_added_tokens_decoder()
        ids = {token.content: i for i, token in added.items() if token.special}
        missing = [token for token in SPECIAL_TOKENS if token not in ids]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} are no special tokens of it: add them with"
                " tokenizers.Tokenizer.from_file(path)'s"
                f" add_special_tokens({list(SPECIAL_TOKENS)}) and save(path)"
            )
        pad, bot, eot = (ids[token] for token in SPECIAL_TOKENS)
        return pad, bot, eot

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the definition."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens.

        `decode` gives `text` back, if the tokenizer can.
        """
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_document(self, text: str) -> list[int]:
        _, bot, eot = self.special_ids
        return [bot, *self.encode(text), eot]

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Return the text of `ids`, a list or a 1-D tensor. Special tokens show as `[BOT]` etc."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)


@checked
def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer in a ``tokenizer.json``, such as the one beside a checkpoint."""
    try:
        tokenizer = Tokenizer(Path(path).read_text(encoding="utf-8"))
        _ = tokenizer.special_ids
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {os.fspath(path)!r}: {error}") from error
    return tokenizer


@checked
def train_tokenizer(
    corpus: Corpus, vocab_size: int = 1024, cache_dir: str | os.PathLike[str] | None = None
) -> Tokenizer:
    """Train the byte-level BPE tokenizer of `corpus`, with at most `vocab_size` tokens.

    A corpus too small to fill the vocabulary gives a smaller one. The result is remembered in
    `cache_dir`, by default `$XDG_CACHE_HOME/course_pp` or `~/.cache/course_pp`, and read from there
    the next time. Ranks may call this all at once: the file appears whole.
    """
    if not _MIN_VOCAB_SIZE <= vocab_size <= _MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size}: choose at least {_MIN_VOCAB_SIZE}, a token for each byte and"
            f" the special ones, and at most {_MAX_VOCAB_SIZE:,}"
        )
    key = _key(corpus.digest, str(vocab_size), tokenizers.__version__)
    make = partial(_train, corpus, vocab_size)
    return Tokenizer(_remembered(f"tokenizer-{key}", make, cache_dir).decode())


@checked
def encode(
    corpus: Corpus, tokenizer: Tokenizer, cache_dir: str | os.PathLike[str] | None = None
) -> tuple[Tensor, ...]:
    """Encode each document as `[BOT] … [EOT]`, int64 (length,). It is remembered, too."""
    key = _key(corpus.digest, tokenizer.digest)
    content = _remembered(f"tokens-{key}", partial(_encode, corpus, tokenizer), cache_dir)
    with np.load(io.BytesIO(content)) as kept:
        return torch.from_numpy(kept["tokens"]).long().split(kept["lengths"].tolist())


def check_vocabulary(vocab_size: int, tokenizer: Tokenizer) -> None:
    """Refuse a model that has fewer embeddings than `tokenizer` has tokens."""
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} of the model is smaller than the tokenizer's"
            f" {tokenizer.vocab_size}: give it as many, or train a smaller tokenizer"
        )


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join((str(_FORMAT), *parts)).encode()).hexdigest()[:32]


def _remembered(
    name: str, make: Callable[[], bytes], cache_dir: str | os.PathLike[str] | None
) -> bytes:
    """Return the bytes kept under `name`. If there are none, or damaged ones, make them."""
    path = (_default_cache_dir() if cache_dir is None else Path(cache_dir)) / name
    with suppress(OSError):
        checksum, _, content = path.read_bytes().partition(b"\n")
        if checksum == _checksum(content):
            return content
    content = make()
    draft = path.with_name(f".{name}-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(_checksum(content) + b"\n" + content)
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        warnings.warn(
            f"{path} could not be written ({error.strerror or error}): set XDG_CACHE_HOME to a"
            " directory that can be written",
            stacklevel=3,
        )
    return content


def _default_cache_dir() -> Path:
    """Return the default folder by the XDG Base Directory Specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        # Some containers run under a user id that has no home.
        base = os.path.join(home, ".cache") if os.path.isabs(home) else tempfile.gettempdir()
    return Path(base) / "course_pp"


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _train(corpus: Corpus, vocab_size: int) -> bytes:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus.documents, trainer)
    return backend.to_str().encode()


def _encode(corpus: Corpus, tokenizer: Tokenizer) -> bytes:
    tokens = array("i")
    lengths = []
    # One document at a time: the library's encodings take a hundred times the space of the ids.
    for document in corpus.documents:
        ids = tokenizer.encode_document(document)
        tokens.extend(ids)
        lengths.append(len(ids))
    buffer = io.BytesIO()
    np.savez(
        buffer,
        tokens=np.asarray(tokens, dtype=np.int32),
        lengths=np.asarray(lengths, dtype=np.int64),
    )
    return buffer.getvalue()
