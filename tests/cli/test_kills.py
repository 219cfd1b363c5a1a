"""A run that a signal ends, at any moment: its record can be read, is not called complete, and
tells the signal. Some cases in `make test`, all of them at many moments in `make fuzz`."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memtools
from tests.cli.runs import RUN
from tests.kit.long import LONG

#: those that `memtools run -- command` passes on, and others
PASSED = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM")
OTHERS = ("KILL", "SEGV", "ABRT", "BUS", "XCPU", "FPE")
LOOP = """
import random
kept = [bytes(1000)]
print("ready", flush=True)
while True:
    kept = [bytes(random.randrange(9999)) for _ in range(99)]
"""
MONITOR = "import memtools\nmonitor = memtools.MemoryMonitor('run.mem')\nmonitor.start()\n"
WAYS = {
    "run": [*RUN, "-o", "run.mem", "loop.py"],
    "run, quiet": [*RUN, "-q", "-o", "run.mem", "loop.py"],
    "run --": [*RUN, "-o", "run.mem", "--", sys.executable, "loop.py"],
    "monitor": [sys.executable, "monitored.py"],
}


CASES = [(way, name) for way in WAYS for name in PASSED + OTHERS * (way != "run --")]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "name"), CASES if LONG else CASES[::6])
def test_a_record_of_a_run_that_a_signal_ends(way: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "monitored.py").write_text(
        MONITOR + LOOP.replace("while True:", "while True:\n    monitor.step()")
    )
    number, moment = signal.Signals[f"SIG{name}"], random.Random()
    for _ in range(13 if LONG else 1):
        (tmp_path / "run.mem").unlink(missing_ok=True)
        pipe = subprocess.PIPE
        with subprocess.Popen(WAYS[way], cwd=tmp_path, stdout=pipe, stderr=pipe) as process:
            is_ready = moment.random() < 0.5 or not LONG
            if is_ready:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            time.sleep(0.4 * moment.random())  # any moment will do
            process.send_signal(number)
            try:
                process.communicate(timeout=60)
            finally:
                process.kill()
        with contextlib.suppress(FileNotFoundError):  # so early that there is none
            record = memtools.read_record(tmp_path / "run.mem")
            ends = [event.text for event in record.events if event.kind == "end"]
            assert not record.written
            if not is_ready:
                continue
            if name == "KILL":
                assert (record.complete, ends) == (False, [])
            elif way == "run --":
                assert ends == [f"exit: killed by {number.name}"]
            elif name == "INT":
                assert ends == ["exit: exception KeyboardInterrupt"]
            else:
                assert (record.complete, ends) == (False, [f"exit: killed by {number.name}"])
