"""A training run on the command line: its layout, a flag a field of :class:`TrainConfig`, and its checkpoints."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from course_pp.parallel import DistributedConfig, ReshardPolicy, schedule_names
from course_pp.training.config import ENGINES, TrainConfig
from course_pp.training.setting import SettingError

__all__ = [
    "add_checkpoint_arguments",
    "add_layout_arguments",
    "add_sample_arguments",
    "add_train_arguments",
    "checkpoint_options",
    "distributed_config",
    "flags_named",
    "reshard_policy",
    "sample_options",
    "train_config",
]

# Flag, type and help of each field, in the order of --help. Defaults are TrainConfig's.
_FIELDS: dict[str, tuple[str, type, str]] = {
    "schedule": ("--schedule", str, f"one of {', '.join(schedule_names())}"),
    "engine": ("--engine", str, f"what runs the pipeline: {' or '.join(ENGINES)}"),
    "microbatches": ("--microbatches", int, "microbatches of a pipeline step"),
    "accumulation": ("--accumulation", int, "pipeline steps whose gradients make one optimizer step"),
    "batch": ("--global-batch-size", int, "sequences an optimizer step, over all ranks"),
    "steps": ("--steps", int, "optimizer steps"),
    "lr": ("--lr", float, "peak learning rate of AdamW, after warm-up"),
    "min_lr": ("--min-lr", float, "learning rate at the end of the cosine, as a share of the peak"),
    "warmup_steps": ("--warmup", int, "steps until the peak (default: a tenth of the steps, at most 100)"),
    "weight_decay": ("--weight-decay", float, "of AdamW, for matrices; norms, biases and embeddings do not decay"),
    "clip_norm": ("--max-norm", float, "clip the norm of the whole gradient; inf only measures it"),
    "eval_every": ("--eval-every", int, "steps between evaluations (default: before and after training only)"),
    "log_every": ("--log-every", int, "steps between lines about the loss"),
    "log_folder": ("--log-folder", str, "where to write metrics.jsonl and TensorBoard's files (default: nowhere)"),
    "profile": ("--profile", int, "steps to trace on every rank, into --log-folder"),
    "seed": ("--seed", int, "of the weights and of the order of the data"),
}
_NEED_DIRECTORY = ("save_every", "async_save", "keep_last", "keep_every")


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how the ranks share the model and the data."""
    add = parser.add_argument
    add("--pp", type=int, help="pipeline ranks (default: what the other factors leave)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    add("--dp-shard", type=int, default=1, help="ranks that FSDP2 shards over; -1 takes what is left (default 1)")
    add("--dp-replicate", type=int, default=1, help="copies of the sharded model (default 1)")
    add("--reshard", default="auto", help="after forward: auto, true, false or a number of ranks (default auto)")
    add("--share-gpus", action="store_true", help="several ranks compute on one GPU, with --engine runtime")
    add("--ac", default="none", choices=("none", "selective", "full"), help="activation checkpointing (default none)")


def distributed_config(arguments: argparse.Namespace, world_size: int) -> DistributedConfig:
    """The layout that was asked for; its sizes are compared with the world's when the ranks join.

    Raises:
        ValueError: a size that no layout can have.
    """
    others = (arguments.dp_replicate, arguments.dp_shard, arguments.tp)
    taken = prod(others)
    left = world_size // taken if taken > 0 and world_size % taken == 0 else 1
    pp = left if arguments.pp is None else arguments.pp
    return DistributedConfig(pp, *others, share_gpus=arguments.share_gpus)


def reshard_policy(text: str) -> ReshardPolicy:
    """What ``--reshard`` says.

    Raises:
        ValueError: for anything but auto, true, false or a number.
    """
    words: dict[str, ReshardPolicy] = {"auto": "auto", "true": True, "false": False}
    if text.lower() not in words and not text.isdecimal():
        raise ValueError(f"--reshard {text} must be auto, true, false or a number of ranks")
    return words[text.lower()] if text.lower() in words else int(text)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of :func:`train_config`."""
    for field, (flag, kind, text) in _FIELDS.items():
        default = getattr(TrainConfig, field)
        shown = text if default is None else f"{text} (default {default})"
        parser.add_argument(flag, dest=field, type=kind, default=default, help=shown)
    parser.add_argument("--batch-size", action=_Renamed, help=argparse.SUPPRESS)


class _Renamed(argparse.Action):
    """Refuses the old name of a flag: elsewhere ``batch_size`` is one microbatch's."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        raise ValueError(
            f"{option} {values} is now --global-batch-size {values}: sequences an optimizer step, over all ranks"
        )


