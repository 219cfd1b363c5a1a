"""What stands is in the record of a run that is killed, however many events came since."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from memtools import LeakFinding, read_record
from memtools._monitor.log import EVENTS, Log
from memtools._monitor.reporter import Listeners, Reporter
from memtools._record import kinds
from memtools._record.events import start_of
from memtools._record.figures import figures_of
from tests.kit.ownprocess import ENV

KILLED = """
    import os, signal, sys
    from memtools import MemoryMonitor

    class Trainer:
        losses = []

    monitor = MemoryMonitor(sys.argv[1], device="cpu", limit="64 GiB", name="kept")
    monitor.start()
    for step in range(600):
        Trainer.losses.append(bytearray(65536))
        monitor.step()
        if step >= 500:
            for i in range(100):
                monitor.mark(sys.argv[2] * int(sys.argv[3]))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "times"), [("an event", 1), ("a long one ", 200)])
def test_a_killed_run_has_its_findings_behind_many_events(
    tmp_path: Path, text: str, times: int
) -> None:
    path = tmp_path / "run.mem"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path), text, str(times)]
    done = subprocess.run(command, env=ENV, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    record = read_record(path)
    assert record.events_total > 8 * EVENTS
    assert record.events[0].step is not None
    assert record.events[0].step > 500, "what was said when it was found is gone"
    assert start_of(record).name == "kept"
    (leak,) = figures_of(record).verdict.findings
    assert leak.holder == "list Trainer.losses"
    assert leak.rate_bytes == pytest.approx(65536, rel=0.05)
    assert leak.grade in ("likely", "leak")
    assert leak.first_step is not None
    assert leak.first_step <= 64
    assert leak.steps_left is not None


class Writer:
    """A RecordWriter that keeps what it is told."""

    path, closed = "run.mem", False

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.findings: list[LeakFinding] = []

    def event(self, kind: str, what: bytes | str, **_: object) -> None:
        self.kinds.append(kind)
        if isinstance(what, bytes):
            event: Any = kinds.read(kind, what)[0]
            self.findings.append(event)


def test_what_lasts_may_fail() -> None:
    def fail() -> list[tuple[str, object]]:
        raise MemoryError("none left")

    log = Log(Writer(), lambda: 0)  # type: ignore[arg-type]
    for _ in range(EVENTS // 2 - 1):
        log.event("mark", "text")
    log.pinned_events = fail
    with pytest.warns(RuntimeWarning, match="the findings could not be recorded again: none left"):
        log.event("mark", "text")
    log.event("mark", "text")
    assert log.writes


def test_a_rate_that_has_changed_is_written_again() -> None:
    writer = Writer()
    reporter = Reporter(Log(writer, lambda: 0), Listeners(), lambda *_: None)  # type: ignore[arg-type]
    one = LeakFinding("growing", holder="list a", kind="list", rate_bytes=100.0)
    reporter.report(one)
    for rate in (105.0, 95.0, 112.0, 118.0, 90.0):
        reporter.renew([LeakFinding("growing", holder="list a", kind="list", rate_bytes=rate)])
    assert [found.rate_bytes for found in writer.findings] == [100.0, 112.0, 90.0]
