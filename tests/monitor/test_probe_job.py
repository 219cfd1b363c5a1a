"""What the job fills, counted by hand and by the probe: shared memory of every making, of others,
and of processes that come and go."""

from __future__ import annotations

import textwrap

import pytest

from tests.kit.ownprocess import in_own_process

pytestmark = pytest.mark.slow  # each is a program of its own

JOB = """
import atexit, contextlib, os, signal, sys
from multiprocessing import shared_memory
import psutil
import memtools
from memtools import _core
from tests.kit.children import wait_for

MIB = 2**20
RSS, SWAP, CHILDREN, SHM = 1, 16, 64, 256

def by_hand(*unmapped):
    "Each page once: what smaps says each process's part of a page is, and files that none maps."
    total = sum(unmapped)
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with open(f"/proc/{process.pid}/smaps_rollup") as file:
            lines = {line.split(":")[0]: line.split(":")[1] for line in list(file)[1:]}
        total += sum(int(lines[f"Pss_{what}"].split()[0]) << 10 for what in ("Anon", "Shmem"))
    with open("/proc/self/status") as file:  # its libraries, which other programs map as well
        mapped = next(line for line in file if line.startswith("RssFile:"))
    return total + (int(mapped.split()[1]) << 10)

def worker(work):
    "A forked child that does its work and waits; its number."
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)  # where the program fails, nobody ends it
        try:
            kept = work()
            os.write(into, b"x")
            os.close(into)
            signal.pause()
        finally:
            os._exit(1)
    os.close(into)
    assert os.read(out, 1) == b"x"
    os.close(out)
    atexit.register(end, pid)
    return pid

def end(*workers):
    for pid in workers:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

def used_now(monitor):
    return monitor.metrics(expert=True)["memory/host_used_bytes"]
"""


TORCH = """
import torch
import torch.multiprocessing as tmp
torch.set_num_threads(1)  # forked children must not wait for threads that they do not have
"""


def job(code: str) -> str:
    return in_own_process(JOB + textwrap.dedent(code))


def test_used_is_the_sum_over_the_job_counted_by_hand() -> None:
    job("""
        import torch

        torch.set_num_threads(1)  # forked children must not wait for threads they do not have
        monitor = memtools.MemoryMonitor(limit=580 << 20, leaks=False)
        monitor.start()
        buffer = b"x" * (100 * MIB)
        segment = shared_memory.SharedMemory(create=True, size=60 * MIB)
        segment.buf[:] = bytes(60 * MIB)
        left = shared_memory.SharedMemory(create=True, size=20 * MIB)
        left.buf[:] = b"y" * (20 * MIB)
        left.close()  # and not unlinked: nobody maps it

        pool = memtools.KVPool(8, 8, 64, dtype=torch.float32, max_tokens=528, max_sequences=17)
        prompt = pool.acquire(1, 512)
        for layer in range(8):
            prompt.update(layer, *torch.randn(2, 1, 8, 512, 64))
        samples = prompt.fork(16)

        def work():
            segment.buf[::4096]  # maps each page
            return os.urandom(30 * MIB)

        before = by_hand(20 * MIB)
        workers = [worker(work) for _ in range(4)]
        for layer in range(8):
            for part in samples.layer(layer):
                part.sum()
        mapped_again = pool.stats().mapped_again_bytes
        assert mapped_again > 100 * MIB, mapped_again
        hand = by_hand(20 * MIB)
        assert hand - before > 110 * MIB, (hand, before)
        now = _core.Probe("/", True).read(RSS | SWAP | CHILDREN | SHM)
        assert abs(now.job / hand - 1) < 0.02, (now, hand)
        assert now.rss > hand  # as the kernel counts the pool's rows
        wait_for(lambda: abs(used_now(monitor) / hand - 1) < 0.02)
        memory = memtools.host_memory()
        assert abs(memory.job / hand - 1) < 0.02, (memory, hand)
        assert memory.process < memory.job - 130 * MIB
        end(*workers)
        wait_for(lambda: abs(used_now(monitor) / (hand - 120 * MIB) - 1) < 0.02)
        left.unlink()
        segment.unlink()
        monitor.stop()
    """)


SHM_NOW = """
def shm():
    "Bytes of the job's shared memory now, less those that memtools itself has."
    return _core.Probe("/", True).read(SHM).shm - own

monitor = memtools.MemoryMonitor(interval_ms=1, leaks=False)
monitor.start()
own = 0
own = shm()
assert own < MIB, own
"""


def test_the_trackers_function_that_was_imported_meanwhile_works_afterwards() -> None:
    job(
        """
import memtools
from multiprocessing import resource_tracker
before = resource_tracker.register
with memtools.MemoryMonitor(leaks=False):
    from multiprocessing.resource_tracker import register
assert register is not before is resource_tracker.register
register("/memtools-test", "semaphore")
resource_tracker.unregister("/memtools-test", "semaphore")
"""
    )


