"""The command line: `memtools COMMAND`, also `python -m memtools COMMAND`.

Exit codes: 0 done, 1 failed, 2 wrong usage. An error is one line on stderr. A command is one class
in a module of its own and one entry in COMMANDS.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

from memtools import MemtoolsError, __version__
from memtools._base.text import shown
from memtools._cli.build_shim import BuildShim
from memtools._cli.compare import Compare
from memtools._cli.demo import Demo
from memtools._cli.doctor import Doctor
from memtools._cli.explain import Explain
from memtools._cli.export import Export
from memtools._cli.plan import Plan
from memtools._cli.records import killed_here
from memtools._cli.report import Report
from memtools._cli.run import Run
from memtools._cli.watch import Watch

EXIT_OK, EXIT_FAILURE, EXIT_USAGE = 0, 1, 2


class Command(Protocol):
    """A sub-command. The class docstring is its help text: the first line in the list of commands,
    all of it in the command's own --help."""

    name: str

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: tuple[type[Command], ...] = (
    Run,
    Explain,
    Report,
    Watch,
    Compare,
    Plan,
    Demo,
    Doctor,
    Export,
    BuildShim,
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. argparse's own error() prints the usage above it."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, shown(f"{self.prog}: {message} (see {self.prog} --help)") + "\n")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="memtools", description="Find out why a PyTorch training runs out of memory."
    )
    parser.add_argument("--version", action="version", version=f"memtools {__version__}")
    choices = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for kind in COMMANDS:
        command, text = kind(), inspect.getdoc(kind) or ""
        sub = choices.add_parser(
            command.name,
            help=text.partition("\n")[0],
            description=filled(text),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.prepare_parser(sub)
        sub.set_defaults(run=command.run, prog=sub.prog)
    return parser


def filled(text: str) -> str:
    """The text with its paragraphs as wide as the terminal. One in columns stays as it is."""
    width = shutil.get_terminal_size().columns - 2
    return "\n\n".join(
        part if "   " in part else textwrap.fill(part, width) for part in text.split("\n\n")
    )


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that asks for completions, and exit; do nothing without argcomplete."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def point_to_explain(command: str) -> None:
    """Say that the last run in this folder was killed. `explain` tells that itself, and `run` under
    which name it keeps the record."""
    name = None if command in (Explain.name, Run.name) else killed_here()
    if name is not None and sys.stderr is not None:
        text = f"memtools: {name} was killed or cut off; memtools explain tells what happened"
        with suppress(OSError, ValueError):  # Standard error may be closed.
            print(shown(text), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        complete(parser)
    words = sys.argv[1:] if argv is None else argv
    names = [kind.name for kind in COMMANDS]
    try:
        if not words:
            parser.error(f"give a command: {', '.join(names)}")
        if words[0] not in names and not words[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(words[0], names, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
            parser.error(f"there is no command {words[0]}: {meant}")
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            parser.prog = args.prog  # so that the message names the command's own --help
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as stop:  # --help, --version and usage errors have printed their text.
        return stop.code if isinstance(stop.code, int) else EXIT_OK
    point_to_explain(words[0])
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # raises here if the reader has gone, not later
        return code
    except BrokenPipeError:
        # What is still buffered has no reader. The interpreter must not try to write it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except KeyboardInterrupt:
        reason = "interrupted"
    # Any other exception is a defect, whose traceback is needed.
    except (MemtoolsError, OSError) as error:
        reason = " ".join(str(error).split())
    print(shown(f"{args.prog}: {reason}"), file=sys.stderr)
    return EXIT_FAILURE
