import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from course_pp.__main__ import main


def command(*arguments: str) -> list[str]:
    return ["schedule", *arguments]


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "schedule" in capsys.readouterr().out


def test_a_schedule_is_drawn_with_its_numbers_under_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("1f1b", "--ranks", "4", "--microbatches", "8")) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1f1b: 4 ranks, 4 stages, 8 microbatches\n\nrank 0 F0F1F2F3····")
    assert "makespan     33.0\nbubble       27.27%" in out
    assert "peaks        4 3 2 1 " in out
    assert "the closed form gives the same makespan, bubbles and peaks" in out
    assert "rank 0 waits from 4.0 to 10.0 for the gradient of microbatch 0 from stage 1" in out
    assert max(map(len, out.splitlines())) <= 100
    assert err == ""


def test_what_several_stages_of_a_rank_hold_is_said_to_be_of_stages(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command("zb_v", "--ranks", "4", "--microbatches", "8")) == 0
    assert (
        "peaks        8 8 8 8 activations of a stage, 2 of which make one of a rank, held"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("costs", "makespan"),
    [
        (("--forward", "1/2"), "27.5"),
        (("--latency", "0e99999999"), "33.0"),
        (("--latency", "0.25"), "37.0"),
        (("--forward", "1,1,1,2"), "41.0"),
    ],
)
def test_costs_are_read_as_numbers_fractions_or_one_a_stage(
    costs: tuple[str, str], makespan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("gpipe" if "," in costs[1] else "1f1b", *costs)) == 0
    assert f"makespan     {makespan}\n" in capsys.readouterr().out


def test_sizes_without_a_closed_form_say_under_which_condition_there_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command("zb_v", "--latency", "1")) == 0
    out = capsys.readouterr().out
    assert "formula      none" in out
    assert "no closed form here: it holds only if" in out


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["scheduel"], "choose from"),
        (command(), "required: name"),
        (command("1f2b"), "use one of naive, gpipe"),
        (command("1f1b", "--ranks", "0"), "at least 1"),
        (command("1f1b", "--ranks", "four"), "invalid int value"),
        (command("1f1b", "--forward", "nan"), "give a number"),
        (command("1f1b", "--forward", "1/0"), "give a number"),
        (command("1f1b", "--forward", "0x"), "give a number"),
        (command("1f1b", "--forward", "1e400"), "too large or too small"),
        (command("1f1b", "--forward", "1e-400"), "too large or too small"),
        (command("1f1b", "--forward", "1,1e99999999"), "too large or too small"),
        (command("1f1b", "--forward", "1e308"), "give times nearer to 1"),
        (command("1f1b", "--forward", "1e-310"), "give times nearer to 1"),
        (command("1f1b", "--latency", "-1"), "at least 0"),
        (command("1f1b", "--forward", "1,2"), "one for each"),
        (command("1f1b", "--save", "chart.pdf"), "end the name in .png or .svg"),
        (
            command("1f1b", "--json", "no/such/folder/x.json"),
            "schedule: no/such/folder/x.json: No such file",
        ),
        (command("1f1b", "--json", "--trace"), "give the others a FILE"),
        (command("1f1b", "--csv", ""), "--csv has an empty name"),
    ],
)
def test_what_is_refused_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert remedy in err
    assert err.count("\n") == 1
    assert err.startswith("python -m course_pp")


def test_figures_traces_and_numbers_are_written_beside_the_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, trace, numbers = tmp_path / "x.svg", tmp_path / "trace.json", tmp_path / "x.json"
    assert (
        main(command("zb_h1", "--save", str(svg), "--trace", str(trace), "--json", str(numbers)))
        == 0
    )
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    written = json.loads(numbers.read_text(encoding="utf-8"))
    assert (written["makespan"], written["peak_activations"]) == (27.0, [4, 4, 4, 4])
    assert len(written["spans"]) == 4 * 8 * 3
    assert capsys.readouterr().out.startswith("zb_h1: ")


@pytest.mark.parametrize("refused", [("--save", "x.pdf"), ("--json", "--trace")])
def test_nothing_is_written_beside_what_is_refused(
    refused: tuple[str, str], tmp_path: Path
) -> None:
    assert main(command("1f1b", "--csv", str(tmp_path / "x.csv"), *refused)) == 2
    assert not list(tmp_path.iterdir())


def test_the_order_of_actions_is_printed_as_torch_reads_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command("1f1b", "--ranks", "2", "--microbatches", "2", "--csv")) == 0
    assert capsys.readouterr().out == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("option", ["--json", "--trace"])
def test_without_a_file_only_what_was_asked_for_is_printed(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("gpipe", option)) == 0
    assert json.loads(capsys.readouterr().out)


def test_colour_is_for_terminals_unless_asked_for_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_coloured(*arguments: str) -> bool:
        main(command("1f1b", *arguments))
        return "\x1b[" in capsys.readouterr().out

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert not is_coloured()
    assert is_coloured("--color", "always")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert is_coloured()
    assert not is_coloured("--color", "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_coloured()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    done = run("-m", "course_pp", "schedule", "1f1b", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "rank 0 F0F1F2F3............B0--F4B1--" in done.stdout


def test_drawing_as_text_imports_neither_matplotlib_nor_torch() -> None:
    code = (
        "import sys; from course_pp.__main__ import main; main(['schedule', '1f1b']); "
        "sys.exit(bool({'torch', 'matplotlib', 'ipywidgets'} & set(sys.modules)))"
    )
    assert run("-c", code).returncode == 0


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ('"$@" --json | true; exit ${PIPESTATUS[0]}', 141, ""),
        (
            '"$@" > /dev/full',
            2,
            "python -m course_pp schedule: standard output: No space left on device\n",
        ),
        (
            '"$@" --json > /dev/full',
            2,
            "python -m course_pp schedule: standard output: No space left on device\n",
        ),
        (
            '"$@" --csv /dev/full',
            2,
            "python -m course_pp schedule: /dev/full: No space left on device\n",
        ),
        (
            '"$@" --save full.svg',
            2,
            "python -m course_pp schedule: full.svg: No space left on device\n",
        ),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_written_is_named_in_one_line(
    line: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "full.svg").symlink_to("/dev/full")
    command = [sys.executable, "-m", "course_pp", "schedule", "zb_v", "--microbatches", "64"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environ,
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_an_interrupt_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("course_pp.show.command.run", interrupted)
    assert main(command("1f1b")) == 130
    assert capsys.readouterr() == ("", "")
