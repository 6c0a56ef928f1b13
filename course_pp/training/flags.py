"""The command line of ``train.py``: a flag for each field of :class:`RunOptions`.

The text below a field is the flag's help. Values override each other in this order:

    defaults  <  --model's preset  <  --config's file  <  flags

A file is TOML and has a key for each flag, ``global_batch_size = 64``. cyclopts makes the flags
from the dataclasses and parses them. Every refusal is one sentence.
"""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args

from course_pp.base.imports import imports_of_extra
from course_pp.model import ModelConfig
from course_pp.parallel import DistributedConfig, ReshardPolicy
from course_pp.training.config import SettingError, TrainConfig, must_be_one_of
from course_pp.training.data import (
    Corpus,
    PackedTokens,
    PaddedTokens,
    Rows,
    Stream,
    Tokenizer,
    encode,
    load_corpus,
    load_stream,
    load_tokenizer,
    open_tokens,
    packed,
    padded,
    train_tokenizer,
)
from course_pp.training.data.corpus import beginning

with imports_of_extra("train"):
    import cyclopts
    from cyclopts import App, ArgumentCollection, Parameter

STREAM_BEGINNING_BYTES = 20_000_000
"""Bytes at the beginning of a stream on which a tokenizer is trained."""

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"dim": 32, "layers": 2, "heads": 4, "seq_len": 32, "tokenizer_size": 300},
    "small": {"dim": 128, "layers": 4, "heads": 4, "seq_len": 128, "tokenizer_size": 1024},
    "small-moe": {
        "dim": 128,
        "layers": 4,
        "heads": 4,
        "experts": 8,
        "top_k": 2,
        "expert_dim": 176,
        "seq_len": 128,
        "tokenizer_size": 1024,
    },
    "article-179m": {
        "dim": 768,
        "layers": 12,
        "heads": 12,
        "kv_heads": 3,
        "ffn_dim": 3072,
        "seq_len": 512,
        "vocab_size": 50_000,
        "tokenizer_size": 50_000,
    },
    "gpt2": {
        "dim": 768,
        "layers": 12,
        "heads": 12,
        "ffn_dim": 2048,
        "tie_embeddings": True,
        "seq_len": 1024,
        "vocab_size": 50_257,
        "tokenizer_size": 50_257,
    },
    "llama-1b": {
        "dim": 2048,
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "ffn_dim": 8192,
        "tie_embeddings": True,
        "rope_theta": 500_000.0,
        "seq_len": 2048,
        "vocab_size": 128_256,
        "tokenizer_size": 128_256,
    },
}
"""Models that go by a name, each with the values of several flags. All are this package's decoder.

    tiny          for trying things out: seconds
    small-moe     8 experts a layer, of which each token uses two. An expert is half as wide as
                  small's feed-forward block
    article-179m  179,448,576 parameters, as in the article that the course began with
    gpt2          123,551,232 parameters, the sizes of GPT-2 (Radford et al. 2019). Its SwiGLU of
                  2,048 has as many parameters as GPT-2's feed-forward block of 3,072
    llama-1b      1,235,814,400 parameters, the sizes of Llama 3.2 1B
"""


@dataclass(frozen=True)
class LayoutOptions:
    """How the ranks share the model and the data."""

    pp: int | None = None
    """pipeline ranks (default: what the other factors leave)"""
    tp: int = 1
    """tensor-parallel ranks"""
    dp_shard: int = 1
    """ranks that FSDP2 shards over; -1 takes what is left"""
    dp_replicate: int = 1
    """copies of the sharded model"""
    ep: int = 1
    """ranks of dp_shard that share the experts out"""
    reshard: str = "auto"
    """after forward: auto, true, false or a number of ranks"""
    share_gpus: bool = False
    """several ranks compute on one GPU, with --engine runtime"""
    ac: Literal["none", "selective", "full"] = "none"
    """activation checkpointing"""
    compile: bool = False
    """compile each block (torch.compile), where the machine has a compiler"""
    timeout: float = 300.0
    """seconds that a rank waits for the others"""

    def distributed(self, world_size: int) -> DistributedConfig:
        """Return the layout of the flags. Its size is compared with the world's when ranks join."""
        taken = self.dp_replicate * self.dp_shard * self.tp
        pp = self.pp
        if pp is None:
            # What does not divide, or dp_shard=-1, is refused or resolved when the ranks join.
            divides = taken > 0 and world_size % taken == 0
            pp = world_size // taken if divides else 1
        return DistributedConfig(
            pp=pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            ep=self.ep,
            share_gpus=self.share_gpus,
            timeout_s=self.timeout,
        )

    @property
    def reshard_policy(self) -> ReshardPolicy:
        """The policy that ``--reshard`` names."""
        words: dict[str, ReshardPolicy] = {"auto": "auto", "true": True, "false": False}
        if self.reshard.lower() in words:
            return words[self.reshard.lower()]
        if self.reshard.isdecimal():
            return int(self.reshard)
        raise ValueError(f"--reshard {self.reshard} must be auto, true, false or a number of ranks")


