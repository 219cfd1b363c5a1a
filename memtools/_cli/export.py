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
    """Export a record as JSON lines, or as a trace for Perfetto.

    jsonl: one object per line, with its "type" first: the record, buckets (the whole run), samples
    (the newest), events and phases. trace: Chrome's trace format, for ui.perfetto.dev and
    chrome://tracing, with a counter for each column and a span for each event that has a duration.
    The run may still be going, or may have been killed. An existing file is replaced only with
    --force, and a failure leaves no partial file.
    """

    name = "export"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "record", nargs="?", metavar="RECORD", help="default: the newest *.mem of this folder"
        )
        parser.add_argument("--to", choices=sorted(FORMATS), required=True, help="the format")
        parser.add_argument(
            "-o",
            "--output",
            metavar="FILE",
            help="the file to write; - is standard output (default: the record's name with .jsonl "
            "or .trace.json)",
        )
        parser.add_argument("--force", action="store_true", help="replace an existing file")
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
        raise FileExistsError(f"{path} exists; pass --force to replace it")
    replace_file(path, lambda file: as_utf8(file, write), mode=0o600)
