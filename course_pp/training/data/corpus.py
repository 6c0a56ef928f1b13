"""A corpus: documents from Python's own sources, from text files or from a dataset."""

import hashlib
import os
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from course_pp.base.arguments import checked
from course_pp.base.imports import imports_of_extra

STDLIB_MAX_BYTES = 2_000_000
"""Size of the default corpus: about 0.7 million tokens of a vocabulary of 1,024."""

# Tables, bundled applications, and packages that later Python versions dropped.
_NOT_READ = frozenset(
    {"distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
)

TextPath = str | os.PathLike[str]


@checked
@dataclass(frozen=True, repr=False)
class Corpus:
    """Documents in a fixed order. At least one of them is more than white space."""

    name: str
    documents: tuple[str, ...]

    def __post_init__(self) -> None:
        if not any(document.strip() for document in self.documents):
            raise ValueError(
                f"empty corpus: {self.name} holds no text in UTF-8; name files or a dataset with"
                " text"
            )

    def __repr__(self) -> str:
        return (
            f"Corpus({self.name!r}, {len(self.documents)} documents, {self.n_characters:,}"
            " characters)"
        )

    @property
    def n_characters(self) -> int:
        return sum(map(len, self.documents))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the documents and their ends. Equal contents have equal digests anywhere."""
        hasher = hashlib.sha256()
        for document in self.documents:
            content = document.encode()
            hasher.update(len(content).to_bytes(8, "little"))
            hasher.update(content)
        return hasher.hexdigest()

    def split(self, validation: float = 0.1) -> tuple["Corpus", "Corpus"]:
        """Split into two corpora, for training and validation.

        The parts depend only on the contents, not on a seed. Whole documents are taken for
        validation, in the order of their hashes, while they fit into the share `validation` of all
        characters. A single document is cut. Neither part is ever empty.
        """
        if not 0 < validation < 1:
            raise ValueError(
                f"validation={validation}: the share must lie between 0 and 1, such as 0.1"
            )
        # Copies of a text stay together, or validation would hold texts of training.
        size: dict[str, int] = defaultdict(int)
        for document in self.documents:
            if document.strip():
                size[document] += len(document)
        train: tuple[str, ...]
        held_out: tuple[str, ...]
        if len(size) == 1:
            [document] = size
            # Each part gets more than white space.
            first = len(document) - len(document.lstrip())
            last = len(document.rstrip()) - 1
            cut = min(max(round(len(document) * (1 - validation)), first + 1), last)
            train = (document[:cut],)
            held_out = (document[cut:],)
        else:
            room = validation * sum(size.values())
            chosen = set()
            by_hash = sorted(size, key=lambda document: hashlib.sha256(document.encode()).digest())
            for document in by_hash:
                if size[document] <= room:
                    chosen.add(document)
                    room -= size[document]
            # Where no text is small enough, the smallest exceeds the share by the least.
            chosen = chosen or {min(by_hash, key=size.__getitem__)}
            train = tuple(d for d in self.documents if d in size and d not in chosen)
            held_out = tuple(d for d in self.documents if d in chosen)
        return Corpus(f"{self.name} (train)", train), Corpus(f"{self.name} (validation)", held_out)


@checked
def load_corpus(
    texts: TextPath | Iterable[TextPath] | None = None,
    dataset: str | None = None,
    *,
    subset: str | None = None,
    split: str = "train",
    text_column: str = "text",
    max_bytes: int | None = None,
) -> Corpus:
    """Load documents from `texts`, from `dataset`, or by default from Python's standard library.

    Documents of nothing but white space are dropped.

    Args:
        texts: a file, a directory, or several of either. Each file is one document. Of a directory,
            every file below it is read, in sorted order, except hidden files and files that are not
            UTF-8.
        dataset: name of a Hugging Face dataset, or path of a local one, for
            `datasets.load_dataset`. Each row is one document.
        subset, split, text_column: part of the `dataset` to load, and the column with the text.
        max_bytes: stop with the document that reaches this many bytes of UTF-8. Without it, texts
            and datasets are read to the end, and the standard library to `STDLIB_MAX_BYTES`.
    """
    part: dict[str, Any] = {"subset": subset, "split": split, "text_column": text_column}
    name, documents = iterate_documents(texts, dataset, **part, max_bytes=max_bytes)
    return Corpus(name, tuple(documents))


@checked
def iterate_documents(
    texts: TextPath | Iterable[TextPath] | None = None,
    dataset: str | None = None,
    *,
    subset: str | None = None,
    split: str = "train",
    text_column: str = "text",
    max_bytes: int | None = None,
) -> tuple[str, Iterator[str]]:
    """Return the name and the documents that :func:`load_corpus` would load, one at a time."""
    if texts is not None and dataset is not None:
        raise ValueError(
            f"texts={texts!r} and dataset={dataset!r}: a corpus has one source; name only one"
        )
    if dataset is None and (subset, split, text_column) != (None, "train", "text"):
        raise ValueError(
            "subset, split and text_column are of a dataset, and none is named: give dataset="
        )
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(
            f"max_bytes={max_bytes}: must be at least 1; leave it out to read everything"
        )
    documents: Iterable[str | None]
    if texts is not None:
        given = [texts] if isinstance(texts, str | os.PathLike) else list(texts)
        if "" in given:  # a shell makes it of a variable that is not set
            raise ValueError(
                "texts has '', which names nothing: give '.' for the files of the working directory"
            )
        paths = [Path(text) for text in given]
        name = ", ".join(map(str, paths[:3])) or "an empty list of texts"
        if len(paths) > 3:
            name += ", …"
        documents = _from_texts(paths)
    elif dataset is not None:
        name = "/".join(filter(None, (dataset, subset, split)))
        documents = (row[text_column] for row in _load_dataset(dataset, subset, split, text_column))
    else:
        name = f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor}"
        documents = _from_stdlib()
        max_bytes = STDLIB_MAX_BYTES if max_bytes is None else max_bytes
    return name, beginning(documents, max_bytes)


def beginning(documents: Iterable[str | None], max_bytes: int | None) -> Iterator[str]:
    """Yield the documents with text in them, up to the one that reaches ``max_bytes`` of UTF-8."""
    n_bytes = 0
    for document in documents:
        if document is not None and document.strip():
            yield document
            n_bytes += len(document.encode())
            if max_bytes is not None and n_bytes >= max_bytes:
                return


def _from_stdlib() -> Iterator[str | None]:
    root = Path(sysconfig.get_path("stdlib"))
    # Only the library's own names: other packages may be installed beside it, and its build data
    # differ by machine.
    for name in sorted(sys.stdlib_module_names - _NOT_READ):
        for path in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))):
            if path.is_file() and not {"test", "tests"} & set(path.relative_to(root).parts):
                yield _read_utf8(path)


def _from_texts(paths: list[Path]) -> Iterator[str | None]:
    for path in paths:
        if not path.exists():
            raise ValueError(
                f"text file {str(path)!r} does not exist: name files or directories that do"
            )
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                names = file.relative_to(path).parts
                is_hidden = any(name.startswith(".") for name in names)
                if file.is_file() and not is_hidden:
                    yield _read_utf8(file)
        else:
            document = _read_utf8(path)
            if document is None:
                raise ValueError(
                    f"text file {str(path)!r} is not UTF-8: convert it, or leave it out"
                )
            yield document


def _read_utf8(path: Path) -> str | None:
    # Not read_text, which changes line endings: the digest covers them.
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return None


def load_stream(
    dataset: str, *, subset: str | None = None, split: str = "train", text_column: str = "text"
) -> tuple[str, Callable[[int], Iterator[str | None]]]:
    """Return the name of a Hugging Face dataset, and a function that yields its documents.

    The function takes the number of the first document. Documents are read when they are needed.
    """
    rows = _load_dataset(dataset, subset, split, text_column, streaming=True)
    name = "/".join(filter(None, (dataset, subset, split, text_column)))
    return name, lambda start: (row[text_column] for row in rows.skip(start))


def _load_dataset(
    dataset: str, subset: str | None, split: str, text_column: str, streaming: bool = False
) -> Any:
    with imports_of_extra("hf"):
        import datasets

    try:
        rows = datasets.load_dataset(dataset, subset, split=split, streaming=streaming)
        # A stream may not know its columns before it is read.
        columns = rows.column_names or list(next(iter(rows), {}))
    # datasets raises an IndexError for an empty name.
    except (OSError, ValueError, IndexError, datasets.exceptions.DatasetsError) as error:
        part = f"dataset={dataset!r} (subset={subset!r}, split={split!r})"
        raise ValueError(
            f"{part} could not be loaded: {error}; correct the name, or give text files"
        ) from error
    if text_column not in columns:
        there = ", ".join(map(repr, columns))
        raise ValueError(
            f"text_column={text_column!r} is not in dataset {dataset!r}: its columns are {there}"
        )
    return rows.select_columns(text_column)
