"""`memtools watch`: a live view of a record that is being written."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from memtools import MemtoolsError
from memtools._base.notebook import is_in_cell
from memtools._cli.records import MAGIC, newest_record, printed, read

if TYPE_CHECKING:
    from memtools._cli.frame import Frame

_MADE = re.compile(r"(.*/)\.(.+)\.\d+\.\d+\.new(?: \(deleted\))?", re.S)
NO_RICH = "for the live view run python -m pip install rich"


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0.05 <= value <= 3600:
        return value
    raise argparse.ArgumentTypeError(f"an interval must be 0.05 to 3600 seconds, got {text}")


class Watch:
    """Follow a running program: memory, its limit, findings, events.

    memtools watch        the newest record of this folder
    memtools watch PATH   a record; of a run that has ended, its last state
    memtools watch PID    the record that this process writes

    It draws a screen if rich is installed and stdout is a terminal. Otherwise it prints a line per
    update and per event. It stops when the run ends. Ctrl-C stops the view, not the run.
    """

    name = "watch"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "target",
            nargs="?",
            metavar="PATH|PID",
            help="default: the newest record of this folder",
        )
        add("--once", action="store_true", help="print the state once and exit")
        add(
            "--json",
            action="store_true",
            help="print one JSON object per line",
        )
        add(
            "--interval",
            type=seconds,
            default=1.0,
            metavar="S",
            help="seconds between updates (default: 1)",
        )

    def run(self, args: argparse.Namespace) -> int:
        path = find_record(args.target) if args.target else newest_record()
        frames = follow(path, args.interval, args.once)
        try:
            with view_for(args) as show:
                for frame in frames:
                    show(frame)
        except KeyboardInterrupt:  # the usual way to leave
            pass
        return 0


def find_record(target: str) -> str:
    """Return a path that exists, or the path of the record that a process has mapped."""
    if os.path.exists(target):
        return target
    if not target.isdecimal():
        raise MemtoolsError(f"there is no record {target}; memtools run writes one")
    try:
        lines = Path("/proc", target, "maps").read_text(errors="surrogateescape").splitlines()
    except ProcessLookupError:
        lines = []
    except PermissionError:
        raise MemtoolsError(
            f"process {target} belongs to another user; give the path of its record"
        ) from None
    except FileNotFoundError:
        raise MemtoolsError(f"there is no process {target}") from None
    for line in lines:
        path = record_in(line)
        if path is not None:
            return path
    raise MemtoolsError(f"process {target} writes no record; start it with memtools run")


def record_in(line: str) -> str | None:
    """The record in a line of /proc/<pid>/maps; None for another file. A record is made under a
    temporary name, which the kernel goes on to show."""
    parts = line.split(maxsplit=5)
    if len(parts) < 6:
        return None
    made = _MADE.fullmatch(parts[5])
    path = f"{made[1]}{made[2]}" if made else parts[5]
    try:
        with open(path, "rb") as file:
            same = os.fstat(file.fileno()).st_ino == int(parts[4])
            return path if same and file.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None


def follow(path: str, interval: float, once: bool) -> Iterator[Frame]:
    """Yield a frame now and after each interval, until the end of the run."""
    from memtools._cli.frame import GrowthLines, frame_of

    growth = GrowthLines()
    while True:
        frame = frame_of(read(path), growth)
        yield frame
        if once or frame.state != "running":
            return
        time.sleep(interval)


# --- how a frame is shown ------------------------------------------------------------------------

Show = Callable[["Frame"], None]


def print_lines() -> Show:
    """A function that prints a line each time, and one for each event when it comes."""
    seen = 0

    def show(frame: Frame) -> None:
        nonlocal seen
        new, seen = frame.events_total - seen, frame.events_total
        printed(frame.line())
        for event in frame.events[-new:] if new > 0 else []:
            printed(event.line())
        if frame.state != "running":
            printed(f"{frame.figures.path}: {frame.state_words()}")

    return show


def view_for(args: argparse.Namespace) -> AbstractContextManager[Show]:
    """Return the view that fits the options and the terminal: while it is open, it gives a function
    that shows a frame."""
    if args.json:
        return nullcontext(lambda frame: print(json.dumps(frame.as_json()), flush=True))
    draws = sys.stdout.isatty() and (args.once or not is_in_cell())
    if draws and importlib.util.find_spec("rich") is None:
        print(f"{args.prog}: {NO_RICH}", file=sys.stderr)
        draws = False
    if not draws:
        return nullcontext((lambda frame: printed(frame.block())) if args.once else print_lines())
    from memtools._cli import watch_live

    return nullcontext(watch_live.print_once) if args.once else watch_live.live()
