"""`memtools explain`: how a run used memory, and how it ended."""

from __future__ import annotations

import argparse
import json

from memtools._cli.records import UnreadableError, complain, newest_record, printed, read


class Explain:
    """Explain what happened in a run, from its run.mem.

    Prints how it ended (by itself, by an exception, out of memory, or killed), how near to the
    limit memory was, what grew and since when, who holds it and when the limit comes, the phases by
    peak, and what to do next. What grows has a grade: suspect, growing, likely or leak;
    docs/guides/leaks.md explains them ("How to read a finding"). The run may go on, have ended, or
    have been killed. The exit code is 2 for a file that is not a record.
    """

    name = "explain"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "record", nargs="?", help="a run.mem; by default the newest record of this folder"
        )
        parser.add_argument(
            "--json",
            action="store_true",
            help="the same facts as JSON: bytes, seconds, stable keys",
        )

    def run(self, args: argparse.Namespace) -> int:
        from memtools._record.figures import figures_of
        from memtools.report._advice import advise
        from memtools.report._explain import explain

        try:
            figures = figures_of(read(args.record or newest_record()))
        except UnreadableError as error:
            return complain(args.prog, error)
        if args.json:
            printed(json.dumps({**figures.as_json(), "advice": advise(figures)}, indent=2))
        else:
            printed(explain(figures))
        return 0