def test_shared_memory_counts_once_however_it_is_held() -> None:
    job(
        SHM_NOW
        + """
block = shared_memory.SharedMemory(create=True, size=6 * MIB)
assert shm() == 0  # no page of it has been written
block.buf[:] = b"x" * (6 * MIB)
assert shm() == 6 * MIB
again = shared_memory.SharedMemory(block.name)
child = worker(lambda: (third := shared_memory.SharedMemory(block.name), bytes(third.buf)))
assert shm() == 6 * MIB  # mapped three times
again.close(), block.close()
assert shm() == 6 * MIB
end(child)
assert shm() == 6 * MIB  # nobody holds it, and it lies in /dev/shm under a name that tells nothing
block.unlink()
assert shm() == 0

def make():
    made = shared_memory.SharedMemory(NAME, create=True, size=MIB)
    made.buf[0] = 1
    return made

NAME = f"memtools-test-{os.getpid()}"

mine = worker(make)
assert 0 < shm() < MIB  # a page of it, made by a worker
end(mine)
assert 0 < shm() < MIB
shared_memory.SharedMemory(NAME).unlink()
assert shm() == 0
    """
    )


def test_files_that_the_program_writes_are_its_own_once_some_were_seen() -> None:
    job(
        SHM_NOW
        + """
import pathlib, shutil, tempfile

def write(name, **how):
    path = pathlib.Path(folder, name)
    path.write_bytes(b"x" * MIB)
    return path

folder = tempfile.mkdtemp(prefix="memtools-test-", dir="/dev/shm")
try:
    write("first")
    assert shm() == 0  # nobody has told of it
    _core._watch_files()
    write("second")
    assert shm() == MIB
    os.replace(write("third"), f"{folder}.bin")
    assert shm() == 2 * MIB
    end(worker(lambda: write("fourth")))
    assert shm() == 3 * MIB
    with open(f"{folder}/first", "rb") as file:
        assert shm() == 4 * MIB  # while it is open
    assert shm() == 3 * MIB
    os.unlink(f"{folder}.bin")
    assert shm() == 2 * MIB
finally:
    shutil.rmtree(folder)
assert shm() == 0
"""
    )


def test_tensors_in_shared_memory_count_in_all_of_torchs_ways() -> None:
    job(
        TORCH
        + SHM_NOW
        + """
for strategy in tmp.get_all_sharing_strategies():
    tmp.set_sharing_strategy(strategy)
    tensor = torch.ones(4 * MIB, dtype=torch.uint8).share_memory_()
    most = 4 * MIB + 4096  # where files have names, torch counts its users in one more page
    assert 4 * MIB <= shm() <= most, (strategy, shm())
    child = worker(tensor.sum)
    assert 4 * MIB <= shm() <= most, (strategy, shm())
    end(child)
    del tensor
    wait_for(lambda: shm() == 0)  # where files have names, torch's manager deletes them
    """
    )


def test_batches_of_a_dataloader_count_while_they_are_there() -> None:
    job(
        TORCH
        + SHM_NOW
        + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((MIB,), float(i))

loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, prefetch_factor=1)
kept = list(loader)
assert len(kept) == 4
wait_for(lambda: shm() == 8 * 4 * MIB)  # the workers' queues have been emptied
del kept[1:]
wait_for(lambda: shm() == 2 * 4 * MIB)
del kept
wait_for(lambda: shm() == 0)
    """
    )


def test_what_others_have_in_shared_memory_is_theirs() -> None:
    """Another program's files, also where this one maps them, and another user's."""
    job(
        SHM_NOW
        + """
import subprocess

OTHER = '''
import os, sys, time
if sys.argv[1] == "user":
    os.setgid(65534), os.setuid(65534)
path = f"/dev/shm/torch_{os.getpid()}_{sys.argv[1]}"
with open(path, "wb") as file:
    file.write(b"x" * (3 << 20))
print(path, flush=True)
sys.stdin.read()
os.unlink(path)
'''

def other(what):
    # By a shell that ends at once: it is no descendant of this process any more.
    out, into = os.pipe()
    hold, keep = os.pipe()
    command = ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", sys.executable, "-c", OTHER, what]
    subprocess.run(command, stdin=hold, stdout=into, check=True)
    os.close(hold), os.close(into)
    path = os.read(out, 200).decode().strip()
    assert path.startswith("/dev/shm/torch_"), path
    return path, keep

