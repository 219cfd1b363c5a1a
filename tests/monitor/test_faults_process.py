"""A monitor and other processes, clocks and limits of the system: the program goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import memtools
from memtools import read_record
from tests.kit.children import wait_for
from tests.monitor.root import root
from tests.monitor.test_faults import use_all_of
from tests.monitor.test_life import in_python, last, monitor

__all__ = ["root"]

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mem"


def run_children(m: memtools.MemoryMonitor, count: int) -> None:
    """Twenty at a time, to the end of the last, and until the monitor has seen that."""
    others = len(psutil.Process().children(recursive=True))
    for _ in range(count // 20):
        for child in [os.posix_spawn("/bin/true", ["true"], {}) for _ in range(20)]:
            m.step()
            os.waitpid(child, 0)
    assert m._last is not None
    sampler = m._last.sampler
    wait_for(lambda: (x := sampler.latest()) is not None and x.children == others)


@pytest.mark.slow
def test_a_thousand_short_lived_children(path: Path) -> None:
    with monitor(path) as m:
        run_children(m, 100)  # what it keeps open, it has opened then
        files = len(os.listdir("/proc/self/fd"))
        run_children(m, 1000)
        use_all_of(m)
        # The thread opens and closes files at any moment, and the leak test keeps one of a child
        # until it looks again; those that were leaked would stay.
        wait_for(lambda: m.step() is None and len(os.listdir("/proc/self/fd")) <= files)
    assert last(path) == "exit: normal"


def test_a_monitor_in_a_dataloader_worker(tmp_path: Path) -> None:
    torch_data = pytest.importorskip("torch.utils.data")

    class Data(torch_data.Dataset):  # type: ignore[name-defined,misc]
        def __init__(self, work: Callable[[int], int]) -> None:
            self.work = work

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> int:
            return self.work(i)

    def work(i: int) -> int:
        outer.step()  # not running here
        with monitor(tmp_path / f"worker{i}.mem") as own:
            use_all_of(own)
        return int(outer.running)

    with monitor(tmp_path / "run.mem") as outer:
        loader: Any = torch_data.DataLoader(Data(work), num_workers=2, batch_size=1)
        assert sum(int(x) for x in loader) == 0
        outer.step()
    assert (outer.step_count, last(tmp_path / "run.mem")) == (1, "exit: normal")
    for i in range(4):
        assert last(tmp_path / f"worker{i}.mem") == "exit: normal"


FORGOTTEN = """
import multiprocessing, memtools
def work(path):
    m = memtools.MemoryMonitor(path, 1, device="cpu")
    m.start()
    m.step(3)
if __name__ == "__main__":
    path, method = sys.argv[1:]
    own = memtools.MemoryMonitor(path + "own", 1, device="cpu")
    own.start()
    worker = multiprocessing.get_context(method).Process(target=work, args=(path,))
    worker.start()
    worker.join()
    assert own.running and worker.exitcode == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_forgotten_in_a_worker(path: Path, method: str) -> None:
    script = path.with_suffix(".py")
    script.write_text("import sys\n" + FORGOTTEN)
    subprocess.run([sys.executable, script, path, method], check=True, cwd=PROJECT)
    assert last(path) == "exit: the worker ended without stop()"
    assert last(Path(f"{path}own")) == "exit: code 0"
    assert read_record(path).samples.values["step"][-1] == 3


def test_no_descriptors_during_the_run(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with monitor(path) as m:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            with pytest.raises(OSError, match="Too many open files"):
                os.open("/", os.O_RDONLY)
            for _ in range(50):
                use_all_of(m)
            m.cleanup_memory()
            seen = m.samples_taken
            wait_for(lambda: m.samples_taken > seen + 3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert last(path) == "exit: normal"


JUMPS = """
#define _GNU_SOURCE
#include <time.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *out) {
    int r = (int)syscall(SYS_clock_gettime, id, out);
    if (id == CLOCK_REALTIME) out->tv_sec += rand() % 2 ? 300000000 : -300000000;
    return r;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.mark.slow
def test_a_clock_that_jumps_by_ten_years(path: Path) -> None:
    """Forth and back at each look at it: only the date of the start is of that clock."""
    source, library = path.with_suffix(".c"), path.with_suffix(".so")
    source.write_text(JUMPS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = """
import time
assert len({time.time() // 10**8 for _ in range(100)}) > 1
with memtools.MemoryMonitor(sys.argv[1], 1, device="cpu") as m:
    m.guard(0.999)
    while m.samples_taken < 100:
        with m.phase("x"):
            m.step()
    assert 0 < m.log_memory(1)["seconds"] < 60 and 0 < m.overhead[1] < 1
assert m.findings() == ()
assert 0 < m.phases()[0].seconds < 60
"""
    command = [sys.executable, "-c", "import os, sys, memtools\n" + code, str(path)]
    subprocess.run(command, env=os.environ | {"LD_PRELOAD": str(library)}, check=True, timeout=60)
    record = read_record(path)
    times = record.samples.time_ns.tolist()
    assert times == sorted(times)
    assert 0 < times[-1] - times[0] < 60e9
    assert all(abs(e.time_ns - times[0]) < 60e9 for e in record.events)


def test_a_daemon_thread_that_steps_while_the_interpreter_ends(path: Path) -> None:
    done = in_python(
        "import threading\nm = memtools.MemoryMonitor(sys.argv[1], 1, device='cpu'); m.start()\n"
        "def work():\n  while True:\n    with m.phase('x'): m.step()\n    m.mark('y')\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "while m.step_count < 2000: pass\nsys.exit(3)",
        path,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert read_record(path).complete


HIDDEN = """
import subprocess
with memtools.MemoryMonitor(sys.argv[1], 1, device="cpu", limit="1 TiB") as m:
    m.guard(0.99)
    if sys.argv[3] == "later":
        subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[2]], check=True)
    child = subprocess.Popen(["sleep", "60"])
    while m.samples_taken < 100:
        with m.phase("x"):
            m.step()
    child.kill()
    child.wait()
    m.summary()
    m.metrics(expert=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "when"),
    [("/proc", "before"), ("/proc", "later"), ("/sys", "before"), ("/sys/fs/cgroup", "later"),
     ("hidepid", "before")],
)  # fmt: skip
def test_system_files_that_are_really_hidden(path: Path, place: str, when: str) -> None:
    mount = {"before": f"mount -t tmpfs none {place} &&", "later": ""}[when]
    if place == "hidepid":
        mount = "mount -t proc -o hidepid=2 none /proc &&"
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("mounting takes root")
    script = path.with_suffix(".py")
    script.write_text("import os, sys, memtools\n" + HIDDEN)
    command = f'{mount} exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, sys.executable, script, path, place, when],
        capture_output=True, text=True, timeout=120, check=False, cwd=PROJECT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert last(path) == "exit: normal"
