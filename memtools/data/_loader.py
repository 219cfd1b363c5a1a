"""bounded(): a DataLoader whose prefetched batches stay under a limit in bytes.

torch's loader asks its workers for `num_workers * prefetch_factor` batches, however large they are.
The loader that is made here draws the same indices at the same moments, keeps them, and hands them
to the workers as the limit allows:

    sampler ──► indices drawn ──► InFlight.admits()? ──► index queues of the workers ──► batches
"""

from __future__ import annotations

import copy
import functools
import traceback
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.size import format_bytes, parse_bytes
from memtools._budget import Budget, check_device
from memtools.data._inflight import InFlight
from memtools.data._sizes import size_of

if TYPE_CHECKING:
    import torch

PRESSURE = 0.85  # A monitor shrinks the loader at this share of the host's limit.
#: The methods used of torch's iterator, which is not a public class.
_USED = ("_reset", "_next_index", "_try_put_index", "_get_data", "_process_data")
_END = object()  # Marks the end of the sampler.
_classes: list[Any] = []  # The class that _iterator_class() has made, if any.


class BoundedLoader:
    """A DataLoader whose prefetched batches stay below a limit. Order, batches, random state and
    attributes are those of the loader."""

    def __init__(
        self,
        loader: torch.utils.data.DataLoader[Any],
        in_flight: int | str | Budget,
        *,
        batch_bytes: int | str | None = None,
        monitor: Any = None,
    ) -> None:
        """As `bounded()`."""
        self._original = loader
        self._given = in_flight, batch_bytes
        check_device(in_flight, "cpu", "a bounded loader")
        largest = 0 if batch_bytes is None else parse_bytes(batch_bytes, "batch_bytes")
        if isinstance(in_flight, Budget):
            part = _core.BudgetPart(in_flight, "bounded loader")
            self._flight = InFlight(in_flight.limit, largest, part)
        else:
            self._flight = InFlight(parse_bytes(in_flight, "in_flight", "2 GiB"), largest)
        self._loader = _with_bounded_iterators(loader, self._flight)
        if monitor is not None:
            self._follow(monitor)

    def _follow(self, monitor: Any) -> None:
        """Shrink while memory of the host is short, for as long as this loader lives."""
        if not callable(getattr(monitor, "on_pressure", None)):
            raise TypeError(f"monitor must be a MemoryMonitor, got {type(monitor).__name__}")
        shrink = weakref.WeakMethod(self.shrink)

        def shrink_loader(pressure: object) -> None:
            method = shrink()
            if method is not None:
                method(pressure)

        handle = monitor.on_pressure(PRESSURE, shrink_loader)
        weakref.finalize(self, handle.remove).atexit = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"'BoundedLoader' object has no attribute {name!r}")
        return getattr(self._loader, name)

    @property
    def loader(self) -> torch.utils.data.DataLoader[Any]:
        """The loader that `bounded()` got."""
        return self._original

    @property
    def limit(self) -> int | None:
        """The most bytes in flight. It may be set at any time, also to a text like `"1 GiB"`. With
        a Budget the lower limit counts."""
        return self._flight.limit

    @limit.setter
    def limit(self, limit: int | str) -> None:
        self._flight.set_limit(parse_bytes(limit, "limit"))

    @property
    def allowed(self) -> int | None:
        """Bytes allowed in flight now, less than `limit` after `shrink()`."""
        return self._flight.allowed

    @property
    def in_flight(self) -> int:
        """Bytes of requested batches that the loop has not got; those not arrived count as the
        largest."""
        return self._flight.held()[1]

    @property
    def batches_in_flight(self) -> int:
        """Requested batches that the loop has not got."""
        return self._flight.held()[0]

    @property
    def batch_bytes(self) -> int:
        """The largest batch so far."""
        return self._flight.largest

    @property
    def peak(self) -> int:
        """The most bytes in flight so far."""
        return self._flight.peak

    def shrink(self, pressure: object = None) -> None:
        """Allow half of what is in flight now, at least one batch.

        It grows back to `limit` by one batch for every 16 that the loop gets. As a callback of
        `MemoryMonitor.on_pressure` it ignores `pressure`.
        """
        self._flight.shrink()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has the same settings, no batch in flight and no monitor."""
        in_flight, largest = self._given
        limit = in_flight if isinstance(in_flight, Budget) else self.limit
        make = functools.partial(BoundedLoader, batch_bytes=largest)
        return make, (self._original, limit)

    def __repr__(self) -> str:
        batches, held = self._flight.held()
        of = "" if self.allowed is None else f" of {format_bytes(self.allowed)}"
        return f"BoundedLoader({batches} batches, {format_bytes(held)}{of} in flight)"


def bounded(
    loader: torch.utils.data.DataLoader[Any],
    in_flight: int | str | Budget = "2 GiB",
    *,
    batch_bytes: int | str | None = None,
    monitor: Any = None,
) -> BoundedLoader:
    """Keep the batches that a DataLoader prefetches below a limit in bytes.

    A batch is in flight from its request to a worker until the loop gets it. None is requested that
    would exceed the limit, the job's memory or `/dev/shm`, but each iterator may always have one in
    flight. So one batch, or one larger than all before it, may exceed the limit.

    Args:
        loader: a torch DataLoader, which does not change. Without workers nothing is prefetched.
        in_flight: the most bytes in flight, or like `"2 GiB"`; or a Budget.
        batch_bytes: the largest batch, if known, or like `"64 MiB"`. None: the largest so far, and
            the first batch is requested alone.
        monitor: a MemoryMonitor, which calls `shrink()` at 85 % of the host's limit.

    Raises TypeError if `loader` makes its own iterators, ValueError if the Budget is for a device,
    RuntimeError if this torch is not supported.
    """
    return BoundedLoader(loader, in_flight, batch_bytes=batch_bytes, monitor=monitor)


def _with_bounded_iterators(loader: torch.utils.data.DataLoader[Any], flight: InFlight) -> Any:
    """A copy of the loader, of the same data set, sampler and generator, whose iterators with
    workers are bounded."""
    kind = bridge.connect().torch.utils.data.DataLoader
    if not isinstance(loader, kind):
        raise TypeError(f"bounded() takes a torch DataLoader, got {type(loader).__name__}")
    if getattr(type(loader), "_get_iterator", None) is not kind._get_iterator:
        remedy = "pass a torch.utils.data.DataLoader"
        if isinstance(getattr(loader, "base_dataloader", None), kind):  # one of accelerate's
            remedy = "write loader.base_dataloader = bounded(loader.base_dataloader)"
        raise TypeError(
            f"bounded() steers the iterators of torch's DataLoader, and {type(loader).__name__} "
            f"makes its own; {remedy}"
        )
    bound = copy.copy(loader)
    vars(bound)["_iterator"] = None  # workers of the loader's own stay its own
    if loader.num_workers > 0:
        make, weak = _iterator_class(), weakref.ref(bound)
        # A reference to the copy itself would be a cycle, and persistent workers would live on.
        vars(bound)["_get_iterator"] = lambda: make(weak(), flight)
    return bound


def _iterator_class() -> Any:
    """torch's iterator with workers, bounded. It is made at the first use, as it needs torch."""
    if _classes:
        return _classes[0]
    torch = bridge.connect().torch
    base: Any = getattr(torch.utils.data.dataloader, "_MultiProcessingDataLoaderIter", None)
    missing = [name for name in _USED if not hasattr(base, name)]
    if missing:
        raise RuntimeError(
            f"bounded() does not know the DataLoader of torch {torch.__version__}, which has no "
            f"{missing[0]}(); use a smaller prefetch_factor instead"
        )

    worker = torch.utils.data._utils.worker
    kinds = torch.utils.data.dataloader._DatasetKind
    no_batch = (worker.ExceptionWrapper, worker._IterableDatasetStopIteration)

    class BoundedIterator(base):  # type: ignore[misc]
        """Its base class draws an index and puts it into a worker's queue in one call; here the
        indices that were drawn wait in between, in `_drawn`."""

        def __init__(self, loader: Any, flight: InFlight) -> None:
            self._flight = flight
            self._drawn: deque[Any] = deque()
            self._sizes: dict[int, int] = {}  # of batches that have arrived, by their number
            self._task_info: dict[int, Any] = {}
            self._workers_status: list[bool] = []
            loader.check_worker_number_rationality()
            super().__init__(loader)

        def _reset(self, loader: Any, first_iter: bool = False) -> None:
            if not first_iter and self._dataset_kind == kinds.Map:
                self._work_off()
            self._drawn.clear()
            self._sizes.clear()
            self._task_info = {}
            self._flight.join(self)
            super()._reset(loader, first_iter)

        def _work_off(self) -> None:
            """Let persistent workers finish an epoch that was left: torch has requested all batches
            that were drawn, and the workers have drawn random numbers for them. One batch at a
            time; all are dropped."""
            waiting = {number: task for number, task in self._task_info.items() if len(task) == 1}
            self._task_info = waiting
            for _ in range(len(waiting)):
                self._get_data()
            while self._drawn:
                super()._try_put_index()
                self._get_data()

        def asked_for(self) -> int:
            """How many batches were asked for and not handed out; some may never come."""
            return len(self._task_info)

        def flying(self) -> tuple[int, list[int]]:
            """How many batches have not arrived, and the bytes of each that has and waits."""
            sizes, lives, coming, arrived = self._sizes, self._workers_status, 0, list[int]()
            # A copy, since `in_flight` and `shrink()` may be called in another thread.
            for number, task in list(self._task_info.items()):
                if len(task) == 2:
                    arrived.append(sizes.get(number, 0))
                elif lives[task[0]]:
                    coming += 1
            return coming, arrived

        def __next__(self) -> Any:
            try:
                return super().__next__()
            except StopIteration:
                raise
            except Exception as error:
                # A worker was killed, or did not answer in time. Or it was killed while its batch
                # was taken over, before torch knows of it. What a worker raised itself, such as a
                # ConnectionError of its data set, begins with "Caught ".
                text = str(error)
                killed = isinstance(error, RuntimeError) and text.startswith("DataLoader ")
                broken = isinstance(error, ConnectionError) and not text.startswith("Caught ")
                if killed or broken:
                    error.add_note(self._flight.cause())
                # A frame of torch's refers to the error. That cycle would keep this iterator, its
                # workers and their batches until a collection, which waits seconds for them.
                traceback.clear_frames(error.__traceback__)
                raise

        def _try_put_index(self) -> None:
            if (drawn := next(self._sampler_iter, _END)) is not _END:
                self._drawn.append(drawn)
            while self._drawn and self._flight.admits(self):
                sent = self._send_idx
                super()._try_put_index()
                if self._send_idx == sent:  # All streams have ended, and no worker takes the index.
                    break
                self._flight.asked()

        def _next_index(self) -> Any:
            return self._drawn.popleft()

        def _get_data(self) -> Any:
            number, data = super()._get_data()
            if number in self._task_info and not isinstance(data, no_batch):
                self._sizes[number] = size_of(data)
                self._flight.arrived(self._sizes[number])
            return number, data

        def _process_data(self, data: Any, worker: int) -> Any:
            tasks, sizes = self._task_info, self._sizes
            if len(sizes) > len(tasks):  # some are of batches that the loop has got
                self._sizes = {i: size for i, size in sizes.items() if i in tasks}
            self._flight.handed()
            return super()._process_data(data, worker)

        def _shutdown_workers(self) -> None:
            try:
                super()._shutdown_workers()
            finally:  # also where Ctrl-C ends the wait for a worker
                self._task_info = {}
                self._flight.release()

    _classes.append(BoundedIterator)
    return BoundedIterator