@dataclass(frozen=True)
class ModelOptions:
    """The sizes of the model."""

    model: str = "small"
    """preset, which the flags below change: tiny, small, small-moe, article-179m, gpt2, llama-1b"""
    dim: int = 128
    """model width"""
    layers: int = 4
    """decoder layers"""
    heads: int = 4
    """attention heads"""
    kv_heads: int | None = None
    """key/value heads, which several attention heads share (default: as many as --heads)"""
    ffn_dim: int | None = None
    """inner width of the feed-forward block (default: 8/3 of the model's width)"""
    rope_theta: float = 10_000.0
    """base of the rotary positions"""
    tie_embeddings: bool = False
    """share the input embedding with the output head"""
    seq_len: int = 128
    """tokens a sequence"""
    vocab_size: int | None = None
    """rows of the model's embedding (default: the tokenizer's size)"""
    experts: int = 0
    """experts in place of a feed-forward block; 0 for none. The flags that follow need some"""
    top_k: int = 2
    """experts that each token goes to"""
    shared_experts: int = 0
    """experts that every token goes to as well"""
    expert_dim: int | None = None
    """inner width of an expert (default: as the feed-forward block's)"""
    moe_every: int = 1
    """layers from one with experts to the next"""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """how the router makes scores"""
    capacity_factor: float | None = None
    """largest load of an expert, as a multiple of a microbatch's mean load (default: no limit)"""
    balance: Literal["loss", "sequence", "bias", "none"] = "loss"
    """what keeps the experts' load even"""
    balance_coef: float = 0.01
    """the factor of the balance loss, or the step of a bias"""
    z_coef: float = 0.0
    """the factor of the router's z-loss"""

    def config(self, vocab_size: int) -> ModelConfig:
        """Return the config of a model with these sizes.

        Its vocabulary has ``--vocab-size`` entries, or ``vocab_size`` if that flag is not given.
        """
        return ModelConfig(
            dim=self.dim,
            n_layers=self.layers,
            n_heads=self.heads,
            vocab_size=vocab_size if self.vocab_size is None else self.vocab_size,
            n_kv_heads=self.kv_heads,
            ffn_dim=self.ffn_dim,
            max_seq_len=self.seq_len,
            rope_theta=self.rope_theta,
            tie_embeddings=self.tie_embeddings,
            n_experts=self.experts,
            n_shared_experts=self.shared_experts,
            **{name: getattr(self, name) for name in _SAME_IN_CONFIG},
        )


# Fields that ModelConfig has under the same name. Each is of use only with --experts.
_SAME_IN_CONFIG = (
    "top_k",
    "expert_dim",
    "moe_every",
    "router",
    "capacity_factor",
    "balance",
    "balance_coef",
    "z_coef",
)


