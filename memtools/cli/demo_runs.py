"""Runs the examples of the demo in all their ways, each in a process of its own."""

from __future__ import annotations

import codecs
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memtools._base.oom import says_out_of_memory
from memtools._base.size import parse_bytes
from memtools._base.text import shown
from memtools.cli.demo_cases import PACKAGE, Case, missing_module
from memtools.cli.demo_page import Rescue, generation_peak, passed_after, rescue
from memtools.cli.demo_words import Outcome, sentences
from memtools.cli.records import printed
from memtools.record.events import signal_name
from memtools.record.figures import figures_of
from memtools.record.record import Record, read_record

UPDATE = re.compile(r"update (\d+) of (\d+), (.*)")
Result = dict[str, Any]
Show = Callable[[str], None]  # takes each line that a running example prints


@dataclass
class Done:
    """A case that was run: the results, the records and the outcome of each way."""

    case: Case
    results: dict[str, Result] = field(default_factory=dict)
    records: list[Record | None] = field(default_factory=list)  # None: it left none
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a run ended by something else than memory, before its end."""
        return any(outcome.failed for outcome in self.outcomes)

    @property
    def good(self) -> bool:
        """Whether no run failed, and memtools did what it is there for, with the same losses where
        those are asked."""
        *_, last = self.outcomes
        return not self.failed and last.ended == "finished" and last.same in ("yes", "")


def run_cases(
    cases: list[Case],
    examples: Path,
    *,
    seed: int,
    full: bool,
    updates: int | None,
    extra: list[str],
    records: Path | None,
) -> list[Done]:
    """Run each case in all its ways, one after the other, and print what happened to each.

    Args:
        cases: what is run.
        examples: the folder that the examples lie in.
        seed: of all random numbers.
        full: whether to add the options that make a case longer.
        updates: of each run; None: each example's own.
        extra: more options for the examples.
        records: the folder that records are kept in; None: they go with the results.

    An example that fails otherwise than by memory says so in its outcome; the others are still run.
    """
    done = []
    with tempfile.TemporaryDirectory() as temporary:
        kept = records or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(cases, start=1):
            head = f"{number} of {len(cases)}: {case.title} ({case.script}, seed {seed})"
            printed(f"{head}\n{case.intro}")
            options = ["--seed", str(seed), *(case.full if full else ()), *extra]
            if updates is not None:
                options += ["--updates", str(updates)]
            if case.model and "--model" not in extra:
                options += ["--model", str(Path(temporary, "model"))]  # the first one makes it
            if case.prepare:  # where it fails, so do the runs, which say why
                subprocess.run([sys.executable, str(examples / case.prepare)], check=False)
            done.append(run_case(case.at_full_length() if full else case, options, examples, kept))
            printed("\n" + told(done[-1]) + "\n")
    return done


def run_case(case: Case, options: list[str], examples: Path, kept: Path) -> Done:
    """Run one example in all its ways; the records go to the folder `kept`."""
    done = Done(case)
    for name, way in case.ways.items():
        record = kept / f"{case.name}-{name}.mem"
        with progress(name) as show:
            result = run_way(case, [*way.options, *options], examples, show, record)
        done.results[name] = result
        done.records.append(record_of(record))
        whole = [one for one in done.results.values() if "failed" not in one]
        first = whole[0] if whole else result
        done.outcomes.append(outcome(case, name, done.records[-1], result, first))
    return done


def record_of(path: Path) -> Record | None:
    """The record of a run; None if it failed before it had one."""
    try:
        return read_record(path)
    except (OSError, ValueError):
        return None


def run_way(case: Case, options: list[str], examples: Path, show: Show, record: Path) -> Result:
    """Run an example to its end in a process of its own, which writes a record.

    Returns what it wrote as JSON, or what is known of a run that the kernel killed. If it failed
    otherwise, "failed" says how and why.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, updates = Path(folder, "result.json"), 0
        # Without the keys that would switch the monitor off or set it otherwise.
        kept = {name: v for name, v in os.environ.items() if not name.startswith("MEMTOOLS")}
        environment = {**kept, "OMP_WAIT_POLICY": "passive"}
        # By its file: under -m the folder that one is in would be searched for memtools first.
        run = [str(PACKAGE / "__main__.py"), "run"]
        monitor = [*run, "--quiet", "--log", str(record), "--limit", case.limit]
        command = [str(examples / case.script), *options, "--progress", "--json", str(out)]
        with subprocess.Popen(
            [sys.executable, *monitor, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            errors = ErrorOutput(process)
            for line in process.stdout or ():
                show(line.rstrip())
                if match := UPDATE.fullmatch(line.rstrip()):
                    updates = int(match[1])
            errors.join()
        if process.returncode == -signal.SIGKILL:
            return {"ended": f"killed in update {updates + 1}", "losses": []}
        told_by_itself = case.enforced and out.exists()
        by = by_memory(errors.last_error) if case.enforced and process.returncode != 0 else ""
        if by and not told_by_itself:
            return {"ended": f"{by} in update {updates + 1}", "losses": []}
        if (process.returncode != 0 and not told_by_itself) or not out.exists():
            failed = failure(process.returncode, errors.reason)
            return {"ended": "failed", "failed": failed, "losses": []}
        result: Result = json.loads(out.read_text())
    return result


class ErrorOutput:
    """Passes on what a process writes to stderr as it comes, and keeps the end of it."""

    KEPT = 64 * 1024

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._kept = ""
        self._thread = threading.Thread(target=self._pass_on, args=(process,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the process has closed its stderr."""
        self._thread.join()

    @property
    def reason(self) -> str:
        """The line that says why the process failed: that of the last exception, or else the last
        line; "" if nothing was written."""
        lines = self.last_error
        after = [line for line in lines[1:] if not line.startswith(" ")]
        return after[0] if after else "".join(lines[-1:])

    @property
    def last_error(self) -> list[str]:
        """The last exception and what follows, or else the last line. The error of a worker brings
        the one that the worker had."""
        lines = [line.rstrip() for line in re.split("[\r\n]+", self._kept) if line.strip()]
        for number in range(len(lines) - 1, -1, -1):
            if lines[number].startswith("Traceback (most recent call last)"):
                return lines[number:]
        return lines[-1:]

    def _pass_on(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # Not by line: a bar of progress ends its line by a carriage return.
        while chunk := os.read(process.stderr.fileno(), 4096):
            text = decode(chunk)
            self._kept = (self._kept + text)[-self.KEPT :]
            sys.stderr.write(text)
            sys.stderr.flush()


def by_memory(error: list[str]) -> str:
    """How a run ended whose last error is of memory; "" if it is another one."""
    text = "\n".join(error)
    if re.search("DataLoader worker .*(killed by signal: Killed|exited unexpectedly)", text):
        return "a worker was killed"
    if re.search("rebuild_storage_fd(.|\n)*Connection", text):  # while its batch was taken over
        return "a worker was killed"
    # Lines that begin with a space are the program's own.
    lines = [line.partition(": ") for line in error if not line.startswith(" ")]
    is_out = any(says_out_of_memory(name, said) for name, _, said in lines)
    return "out of memory" if is_out else ""


def failure(status: int, reason: str) -> str:
    """How a process ended that wrote no result, why, and what to install if that is the reason."""
    how = "Ended without a result"
    if status:
        how = f"Failed with exit status {status}"
    if status < 0:
        how = f"Ended by {signal_name(-status)}"
    said = f"{how}: {shown(reason)}" if reason else how
    return " ".join(
        filter(None, [said if said.endswith((".", "!")) else f"{said}.", missing_module(reason)])
    )


def outcome(case: Case, name: str, record: Record | None, result: Result, first: Result) -> Outcome:
    """The facts of one run, out of its record and of what it wrote itself."""
    figures = None if record is None else figures_of(record)
    limit = parse_bytes(case.limit, "the limit")
    peak = 0
    if figures is not None:
        peak = (figures.job_peak_bytes if case.workers else figures.peak_bytes) or 0
    if case.workers:  # the monitor reads them rarely; the example itself does so all the time
        peak = max([peak, *result.get("samples", {}).get("held_bytes", [])])
    if record is None or "failed" in result:
        failed = result.get("failed", "It left no record.")
        return Outcome(
            way=name,
            label=case.ways[name].label,
            ended="failed",
            updates=0,
            seconds=record.seconds if record else 0.0,
            pace=0.0,
            peak_bytes=peak,
            limit_bytes=limit,
            enforced=case.enforced,
            failed=failed,
        )
    updates = len(result["losses"])
    ended = result.get("ended", "finished")
    compared = case.compared and result is not first and ended == "finished"
    return Outcome(
        way=name,
        label=case.ways[name].label,
        ended=ended,
        updates=updates,
        seconds=record.seconds,
        pace=result.get("seconds", record.seconds) / max(1, updates),
        peak_bytes=peak,
        limit_bytes=limit,
        same=same(first, result) if compared else "",
        growth_bytes=None if case.enforced else result.get("growth_bytes_per_1000_updates"),
        passed_after=None if case.enforced else passed_after(record, limit),
        generation_peak=generation_peak(record),
        generation_cpu=result.get("sampling_cpu_seconds"),
        enforced=case.enforced,
        free=case.ways[name].free,
        workers=case.workers,
        remark=result.get("remark", ""),
    )


def first_difference(one: Result, other: Result) -> int | None:
    """The first update, from 1, whose losses differ in any bit; None if there is none."""
    pairs = zip(one["losses"], other["losses"], strict=False)
    for update, (a, b) in enumerate(pairs, start=1):
        if a != b:
            return update
    lengths = len(one["losses"]), len(other["losses"])
    return None if lengths[0] == lengths[1] else min(lengths) + 1


def same(one: Result, other: Result) -> str:
    """ "yes", or where two runs differ; only models that sample have "tokens"."""
    update = first_difference(one, other)
    if update is not None:
        return f"they differ from update {update}"
    return "yes" if one.get("tokens") == other.get("tokens") else "the samples differ"


@contextmanager
def progress(way: str) -> Iterator[Show]:
    """A live bar on a terminal where rich is installed, otherwise plain lines."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        plain = True
    else:
        plain = not sys.stdout.isatty()
    if plain:
        yield plain_lines(way)
        return
    columns = (TextColumn("  {task.fields[way]:<10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}")) as bar:
        task = bar.add_task("starting", total=None, way=way)

        def show(line: str) -> None:
            if match := UPDATE.fullmatch(line):
                made, total, state = match.groups()
                bar.update(task, completed=int(made), total=int(total), description=state)
            else:
                bar.console.print(f"  {line}", markup=False, highlight=False)

        yield show


def plain_lines(way: str) -> Show:
    """Pass every line on, except the updates that do not reach another sixth of the run."""
    shown = 0

    def show(line: str) -> None:
        nonlocal shown
        if match := UPDATE.fullmatch(line):
            sixth = 6 * int(match[1]) // int(match[2])
            if sixth == shown:
                return
            shown = sixth
        printed(f"  {way:<10} {line}")

    return show


def told(done: Done) -> str:
    """What happened to each run of a case, one line each."""
    limit = "" if done.case.enforced else f" (the stated limit is {done.case.limit})"
    lines = [f"  {one.label}: {sentences(one)}" for one in done.outcomes]
    return "\n".join([f"{done.case.title}{limit}:", *lines])


def page_of(done: list[Done]) -> tuple[list[Record], list[Rescue]]:
    """All records, and what the page begins with."""
    records: list[Record] = []
    rescues: list[Rescue] = []
    for one in done:
        case = one.case
        rescues.append(rescue(case.title, case.intro, len(records), one.records, one.outcomes))
        records += [record for record in one.records if record is not None]
    return records, rescues
