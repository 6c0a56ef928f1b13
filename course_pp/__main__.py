"""``python -m course_pp``: what the package does from a terminal."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

# Each module has HELP, add_arguments(parser) and run(arguments), and imports nothing heavy before run.
_COMMANDS = {
    "checkpoint": "course_pp.training.checkpoint_command",
    "lab": "course_pp.notebook.command",
    "schedule": "course_pp.show.command",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without repeating the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 2, with one line on standard error, for what a command refuses."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.run is None:
        parser.print_help()
        return 0
    try:
        parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as head, has seen enough. The interpreter would flush once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ArithmeticError, OSError) as error:
        print(f"{parser.prog} {parsed.command}: {_sentence(error)}", file=sys.stderr)
        return 2
    return 0


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot write {str(error.filename)!r}: {error.strerror}"
    if isinstance(error, ArithmeticError):
        return f"numbers too large or too small to compute with ({error}): give times nearer to 1"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m course_pp", description="A course on pipeline parallelism, from the terminal.")
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