@dataclass(frozen=True)
class DataOptions:
    """The text that the model learns from."""

    text: tuple[str, ...] | None = None
    """text files or folders to train on (default: the source code of Python's standard library)"""
    dataset: str | None = None
    """name or path of a Hugging Face dataset to train on"""
    subset: str | None = None
    """of --dataset: one of its configurations"""
    split: str = "train"
    """of --dataset: its part, as datasets.load_dataset takes it"""
    column: str = "text"
    """of --dataset: the column that holds the text"""
    tokenizer: str | None = None
    """a tokenizer.json with [PAD], [BOT] and [EOT] to use (default: one is trained on the text)"""
    tokenizer_size: int = 1024
    """entries of the tokenizer that is trained"""
    padded: bool = False
    """one document a sequence, padded, instead of packed sequences"""
    streaming: bool = False
    """read --dataset as training goes on, from where a checkpoint left it"""
    tokens: str | None = None
    """a file of python -m course_pp tokens to train on, which is read as it is needed"""

    def load(self, seq_len: int, held_out: int) -> tuple[Rows | Stream, Rows, Tokenizer]:
        """Return training and validation sequences, and the tokenizer that made them.

        They are the same on every rank. Of a stream, ``held_out`` sequences are for validation.
        """
        if self.tokens is not None:
            return self._load_tokens(self.tokens, seq_len)
        given = load_tokenizer(self.tokenizer) if self.tokenizer is not None else None
        if self.streaming:
            return self._load_stream(seq_len, held_out, given)

        corpus = load_corpus(
            self.text, self.dataset, subset=self.subset, split=self.split, text_column=self.column
        )
        train, validation = corpus.split()
        tokenizer = given or train_tokenizer(train, self.tokenizer_size)
        rows = encode(train, tokenizer)
        others = encode(validation, tokenizer)
        if self.padded:
            pad, *_ = tokenizer.special_ids
            return padded(rows, seq_len, pad), padded(others, seq_len, pad), tokenizer
        return packed(rows, seq_len), packed(others, seq_len), tokenizer

    def _load_stream(
        self, seq_len: int, held_out: int, given: Tokenizer | None
    ) -> tuple[Stream, Rows, Tokenizer]:
        if self.dataset is None or self.text:
            raise ValueError("--streaming reads --dataset: name one, and leave --text out")
        name, documents = load_stream(
            self.dataset, subset=self.subset, split=self.split, text_column=self.column
        )
        tokenizer = given
        if tokenizer is None:
            start = beginning(documents(0), STREAM_BEGINNING_BYTES)
            tokenizer = train_tokenizer(Corpus(name, tuple(start)), self.tokenizer_size)
        stream = Stream(name, documents, tokenizer, seq_len, is_padded=self.padded)
        return *stream.split(held_out), tokenizer

    def _load_tokens(self, path: str, seq_len: int) -> tuple[Rows, Rows, Tokenizer]:
        sources = ("text", "dataset", "streaming", "tokenizer")
        others = [name for name in sources if getattr(self, name)]
        if others:
            raise ValueError(
                f"--tokens {path} is the data, and knows its tokenizer: leave --{others[0]} out"
            )
        file = open_tokens(path)
        rows = PaddedTokens(file, seq_len) if self.padded else PackedTokens(file, seq_len)
        return *rows.split(), Tokenizer(file.tokenizer)


@dataclass(frozen=True)
class CheckpointOptions:
    """When the run is saved, and which checkpoint it resumes from."""

    checkpoint_dir: str | None = None
    """keep the run's checkpoints here, and save when SIGTERM or SIGUSR1 asks to end"""
    save_every: int | None = None
    """steps between checkpoints (default: after the last step only)"""
    async_save: bool = False
    """write checkpoints while training goes on"""
    keep_last: int | None = None
    """delete all but this many of the newest checkpoints (default: keep all)"""
    keep_every: int | None = None
    """with --keep-last, also keep the steps that are a multiple of this"""
    resume: str = "auto"
    """auto: the newest whole checkpoint in --checkpoint-dir, if any; never; or a checkpoint"""

    @property
    def checkpointer(self) -> dict[str, Any]:
        """The arguments of :class:`~course_pp.training.checkpointer.Checkpointer`."""
        if self.checkpoint_dir == "":
            raise ValueError(
                "--checkpoint-dir '' names no directory: give one, or leave the flag out to save"
                " nothing"
            )
        saving = ("save_every", "async_save", "keep_last", "keep_every")
        given = [name for name in saving if getattr(self, name)]
        if self.resume not in ("auto", "never"):
            given.append("resume")
        if given and self.checkpoint_dir is None:
            raise ValueError(
                f"--{_flag(given[0])} needs --checkpoint-dir, where the run's checkpoints are kept"
            )
        return {
            "root": self.checkpoint_dir,
            "save_every": self.save_every,
            "asynchronous": self.async_save,
            "keep_last": self.keep_last,
            "keep_every": self.keep_every,
        }


@dataclass(frozen=True)
class SampleOptions:
    """The text that is written at the end."""

    sample: int = 0
    """tokens to write with the trained model"""
    prompt: str = ""
    """text that the model continues (default: the beginning of a text)"""


_FLAT = Parameter(name="*")  # a field's flag is --steps and not --train.steps


