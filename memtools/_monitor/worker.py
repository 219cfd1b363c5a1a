"""What runs in a worker: a DataLoader's, or any other process of multiprocessing.

    parent                                     worker
    WorkerReports ──► Page: it asks            at each get() or put() of its queue, or step of an
                                               optimizer: Worker.before()
                                                 not asked: a look at one number, 0.5 us
                      Page: slots  ◄──────       asked: a look of the census at every so many
    findings() ◄── what grows in whom            batches, and what it names into its own slot

The page is shared memory that the parent makes. A forked worker inherits it; a spawned one finds it
by an entry of multiprocessing's own settings, which each process passes on to those that it starts.
So nothing of the program is replaced, but for the methods of the queues that a worker is given: on
those objects, in that process, their calls are counted, and by torch's own hook the steps of
optimizers. A batch is the step of a worker: workers run ahead of the program, so the program's own
steps would say little of them.

A look in a worker must not write into the memory that it shares with its parent: the kernel copies
each page that is written to. So the census takes no references, does not collect, and its tables
are pages of their own, freed after the look but for 1 MiB. While the parent does not ask, nothing
happens.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools import _core
from memtools._base import process
from memtools._base.mapping import Descriptor, map_file
from memtools._base.steps import OPTIMIZERS, Steps, is_of_another_step

if TYPE_CHECKING:
    from memtools._census.holders import Holder

MAGIC = b"memtool1"
SLOTS = 1020  # So many workers can report, because their pids fit the first page.
SLOT_BYTES = 4096  # A slot is a page of the kernel's, so that an unused one takes no memory.
_HEAD = struct.Struct("<8sI")  # The head of the page: what it is, and whether the parent asks.
_OWNERS_AT = 16  # Behind it: the pid of each slot, so that unused slots are never touched.
_OWNERS = struct.Struct(f"<{SLOTS}I")
#: The head of a slot: pid, bytes of text, their checksum, since when it looks, batches, bytes in
#: use, and how many looks have begun or ended.
_SLOT = struct.Struct("<IIIIQQQ")
_TEXT = struct.Struct("<III")  # the part of it that is of the text
_ASKS = struct.Struct("<I")
_LOOKS_AT, _PASSED_AT, _IN_USE_AT, _TURNS_AT = 12, 16, 24, 32
TRIES = 64  # A worker tries so many slots to find a free one.
CLOCKS = ("get", "put", "recv", "send")  # Calls of these methods are batches.
LONGEST = 60  # A look that has begun so many seconds ago has ended.
HOLDERS = 6  # A worker reports at most so many holders.
GAP = 2  # So many batches are between the first looks.
LOOKS_AT_ONCE = 3  # The first looks come as soon as there are these batches between them, ...
SHARE = 50  # ... later ones after so many times the processor time that the look before took.
ENTRY = "memtools"  # The key in multiprocessing's settings of a process.


class Page:
    """Shared memory between a process and its workers.

    |magic, asks, pid of each slot | slot 0: pid, batches, text | slot 1 | ... |

    Batches and bytes in use are newer than the text: they are written between the looks.
    A slot is written by the one worker whose pid it has. A text is read only if its checksum is
    right, so that half of one is never taken for a whole, whatever order the processor writes in.
    A number is written by one store: struct's pack_into() writes zeros first, which others may see.
    Reading a page of a file in memory allocates it. So unused slots are not read, or they would be
    4 MiB of the job's shared memory.
    """

    __slots__ = ("_descriptor", "_memory", "_numbers")

    def __init__(self, fd: int) -> None:
        """Map the page of a file descriptor, which stays the caller's. Raises OSError, and
        ValueError if it is not such a page."""
        self._descriptor: Descriptor | None = None
        size = SLOT_BYTES * (1 + SLOTS)
        if os.fstat(fd).st_size < size or os.pread(fd, len(MAGIC), 0) != MAGIC:
            raise ValueError("this is not a page of memtools")
        self._memory = memoryview(map_file(fd, size)).cast("B")
        self._numbers = self._memory.cast("Q")  # the same, by numbers of 8 bytes

    @classmethod
    def new(cls) -> Page:
        """Make a page. Takes 4 KiB until workers write into it. Raises OSError."""
        fd = os.memfd_create("memtools-workers", os.MFD_CLOEXEC)
        descriptor = Descriptor(fd)
        os.truncate(fd, SLOT_BYTES * (1 + SLOTS))
        os.pwrite(fd, _HEAD.pack(MAGIC, 0), 0)
        page = cls(fd)
        page._descriptor = descriptor
        return page

    @property
    def fd(self) -> int:
        """The descriptor by which spawned processes find the page; -1 in a process that has not
        made it."""
        found = None if self._descriptor is None else self._descriptor.get()
        return -1 if found is None else found

    def close(self) -> None:
        """Unmap the page: nothing can be read or asked any more. Other processes keep it."""
        self.leave()
        self._numbers.release()
        self._memory.release()

    def leave(self) -> None:
        """Close the descriptor: processes that are spawned from now on cannot find the page."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            descriptor.close()

    # --- what the parent asks ---

    def asks(self) -> bool:
        """Whether the parent wants to know what grows."""
        return self._memory[len(MAGIC)] != 0

    def ask(self, wanted: bool) -> None:
        _ASKS.pack_into(self._memory, len(MAGIC), wanted)

    # --- what workers report ---

    def take(self, pid: int) -> int | None:
        """Take a slot for a process: its own, a free one, or one of a process that has ended.
        Returns None if there is none."""
        for i in range(TRIES):
            slot = (pid + i) % SLOTS
            owner = self.owner(slot)
            if owner == pid:
                return slot
            if owner == 0 or not _lives(owner):
                _SLOT.pack_into(self._memory, _place(slot), pid, 0, 0, 0, 0, 0, 0)
                _ASKS.pack_into(self._memory, _owner_at(slot), pid)
                return slot
        return None

    def owner(self, slot: int) -> int:
        """The pid of the process that has a slot, 0 for none."""
        pid: int = _ASKS.unpack_from(self._memory, _owner_at(slot))[0]
        return pid

    def _owners(self) -> list[tuple[int, int]]:
        """(slot, pid) of each slot that a process has or had."""
        pids = _OWNERS.unpack_from(self._memory, _OWNERS_AT)
        return [(slot, pid) for slot, pid in enumerate(pids) if pid]

    def write(self, slot: int, passed: int, text: bytes) -> None:
        """Write a report, which must be shorter than a slot, and how many batches there were."""
        at = _place(slot) + _SLOT.size
        self._memory[at : at + len(text)] = text
        checksum = zlib.crc32(text)
        _TEXT.pack_into(self._memory, _place(slot), os.getpid(), len(text), checksum)
        self.count(slot, passed)

    def count(self, slot: int, passed: int) -> None:
        """Write how many batches there were so far."""
        self._set_number(slot, _PASSED_AT, passed)

    def weigh(self, slot: int, in_use: int) -> None:
        """Write how many bytes are in use now."""
        self._set_number(slot, _IN_USE_AT, in_use)

    def _number(self, slot: int, at: int) -> int:
        return self._numbers[(_place(slot) + at) // 8]

    def _set_number(self, slot: int, at: int, number: int) -> None:
        self._numbers[(_place(slot) + at) // 8] = number

    def look(self, slot: int, looks: bool) -> None:
        """Note that a look begins, or that it has ended."""
        since = int(time.monotonic()) & 0xFFFFFFFF or 1 if looks else 0
        _ASKS.pack_into(self._memory, _place(slot) + _LOOKS_AT, since)
        self._set_number(slot, _TURNS_AT, self._number(slot, _TURNS_AT) + 1)

    def turns(self) -> dict[int, int]:
        """How many looks each process has begun or ended, by pid. A look between two calls changes
        what they return, whether it is over or not."""
        return {owner: self._number(slot, _TURNS_AT) for slot, owner in self._owners()}

    def looking(self) -> bool:
        """Whether a process looks at its heap now, and lives."""
        now = int(time.monotonic()) & 0xFFFFFFFF
        for slot, owner in self._owners():
            since = _ASKS.unpack_from(self._memory, _place(slot) + _LOOKS_AT)[0]
            if since and 0 <= now - since <= LONGEST and _lives(owner):
                return True
        return False

    def in_use(self) -> dict[int, int]:
        """The newest bytes in use of each process that has written them, and lives, by pid."""
        known = {owner: self._number(slot, _IN_USE_AT) for slot, owner in self._owners()}
        return {pid: size for pid, size in known.items() if size and _lives(pid)}

    def read(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(pid, batches so far, report) of each process that lives and has reported."""
        for slot, owner in self._owners():
            pid, size, checksum, _, passed, *_ = _SLOT.unpack_from(self._memory, _place(slot))
            if pid != owner or not 0 < size <= SLOT_BYTES - _SLOT.size:
                continue
            at = _place(slot) + _SLOT.size
            text = bytes(self._memory[at : at + size])
            if zlib.crc32(text) != checksum or not _lives(pid):
                continue
            with contextlib.suppress(ValueError):
                report = json.loads(text)
                if type(report) is dict:
                    yield pid, passed, report


def _place(slot: int) -> int:
    return SLOT_BYTES * (1 + slot)


def _owner_at(slot: int) -> int:
    return _OWNERS_AT + _ASKS.size * slot


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, so not a worker of ours
        return False
    return True


# --- in a worker ----------------------------------------------------------------------------------


class _Garbage(NamedTuple):
    """What is known of garbage at one time: how often it was collected, batches, bytes in use and
    those that the census has reached, and objects that the collector would look at."""

    runs: int
    batches: int
    used: int
    reached: int
    objects: int

    def since(self, first: _Garbage) -> dict[str, int]:
        """What has come since then: `bytes` are those in use that the census does not reach."""
        _, batches, used, reached, objects = (b - a for a, b in zip(first, self, strict=True))
        return {"batches": batches, "used": used, "bytes": used - reached, "objects": objects}


class Worker:
    """Counts the batches of this process, and looks at its heap when it is asked to."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._passed: dict[int, int] = {}  # calls, by the clock that they were of
        self._clock: int | None = None  # the one that counts, once it was asked
        self._census: Any = None
        self._slot: int | None = None
        self._due = self._looks = 0
        self._rests_until = self._weighs_at = 0.0
        #: as of the first look, or the newest collection, and as of now
        self._garbage: tuple[_Garbage, _Garbage] | None = None
        #: what had come by the newest collection, and the bytes that went with it
        self._collected: dict[str, int] = {}
        self._failed = False
        self._busy = threading.Lock()  # a queue may be used by several threads

    def passed(self, clock: int) -> None:
        """Count a call of a queue's method that has returned."""
        self._passed[clock] = self._passed.get(clock, 0) + 1
        if clock == self._clock and self._slot is not None:
            self._page.count(self._slot, self._passed[clock])

    def before(self, clock: int) -> None:
        """Look at the heap if that is due, before a method of a queue is called: the batch before
        is done with. Raises nothing."""
        if not self._page.asks():
            if self._census is not None:
                self._rest()
            return
        if self._failed or not self._busy.acquire(blocking=False):
            return
        try:
            self._look(clock)
            self._weigh(clock)
        except Exception:
            self._failed = True  # a worker whose census fails does not report any more
            self._rest()
        finally:
            self._busy.release()

    def _rest(self) -> None:
        """Drop what looks have kept, and the report, which would be old when the parent asks again:
        it does not ask any more."""
        self._census = self._clock = self._garbage = None
        self._due = self._looks = 0
        if self._slot is not None:
            self._page.write(self._slot, 0, b"")

    def _look(self, clock: int) -> None:
        if self._clock is None:
            # Of several queues the busiest counts. get() and put() of a loop are even: the first.
            self._clock = max(self._passed, key=self._passed.__getitem__, default=clock)
        if clock != self._clock:
            return
        passed = self._passed.get(clock, 0)
        rests = self._looks >= LOOKS_AT_ONCE and time.monotonic() < self._rests_until
        if passed < self._due or rests:
            return
        if self._slot is None or self._page.owner(self._slot) != os.getpid():
            self._slot = self._page.take(os.getpid())
            if self._slot is None:  # more workers than slots
                self._failed = True
                return
        begun = time.thread_time()
        self._page.look(self._slot, True)
        try:
            if self._census is None:
                self._census = new_census()
            self._census.look(passed)
        finally:
            self._page.look(self._slot, False)
        self._looks += 1
        self._note_garbage(bytes_in_use(), passed)
        self._page.write(self._slot, passed, self._report(passed))
        self._due = passed + max(GAP, self._looks * GAP // 2)
        self._rests_until = time.monotonic() + SHARE * (time.thread_time() - begun)

    def _weigh(self, clock: int) -> None:
        """Note how many bytes are in use, between two batches: a look shows what grows, and this
        whether it goes on, and what a collection of garbage has freed."""
        is_due = time.monotonic() >= self._weighs_at
        if clock == self._clock and self._slot is not None and is_due:
            begun = time.thread_time()
            in_use, passed = bytes_in_use(), self._passed.get(clock, 0)
            self._page.weigh(self._slot, in_use)
            if self._note_garbage(in_use, passed):
                self._page.write(self._slot, passed, self._report(passed))
            self._weighs_at = time.monotonic() + SHARE * (time.thread_time() - begun)

    def _report(self, passed: int) -> bytes:
        """What is known, as a text that fits into a slot."""
        name, number, of = who()
        report: dict[str, Any] = {
            "name": name,
            "worker": number,
            "workers": of,
            "looks": self._looks,
            "batch": passed,
            "cut": bool(self._census.cut),
            "holders": [
                {**_as_dict(holder), "way": self._census.keepers.known.get(holder.path)}
                for holder in self._census.holders()[:HOLDERS]
            ],
            "garbage": self._garbage_report(),
        }
        while True:
            text = json.dumps(report).encode()
            if len(text) <= SLOT_BYTES - _SLOT.size:
                return text
            report["holders"].pop()

    def _note_garbage(self, in_use: int, passed: int) -> bool:
        """Note how much is in use. Returns whether a collection of garbage since then shows how
        much of that was garbage. Nothing is collected here: that would write to shared pages."""
        runs = sum(generation["collections"] for generation in gc.get_stats())
        now = _Garbage(runs, passed, in_use, self._census.reached_bytes, gc.get_count()[0])
        first, newest = self._garbage or (now, now)
        is_collected = runs != first.runs and newest is not first
        if is_collected:
            freed = newest.since(now)["bytes"]
            self._collected = {**newest.since(first), "freed": freed}
        self._garbage = (now, now) if runs != first.runs else (first, now)
        return is_collected

    def _garbage_report(self) -> dict[str, int]:
        """What has come since the newest collection, or, if that is short ago, until it; and what
        it has freed."""
        if self._garbage is None:
            return {}
        first, now = self._garbage
        found = {**self._collected, **now.since(first)}
        if found["batches"] < self._collected.get("batches", 0):
            found = dict(self._collected)
        return {**found, "grown": self._collected.get("bytes", 0), "collects": int(gc.isenabled())}


def _as_dict(holder: Holder) -> dict[str, Any]:
    """A holder as it is in a report."""
    return {
        "path": holder.path[:300],
        "kind": holder.kind[:40],
        "what": holder.what[:100],
        "length": holder.length,
        "capacity": holder.capacity,
        "containers": holder.containers,
        "new_objects": holder.new_objects,
        "new_bytes": holder.new_bytes,
        "batches": holder.steps,
        "only_gained": holder.only_gained,
        "may_fill": holder.may_fill,
    }


def bytes_in_use() -> int:
    """Return what malloc and the interpreter have handed out in this process. Resident memory may
    grow beside it, by fragmentation."""
    blocks = _core._python_bytes()
    python = 64 * sys.getallocatedblocks() if blocks is None else blocks
    return python + (_core._heap_bytes() or 0)


def new_census() -> Any:
    """Return the census of a worker. It names all that gains: the parent knows how many batches
    make a step, and leaves out what gains too little. It does not read the program's code, which
    the parent has as well."""
    from memtools._census.growth import GrowthCensus
    from memtools._census.keepers import Ways

    return GrowthCensus((Worker, Page), least_rate=1.0, keepers=Ways())


def who() -> tuple[str, int | None, int | None]:
    """Return the name of this process and, if it is a DataLoader's worker, its number and how many
    there are, else None for both."""
    current = sys.modules["multiprocessing.process"].current_process()
    loader = sys.modules.get("torch.utils.data")
    info = None if loader is None else loader.get_worker_info()
    if info is None:
        return str(current.name)[:100], None, None
    return str(current.name)[:100], info.id, info.num_workers


# --- how a process becomes a worker that can be asked ---------------------------------------------

_page: list[Page] = []  # the page for the children of this process
_parents: list[Page] = []  # the page of its parent, if this process is a worker
_worker: list[Worker] = []  # this process as a worker
_waits = False  # whether multiprocessing will call _begin in its children


def publish(page: Page) -> None:
    """Pass a page to the children that this process starts from now on."""
    _page[:] = [page]
    process.at_fork(_in_child)
    invite()


def withdraw() -> None:
    """Pass no page to children that start from now on."""
    _page.clear()
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process()._config.pop(ENTRY, None)


def invite() -> None:
    """Pass the page to processes that multiprocessing spawns, too. Must be called again if the
    program may have imported multiprocessing since: nothing here imports it."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    page = next(iter(_page), None)
    current = getattr(multiprocessing, "current_process", None)  # None while it is being imported
    if current is not None and page is not None:
        current()._config.setdefault(ENTRY, Invitation(os.getpid(), page.fd))


class Invitation:
    """An entry of the settings that multiprocessing copies to each process that it starts. A
    spawned process unpickles it, and finds the page by it; a forked one never does.

    It is pickled as a text of code, so that a process without memtools goes on undisturbed.
    """

    __slots__ = ("_fd", "_pid")

    def __init__(self, pid: int, fd: int) -> None:
        self._pid, self._fd = pid, fd

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return exec, (
            "try:\n"
            "    from memtools._monitor.worker import arrive\n"
            f"    arrive({self._pid}, {self._fd})\n"
            "except Exception:\n"
            "    pass\n",
        )


def arrive(parent: int, fd: int) -> None:
    """In a spawned process, before it has begun: map its parent's page. Raises OSError and
    ValueError."""
    own = os.open(f"/proc/{parent}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        _parents[:] = [Page(own)]
    finally:
        os.close(own)
    importlib.import_module("multiprocessing.util")  # as the process does next
    _wait()
    _wait_for_spawned()
    process.at_fork(_in_child)  # a worker that forks again


def _in_child() -> None:
    """In a child, right after the fork: its parent's page is this process's page to report in."""
    if _page:
        _page[0].leave()
        _parents[:] = _page
    _page.clear()
    _worker.clear()
    if _parents:
        _wait()


def _wait() -> None:
    """Have multiprocessing call _begin when a process of its own has begun: what it runs is known
    by then. A child of os.fork() alone is not a worker."""
    global _waits
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _waits:
        util.register_after_fork(_here, _begin)
        _waits = True


def _wait_for_spawned() -> None:
    """Have the classes of processes that are not forked call _begin, once: such processes skip what
    _wait() has registered."""
    for name in ("SpawnProcess", "ForkServerProcess"):
        kind: Any = getattr(sys.modules.get("multiprocessing.context"), name, None)
        skip = None if kind is None else vars(kind).get("_after_fork")
        if skip is not None:
            kind._after_fork = staticmethod(functools.partial(_begin_spawned, kind, skip))


def _begin_spawned(kind: Any, skip: Any) -> None:
    kind._after_fork = skip
    kind._after_fork()
    _begin(None)


def _here() -> None:
    """The object for which multiprocessing keeps _begin: it lives as long as this module."""


def _begin(_: object) -> None:
    """Count the calls of the queues of this process, before its target is called."""
    current = sys.modules["multiprocessing.process"].current_process()
    current._config.pop(ENTRY, None)  # the parent's: this process passes on its own
    if not _parents or _worker:
        return
    _worker[:] = [Worker(_parents[0])]
    for queue in _queues(current):
        for name in CLOCKS:
            _count_calls(queue, name)
    _count_steps()


def _count_steps() -> None:
    """Count the steps of torch's optimizers as batches, in a process that has imported torch: one
    that trains may have no queue, as those of torch.multiprocessing.spawn()."""
    register = getattr(sys.modules.get(OPTIMIZERS), "register_optimizer_step_post_hook", None)
    if register is None:
        return
    steps, clock = Steps(), id(_count_steps)

    def stepped(optimizer: object, args: object, kwargs: object) -> None:
        worker = _worker[0] if _worker else None
        nested = is_of_another_step(sys._getframe(1))
        if worker is not None and not nested and steps.begins(optimizer):
            worker.before(clock)
            worker.passed(clock)

    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]
    register(stepped)


def _queues(current: Any) -> Iterator[Any]:
    """The queues and connections that a process was given as arguments, within lists or tuples
    among these, or as attributes."""
    given: list[Any] = [list(getattr(current, "_args", ())), list(vars(current).values())]
    given.append(list(getattr(current, "_kwargs", {}).values()))
    kinds = tuple(_kinds())
    for _ in range(3):
        inner: list[Any] = []
        for value in (value for some in given for value in some):
            kind = type(value)
            if issubclass(kind, kinds):
                yield value
            elif issubclass(kind, (list, tuple)):
                inner.append(value)
        given = inner


def _kinds() -> Iterator[type]:
    """The classes of multiprocessing's queues and connections that are imported."""
    for module, names in (
        ("multiprocessing.queues", ("Queue", "SimpleQueue")),
        ("multiprocessing.connection", ("_ConnectionBase",)),
    ):
        for name in names:
            kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type):
                yield kind


def _count_calls(queue: Any, name: str) -> None:
    """Count the calls of one method of one queue, in this process."""
    call = getattr(queue, name, None)
    if call is None or name in vars(queue):  # the fork of a worker counts it already
        return
    clock = id(queue) ^ CLOCKS.index(name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        worker = _worker[0] if _worker else None
        if worker is None:
            return call(*args, **kwargs)
        worker.before(clock)
        result = call(*args, **kwargs)
        worker.passed(clock)
        return result

    with contextlib.suppress(AttributeError, TypeError):
        setattr(queue, name, counted)
