"""A monitor and what goes wrong around it: the program goes on, and its record stays readable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from memtools import MemoryMonitor, read_record
from tests.kit.children import wait_for
from tests.kit.long import LONG
from tests.monitor.root import LIMIT, MIB, Root, root, settle
from tests.monitor.test_life import in_python, last, monitor, threads

__all__ = ["root"]
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mem"


def use_all_of(m: MemoryMonitor) -> None:
    """Every call that a training loop may make."""
    with m.phase("x"):
        m.step()
    m.mark("here")
    m.findings()
    m.metrics(expert=True)
    m.log_memory(1)
    m.get_peak_memory()
    m.check_memory_leak()
    m.summary()


@pytest.mark.slow
def test_sigkills_of_a_monitored_loop(tmp_path: Path) -> None:
    script = str(PROJECT / "tests/monitor/killer.py")
    kills = 1000 if LONG else 200
    done = subprocess.run(
        [sys.executable, script, str(tmp_path), str(kills)],
        capture_output=True, text=True, cwd=PROJECT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lengths, without = map(int, done.stdout.split())
    assert lengths > kills / 10  # they were killed at many places
    assert without <= kills / 4  # before there was a record: of the kills that do not wait for one


def test_records_are_read_while_they_are_written(path: Path) -> None:
    with monitor(path) as m:
        m.step()
        record = read_record(path)
        assert (record.complete, record.written, record.events[0].kind) == (False, True, "start")


# --- what it reads ---


def test_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryMonitor, "_root", str(tmp_path / "nothing"))
    with monitor(tmp_path / "run.mem", limit="1 GiB") as m:
        m.guard(0.01)
        for _ in range(300):
            use_all_of(m)
        wait_for(lambda: m.samples_taken > 5)
        m.step()
        assert m.summary().startswith("Memory Usage:\n  CPU: unknown (System: unknown)")
        assert "memory/host_rss_bytes" not in m.metrics()
    record = read_record(tmp_path / "run.mem")
    assert set(record.samples.values["rss"]) == {2**64 - 1}
    assert record.samples.values["step"][-1] == 301


def test_proc_that_goes_and_comes_back_during_the_run(root: Root) -> None:
    """A probe keeps files open, so that only what it opens anew goes; then all that it reads is
    made unreadable in place."""
    told: list[float] = []
    with monitor(leaks=False) as m:
        m.on_pressure(0.9, lambda p: told.append(p.fraction))
        files = [f for f in root.path.rglob("*") if f.is_file()]
        kept = {file: file.read_text() for file in files}
        for file in files:
            root._put(file, "\0 \xff" * 3)
        seen = m.samples_taken
        wait_for(lambda: m.samples_taken > seen + 3)
        m.step()
        assert m._last is not None
        assert m._last.readings.host().used is None
        for file, text in kept.items():
            root._put(file, text)
        root.use(0.95)
        settle(m, root)
        m.step()
    assert told == [0.9]


@pytest.mark.parametrize("text", ["max", "9223372036854771712", "0", "", "-1", "many"])
def test_a_group_whose_limit_is_none(root: Root, text: str) -> None:
    root._put(root.group / "memory.max", text + "\n")
    with monitor() as m:
        m.guard(0.95)
        wait_for(lambda: m.samples_taken > 3)
        if text != "0":  # which is a limit, and passed
            use_all_of(m)
            assert m._last is not None
            assert m._last.sampler.limit() == (8 << 30, "machine")


def test_a_limit_that_changes_at_run_time_moves_the_guard(root: Root) -> None:
    told: list[int] = []
    with monitor() as m:
        m.on_pressure(0.9, lambda p: told.append(p.limit_bytes))
        root.use(0.6)
        settle(m, root)
        m.step()
        assert told == []
        root._put(root.group / "memory.max", f"{LIMIT * 6 // 10}\n")
        wait_for(lambda: m._last.sampler.limit() == (LIMIT * 6 // 10, "cgroup"))  # type: ignore[union-attr]
        m.step()
        assert told == [LIMIT * 6 // 10]


def test_a_limit_below_what_is_used_already(root: Root, path: Path) -> None:
    told: list[int] = []
    root.use(0.5)
    with monitor(path, limit=1 * MIB) as m:
        m.on_pressure(0.9, lambda p: told.append(p.used_bytes))
        seen = m.samples_taken
        wait_for(lambda: m.samples_taken > seen + 2)
        m.step()
        m.step()
        use_all_of(m)
        assert told == [root.used]
        assert "System: 50000." in m.summary() or "System: 49999." in m.summary()
        assert m._last is not None
        assert m._last.sampler.interval_ns >= 1_000_000  # never faster than that for it
    assert any(e.kind == "pressure" for e in read_record(path).events)


def test_a_tenth_of_a_millisecond(path: Path) -> None:
    with monitor(path, interval_ms=0.1) as m:
        wait_for(lambda: m.samples_taken > 500)
        use_all_of(m)
    assert read_record(path).total == m.samples_taken


# --- the record's place ---


def test_a_directory_that_goes_during_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with monitor(folder / "run.mem") as m:
        use_all_of(m)
        shutil.rmtree(folder)
        use_all_of(m)
        assert m._last is not None
        assert m._last.log.writes
    assert not folder.exists()
    with pytest.raises(FileNotFoundError, match="make its directory first"):
        m.start()
    folder.mkdir()
    with m:
        m.step()
    assert last(folder / "run.mem") == "exit: normal"


CUT = """
with memtools.MemoryMonitor(sys.argv[1], 1, device="cpu") as m:
    def sample():
        seen = m.samples_taken
        while m.samples_taken < seen + 5:
            m.step()
    sample()
    os.truncate(sys.argv[1], int(sys.argv[2]))
    sample()
    for n in range(300):
        with m.phase(f"phase {n}"):
            m.step()
    m.mark("after")
    sample()
    print(m.step_count > 300, m._last.log.writes)
"""
HANDLER = "import faulthandler; faulthandler.enable()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "handler"), [(0, ""), (4096, HANDLER), (100_000, ""), (0, HANDLER)]
)
def test_a_record_that_is_cut_during_the_run(path: Path, length: int, handler: str) -> None:
    done = in_python(handler + CUT, path, length)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr
    assert done.stderr.count("nothing more is recorded: [Errno 5] the file was cut off") == 1
    assert "Bus error" not in done.stderr
    with pytest.raises(ValueError, match="not a whole record|not a record"):
        read_record(path)


@pytest.mark.slow
def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", tmp_path]).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        with pytest.raises(OSError, match=r"No space left on device; free space there.*log=None"):
            monitor(tmp_path / "run.mem").start()
        assert os.listdir(tmp_path) == []
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        with pytest.raises(OSError, match="the file system is read-only; name another place"):
            monitor(tmp_path / "run.mem").start()
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert threads() == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_during_the_run(tmp_path: Path) -> None:
    """All space was taken at the start: the record has every sample."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", tmp_path]).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        with monitor(tmp_path / "run.mem") as m:
            with suppress(OSError), (tmp_path / "fill").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            assert os.statvfs(tmp_path).f_bavail == 0
            wait_for(lambda: m.samples_taken > 20)
            use_all_of(m)
            m.mark("all the same")
        record = read_record(tmp_path / "run.mem")
        marks = [event.text for event in record.events if event.kind == "mark"]
        assert (record.total, marks) == (m.samples_taken, ["here", "all the same"])
    finally:
        subprocess.run(["umount", tmp_path], check=True)
