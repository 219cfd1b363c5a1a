"""The probe on this machine against psutil, another reader of the same kernel; peaks, forks and
children; made-up control groups against a plain model of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import memtools
from memtools import _core
from memtools._cli.system import host_memory
from tests.kit.ownprocess import in_own_process

MIB = 2**20
HEAP, CHILDREN = 32, 64


def near(got: int | None, wanted: int, within: int = 8 * MIB) -> bool:
    return got is not None and abs(got - wanted) <= within


def agree(ours: Callable[[], int | None], theirs: Callable[[], int]) -> bool:
    """Whether they do at one of many moments: the machine's memory comes and goes between two
    readings."""
    return any(near(ours(), theirs()) for _ in range(10_000))


def test_readings_agree_with_psutil() -> None:
    block, probe = bytearray(64 * MIB), _core.Probe("/", True)
    s, process = probe.read(127), psutil.Process().memory_info()
    assert near(s.rss, process.rss)
    assert near(s.private, process.rss - process.shared)
    assert s.total == psutil.virtual_memory().total
    assert agree(lambda: probe.read(31).available, lambda: int(psutil.virtual_memory().available))
    assert s.swap == 0 or psutil.swap_memory().total > 0
    assert s.heap_used is not None
    assert s.heap_used > len(block)
    assert s.children == len(psutil.Process().children(recursive=True))


# Of a process of their own: in this one other tests' garbage may be freed at any moment.
PEAKS = """
import mmap, os
import psutil
from memtools import _core
from tests.monitor.test_probe import CHILDREN, MIB, near

def spike(mib):
    with mmap.mmap(-1, mib * MIB) as block:  # malloc might have the pages already
        for page in range(0, mib * MIB, mmap.PAGESIZE):
            block[page] = 1