def train_config(arguments: argparse.Namespace) -> TrainConfig:
    """The run that was asked for.

    Raises:
        ValueError: a value that no run can have.
    """
    return TrainConfig(**{field: getattr(arguments, field) for field in _FIELDS})


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what :class:`~course_pp.training.checkpointer.Checkpointer` needs to know."""
    add = parser.add_argument
    add("--checkpoint-dir", help="keep the run's checkpoints here, and save when SIGTERM or SIGUSR1 asks to end")
    add("--save-every", type=int, help="steps between checkpoints (default: after the last step only)")
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--keep-last", type=int, help="delete all but this many of the newest checkpoints (default: keep all)")
    add("--keep-every", type=int, help="with --keep-last, also keep those of every so many steps")
    add("--resume", default="auto", help="auto: from the newest whole checkpoint in --checkpoint-dir, if there is one; "
        "never; or the path of a checkpoint (default auto)")  # fmt: skip


def checkpoint_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of :class:`~course_pp.training.checkpointer.Checkpointer` that were asked for.

    Raises:
        ValueError: for a flag that means nothing without a directory.
    """
    if arguments.checkpoint_dir == "":
        raise ValueError("--checkpoint-dir '' names no directory: give one, or leave the flag out to save nothing")
    given = [name for name in _NEED_DIRECTORY if getattr(arguments, name)]
    if arguments.resume not in ("auto", "never"):
        given.append("resume")
    if given and arguments.checkpoint_dir is None:
        raise ValueError(f"--{given[0].replace('_', '-')} needs --checkpoint-dir, where the run's checkpoints are kept")
    return {
        "root": arguments.checkpoint_dir,
        "save_every": arguments.save_every,
        "asynchronous": arguments.async_save,
        "keep_last": arguments.keep_last,
        "keep_every": arguments.keep_every,
    }


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the text that is written at the end."""
    parser.add_argument("--sample", type=int, default=0, help="tokens to write with the trained model (default 0)")
    parser.add_argument("--prompt", default="", help="what they continue (default: the beginning of a text)")


def sample_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of :func:`~course_pp.training.sampling.sample` that were asked for.

    Raises:
        ValueError: for a negative number of tokens, or one of them on shared GPUs.
    """
    if arguments.sample < 0:
        raise ValueError(f"--sample {arguments.sample} must be at least 0: it is the number of tokens to write")
    if arguments.sample and arguments.share_gpus:
        raise ValueError(
            f"--sample {arguments.sample} with --share-gpus: text is written by torch's pipeline, which cannot share "
            "GPUs. Leave --sample out, or write it from the checkpoint on a GPU a rank"
        )
    return {"n_tokens": arguments.sample, "seed": arguments.seed}


@contextmanager
def flags_named() -> Iterator[None]:
    """Refuse in the command line's words: ``--global-batch-size 9`` where the package says ``batch=9``.

    Raises:
        ValueError: the one from inside, in these words.
    """
    flags = {field: flag for field, (flag, _, _) in _FIELDS.items()}
    flags |= {name: f"--{name.replace('_', '-')}" for name in (*_NEED_DIRECTORY, "resume")}
    try:
        yield
    except SettingError as error:
        said = error.spelled(lambda name, value: f"{flags[name]} {value!r}" if name in flags else f"{name}={value!r}")
        raise ValueError(said) from error
