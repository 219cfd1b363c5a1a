"""`memtools explain`: how a run used memory, and how it ended; or what a text says of it."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from memtools._base.terminal import OUTPUT, columns_of, has_colours
from memtools._base.text import shown, shown_lines, wrapped
from memtools._cli.records import (
    MAGIC,
    UnreadableError,
    complain,
    newest_record,
    print_safe,
    printed,
    read,
)

if TYPE_CHECKING:
    from memtools._oom.log import Log
    from memtools._record.figures import Figures


class Explain:
    """Explain what happened in a run, from its record or its output.

    memtools explain                     the newest record of this folder
    memtools explain train.log           an out-of-memory message; - is stdin
    memtools explain train.log run.mem   both, of one run

    From a record, also while the program runs: how the run ended, how close memory came to the
    limit, what grew and what holds it, when the limit is reached, the tensors at the peak, and what
    to do next.

    From a text, of any size and from any number of ranks: the message of torch, another library, a
    DataLoader, a scheduler or the kernel. It shows each figure to scale, whether the cause is size
    or fragmentation, and what to change.

    The exit code is 2 if a file is neither, or if a change is unknown.
    """

    name = "explain"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "files",
            nargs="*",
            metavar="FILE",
            help="default: the newest record of this folder",
        )
        parser.add_argument(
            "--exit-code",
            type=int,
            metavar="CODE",
            help="explain an exit code, such as 137 or -9",
        )
        parser.add_argument(
            "--with",
            dest="changes",
            metavar="CHANGES",
            help="print the peak that the traced steps would have with these changes together, "
            "such as del,checkpoint:blocks; the explanation lists their names",
        )
        parser.add_argument(
            "--json",
            action="store_true",
            help="the same facts as JSON: bytes, seconds, stable keys",
        )

    def run(self, args: argparse.Namespace) -> int:
        try:
            if args.exit_code is not None:
                if args.files or args.changes is not None:
                    raise UnreadableError(
                        "give files or --exit-code, not both; --with needs a file"
                    )
                parts = [_of_code(args.exit_code)]
            else:
                parts = _of_files(args.files or [newest_record()], args.changes)
        except UnreadableError as error:
            return complain(args.prog, error)
        if args.json:
            facts: dict[str, Any] = {}
            for _, found, key in parts:
                facts |= {key: found} if key and len(parts) > 1 else found
            printed(json.dumps(facts, indent=2))
        else:
            text = "\n\n".join(text for text, _, _ in parts)
            lines = (wrapped(line, columns_of(OUTPUT)) for line in text.splitlines())
            print_safe("\n".join(part for several in lines for part in several))
        return 0


#: the text, which may be printed as it is, the facts of the JSON, and their key where there are
#: others
_Part = tuple[str, dict[str, Any], str]


def _of_code(code: int) -> _Part:
    from memtools._oom.codes import exit_code
    from memtools._oom.words import code_as_json, explained_code

    found = exit_code(code)
    return shown_lines(explained_code(found)), code_as_json(found), ""


def _of_files(names: list[str], changes: str | None) -> list[_Part]:
    """The parts, the text before the record. Raises UnreadableError."""
    from memtools._record.figures import figures_of

    texts = [found for name in names if (found := _text(name)) is not None]
    read_as_text = {name for name, _ in texts}
    records = [name for name in names if name not in read_as_text]
    if len(texts) > 1 or len(records) > 1:
        raise UnreadableError("give one run.mem, one text, or one of each")
    if changes is not None and not records:
        raise UnreadableError("--with needs a run.mem: a text has no data about single tensors")
    parts = [_of_text(*found) for found in texts]
    return parts + [_of_record(figures_of(read(name)), changes) for name in records]


def _of_record(figures: Figures, changes: str | None) -> _Part:
    from memtools._cli.together import together
    from memtools.report._advice import advise
    from memtools.report._explain import explain

    if changes is not None:  # Who asks this has read all else.
        text, facts = together(figures.record, changes)
        return shown_lines(text), {"with": facts}, "record"
    text = explain(figures, columns_of(OUTPUT), colour=has_colours(OUTPUT))
    return text, {**figures.as_json(), "advice": advise(figures)}, "record"


def _of_text(name: str, log: Log) -> _Part:
    from memtools._oom.words import as_json, explained, refusal

    name = "standard input" if name == "-" else shown(name)
    if log.main is None:
        raise UnreadableError(refusal(log, name))
    return shown_lines(explained(log, name)), as_json(log, name), ""


def _text(name: str) -> tuple[str, Log] | None:
    """What a text says; None for a record and for what is not there, which `read` says."""
    from memtools._oom.log import search

    if name == "-":
        if sys.stdin is None:
            raise UnreadableError("standard input is closed")
        return name, search(sys.stdin.buffer)
    try:
        if os.path.isdir(name):
            return None
        # A pipe may be given as well: dmesg, or bash's <(...).
        with open(name, "rb") as file:
            head = file.read(len(MAGIC))
            if head == MAGIC:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise UnreadableError("a record must be a file")
                return None
            return name, search(file, head)
    except (OSError, ValueError):
        return None