"""


def peaks(code: str) -> None:
    in_own_process(PEAKS + textwrap.dedent(code))


@pytest.mark.slow
def test_nested_phases_have_exact_peaks() -> None:
    peaks("""
        probe = _core.Probe()
        spike(300)
        base = probe.rss()
        outer = probe.enter("outer")
        spike(40)
        inner = probe.enter("inner")
        spike(120)
        peak, _, exact = probe.leave(inner)
        assert exact
        assert near(peak, base + 120 * MIB), (peak, base)
        again = probe.enter("inner")
        assert probe.current() == "inner"
        spike(10)
        assert near(probe.leave(again)[0], base + 10 * MIB)
        peak, ns, exact = probe.leave(outer)
        assert near(peak, base + 120 * MIB)
        assert ns > 0
        assert [row[:2] for row in probe.phases()] == [("outer", 1), ("inner", 2)]
        assert near(probe.phases()[1][4], base + 120 * MIB)
    """)


@pytest.mark.slow
def test_two_probes_do_not_take_each_others_peak() -> None:
    peaks("""
        one, other = _core.Probe(), _core.Probe()
        base = one.rss()
        assert one.reset_peak()
        spike(150)
        other.reset_peak()
        other.leave(other.enter("x"))
        assert near(one.peak()[0], base + 150 * MIB)
        assert near(other.peak()[0], base)
    """)


def test_a_phase_may_be_left_by_another_thread_and_only_once() -> None:
    probe = _core.Probe()
    token = probe.enter("here")
    thread = threading.Thread(target=probe.leave, args=(token,))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="not open"):
        probe.leave(token)
    tokens = [probe.enter("many") for _ in range(64)]
    with pytest.raises(RuntimeError, match="64 phases are open"):
        probe.enter("one more")
    for token in tokens:
        probe.leave(token)
    with pytest.raises(RuntimeError, match="reset_peak"):
        probe.peak()


@pytest.mark.slow
def test_a_forked_child_reads_itself() -> None:
    peaks("""
        probe = _core.Probe()
        probe.reset_peak()
        before = probe.read(127).rss
        child = os.fork()
        if child == 0:
            block = bytearray(200 * MIB)
            good = near(probe.rss(), psutil.Process().memory_info().rss)
            good = good and probe.peak()[0] > before / 4 + 200 * MIB
            good = good and probe.read(CHILDREN).children == 0
            del block
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert probe.peak()[0] < before + 100 * MIB
    """)


@pytest.mark.slow
def test_descriptors_that_the_program_closed_and_used_again_are_left_alone() -> None:
    said = in_own_process(
        """
        import os, tempfile
        import torch
        import memtools
        from memtools import _core

        os.chdir(tempfile.mkdtemp())
        texts = [b"A" * 100, b"7 7 7 7 7 7 7\\n", b"4096\\n"]
        probe = _core.Probe()
        right = probe.read()
        monitor = memtools.MemoryMonitor("run.mem", 2)
        pool = memtools.KVPool(num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.float32,
                               max_tokens=256, max_sequences=4)
        monitor.start()
        with monitor.phase("before"):
            lease = pool.acquire(batch_size=1)
        monitor.step()
        os.closerange(3, 256)
        files = [open(f"user{i}.dat", "w+b") for i in range(40)]
        for n, file in enumerate(files):
            file.write(texts[n % 3])
            file.flush()
        for _ in range(5):
            with monitor.phase("after"):
                monitor.step()
        lease.update(0, torch.ones(1, 1, 64, 64), torch.ones(1, 1, 64, 64))
        for field in ("rss", "cgroup_used", "cgroup_limit", "total", "available"):
            was = getattr(right, field)
            for now in getattr(probe.read(), field), getattr(probe.read(), field):
                assert now is None or now == was or 0.5 < now / was < 2, (field, now, was)
        record = memtools.read_record("run.mem")
        assert all(rss is None or rss > 2**20 for rss in record.samples.values["rss"])
        print(memtools.host_memory().rss is not None, probe.rss() > 2**20)
        lease.release()
        del lease, pool
        monitor.stop()
        del monitor
        kept = [os.pread(file.fileno(), 200, 0) for file in files]
        print(kept == [texts[n % 3] for n in range(40)])
        """
    )
    assert said == "True True\nTrue\n"


def test_children_and_grandchildren_count() -> None:
    code = "import os, sys; b = bytearray(50 << 20); os.fork(); print(flush=True); sys.stdin.read()"
    probe = _core.Probe("/", True)
    before = probe.read(CHILDREN)
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    child = subprocess.Popen(  # without a sanitiser, which has memory of its own
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plain
    )
    assert child.stdin
    assert child.stdout
    child.stdout.read(2)
    during = probe.read(CHILDREN)
    child.communicate()
    assert during.children == (before.children or 0) + 2
    # What the two share since the fork counts once.
    assert near(during.children_private, (before.children_private or 0) + 55 * MIB)
    assert probe.read(CHILDREN).children == before.children


LEVELS = {"v1": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
          "v2": ("memory.max", "memory.current")}  # fmt: skip


def grow_groups(root: Path, rng: random.Random) -> int | None:
    """A host with control groups of either version, with limits, gaps and dirt. Returns the lowest
    limit over the group and its ancestors up to the mount, -1 without one, None where it cannot be
    seen or read."""
    version = rng.choice(["v1", "v2"])
    top = rng.choice(["/", "/a"])
    path = rng.choice(["/a", "/a/b", "/a/b/c", "/x", "/", "/../a"])
    kind = "cgroup cgroup rw,memory" if version == "v1" else "cgroup2 cgroup2 rw"
    (root / "proc/self").mkdir(parents=True)
    number = "4:memory" if version == "v1" else "0:"
    (root / "proc/self/cgroup").write_text(f"9:pids:/z\n{number}:{path}\n")
    (root / "proc/self/mountinfo").write_text(f"1 2 0:3 {top} /cg rw - {kind}\n")
    directory, stated = root / "cg", {}
    for name in ["", "a", "b", "c"]:
        directory = directory / name
        if rng.random() < 0.1:
            break
        directory.mkdir(exist_ok=True)
        says = ["max", "max", "4096", "8192", "12288", "lots", "9223372036854771712", "-5", ""]
        limit = rng.choice(says if rng.random() < 0.3 else ["8192", "9999999", "4096"])
        if limit == "max" and version == "v1":
            limit = "9223372036854771712"
        stated[directory] = "" if version == "v1" else "max"  # as if there were no file
        if rng.random() < 0.9:
            (directory / LEVELS[version][0]).write_text(limit + rng.choice(["", "\n"]))
            stated[directory] = limit
        (directory / LEVELS[version][1]).write_text("100\n")
        (directory / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 1\n")
    below = [part for part in top.split("/") if part]
    parts = [part for part in path.split("/") if part]
    if parts[: len(below)] != below or ".." in parts:
        return None
    group = (root / "cg").joinpath(*parts[len(below) :])
    levels = [level for level in (group, *group.parents) if level.is_relative_to(root / "cg")]
    says_all = [stated.get(level) for level in levels]
    if None in says_all or any(says in ("", "lots", "-5") for says in says_all):
        return None
    if version == "v1" and "max" in says_all:
        return None
    numbers = [int(says) for says in says_all if says is not None and says.isdecimal()]
    return min((number for number in numbers if number < 2**62), default=-1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_limits_agree_with_a_plain_model_and_doctor_says_the_same(
    seed: int, tmp_path: Path
) -> None:
    limit = grow_groups(tmp_path, random.Random(seed))
    assert _core.Probe(str(tmp_path)).source()[1] == limit
    fact = host_memory(tmp_path)["memory_limit_bytes"]
    assert fact.value == (None if limit == -1 else limit)
    assert (fact.text == "unlimited") == (limit == -1)


def plant_limit(root: Path, limit: str) -> None:
    for name, text in {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": "1 2 0:3 / /cg rw - cgroup2 cgroup2 rw\n",
        "proc/self/statm": "9 5 1 0 0 0 0\n",
        "proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n",
        "cg/a/memory.max": limit,
        "cg/a/memory.current": str(3 * MIB),
        "cg/a/memory.stat": f"inactive_file {MIB}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_host_memory_tells_the_containers_limit(tmp_path: Path) -> None:
    plant_limit(tmp_path, str(4 * MIB))
    memory = memtools.host_memory(str(tmp_path))
    assert (memory.cgroup_used, memory.cgroup_limit) == (2 * MIB, 4 * MIB)
    assert memory.percent == 50.0
    assert str(memory) == (
        "CPU: 0.00 GB (System: 50.0%)\n  Process: 20.0 KiB\n"
        "  Container: 2.0 MiB of 4.0 MiB used\n  Machine: 3.0 MiB of 4.0 MiB used"
    )
    assert memory.limit_source == f"cgroup v2 limit 4.0 MiB ({tmp_path}/cg/a)"
    plant_limit(tmp_path, str(5 * MIB))  # more than the machine has, whose memory counts then
    assert memtools.host_memory(str(tmp_path)).percent == 75.0
    plant_limit(tmp_path, "max\n")
    memory = memtools.host_memory(str(tmp_path))
    assert (memory.cgroup_limit, memory.percent) == (None, 75.0)
    assert memory.limit_source == "no cgroup limit; machine 4.0 MiB"
    assert host_memory(tmp_path)["peak_reset"].value is False
    assert host_memory(tmp_path)["pressure_readings"].value is False


def test_host_memory_keeps_its_files_and_a_forked_child_reads_its_own() -> None:
    told = in_own_process("""
        import os, sys
        import memtools

        before = memtools.host_memory()
        assert "torch" not in sys.modules
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            memtools.host_memory()
        assert len(os.listdir("/proc/self/fd")) == files
        out, into = os.pipe()
        if os.fork() == 0:
            kept = b"x" * (64 << 20)
            os.write(into, str(memtools.host_memory().rss - before.rss).encode())
            os._exit(0)
        grown = int(os.read(out, 99))
        os.wait()
        print(grown >> 20, memtools.host_memory().rss - before.rss >> 20)
        """)
    child, parent = map(int, told.split())
    assert child > 48
    assert parent < 16


def test_host_memory_of_nothing_is_unknown_and_raises_nothing(tmp_path: Path) -> None:
    memory = memtools.host_memory(str(tmp_path))
    assert (memory.rss, memory.percent, memory.cgroup_limit) == (None, None, None)
    assert str(memory) == "CPU: unknown (System: unknown)"
    assert memory.limit_source == "unknown (no /proc/self/cgroup that can be read)"
