"""`memtools export`: write a record in a format that other programs read."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable
from typing import IO, BinaryIO

from memtools._base.file import replace_file
from memtools._base.text import shown
from memtools._cli.records import newest_record, printed, read

FORMATS = {"jsonl": ".jsonl", "trace": ".trace.json"}


class Export:
    """Write a record as JSON lines, or as a trace for Perfetto.

    jsonl: one object a line, its "type" first: the record, then its buckets (the whole run),
    samples (the newest, one by one), events and phases. trace: Chrome's trace format, which
    ui.perfetto.dev and chrome://tracing open: a counter for each column, and a span for each event
    with a duration. The run may go on or have been killed. A file that exists is replaced only with
    --force, and a failure leaves no part of a file.
    """

    name = "export"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "record", nargs="?", metavar="RECORD", help="by default the newest *.mem here"
        )
        parser.add_argument("--to", choices=sorted(FORMATS), required=True, help="the format")
        parser.add_argument(
            "-o",
            "--output",
            metavar="FILE",
            help="where to; - is the standard output; by default the record's name with .jsonl or "
            ".trace.json",
        )
        parser.add_argument("--force", action="store_true", help="replace a file that exists")
        parser.add_argument("--json", action="store_true", help="print what was written as JSON")

    def run(self, args: argparse.Namespace) -> int:
        name = args.record or newest_record()
        record = read(name)
        write = record.to_jsonl if args.to == "jsonl" else record.to_chrome_trace
        if args.output == "-":
            as_utf8(sys.stdout.buffer, write)
            return 0
        path = args.output or os.path.splitext(name)[0] + FORMATS[args.to]
        save(path, write, args.force)
        if args.json:
            size = os.stat(path).st_size
            facts = {"wrote": path, "format": args.to, "bytes": size, "samples": record.total}
            print(json.dumps({**facts, "complete": record.complete}))
        else:
            printed(f"Wrote {shown(path)}")
        return 0


def as_utf8(file: BinaryIO, write: Callable[[IO[str]], None]) -> None:
    """Let `write` write JSON to `file`, whatever the terminal's encoding is."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="\n")
    try:
        write(text)
        text.flush()
    finally:
        text.detach()  # Otherwise it would close the file.


def save(path: str, write: Callable[[IO[str]], None], force: bool) -> None:
    """Write the file in one step. Raises FileExistsError if it exists and `force` is False."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, a device
        with open(path, "wb") as file:
            as_utf8(file, write)
        return
    if not force and os.path.lexists(path):
        raise FileExistsError(f"{path} is there already; pass --force to write over it")
    replace_file(path, lambda file: as_utf8(file, write), mode=0o600)
