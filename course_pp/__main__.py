"""``python -m course_pp``: what the package does from a terminal."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from course_pp.files import naming

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# Each module has HELP, add_arguments(parser) and run(arguments), and imports nothing heavy before run.
# What run returns is the exit code; None is 0.
_COMMANDS = {
    "checkpoint": "course_pp.training.checkpoint_command",
    "doctor": "course_pp.doctor.command",
    "lab": "course_pp.notebook.command",
    "plan": "course_pp.plan.command",
    "report": "course_pp.exercises.inventory.command",
    "schedule": "course_pp.show.command",
    "tokens": "course_pp.training.tokens_command",
}
_NAME = "python -m course_pp"
_STANDARD_OUTPUT = "standard output"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the help as anything else is printed: argparse takes no notice of an error."""
        print(self.format_help(), end="", file=file)


class _Output:
    """Standard output, whose errors name it as those of other files do."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with naming(_STANDARD_OUTPUT):
            return self._stream.write(text)

    def flush(self) -> None:
        with naming(_STANDARD_OUTPUT):
            self._stream.flush()

    def give_up(self) -> None:
        """Drop what could not be written, or the interpreter would try once more at its end, and complain."""
        if self._stream is sys.__stdout__:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code.

    That is 2, with one line on standard error, for what a command refuses or cannot write; 130 after an interrupt;
    141, as for other programs in a pipeline, if the reader has gone.
    """
    name, code = _NAME, 0
    if sys.stdout is None:
        return _refuse(name, f"{_STANDARD_OUTPUT}: it is closed")
    output = _Output(sys.stdout)
    try:
        with redirect_stdout(output):
            try:
                parser = _parser()
                parsed = parser.parse_args(arguments)
                if parsed.run is None:
                    parser.print_help()
                else:
                    name += f" {parsed.command}"
                    code = parsed.run(parsed) or 0
            finally:
                output.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        output.give_up()
        return 128 + signal.SIGPIPE
    except (ValueError, ArithmeticError, OSError) as error:
        if isinstance(error, OSError) and error.filename == _STANDARD_OUTPUT:
            output.give_up()
        return _refuse(name, _sentence(error))
    return code


def _refuse(name: str, why: str) -> int:
    if sys.stderr is not None:
        print(f"{name}: {why}", file=sys.stderr)
    return 2


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ArithmeticError):
        return f"numbers too large or too small to compute with ({error}): give times nearer to 1"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=_NAME, description="A course on pipeline parallelism, from the terminal.")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, home in _COMMANDS.items():
        module = import_module(home)
        command = commands.add_parser(name, help=module.HELP, description=module.HELP[0].upper() + module.HELP[1:])
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
