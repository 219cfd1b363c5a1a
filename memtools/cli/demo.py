"""`memtools demo`: the rescues. Each example trains as people write it, and then with memtools."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from memtools import MemtoolsError
from memtools._base.size import format_bytes
from memtools.cli.demo_cases import CASES, Case, examples_folder, missing_packages
from memtools.cli.records import printed


class Demo:
    """Train real models as people write them, and again with memtools.

    Each run has a process of its own and the same stated limit. The demo says in words what
    happened to each, compares every loss and sample bit for bit, and writes a page that begins with
    the same sentences and a picture of each rescue. It needs what the extra `examples` names, and
    the package of a language model; what is missing is named before anything runs.

    Where an example fails otherwise than by memory, its row says why and the others go on. The exit
    code is 1 then, and if a run with memtools does not finish, or if its losses or samples are not
    the same.
    """

    name = "demo"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        length = parser.add_mutually_exclusive_group()
        length.add_argument(
            "--quick", action="store_true", help="at most 12 minutes on two cores (the default)"
        )
        length.add_argument(
            "--full", action="store_true", help="longer runs, all layers, and one more example"
        )
        names = [case.name for case in CASES]
        add("--only", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
        add("--updates", type=int, help="of each run; default: each example's own")
        add("--seed", type=int, default=0, help="of all random numbers; default 0")
        add("-o", "--report", metavar="PATH", type=Path, default=Path("report.html"))
        add("--records", metavar="FOLDER", type=Path, help="keep the records there")
        add("--json", metavar="PATH", type=Path, help="write all results there")
        add("extra", nargs="*", help="after --: more options for the example that --only names")

    def run(self, args: argparse.Namespace) -> int:
        if args.extra and args.only is None:
            print(
                f"{args.prog}: options after -- are for one example: name it with --only",
                file=sys.stderr,
            )
            return 2
        cases = [case for case in CASES if _wanted(case, args)]
        if missing := missing_packages(cases, args.extra):
            raise MemtoolsError(missing)
        from memtools.cli import demo_page, demo_runs

        demo_page.check_target(args.report)
        done = demo_runs.run_cases(
            cases,
            examples_folder(),
            seed=args.seed,
            full=args.full,
            updates=args.updates,
            extra=args.extra,
            records=args.records,
        )
        size = demo_page.write_page(args.report, *demo_runs.page_of(done))
        printed(f"Wrote {args.report} ({format_bytes(size)})")
        failed = [one.case.script for one in done if one.failed]
        if failed:
            print(f"{args.prog}: failed: {', '.join(failed)}; the page says why", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps({one.case.name: one.results for one in done}))
        return 0 if all(one.good for one in done) else 1


def _wanted(case: Case, args: argparse.Namespace) -> bool:
    if args.only is not None:
        return bool(case.name == args.only)
    return args.full or not case.only_full
