"""loader_report(): what a DataLoader's workers, prefetching and pinning cost, and what to set."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.limits import SHM, left_of, nearest_limit, shm_room
from memtools._base.number import positive, whole_number
from memtools._base.size import format_bytes
from memtools._base.text import aligned, count, duration, sentence
from memtools.data._loader import BoundedLoader
from memtools.data._measure import Measured, measure

if TYPE_CHECKING:
    import torch

SHARE_OF_SHM = 0.5  # Batches in flight may take this share of the free part of /dev/shm.
SHARE_OF_JOB = 0.25  # The loader may take this share of what the job may still take.


@dataclass(frozen=True)
class LoaderSettings:
    """The settings of a DataLoader that decide its memory."""

    #: worker processes
    num_workers: int
    #: batches per worker
    prefetch_factor: int | None
    #: whether batches are pinned
    pin_memory: bool
    #: samples; None with a batch sampler
    batch_size: int | None

    @property
    def batches(self) -> int:
        """Prefetched batches."""
        return self.num_workers * (self.prefetch_factor or 0)


@dataclass(frozen=True)
class LoaderCost:
    """The most memory that a loader takes, in bytes; None if unknown."""

    #: batches that wait for the loop
    in_flight: int | None
    #: the batch in use
    loop: int | None
    #: both, in /dev/shm
    shm: int | None
    #: worker processes
    workers: int | None
    #: pinned memory, in blocks of powers of two
    pinned: int | None

    @property
    def total(self) -> int | None:
        """The sum; batches in /dev/shm or pinned memory count once."""
        if self.in_flight is None or self.loop is None:
            return None
        return max(self.in_flight + self.loop, self.pinned or 0) + (self.workers or 0)


@dataclass(frozen=True)
class LoaderReport:
    """The memory of a DataLoader in bytes, from `loader_report()`; `str()` is a table with
    advice."""

    #: the largest drawn batch
    batch_bytes: int | None
    #: of one process per batch
    batch_seconds: float | None
    #: the loader's settings
    settings: LoaderSettings
    #: its cost
    cost: LoaderCost
    #: better settings
    advised: LoaderSettings
    #: their cost
    advised_cost: LoaderCost
    #: free in /dev/shm
    shm_free: int | None
    #: the size of /dev/shm
    shm_total: int | None
    #: the lowest limit of the job, or the machine's memory
    job_limit: int | None
    #: used of it
    job_used: int | None
    #: what to set and why
    advice: str
    #: why figures are None, a sentence each
    unknown: tuple[str, ...]
    _loader: Any

    def apply(self) -> torch.utils.data.DataLoader[Any]:
        """Make a plain DataLoader with the advised settings, of the same data set, sampler and
        generator. Raises TypeError if the loader is of another class."""
        torch, old, new = bridge.connect().torch, self._loader, self.advised
        if type(old) is not torch.utils.data.DataLoader:
            raise TypeError(
                f"apply() makes a torch DataLoader, and this one is a {type(old).__name__}; set "
                f"num_workers={new.num_workers} and prefetch_factor={new.prefetch_factor} where "
                "you make it"
            )
        arguments = _arguments(old, new)
        return torch.utils.data.DataLoader(old.dataset, **arguments)  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain dicts."""
        found = asdict(replace(self, _loader=None))
        del found["_loader"]
        return found

    def __str__(self) -> str:
        return "\n".join([self._first_line(), *aligned(self._rows()), *self._last_lines()])

    def _first_line(self) -> str:
        if self.batch_bytes is None or self.batch_seconds is None:
            return "loader: the size of a batch is not known"
        made = duration(self.batch_seconds)
        return f"loader: a batch takes {format_bytes(self.batch_bytes)}, and one process {made}"

    def _rows(self) -> list[list[str]]:
        now, new, cost, less = self.settings, self.advised, self.cost, self.advised_cost
        rows = [["", "now", "advised", "of"]]
        for name in ("num_workers", "prefetch_factor", "pin_memory", "batch_size"):
            rows.append([name, str(getattr(now, name)), str(getattr(new, name)), ""])
        job_free = left_of(self.job_limit, self.job_used)
        rooms = {"shm": self.shm_free, "total": job_free}
        titles = {
            "in_flight": "batches in flight",
            "loop": "in the loop",
            "shm": f"in {SHM}",
            "workers": "workers",
            "pinned": "pinned",
            "total": "in all",
        }
        for name, title in titles.items():
            room = rooms.get(name)
            of = "" if room is None else f"{format_bytes(room)} free"
            rows.append([title, _text(getattr(cost, name)), _text(getattr(less, name)), of])
        return rows

    def _last_lines(self) -> Iterator[str]:
        yield from (f"not known: {line}" for line in self.unknown)
        yield self.advice


