"""From text to batches, the same on every rank.

    texts ─load_corpus─► Corpus ─split─► train, validation
    train ─train_tokenizer─► Tokenizer ─encode─► one tensor of token ids per document
    documents ─packed | padded─► Sequences ─Batches─► the batch of a step

    texts ─python -m course_pp tokens─► a file ─open_tokens─► PackedTokens | PaddedTokens
    rows of ids that `datasets` has saved ─open_arrow─► ArrowRows
    PackedTokens | PaddedTokens | ArrowRows ─Batches─► the batch of a step, read from disk

Every arrow is a pure function of its inputs, so ranks that start alike agree without exchanging a
message.
"""

from course_pp.training.data.corpus import Corpus, load_corpus, load_stream
from course_pp.training.data.on_disk import (
    PackedTokens,
    PaddedTokens,
    TokenFile,
    open_arrow,
    open_tokens,
    write_tokens,
)
from course_pp.training.data.sequences import (
    IGNORE_INDEX,
    Batches,
    Rows,
    Sequences,
    packed,
    padded,
    unigram_entropy,
    validation_batches,
)
from course_pp.training.data.streams import Stream, StreamedBatches
from course_pp.training.data.tokenizer import (
    BOT_ID,
    EOT_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    Tokenizer,
    check_vocabulary,
    encode,
    load_tokenizer,
    train_tokenizer,
)

__all__ = [
    "BOT_ID",
    "EOT_ID",
    "IGNORE_INDEX",
    "PAD_ID",
    "SPECIAL_TOKENS",
    "Batches",
    "Corpus",
    "PackedTokens",
    "PaddedTokens",
    "Rows",
    "Sequences",
    "Stream",
    "StreamedBatches",
    "TokenFile",
    "Tokenizer",
    "check_vocabulary",
    "encode",
    "load_corpus",
    "load_stream",
    "load_tokenizer",
    "open_arrow",
    "open_tokens",
    "packed",
    "padded",
    "train_tokenizer",
    "unigram_entropy",
    "validation_batches",
    "write_tokens",
]
