"""`memtools report`: make one self-contained HTML page of one or several records."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from memtools._cli.records import UnreadableError, complain, newest_record, printed, read


class Report:
    """Make an HTML page of one record, or of several side by side.

    The page is one file and works without a network: memory over time with phases and events,
    findings, the tensors at the peak, cleanups, and a comparison of the records. It needs jinja2
    (pip install jinja2). The exit code is 2 if a file is not a record.
    """

    name = "report"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "records",
            nargs="*",
            metavar="record",
            help="default: the newest record of this folder",
        )
        parser.add_argument(
            "--redact",
            action="store_true",
            help="mask what looks like a secret in command lines and texts",
        )
        parser.add_argument(
            "-o", "--output", help="the page (default: run.html next to the first run.mem)"
        )
        parser.add_argument("--title", help="the title of the page")
        parser.add_argument(
            "--json", action="store_true", help="print the facts and the page's path as JSON"
        )

    def run(self, args: argparse.Namespace) -> int:
        from memtools import report
        from memtools._base.size import format_bytes
        from memtools._base.text import shown
        from memtools._record.figures import figures_of
        from memtools._record.redact import redacted_record
        from memtools.report._advice import advise

        try:
            paths = args.records or [newest_record()]
            records = [read(path) for path in paths]
        except UnreadableError as error:
            return complain(args.prog, error)
        if args.redact:
            records = [redacted_record(record) for record in records]
        output = args.output or str(Path(paths[0]).with_suffix(".html"))
        written = report.write_report(records, output, title=args.title)
        if args.json:
            figures = [figures_of(record) for record in records]
            found = [{**f.as_json(), "advice": advise(f)} for f in figures]
            printed(json.dumps({"path": output, "bytes": written, "records": found}, indent=2))
        else:
            printed(f"Wrote {shown(output)} ({format_bytes(written)})")
        return 0