def _text(size: int | None) -> str:
    return "not known" if size is None else format_bytes(size)


def loader_report(
    loader: torch.utils.data.DataLoader[Any] | BoundedLoader,
    *,
    batches: int = 2,
    step_seconds: float | None = None,
    timeout: float = 60.0,
) -> LoaderReport:
    """Measure the size of a batch in a forked child, and report what a loader takes and which
    settings to change.

    Args:
        loader: a torch DataLoader, or a bounded one.
        batches: how many batches to draw.
        step_seconds: the time of the loop for a batch, if known, to advise the number of workers.
        timeout: seconds after which the child is killed.
    """
    original, in_flight = loader, None
    if isinstance(loader, BoundedLoader):
        original, in_flight = loader.loader, loader.limit
    torch = bridge.connect().torch
    if not isinstance(original, torch.utils.data.DataLoader):
        raise TypeError(f"loader_report() takes a torch DataLoader, got {type(loader).__name__}")
    batches = whole_number("batches", batches)
    for name, number in (("step_seconds", step_seconds), ("timeout", timeout)):
        if number is not None:
            positive(name, number)
    found = measure(original, batches, timeout)
    return _report(original, found, step_seconds, in_flight)


def _report(
    loader: Any, found: Measured, step_seconds: float | None, in_flight: int | None
) -> LoaderReport:
    torch = bridge.connect().torch
    settings = LoaderSettings(
        loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.batch_size
    )
    sample, shm = _core.Probe("/", True).read(), shm_room()
    shm_free, shm_total = (None, None) if shm is None else shm
    limit, used = nearest_limit(sample)
    pins = bool(torch.accelerator.is_available())
    is_stream = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    room = left_of(limit, used)
    wanted = _Wanted(settings, found, pins, shm_free, room, in_flight, is_stream)
    advised, reasons = wanted.advise(step_seconds)
    return LoaderReport(
        batch_bytes=found.batch_bytes,
        batch_seconds=found.batch_seconds,
        settings=settings,
        cost=wanted.cost(settings),
        advised=advised,
        advised_cost=wanted.cost(advised),
        shm_free=shm_free,
        shm_total=shm_total,
        job_limit=limit,
        job_used=used,
        advice=_advice(settings, advised, reasons, found),
        unknown=tuple(_unknown(loader, found, step_seconds, is_stream)),
        _loader=loader,
    )