@dataclass(frozen=True)
class RunOptions:
    """A run on the command line."""

    train: Annotated[TrainConfig, _FLAT] = field(default_factory=TrainConfig)
    layout: Annotated[LayoutOptions, _FLAT] = field(default_factory=LayoutOptions)
    model: Annotated[ModelOptions, _FLAT] = field(default_factory=ModelOptions)
    data: Annotated[DataOptions, _FLAT] = field(default_factory=DataOptions)
    checkpoints: Annotated[CheckpointOptions, _FLAT] = field(default_factory=CheckpointOptions)
    writing: Annotated[SampleOptions, _FLAT] = field(default_factory=SampleOptions)

    def __post_init__(self) -> None:
        if self.train.versions == "none" and self.layout.ac != "none":
            raise ValueError(
                f"--ac {self.layout.ac} with --versions none: the forward would be computed again"
                " with other weights. Leave --ac out, or take other versions"
            )
        if self.writing.sample and self.layout.share_gpus:
            raise ValueError(
                f"--sample {self.writing.sample} with --share-gpus: torch's pipeline writes text,"
                " and cannot share GPUs. Leave --sample out"
            )
        if not self.model.experts:
            usual = ModelOptions()
            for name in ("shared_experts", *_SAME_IN_CONFIG):
                value = getattr(self.model, name)
                if value != getattr(usual, name):
                    raise ValueError(f"--{_flag(name)} {value} is of experts: give --experts, too")


# Flags that are named otherwise than their field.
_RENAMED = {"batch": "global-batch-size", "warmup_steps": "warmup", "clip_norm": "max-norm"}


def _flag(field: str) -> str:
    return _RENAMED.get(field, field.replace("_", "-"))


def parse(arguments: Sequence[str], description: str = "") -> RunOptions | None:
    """Return the run that the arguments ask for; if they ask for help, print it and return None.

    If a flag is given twice, the last one counts, as with most programs. Every refusal is a
    ValueError of one sentence.
    """
    # Without the last two, cyclopts would add flags such as --empty-text.
    rules = Parameter(
        name_transform=_flag,
        consume_multiple=True,
        allow_repeating=True,
        negative_iterable=(),
        negative_none=(),
    )
    app = App(
        name="train.py",
        help=description,
        default_parameter=rules,
        version_flags=[],
        help_format="plaintext",
    )
    app.config = (_fill_in, _check_whole_numbers)

    @app.default
    def run(
        *, config: str | None = None, options: Annotated[RunOptions | None, _FLAT] = None
    ) -> RunOptions:
        """Build the options.

        Parameters
        ----------
        config
            a TOML file with a key for each of the other flags, which override it
        """
        return options or RunOptions()

    try:
        found: RunOptions | None = app(
            list(arguments), exit_on_error=False, print_error=False, result_action="return_value"
        )
    except cyclopts.CycloptsError as error:
        # cyclopts breaks its sentences into lines.
        raise ValueError(" ".join(str(error).split())) from error
    return found


def _fill_in(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in flags that were not given, from --config's file, or else from --model's preset."""
    flags = {}
    for argument in arguments:
        if argument.tokens:
            flags[argument.name.lstrip("-")] = argument.tokens[-1].value
    path = flags.get("config")
    file = {} if path is None else _read(path)

    length = {"steps", "epochs"}
    if length <= flags.keys() or length <= file.keys():
        raise ValueError("--steps and --epochs both say how long to train: leave one out")
    # A length on the command line overrides the other kind of length in the file, too.
    if length & flags.keys():
        file = {name: value for name, value in file.items() if name not in length}

    model = flags.get("model", file.get("model", ModelOptions.model))
    if str(model) not in PRESETS:
        raise ValueError(f"--model {model!r} {must_be_one_of(model, PRESETS)}")
    # Each fills only flags that have no value yet, so the file comes before the preset.
    for values, source in ((file, path), (PRESETS[model], "a preset")):
        cyclopts.config.Dict(values, source=source)(app, commands, arguments)


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ValueError(
            f"--config {path!r} cannot be read ({error.strerror}): give a TOML file"
        ) from error
    # Text that is not UTF-8 raises a ValueError, too.
    except ValueError as error:
        raise ValueError(f"--config {path!r} is not TOML: {error}") from error


def _check_whole_numbers(
    app: App, commands: tuple[str, ...], arguments: ArgumentCollection
) -> None:
    """Refuse 3.5 for a whole number, which cyclopts would round."""
    for argument in arguments:
        if int in (argument.hint, *get_args(argument.hint)):
            for token in argument.tokens:
                if not token.value.strip().lstrip("+-").isdecimal():
                    raise ValueError(f"{argument.name} {token.value!r} must be a whole number")


@contextmanager
def flags_named() -> Iterator[None]:
    """Name flags in a refusal from inside: ``--global-batch-size 9`` in place of ``batch=9``."""
    names: set[str] = set()
    for part in fields(RunOptions):
        options: Any = part.default_factory
        names.update(each.name for each in fields(options))

    def spell(name: str, value: Any) -> str:
        return f"--{_flag(name)} {value!r}" if name in names else f"{name}={value!r}"

    try:
        yield
    except SettingError as error:
        raise ValueError(error.spelled(spell)) from error
