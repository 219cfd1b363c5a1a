"""`memtools compare`: compare two records, and check bounds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memtools._cli.records import UnreadableError, complain, printed, read

if TYPE_CHECKING:
    from memtools._record.bounds import Bound, Judgement
    from memtools._record.compare import Comparison

EXIT_BROKEN, EXIT_UNKNOWN = 1, 2
HEAD = ("", "base", "new", "difference", "bound")


def bounds(text: str) -> list[Bound]:
    from memtools._record.bounds import parse_bounds

    try:
        return parse_bounds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Compare:
    """Compare two runs, and fail if memory got worse.

    memtools compare base.mem new.mem   a table
    memtools compare base.mem new.mem --fail peak=+5%,growth=+1KiB/step,leak

    Differences that two runs of one script also have are shown as "same" or "within noise".

    A bound is a rise above base (peak=+5%, growth=+1KiB/step, seconds=+10%) or a maximum for new
    (peak=2GiB, seconds=0.5s). It is on the peak (of what counts against the limit), process,
    device, growth, seconds (per step) or phase:NAME. The bound "leak" fails on a leak that base
    does not have.

    The exit code is 1 if a bound is broken, and 2 if one cannot be judged or a file is not a
    record.
    """

    name = "compare"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("base", help="the record to compare with")
        add("new", help="the record to judge")
        add(
            "--fail",
            type=bounds,
            action="append",
            default=[],
            metavar="BOUNDS",
            help="comma-separated bounds; may be repeated",
        )
        add(
            "--same-script",
            action="store_true",
            help="refuse runs of different programs, instead of printing a note",
        )
        add("--json", action="store_true", help="all figures as JSON: bytes, seconds, stable keys")

    def run(self, args: argparse.Namespace) -> int:
        from memtools._record.bounds import judge
        from memtools._record.compare import compare
        from memtools._record.figures import figures_of

        try:
            compared = compare(figures_of(read(args.base)), figures_of(read(args.new)))
            if args.same_script and not compared.same_script:
                raise UnreadableError(_different(compared))
        except UnreadableError as error:
            return complain(args.prog, error)
        judged = judge(compared, [bound for several in args.fail for bound in several])
        broken = any(one.result == "broken" for one in judged)
        unknown = [one.text for one in judged if one.result == "unknown"]
        code = EXIT_BROKEN if broken else EXIT_UNKNOWN if unknown else 0
        if args.json:
            found = {**compared.as_json(), "bounds": [one.as_json() for one in judged]}
            printed(json.dumps({**found, "exit_code": code}, indent=2))
        else:
            show(compared, judged)
        for text in unknown:
            complain(args.prog, text)
        return code


def _different(compared: Comparison) -> str:
    commands = [
        f"{one.path}: {one.command or 'no command'}" for one in (compared.base, compared.new)
    ]
    return (
        f"these may be runs of different programs ({'; '.join(commands)}); compare runs of one "
        "script, or leave out --same-script"
    )


# --- the table ------------------------------------------------------------------------------------


def show(compared: Comparison, judged: Sequence[Judgement]) -> None:
    from memtools._base.text import aligned

    rows = list(_rows(compared, judged))
    table = aligned([HEAD[: len(rows[0])], *rows], right=(1, 2), indent="")
    lines = [*_leaks(compared), *_verdict(judged)]
    printed("\n".join([*_runs(compared), "", *table, *([""] if lines else []), *lines]))


def _runs(compared: Comparison) -> Iterator[str]:
    from memtools._base.text import count, duration

    for side, one in (("base", compared.base), ("new", compared.new)):
        length = duration(one.seconds) + (f", {count(one.steps, 'step')}" if one.steps else "")
        yield f"{side + ':':5} {one.path}: {one.command or 'no command recorded'}, {length}"
    yield from (f"note: {note}" for note in compared.notes)


def _rows(compared: Comparison, judged: Sequence[Judgement]) -> Iterator[tuple[str, ...]]:
    from memtools._record.compare import difference_in_words, in_words

    for row in compared.rows:
        cells = [row.label, in_words(row.base, row.unit), in_words(row.new, row.unit)]
        cells.append(difference_in_words(row))
        if judged:
            of = [one for one in judged if (one.bound.name, one.label) == (row.name, row.label)]
            cells.append(", ".join(f"{one.bound.text} {_result(one)}" for one in of))
        yield tuple(cells)


def _result(one: Judgement) -> str:
    return "cannot be judged" if one.result == "unknown" else one.result


def _leaks(compared: Comparison) -> Iterator[str]:
    for change in compared.leaks:
        found = change.new or change.base
        if found is None:
            continue
        line = f"{change.change}: {found.without_forecast()}"
        both = change.base is not None and change.new is not None
        if both and change.change != "same" and change.base is not None:
            line += f"; in base {change.base.without_forecast()}"
        yield line


def _verdict(judged: Sequence[Judgement]) -> Iterator[str]:
    for one in judged:
        if one.result == "broken":
            yield f"broken: {one.text}"
        elif one.doubtful:
            yield f"held, but too uncertain (run more steps): {one.text}"
    if judged and all(one.result == "held" for one in judged):
        yield "all bounds hold"
