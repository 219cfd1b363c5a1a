"""`memtools run`: run a script in an interpreter of its own, or any command as a child."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from memtools import MemtoolsError
from memtools._base import environment
from memtools._base.environment import as_fraction
from memtools._base.every import Every, parse_every
from memtools._base.size import parse_bytes
from memtools._base.text import shown

PACKAGE = Path(__file__).resolve().parent.parent
BOOT = PACKAGE / "_cli" / "boot"
SUMMARY = PACKAGE / "_cli" / "summary.py"
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # the exit codes of shells for such a command


def size(text: str) -> int:
    try:
        return parse_bytes(text, "the limit")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def fraction(text: str) -> float:
    try:
        return as_fraction(text, "it")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def every(text: str) -> Every:
    try:
        return parse_every(text, "it")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def milliseconds(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 60_000:
        return int(text)
    raise argparse.ArgumentTypeError(f"an interval must be 1 to 60000 ms, got {text}")


class Run:
    """Run a training script, or any command, and report what leaks.

    memtools run train.py --lr 0.1      a script and its arguments
    memtools run -m package.train       a module; also -c CODE, or - for stdin
    memtools run -- torchrun train.py   a command, watched from outside

    Findings are printed on stderr while the program runs, and a summary at its end. Stdout and the
    exit code are the program's. The record, run.mem, survives a kill; `memtools explain` reads it.

    MEMTOOLS_LOG, _LIMIT, _GUARD, _PRINT_EVERY and _TRACE set defaults for the options. With
    MEMTOOLS=0 the program runs without memtools.

    memtools itself exits with 1 if the record cannot be made, 2 for wrong usage or a missing
    script, 126 if a command cannot be executed, and 127 if it is not found.
    """

    name = "run"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        record = "the record (default: run.mem; run-2.mem while run.mem is in use)"
        interval = "milliseconds between samples (default: 10; shorter near the limit)"
        add("-o", "--output", "--log", dest="log", metavar="PATH", help=record)
        add("--interval-ms", type=milliseconds, default=10, metavar="N", help=interval)
        add("--limit", type=size, metavar="SIZE", help='the memory limit, for example "12 GiB"')
        add(
            "--guard",
            type=fraction,
            metavar="FRACTION",
            help="at this share of the limit, raise HostMemoryPressure at the end of a step; a "
            "command after -- gets SIGTERM",
        )
        add(
            "--print-every",
            type=every,
            metavar="N",
            help='print memory on stderr every N steps, or every "30 s" (scripts only)',
        )
        traced = "trace no steps: no lines that allocate, no tensors at the peak"
        add("--no-trace", dest="trace", action="store_false", default=None, help=traced)
        add("-q", "--quiet", action="store_true", help="print nothing on stderr")
        add("--json", action="store_true", help="print lines of JSON on stderr")
        rest = argparse.REMAINDER
        add("-m", nargs=rest, dest="module", metavar="MODULE", help="a module and its arguments")
        add("-c", nargs=rest, dest="code", metavar="CODE", help="a program and its arguments")
        add("command", nargs=rest, metavar="script ... | -- command ...", help="what to run")

    def run(self, args: argparse.Namespace) -> int:
        try:
            keys = environment.read()
        except ValueError as error:
            return wrong(str(error))
        for name, value in keys._asdict().items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        words: list[str] = args.command
        if args.module is not None or args.code is not None:
            flag, first = ("-m", args.module) if args.module is not None else ("-c", args.code)
            if not first:
                return wrong(f"{flag} needs an argument")
            return exec_python(args, [flag, *first, *words])
        if not words or words == ["--"]:
            return wrong("nothing to run: give a script, or -- and a command")
        if words[0] == "--" and environment.is_off:
            return exec_command(words[1:])
        if words[0] == "--":
            from memtools._cli.tree import run_command

            return run_command(words[1:], args)
        if words[0] != "-" and not os.path.exists(words[0]):
            command = f"; to run a command: memtools run -- {shlex.join(words)}"
            return wrong(
                f"there is no script {words[0]}{command if shutil.which(words[0]) else ''}"
            )
        return exec_python(args, words)


def wrong(reason: str) -> int:
    print(shown(f"memtools run: {reason} (see memtools run --help)"), file=sys.stderr)
    return 2


def interpreter() -> list[str]:
    """The command of this Python with its own flags. PYTHONPATH makes it start the monitor."""
    if (sys.flags.ignore_environment or sys.flags.no_site) and not environment.is_off:
        raise MemtoolsError(
            "a script cannot be run under Python's -E, -I or -S, which ignore what starts the "
            "monitor; leave them out, or watch from outside: memtools run -- python -I ..."
        )
    if not sys.executable or os.pathsep in str(BOOT):
        raise MemtoolsError(
            f"Python cannot be started with {BOOT} on PYTHONPATH; "
            "watch from outside: memtools run -- python ..."
        )
    return [sys.executable, *own_flags(sys.orig_argv, len(sys.argv) - 1)]


def own_flags(command: Sequence[str], arguments: int) -> list[str]:
    """The flags between `python` and `-m memtools`, or the script; `arguments` is how many
    follow."""
    flags = list(command[1 : max(1, len(command) - arguments - 1)])
    if flags and re.fullmatch("-[A-Za-z]*[mc]", flags[-1]):
        others = flags.pop()[:-1]
        flags += [others] if others != "-" else []
    return flags


def variables(args: argparse.Namespace) -> dict[str, str]:
    """The environment that starts the monitor with these options."""
    if environment.is_off:
        return dict(os.environ)
    before = os.environ.get("PYTHONPATH")
    printed = args.print_every
    options = {
        "log": args.log,
        "interval_ms": args.interval_ms,
        "limit": args.limit,
        "guard": args.guard,
        "print_every": None if printed is None else list(printed),
        "trace": args.trace is not False,
        "quiet": args.quiet,
        "json": args.json,
        "summary": [sys.executable, "-IBS" if sys.dont_write_bytecode else "-IS", str(SUMMARY)],
        "pythonpath": before,
        "root": str(PACKAGE.parent),
    }
    path = os.pathsep.join([str(BOOT), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path, "MEMTOOLS_RUN": json.dumps(options)}


def exec_python(args: argparse.Namespace, words: Sequence[str]) -> NoReturn:
    command = [*interpreter(), *words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, variables(args))


def exec_command(words: Sequence[str]) -> int:
    """Become the command: MEMTOOLS=0 asks for the plain program."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        print(shown(f"memtools run: {words[0]}: {error.strerror}"), file=sys.stderr)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