@dataclass(frozen=True)
class _Wanted:
    """What a loader takes with other settings than its own, and which of them fit."""

    now: LoaderSettings
    found: Measured
    pins: bool  # whether the machine has a device to pin memory for
    shm: int | None  # free bytes in /dev/shm
    room: int | None  # bytes that the job may still take
    in_flight: int | None = None  # the limit of a bounded loader, in bytes
    is_stream: bool = False  # whether the data set is an IterableDataset

    def cost(self, settings: LoaderSettings) -> LoaderCost:
        """What the loader takes; another batch size is taken to change all bytes in proportion."""
        found, share = self.found, (settings.batch_size or 1) / (self.now.batch_size or 1)
        workers = None if found.worker_bytes is None else settings.num_workers * found.worker_bytes
        if found.batch_bytes is None:
            return LoaderCost(None, None, None, workers, None)
        tensors = [round(share * size) for size in found.tensors]
        batch, ahead = round(share * found.batch_bytes), settings.batches
        if self.in_flight is not None:
            ahead = min(ahead, max(1, self.in_flight // max(1, batch)))
        held = ahead + 1  # with the one that the loop uses
        pinned = 0
        if settings.pin_memory and self.pins:
            pinned = held * sum(1 << (size - 1).bit_length() for size in tensors if size)
        return LoaderCost(
            in_flight=ahead * batch,
            loop=batch,
            shm=held * sum(tensors) if settings.num_workers else 0,
            workers=workers,
            pinned=pinned,
        )

    def lack(self, settings: LoaderSettings) -> str:
        """Why the loader does not fit well with these settings; "" where it does."""
        cost = self.cost(settings)
        if cost.shm is not None and self.shm is not None and cost.shm > SHARE_OF_SHM * self.shm:
            return (
                f"batches take up to {format_bytes(cost.shm)} of the {format_bytes(self.shm)} "
                f"that are free in {SHM}"
            )
        total, room = cost.total, self.room
        if total is not None and room is not None and total > SHARE_OF_JOB * room:
            return (
                f"the loader takes up to {format_bytes(total)} of the {format_bytes(room)} that "
                "the job may still take"
            )
        return ""

    def advise(self, step_seconds: float | None) -> tuple[LoaderSettings, list[str]]:
        """Settings that fit, and why they differ from those of the loader."""
        new, reasons, cores = self.now, list[str](), len(os.sched_getaffinity(0))
        if new.pin_memory and not self.pins:
            new = replace(new, pin_memory=False)
            reasons.append("there is no device to pin memory for")
        seconds = self.found.batch_seconds
        if step_seconds is not None and seconds is not None:
            workers = math.ceil(min(cores, seconds / step_seconds))
            if self.is_stream:  # more of them would draw the same, unless it divides itself
                workers = min(workers, max(1, new.num_workers))
            if workers != new.num_workers:
                new = _with_workers(new, workers)
                reasons.append(
                    f"one process takes {duration(seconds)} for a batch and the loop "
                    f"{duration(step_seconds)}"
                )
        if new.num_workers > cores:
            reasons.append(f"{new.num_workers} workers share {count(cores, 'core')}")
            new = _with_workers(new, cores)
        if lack := self.lack(new):
            smaller = self._that_fit(new)
            new = smaller or new
            reasons.append(lack if smaller else f"{lack}, and no smaller settings fit")
        return new, reasons

    def _that_fit(self, settings: LoaderSettings) -> LoaderSettings | None:
        """The first smaller settings that fit: fewer batches of each worker, then fewer workers,
        then smaller batches. None where nothing fits."""
        for factor in range((settings.prefetch_factor or 1) - 1, 0, -1):
            if not self.lack(smaller := replace(settings, prefetch_factor=factor)):
                return smaller
        for workers in range(settings.num_workers - 1, -1, -1):
            smaller = _with_workers(settings, workers)
            smaller = replace(smaller, prefetch_factor=1 if workers else None)
            if not self.lack(smaller):
                return smaller
        alone, size = replace(settings, num_workers=0, prefetch_factor=None), settings.batch_size
        while size is not None and size > 1:
            size //= 2
            if not self.lack(smaller := replace(alone, batch_size=size)):
                return smaller
        return None


def _with_workers(settings: LoaderSettings, workers: int) -> LoaderSettings:
    factor = (settings.prefetch_factor or 2) if workers else None
    return replace(settings, num_workers=workers, prefetch_factor=factor)


def _advice(now: LoaderSettings, new: LoaderSettings, reasons: list[str], found: Measured) -> str:
    """The one sentence."""
    changes = [
        f"{name}={getattr(new, name)}"
        for name in ("num_workers", "prefetch_factor", "pin_memory", "batch_size")
        if getattr(new, name) != getattr(now, name)
    ]
    if changes:
        return sentence(f"set {', '.join(changes)}: {', and '.join(reasons)}")
    if reasons:
        return sentence(reasons[-1])
    if found.batch_bytes is None:
        return "No advice: the size of a batch is not known."
    return "Nothing to change: the loader fits."


def _unknown(
    loader: Any, found: Measured, step_seconds: float | None, is_stream: bool
) -> Iterator[str]:
    """What could not be found out."""
    if found.why:
        yield f"what a batch takes: {found.why}"
    elif found.worker_bytes is None:
        yield "what a worker takes for itself: /proc/self/smaps_rollup cannot be read"
    elif loader.num_workers and _starts_anew(loader):
        yield ("what a spawned worker takes: add Python, torch and its copy of the data set")
    if step_seconds is not None and is_stream:
        yield "whether more workers are possible: a stream must divide itself among them"
    if step_seconds is None:
        yield "whether there are enough workers: pass step_seconds, the time of a step of the loop"


def _starts_anew(loader: Any) -> bool:
    """Whether workers are spawned, or come from a fork server."""
    context = loader.multiprocessing_context or bridge.connect().torch.multiprocessing
    return bool(context.get_start_method(allow_none=True) not in (None, "fork"))


def _arguments(old: Any, new: LoaderSettings) -> dict[str, Any]:
    """What DataLoader() takes to make one like `old` with other settings."""
    names = ["collate_fn", "timeout", "worker_init_fn", "generator", "in_order"]
    arguments = {name: getattr(old, name) for name in names}
    arguments |= {"num_workers": new.num_workers, "pin_memory": new.pin_memory}
    if new.num_workers:
        arguments["prefetch_factor"] = new.prefetch_factor
        arguments["persistent_workers"] = old.persistent_workers
        arguments["multiprocessing_context"] = old.multiprocessing_context
    else:
        arguments["timeout"] = 0
    torch = bridge.connect().torch
    is_iterable = isinstance(old.dataset, torch.utils.data.IterableDataset)
    if old.batch_size is None and old.batch_sampler is not None:
        return {**arguments, "batch_sampler": old.batch_sampler}
    arguments |= {"batch_size": new.batch_size, "drop_last": old.drop_last}
    return arguments if is_iterable else {**arguments, "sampler": old.sampler}
