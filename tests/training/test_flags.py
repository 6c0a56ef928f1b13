"""The command line: a flag and a key for each field, and refusals in one sentence."""

import re
import shlex
from pathlib import Path

import pytest

from course_pp.training.flags import PRESETS, ModelOptions, RunOptions, parse

SCRIPTS = (Path(__file__).parents[2] / "docs" / "scripts.md").read_text()


def parsed(*arguments: str) -> RunOptions:
    options = parse(arguments)
    assert options is not None
    return options


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        'model = "tiny"\nsteps = 7\nglobal-batch-size = 16\nlayers = 3\ntie_embeddings ='
        ' true\nbetas = [0.9, 0.95]\nlr_schedule = "wsd"\ntext = ["a", "b"]\npadded ='
        " false\n[optimizer_options]\namsgrad = true\n"
    )
    return path


def test_a_file_overrides_the_preset_and_flags_override_the_file(toml: Path) -> None:
    options = parsed(f"--config={toml}", "--layers=5", "--no-tie-embeddings", "--text", "c")
    assert (options.model.dim, options.data.tokenizer_size) == (32, 300)  # the preset's
    # the file's
    assert (options.train.steps, options.train.batch, options.train.betas) == (7, 16, (0.9, 0.95))
    assert (options.train.lr_schedule, options.train.optimizer_options) == (
        "wsd",
        {"amsgrad": True},
    )
    # the flags'
    assert (options.model.layers, options.model.tie_embeddings, options.data.text) == (
        5,
        False,
        ("c",),
    )
    assert (options.model.heads, options.train.lr) == (4, 3e-3)  # defaults


def test_another_preset_and_epochs_instead_of_steps_override_the_file(toml: Path) -> None:
    options = parsed("--model", "gpt2", "--epochs", "2", "--config", str(toml))
    assert (options.model.dim, options.model.layers, options.train.epochs) == (768, 3, 2)


def test_a_flag_given_twice_counts_the_last_time() -> None:
    options = parsed(
        "--layers=2",
        "--steps",
        "3",
        "--layers=4",
        "--optimizer-options.momentum=0.5",
        "--optimizer=SGD",
    )
    assert (options.model.layers, options.train.steps, options.train.optimizer_options) == (
        4,
        3,
        {"momentum": 0.5},
    )


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("article-179m", 179.4),
        ("gpt2", 123.6),
        ("llama-1b", 1235.8),
        ("small", 1.1),
        ("small-moe", 2.7),
    ],
)
def test_a_preset_has_as_many_parameters_as_its_name_says(name: str, millions: float) -> None:
    model = parsed("--model", name).model
    assert round(model.config(PRESETS[name]["tokenizer_size"]).n_parameters / 1e6, 1) == millions


def test_the_default_is_the_small_preset() -> None:
    assert ModelOptions() == parsed("--model=small").model == parsed().model


def test_the_readmes_run_of_the_article_and_its_file_are_what_it_says(tmp_path: Path) -> None:
    [command] = re.findall(r"^torchrun.*train\.py (--model article.*)", SCRIPTS, re.M)
    options = parsed(*shlex.split(command))
    sizes = (
        options.model.layers,
        options.model.heads,
        options.model.kv_heads,
        options.model.seq_len,
    )
    assert sizes == (12, 12, 3, 512)
    assert (options.data.padded, options.train.lr_schedule, options.train.warmup) == (
        True,
        "cosine",
        100,
    )
    [content] = re.findall(r"```toml\n(.*?)```", SCRIPTS, re.S)
    (tmp_path / "run.toml").write_text(content)
    assert parsed(f"--config={tmp_path}/run.toml").train.optimizer_options == {"momentum": 0.9}


@pytest.mark.parametrize(
    ("arguments", "line", "words"),
    [
        ("--stps 3", "", "Unknown option: --stps. Did you mean --steps?"),
        ("--steps x", "", "--steps 'x' must be a whole number"),
        ("--steps=3.5", "", "--steps '3.5' must be a whole number"),
        ("--steps", "", "--steps requires an argument"),
        ("--batch-size=8", "", "Did you mean --global-batch-size?"),
        ("stray", "", "Unused Tokens: ['stray']"),
        (
            "--steps 3 --epochs 3",
            "",
            "--steps and --epochs both say how long to train: leave one out",
        ),
        ("--balance=bias --top-k=3", "", "--top-k 3 is of experts: give --experts, too"),
        ("--model=gpt3", "", "article-179m, gpt2, llama-1b: did you mean 'gpt2'?"),
        (
            "--versions=stach",
            "",
            '"stach" for --versions. Choose from: "none", "stash", "vertical", "2bw". Did you mean',
        ),
        ("--betas x y", "", 'Invalid value for --betas: unable to convert "x" into float'),
        ("--config=", "", "--config '' cannot be read"),
        (f"--config={__file__}", "", "is not TOML"),
        ("", "stps = 3", '"[stps]" from'),
        ("", "[train]\nsteps = 3", '"[train][steps]" from'),
        ("", "steps = true", "--steps 'True' must be a whole number"),
        ("", "steps = 3.5", "--steps '3.5' must be a whole number"),
        ("", "padded = 3", "Invalid value for [padded]"),
        ("", "model = 3", "--model 3 must be one of tiny"),
        ("", "steps = 3\nepochs = 3", "--steps and --epochs both say"),
    ],
)
def test_a_flag_or_key_that_is_none_is_refused_in_one_sentence(
    arguments: str, line: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(line)
    with pytest.raises(ValueError, match=re.escape(words)) as refusal:
        parse(arguments.split() if arguments else [f"--config={path}"])
    assert "\n" not in str(refusal.value)
