"""Site settings: which file is read, and what is refused in it."""

from pathlib import Path

import pytest

from course_pp.launch.where import Site, load_site


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, seen from its notebooks, with a home beside it."""
    monkeypatch.delenv("COURSE_PP_SITE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "repository" / "notebooks").mkdir(parents=True)
    (tmp_path / "repository" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "repository" / "notebooks")
    return tmp_path / "repository"


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_nearest_file_is_read_and_the_environment_comes_first(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository.parent / "site.toml", 'partition = "of somebody else"')
    assert load_site() == Site()
    write(Path.home() / ".config/course_pp/site.toml", 'partition = "home"')
    assert load_site().partition == "home"
    write(repository / "site.toml", 'partition = "root"\nsetup = ["module load cuda"]\ngpus_per_node = 8')
    assert load_site() == Site(partition="root", setup=("module load cuda",), gpus_per_node=8)
    write(repository / "notebooks" / "site.toml", 'partition = "here"')
    assert load_site().partition == "here"
    monkeypatch.setenv("COURSE_PP_SITE", str(write(repository / "x.toml", 'partition = "named"')))
    assert load_site().partition == "named"


def test_the_example_keeps_the_defaults_but_for_the_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[2] / "source_code" / "slurm" / "site.toml"
    monkeypatch.setenv("COURSE_PP_SITE", str(example))
    assert load_site() == Site(partition="gpu")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('partion = "gpu"', "sets 'partion', which is no setting; did you mean 'partition'"),
        ("zzz = 1", "sets 'zzz', which is no setting; known are partition, cpu_partition"),
        ("partition = 3", r"partition is 3 \(an int\): pass a text"),
        ('setup = "module load cuda"', r"setup is 'module load cuda' \(a str\): pass a tuple of texts"),
        ('gpus_per_node = "4"', r"gpus_per_node is '4' \(a str\): pass an integer"),
        ('gres = "gpu:2"', r"the number of GPUs goes where \{n\} stands"),
        ('gres = "gpu:{x}"', r"the number of GPUs goes where \{n\} stands"),
        ("partition =", "is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_a_remedy(repository: Path, line: str, words: str) -> None:
    write(repository / "site.toml", line)
    with pytest.raises(ValueError, match=words):
        load_site()


def test_a_home_is_found_in_the_nodes_interpreter_and_not_needed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository / "site.toml", 'python = "~/venv/bin/python"')
    assert load_site().python == f"{Path.home()}/venv/bin/python"

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    (repository / "site.toml").unlink()
    assert load_site() == Site()


def test_a_file_that_is_named_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PP_SITE", "nowhere.toml")
    with pytest.raises(FileNotFoundError, match=r"COURSE_PP_SITE is 'nowhere\.toml', which is no file"):
        load_site()