program, keep = other("program")
assert shm() == 0
import mmap
with open(program, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    assert sum(mapped[::4096]) > 0
    assert shm() == 0
    before = _core.Probe("/", True).read(RSS | SHM)
    assert before.job >= before.process
os.close(keep)
wait_for(lambda: not os.path.exists(program))
if os.geteuid() == 0:
    user, keep = other("user")
    assert shm() == 0
    os.close(keep)
    wait_for(lambda: not os.path.exists(user))
    """
    )


def test_a_file_that_is_deleted_and_still_mapped_counts_until_it_is_not() -> None:
    job(
        SHM_NOW
        + """
import mmap

path = f"/dev/shm/memtools-test-{os.getpid()}"
with open(path, "w+b") as file:
    file.truncate(5 * MIB)
    mapped = mmap.mmap(file.fileno(), 0)
mapped[:] = b"x" * (5 * MIB)
assert shm() == 5 * MIB
os.unlink(path)
assert shm() == 5 * MIB
child = worker(lambda: mapped[::4096])
mapped.close()
assert shm() == 5 * MIB  # the child's, which has it from before
end(child)
assert shm() == 0
anonymous = mmap.mmap(-1, 7 * MIB)
anonymous[: 2 * MIB] = b"x" * (2 * MIB)
assert shm() == 2 * MIB  # and the rest is no memory yet
    """
    )


def test_processes_that_vanish_while_they_are_read_change_no_figure() -> None:
    job(
        SHM_NOW
        + """
import mmap, threading, time

probe = _core.Probe("/", True)
shared = mmap.mmap(-1, 3 * MIB)
shared[:] = b"x" * (3 * MIB)
done = threading.Event()
seen, unknown = [], 0
pids = []

def come_and_go():
    while not done.is_set():
        if (pid := os.fork()) == 0:
            os._exit(shared[0] == 0)
        os.waitpid(pid, 0)

thread = threading.Thread(target=come_and_go)
thread.start()
deadline = time.monotonic() + 60
while len(seen) < 300 or not any(children for children, _, _ in seen):
    assert time.monotonic() < deadline
    sample = probe.read(RSS | CHILDREN | SHM)
    seen.append((sample.children, sample.shm, sample.children_private))
done.set()
thread.join()
assert {shm - own for _, shm, _ in seen} == {3 * MIB}, set(seen)
assert all(private is not None for _, _, private in seen)
    """
    )


def test_another_users_worker_is_counted_by_what_may_be_read_of_it() -> None:
    job(
        SHM_NOW
        + """
import mmap

if os.geteuid() != 0:
    raise SystemExit  # only the superuser may become another one

def as_nobody():
    os.setgid(65534), os.setuid(65534)
    return os.urandom(9 * MIB)

shared = mmap.mmap(-1, 3 * MIB)
shared[:] = b"x" * (3 * MIB)
child = worker(as_nobody)
sample = _core.Probe("/", True).read(RSS | CHILDREN | SHM)
assert sample.children >= 1
assert sample.shm - own == 3 * MIB
assert 9 * MIB <= sample.children_private < 60 * MIB, sample
end(child)

# The other way round: a program of a user who may not look into the superuser's child.
ready, tell = os.pipe()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    helper = worker(lambda: (os.urandom(9 * MIB), shared[::4096]))  # of the superuser
    os.setgid(65534), os.setuid(65534)
    sample = _core.Probe("/", True).read(RSS | CHILDREN | SHM)
    assert sample.children == 1, sample
    assert sample.children_private is not None and sample.children_private >= 9 * MIB, sample
    os.write(tell, f"{helper} {sample.shm}".encode())
    os._exit(0)
os.close(tell)
helper, told = os.read(ready, 100).decode().split()
os.kill(int(helper), signal.SIGKILL)
assert os.waitpid(pid, 0)[1] == 0
assert told == "None", told  # its mappings cannot be seen: not known, and no error
    """
    )


def test_a_control_group_without_counters_is_not_known_and_stops_nothing() -> None:
    job(
        """
        import tempfile
        from pathlib import Path

        root = Path(tempfile.mkdtemp())
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/statm").write_text("4096 1024 0 1 0 3 0\\\\n")
        (root / "proc/self/cgroup").write_text("0::/a\\\\n")
        mount = "3 2 0:2 / /cg rw - cgroup2 cgroup2 rw\\\\n"
        (root / "proc/self/mountinfo").write_text(mount)
        (root / "cg/a").mkdir(parents=True)
        (root / "cg/a/memory.max").write_text("max\\\\n")
        memory = memtools.host_memory(str(root))
        assert (memory.process, memory.job, memory.shm) == (4 * MIB, 4 * MIB, None), memory
        assert (memory.cgroup_used, memory.pressure, memory.cgroup_limit) == (None, None, None)
        assert memory.percent is None
        memtools.MemoryMonitor._root = str(root)
        with memtools.MemoryMonitor(interval_ms=1, limit=8 * MIB, leaks=False) as monitor:
            wait_for(lambda: monitor.metrics().get("memory/host_percent") == 50.0)
            assert "Limit: 4.0 MiB of 8.0 MiB used (50.0%)" in monitor.summary()
    """.replace("\\\\", "\\")
    )
