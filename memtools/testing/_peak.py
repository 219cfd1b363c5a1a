"""Peak: the exact peak of a part of a test, and who held memory when it passed what is allowed.

    with Peak(...):      the mark of resident memory set back (or torch's, of a device)
        call()  ◄─────── a thread reads every 2 ms; once it is above the limit, the test is stopped
                         for a look: where is it, which tensors are new and who holds them, which
                         variable is large
    .text                the exact peak against the limit

The number is the kernel's or the allocator's own, and misses nothing. Who held it is seen where the
memory is kept for some milliseconds.
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
from memtools.testing._limits import Allowed

NO_PEAK = (
    "peak= needs the kernel's mark of resident memory set back, and it refuses to write "
    "/proc/self/clear_refs here; run the test where /proc may be written, or pass growth= alone"
)
_EVERY_S = 0.002
_LOOKS = 4
_SAMPLE = 1000  # entries of a container that are weighed
_WORTH = 0.2  # of what is allowed: who holds less is not told
_NOT_THE_PROGRAMS = (*library_paths(), PACKAGE, "<")


def can_tell_peaks() -> bool:
    """Whether the kernel lets a process set back the mark of its resident memory."""
    return _core.Probe().reset_peak()


class Peak:
    """The exact peak of a `with` statement above what was in use at its beginning.

    Args:
        allowed: what it may be; None: anything, and nothing is measured.
        devices: indexes of the CUDA devices whose peak it is; with none it is resident memory's.
        given: objects that the test did not make, such as the values of its fixtures.
    """

    def __init__(
        self, allowed: Allowed | None, devices: Sequence[int], given: Iterable[object] = ()
    ) -> None:
        self._allowed, self._devices = allowed, devices
        self._given = {id(value) for value in given}
        self._probe = _core.Probe()
        self._token, self._first = 0, 0
        self._top, self._looked_bytes = 0, 0  # before a look, and what looks have added
        self._is_exact = True
        self._peaks: DevicePeaks | None = None
        self._witness: Witness | None = None
        #: what to say, once it has ended; "" where the peak is allowed
        self.text = ""

    def __enter__(self) -> None:
        if self._allowed is None:
            return
        gc.collect()  # what others left is not to be taken for what this one gives back
        earlier = census()
        if self._devices:
            self._peaks = DevicePeaks(self._devices)
            self._first = allocated(self._devices) or 0
            self._peaks.enter(1)
        else:
            reclaim.trim()  # else the test would first fill what malloc keeps, unseen
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
                f"the test takes {format_bytes(taken)} at its peak (allowed: {self._allowed.told}),"
                f" above the {format_bytes(self._first)} {where} when it began\n"
                f"  {self._witness.text}"
            )

    @property
    def allowed_bytes(self) -> int:
        """What the peak may be; 0 where anything is allowed."""
        return 0 if self._allowed is None else self._allowed.bytes

    def read(self) -> int:
        """Bytes in use now; 0 while somebody looks."""
        if self._devices:
            return allocated(self._devices) or 0
        if not self._token:
            return 0
        return (self._probe.rss() or 0) - self._looked_bytes

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A look that takes resident memory itself, which does not count."""
        if self._devices or not self._token:
            yield
            return
        self._close()
        before = self._probe.rss() or 0
        try:
            yield
        finally:
            reclaim.trim()  # what the look has freed is not for the test to fill, unseen
            self._looked_bytes += max(0, (self._probe.rss() or 0) - before)
            self._token = self._probe.enter("test")

    def _close(self) -> None:
        """The end of an interval without looks in it."""
        top, _, exact = self._probe.leave(self._token)
        self._is_exact = self._is_exact and exact and top is not None
        # The kernel's mark may lag behind what is resident by some pages of each processor.
        top = max(top or 0, self._probe.rss() or 0)
        self._top = max(self._top, top - self._looked_bytes)
        self._token = 0


_Pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Witness:
    """Looks at who holds memory once it has passed a limit: at most four times, until somebody is
    known.

    A thread reads; the look itself is a pending call of the interpreter, which the main thread
    makes between two of the test's own instructions: so nothing of the test runs beside it, and
    what the look takes is known. In a test of another thread nobody looks.

    Args:
        peak: what reads memory.
        limit: bytes above which it looks.
        earlier: a census of before.
        given: ids of objects that were there before.
    """

    def __init__(self, peak: Peak, limit: int, earlier: Census, given: set[int]) -> None:
        self._peak, self._limit = peak, limit
        self._worth = _WORTH * peak.allowed_bytes
        self._earlier, self._given = earlier, given
        self._is_over, self._looks, self._place = threading.Event(), 0, ""
        self._is_done = threading.Event()  # no look is under way
        self._is_done.set()
        self._call = _Pending(self._look)
        self._interrupt: type[BaseException] | None = None  # came within a look
        self._thread = threading.Thread(target=self._watch, name="memtools peak", daemon=True)
        #: what it saw
        self.text = "who held it is not known: it was there for some milliseconds only"

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            with process.signals_blocked():
                self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        while not self._is_done.is_set():  # the interpreter still has the pending call
            pass

    def _watch(self) -> None:
        pause = _EVERY_S
        while self._looks < _LOOKS and not self._is_over.wait(pause):
            if not self._is_done.is_set() or self._peak.read() <= self._limit:
                continue
            self._is_done.clear()
            if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
                self._is_done.set()  # the interpreter has too many; later, then
            pause = _EVERY_S * 10**self._looks
        if self._interrupt is not None:
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(self._interrupt))

    def _look(self, _: object) -> int:
        """Called by the interpreter, on the main thread."""
        try:
            if not self._is_over.is_set():
                with self._peak.looking():
                    self._place = self._place or _place_of(sys._getframe(1))
                    holder = self._of_tensors() or self._of_variables(sys._getframe(1))
                self.text = f"passed at {self._place}: {holder or 'who held it is not known'}"
                self._looks = _LOOKS if holder else self._looks + 1
        except Exception as error:
            self.text = f"who held it is not known: {type(error).__name__}: {error}"
            self._looks = _LOOKS
        except BaseException as error:  # Ctrl-C, for example: a callback of C hands none on
            self._interrupt = type(error)
            self._looks = _LOOKS
        finally:
            self._is_done.set()
        return 0

    def _of_tensors(self) -> str:
        """The new tensors of the kind that takes most, by who holds them."""
        growth = census().diff(self._earlier)
        for group in growth.groups[:1]:
            if group.bytes >= self._worth:
                holders = growth.holders()
                return str(holders[0]) if holders else ""
        return ""

    def _of_variables(self, innermost: FrameType) -> str:
        """The largest variable of the program's running functions."""
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
    """Where the program runs, like `test_it.py:14 in test_it`."""
    for frame in _frames_of(innermost):
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"
    return "the end of the test"


def _frames_of(innermost: FrameType) -> Iterator[FrameType]:
    """The running functions of the program, the innermost first; without those of libraries."""
    frame: FrameType | None = innermost
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name) or not name.startswith(_NOT_THE_PROGRAMS):
            yield frame
        frame = frame.f_back


def _weight(value: object) -> int:
    """Bytes of a buffer or a container of the built-in types, its entries by a sample; 0 of
    others."""
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
