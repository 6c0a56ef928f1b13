"""``python -m course_pp tokens``: text as a file of tokens that training maps into memory."""

import argparse

HELP = "write text as a file of tokens, for train.py --tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of :func:`run`."""
    add = parser.add_argument
    add("file", help="where to write the tokens; a description goes beside it, as FILE.json")
    add(
        "--text",
        nargs="+",
        help="text files or folders (default: the source code of Python's standard library)",
    )
    add("--dataset", help="name or path of a Hugging Face dataset")
    add("--subset", help="of --dataset: one of its configurations")
    add("--split", default="train", help="of --dataset: its part (default train)")
    add(
        "--column",
        default="text",
        help="of --dataset: the column that holds the text (default text)",
    )
    add(
        "--tokenizer",
        help="a tokenizer.json (default: one is trained on the beginning of the text)",
    )
    add(
        "--tokenizer-size",
        type=int,
        default=1024,
        help="entries of the tokenizer that is trained (default 1024)",
    )
    add(
        "--train-bytes",
        type=int,
        default=20_000_000,
        help="text to train it on, in bytes (default 20000000)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the file."""
    from course_pp.training.data.corpus import iterate_documents, load_corpus
    from course_pp.training.data.on_disk import write_tokens
    from course_pp.training.data.tokenizer import load_tokenizer, train_tokenizer

    where = {"subset": arguments.subset, "split": arguments.split, "text_column": arguments.column}
    if arguments.tokenizer is not None:
        tokenizer = load_tokenizer(arguments.tokenizer)
    else:
        beginning = load_corpus(
            arguments.text, arguments.dataset, max_bytes=arguments.train_bytes, **where
        )
        tokenizer = train_tokenizer(beginning, arguments.tokenizer_size)
    name, documents = iterate_documents(arguments.text, arguments.dataset, **where)
    written = write_tokens(arguments.file, documents, tokenizer)
    print(f"{written.path}: {written.n_tokens:,} tokens ({written.dtype}) of {name}")
