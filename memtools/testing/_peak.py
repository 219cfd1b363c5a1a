"""Peak: the exact peak of a part of a test, and who held memory when it exceeded the limit.

    with Peak(...):      resets the kernel's peak of resident memory (or torch's, of a device)
        call()  ◄─────── a thread reads every 2 ms; above the limit the test stops for a look: where
                         is it, which tensors are new, who holds them, and which variable is large
    .text                a message if the peak exceeded the limit

The peak is the kernel's or the allocator's own number and misses nothing. A look finds a holder
only if it keeps the memory for some milliseconds.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType

from memtools import _core
from memtools._base import process, reclaim
from memtools._base.devices import DevicePeaks, allocated
from memtools._base.libraries import PACKAGE, is_users, library_paths
from memtools._base.size import format_bytes
from memtools._census.census import Census, census
from memtools.testing._flat import Allowed

NO_PEAK = (
    "peak= has to reset the kernel's peak of resident memory, but /proc/self/clear_refs cannot be "
    "written here; run the test where /proc is writable, or pass growth= alone"
)
_EVERY_S = 0.002  # The thread reads this often.
_LOOKS = 4  # A test has at most this many looks.
_SAMPLE = 1000  # A container is weighed by this many entries.
_WORTH = 0.2  # A holder is named from this share of the limit on.
_NOT_THE_PROGRAMS = (*library_paths(), PACKAGE, "<")


def can_reset_peak() -> bool:
    """Whether the kernel lets a process reset the peak of its resident memory."""
    return _core.Probe().reset_peak()


class Peak:
    """The exact peak of a `with` statement above what was in use at its beginning.

    Args:
        allowed: the limit; None: there is none, and nothing is measured.
        devices: indexes of the CUDA devices to measure; if empty, resident memory is measured.
        given: objects that the test has not made, such as its fixtures.
    """

    def __init__(
        self, allowed: Allowed | None, devices: Sequence[int], given: Iterable[object] = ()
    ) -> None:
        self._allowed, self._devices = allowed, devices
        self._given = {id(value) for value in given}
        self._probe = _core.Probe()
        self._token, self._first = 0, 0
        self._top = 0  # the highest so far
        self._looked_bytes = 0  # what looks have added to resident memory
        self._is_exact = True
        self._peaks: DevicePeaks | None = None
        self._witness: Witness | None = None
        #: the message, once the statement has ended; "" if the peak is within the limit
        self.text = ""

    def __enter__(self) -> None:
        if self._allowed is None:
            return
        gc.collect()  # Garbage of earlier tests must not hide what this test takes.
        earlier = census()
        if self._devices:
            self._peaks = DevicePeaks(self._devices)
            self._first = allocated(self._devices) or 0
            self._peaks.enter(1)
        else:
            reclaim.trim()  # Otherwise the test would first fill free memory that malloc keeps.
            self._first = self._probe.rss() or 0
            self._token = self._probe.enter("test")
        self._witness = Witness(self, self._first + self._allowed.bytes, earlier, self._given)
        self._witness.start()

    def __exit__(self, *error: object) -> None:
        if self._allowed is None or self._witness is None:
            return
        self._witness.stop()
        where = "on the device" if self._peaks is not None else "of resident memory"
        if self._peaks is not None:
            self._top = sum(self._peaks.leave(1).values())
        else:
            self._close()
        taken = max(0, self._top - self._first)
        if not self._is_exact:
            self.text = NO_PEAK
        elif taken > self._allowed.bytes:
            self.text = (
                f"the test takes {format_bytes(taken)} at its peak (allowed: {self._allowed.text}),"
                f" above the {format_bytes(self._first)} {where} when it began\n"
                f"  {self._witness.text}"
            )

    @property
    def allowed_bytes(self) -> int:
        """The limit; 0 if there is none."""
        return 0 if self._allowed is None else self._allowed.bytes

    def read(self) -> int:
        """Bytes in use now; 0 during a look."""
        if self._devices:
            return allocated(self._devices) or 0
        if not self._token:
            return 0
        return (self._probe.rss() or 0) - self._looked_bytes

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A context for a look, whose own memory does not count."""
        if self._devices or not self._token:
            yield
            return
        self._close()
        before = self._probe.rss() or 0
        try:
            yield
        finally:
            reclaim.trim()  # Otherwise the test would fill what the look has freed.
            self._looked_bytes += max(0, (self._probe.rss() or 0) - before)
            self._token = self._probe.enter("test")

    def _close(self) -> None:
        """End an interval between looks."""
        top, _, exact = self._probe.leave(self._token)
        self._is_exact = self._is_exact and exact and top is not None
        # The kernel's mark may lag behind what is resident by some pages of each processor.
        top = max(top or 0, self._probe.rss() or 0)
        self._top = max(self._top, top - self._looked_bytes)
        self._token = 0


_Pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Witness:
    """Looks at who holds memory once it exceeds a limit: up to four times, until a holder is found.

    A thread reads memory. The look itself is a pending call of the interpreter, which the main
    thread makes between two instructions of the test: so the test does not run beside it, and the
    memory of the look is known. There are no looks in a test that runs on another thread.

    Args:
        peak: reads memory.
        limit: the bytes above which it looks.
        earlier: a census of before the test.
        given: ids of objects that the test has not made.
    """

    def __init__(self, peak: Peak, limit: int, earlier: Census, given: set[int]) -> None:
        self._peak, self._limit = peak, limit
        self._worth = _WORTH * peak.allowed_bytes
        self._earlier, self._given = earlier, given
        self._is_over, self._looks, self._place = threading.Event(), 0, ""
        self._is_done = threading.Event()  # set unless a look runs
        self._is_done.set()
        self._call = _Pending(self._look)
        self._interrupt: type[BaseException] | None = None  # raised during a look
        self._thread = threading.Thread(target=self._watch, name="memtools peak", daemon=True)
        #: what the looks have found
        self.text = "its holder is not known: it existed for a few milliseconds only"

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            with process.signals_blocked():
                self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        while not self._is_done.is_set():  # The interpreter still has the pending call.
            pass

    def _watch(self) -> None:
        pause = _EVERY_S
        while self._looks < _LOOKS and not self._is_over.wait(pause):
            if not self._is_done.is_set() or self._peak.read() <= self._limit:
                continue
            self._is_done.clear()
            if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
                self._is_done.set()  # The interpreter has too many calls: try again later.
            pause = _EVERY_S * 10**self._looks
        if self._interrupt is not None:
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(self._interrupt))

    def _look(self, _: object) -> int:
        """Look. The interpreter calls it on the main thread."""
        try:
            if not self._is_over.is_set():
                with self._peak.looking():
                    self._place = self._place or _place_of(sys._getframe(1))
                    holder = self._of_tensors() or self._of_variables(sys._getframe(1))
                self.text = f"passed at {self._place}: {holder or 'its holder is not known'}"
                self._looks = _LOOKS if holder else self._looks + 1
        except Exception as error:
            self.text = f"its holder is not known: {type(error).__name__}: {error}"
            self._looks = _LOOKS
        except BaseException as error:  # A callback of C cannot raise Ctrl-C: the thread does.
            self._interrupt = type(error)
            self._looks = _LOOKS
        finally:
            self._is_done.set()
        return 0

    def _of_tensors(self) -> str:
        """The holder of the new tensors of the kind that takes most, or ""."""
        growth = census().diff(self._earlier)
        for group in growth.groups[:1]:
            if group.bytes >= self._worth:
                holders = growth.holders()
                return str(holders[0]) if holders else ""
        return ""

    def _of_variables(self, innermost: FrameType) -> str:
        """The largest variable of the program's running functions, or ""."""
        most, name = self._worth, ""
        for frame in _frames_of(innermost):
            for variable, value in list(frame.f_locals.items()):
                size = 0 if id(value) in self._given else _weight(value)
                if size > most:
                    kind = type(value).__name__
                    most = size
                    name = (
                        f"{kind} local {variable!r} of {frame.f_code.co_qualname}() holds "
                        f"{format_bytes(size)}"
                    )
        return name


def _place_of(innermost: FrameType) -> str:
    """The line of the program that runs, like `test_it.py:14 in test_it`."""
    for frame in _frames_of(innermost):
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"
    return "the end of the test"


def _frames_of(innermost: FrameType) -> Iterator[FrameType]:
    """The running functions of the program, without those of libraries, the innermost first."""
    frame: FrameType | None = innermost
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name) or not name.startswith(_NOT_THE_PROGRAMS):
            yield frame
        frame = frame.f_back


def _weight(value: object) -> int:
    """Bytes of a buffer or a built-in container, whose entries are sampled; 0 for other objects."""
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return int(value.nbytes)  # type: ignore[attr-defined]
    if kind in (bytes, bytearray, str):
        return sys.getsizeof(value)
    if kind not in (list, tuple, set, frozenset, dict, deque):
        return 0
    entries = list(islice(value.values() if isinstance(value, dict) else iter(value), _SAMPLE))  # type: ignore[call-overload]
    if not entries:
        return 0
    below = sum(_own(entry) for entry in entries) * len(value) // len(entries)  # type: ignore[arg-type]
    return sys.getsizeof(value) + below


def _own(value: object) -> int:
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return int(value.nbytes)  # type: ignore[attr-defined]
    return sys.getsizeof(value) if kind.__module__ == "builtins" else 0
