"""Site settings: which file is read, and what is refused in it."""

import errno
import os
from pathlib import Path

import pytest

from course_pp.doctor import running
from course_pp.launch import where
from course_pp.launch.where import Site, load_site
from tests.launch.conftest import pretend


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, seen from its notebooks, with a home beside it and the package installed."""
    monkeypatch.delenv("COURSE_PP_SITE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(where, "_ABOVE_THE_PACKAGE", tmp_path / "site-packages")
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
    write(
        repository / "site.toml",
        'partition = "root"\nsetup = ["module load cuda"]\ngpus_per_node = 8',
    )
    assert load_site() == Site(partition="root", setup=("module load cuda",), gpus_per_node=8)
    write(repository / "notebooks" / "site.toml", 'partition = "here"')
    assert load_site().partition == "here"
    monkeypatch.setenv("COURSE_PP_SITE", str(write(repository / "x.toml", 'partition = "named"')))
    assert load_site().partition == "named"


def test_who_works_elsewhere_with_the_package_of_a_clone_gets_the_settings_in_its_root(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository / "site.toml", 'partition = "of the room"\nfolder = "/scratch/$USER"')
    (repository.parent / "my_course").mkdir()
    monkeypatch.chdir(repository.parent / "my_course")
    monkeypatch.setenv("USER", "ann")
    assert load_site() == Site(), "the package lies elsewhere"
    monkeypatch.setattr(where, "_ABOVE_THE_PACKAGE", repository)
    assert load_site() == Site(partition="of the room", folder="/scratch/ann")
    write(Path.home() / ".config/course_pp/site.toml", 'partition = "of ann"')
    assert load_site().partition == "of ann"
    (repository / "pyproject.toml").unlink()
    (Path.home() / ".config/course_pp/site.toml").unlink()
    assert load_site() == Site(), "a file among installed packages is nobody's"


def test_the_clone_is_that_of_the_package() -> None:
    assert (where._ABOVE_THE_PACKAGE / "course_pp" / "launch" / "where.py").samefile(where.__file__)


def test_the_doctor_names_the_file_that_holds(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(repository / "srun", "exit 1")
    pretend(repository / "sinfo", "exit 1")
    monkeypatch.setenv("PATH", str(repository), prepend=os.pathsep)
    assert str(running.slurm()[0]) == "ok    site.toml: none; the cluster's own defaults hold"
    monkeypatch.setattr(where, "_ABOVE_THE_PACKAGE", repository)
    monkeypatch.chdir(repository.parent)
    file = write(repository / "site.toml", "")
    assert str(running.slurm()[0]) == f"ok    site.toml: {file}"
    monkeypatch.setenv("HOME", str(repository.parent))
    assert str(running.slurm()[0]) == "ok    site.toml: ~/repository/site.toml"
    file.write_text("partion = 1")
    assert str(running.slurm()[0]).startswith(
        f"WRONG site.toml: cannot be read ({file} sets 'partion', which is no"
    )


def test_the_example_keeps_the_defaults_but_for_the_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = Path(__file__).parents[2] / "source_code" / "slurm" / "site.toml"
    monkeypatch.setenv("COURSE_PP_SITE", str(example))
    assert load_site() == Site(partition="gpu")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('partion = "gpu"', "sets 'partion', which is no setting; did you mean 'partition'"),
        ("zzz = 1", "sets 'zzz', which is no setting; known are partition, cpu_partition"),
        ("partition = 3", r"partition is 3 \(an int\): pass a text"),
        (
            'setup = "module load cuda"',
            r"setup is 'module load cuda' \(a str\): pass a tuple of texts",
        ),
        ('gpus_per_node = "4"', r"gpus_per_node is '4' \(a str\): pass an integer"),
        ('gres = "gpu:2"', r"the number of GPUs goes where \{n\} stands"),
        ('gres = "gpu:{x}"', r"the number of GPUs goes where \{n\} stands"),
        ("partition =", "is not TOML"),
        (
            'options = ["--exclusive", "--job-name=me"]',
            "options name the job by '--job-name=me'; leave that out",
        ),
        ('options = ["-J", "me"]', "options name the job by '-J'; leave that out"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_a_remedy(
    repository: Path, line: str, words: str
) -> None:
    write(repository / "site.toml", line)
    with pytest.raises(ValueError, match=words):
        load_site()


def test_a_file_that_others_may_not_read_is_named_with_a_remedy(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    file = write(repository / "site.toml", "")
    monkeypatch.setattr(Path, "read_text", refused)  # root may read whatever its mode is
    with pytest.raises(
        ValueError, match=rf"{file} cannot be read: Permission denied\. Its owner can"
    ):
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
    with pytest.raises(
        FileNotFoundError, match=r"COURSE_PP_SITE is 'nowhere\.toml', which is no file"
    ):
        load_site()
