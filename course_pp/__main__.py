"""``python -m course_pp``: what the package does from a terminal."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from course_pp.base.imports import MissingExtra

# Each module has HELP, add_arguments(parser) and run(arguments), and imports nothing heavy before
# run. What run returns is the exit code; None is 0.
_COMMANDS = {
    "checkpoint": "course_pp.training.checkpoint_command",
    "doctor": "course_pp.doctor",
    "lab": "course_pp.notebook.command",
    "plan": "course_pp.plan.command",
    "report": "course_pp.exercises.report",
    "schedule": "course_pp.show.command",
    "tokens": "course_pp.training.tokens_command",
}
_NAME = "python -m course_pp"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    That is 2, with one line on standard error, for what a command refuses or cannot write; 130
    after an interrupt; 141, as for other programs in a pipeline, if the reader has gone.
    """
    name = _NAME
    try:
        parser = _parser()
        parsed = parser.parse_args(arguments)
        if parsed.run is None:
            print(parser.format_help(), end="")
            code = 0
        else:
            name += f" {parsed.command}"
            code = parsed.run(parsed) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except (ValueError, ArithmeticError, OSError, MissingExtra) as error:
        if isinstance(error, OSError) and error.filename is None:
            _drop_output()
        print(f"{name}: {_sentence(error)}", file=sys.stderr)
        return 2


def _drop_output() -> None:
    """Drop what standard output would not take, or the interpreter would try once more at its end, and complain."""
    if (stream := sys.__stdout__) is not None and sys.stdout is stream:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename or 'standard output'}: {error.strerror}"
    if isinstance(error, ArithmeticError):
        return f"numbers too large or too small to compute with ({error}): give times nearer to 1"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_NAME, description="A course on pipeline parallelism, from the terminal.")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, home in _COMMANDS.items():
        module = import_module(home)
        command = commands.add_parser(
            name, help=module.HELP, description=module.HELP[0].upper() + module.HELP[1:]
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
