"""Costs of the memory monitor's readings and phases, beside the usual ways of taking them.

`rss` is resident bytes alone, `sample` what a monitor reads each step, `phase` a stretch of code
with its peak. `bare` ways are the same kernel files by a plain loop in C, with no parsing and no
Python: what cannot be beaten. `cold` is a sample after 12 ms of pause, when what is kept for 10 ms
is read anew. `slowdown` is what a Python loop costs while a peak is taken, also as transformers'
Trainer does it: by a thread that never sleeps.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.kit.harness import (
    Json,
    Runner,
    arguments,
    compiled,
    environment,
    interleave,
    statement,
    timing_table,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import _core

BARE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
static double run(const char **paths, int n, long times)
{
    char buf[4096]; int fds[8]; struct timespec a, b;
    for (int i = 0; i < n; i++) fds[i] = open(paths[i], O_RDONLY);
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (long k = 0; k < times; k++)
        for (int i = 0; i < n; i++)
            if (pread(fds[i], buf, sizeof buf, 0) < 0) return -1;
    clock_gettime(CLOCK_MONOTONIC, &b);
    for (int i = 0; i < n; i++) close(fds[i]);
    return (b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec);
}
double bare(const char *one, const char *two, const char *three, long times)
{
    const char *paths[] = {one, two, three};
    return run(paths, (*one != 0) + (*two != 0) + (*three != 0), times);
}
double mark(long times)
{
    int fd = open("/proc/self/clear_refs", O_WRONLY); struct rusage r; struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (long k = 0; k < times; k++) {
        if (pwrite(fd, "5", 1, 0) != 1) return -1;
        getrusage(RUSAGE_SELF, &r);
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    close(fd);
    return (b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec);
}
"""
PROBE = _core.Probe()
PROCESS = psutil.Process()


def bare(*paths: str) -> Runner:
    import ctypes

    function = compiled(BARE).bare
    function.restype = ctypes.c_double
    three = [path.encode() for path in (*paths, "", "", "")[:3]]
    return lambda n: checked(function(*three, ctypes.c_long(n)))


def bare_mark() -> Runner:
    import ctypes

    function = compiled(BARE).mark
    function.restype = ctypes.c_double
    return lambda n: checked(function(ctypes.c_long(n)))


def checked(took: float) -> float:
    if took < 0:
        raise SystemExit("a file that the bare loop reads is not there")
    return took


def usage_files() -> tuple[str, ...]:
    """What a warm sample reads: statm, the group's usage, the group's pressure."""
    version, _, directory, _, _, pressure, _ = PROBE.source()
    name = "memory.usage_in_bytes" if version == 1 else "memory.current"
    files = [f"{directory}/{name}" if directory else "", pressure or ""]
    return ("/proc/self/statm", *(f for f in files if f and os.path.exists(f)))


def rss() -> dict[str, Runner]:
    return {
        "Probe.rss()": statement("rss()", rss=PROBE.rss),
        "bare pread, C": bare("/proc/self/statm"),
        "os.pread and split": statement(
            "int(pread(fd, 128, 0).split()[1]) * 4096",
            pread=os.pread,
            fd=os.open("/proc/self/statm", os.O_RDONLY),
        ),
        "resource.getrusage (a peak)": statement("g(0).ru_maxrss", g=resource.getrusage),
        "psutil memory_info().rss": statement("p.memory_info().rss", p=PROCESS),
        "psutil.Process() each time": statement("P().memory_info().rss", P=psutil.Process),
    }


def cold(read: Callable[[], Any]) -> Runner:
    def run(n: int) -> float:
        took = 0
        for _ in range(n):
            time.sleep(0.012)
            start = time.perf_counter_ns()
            read()
            took += time.perf_counter_ns() - start
        return float(took)

    return run


def pair() -> None:
    PROCESS.memory_info()
    psutil.virtual_memory()


def sample() -> dict[str, Runner]:
    return {
        "Probe.read()": statement("read()", read=PROBE.read),
        "bare preads, C": bare(*usage_files()),
        "Probe.read(), cold": cold(PROBE.read),
        "psutil pair, cold": cold(pair),
        "psutil memory_info, virtual_memory": statement("pair()", pair=pair),
        "the same, Process() each time": statement(
            "P().memory_info(); v()", P=psutil.Process, v=psutil.virtual_memory
        ),
        "psutil virtual_memory": statement("v()", v=psutil.virtual_memory),
    }


def phase() -> dict[str, Runner]:
    return {
        "enter and leave": statement("leave(enter('a'))", enter=PROBE.enter, leave=PROBE.leave),
        "bare reset and getrusage, C": bare_mark(),
        "with both ends": statement(
            "leave(enter('a', True))", enter=PROBE.enter, leave=PROBE.leave
        ),
        "psutil rss at both ends (no peak)": statement("r().rss; r().rss", r=PROCESS.memory_info),
        "thread that never sleeps, started": lambda n: sum(spinning(lambda: 0) for _ in range(n)),
    }


def spinning(work: Callable[[], object]) -> float:
    """Runs work beside a thread that reads psutil's rss without a pause; nanoseconds, all in."""
    stop, peak = threading.Event(), [0]

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], PROCESS.memory_info().rss)

    start = time.perf_counter_ns()
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    stop.set()
    thread.join()
    return float(time.perf_counter_ns() - start)


def busy() -> int:
    return sum(i * i for i in range(200_000))


def phased() -> float:
    start = time.perf_counter_ns()
    token = PROBE.enter("busy")
    busy()
    PROBE.leave(token)
    return float(time.perf_counter_ns() - start)


def slowdown() -> dict[str, Runner]:
    """A loop of about 10 ms."""
    return {
        "loop alone": statement("busy()", busy=busy),
        "loop in a phase": lambda n: sum(phased() for _ in range(n)),
        "loop beside a thread that never sleeps": lambda n: sum(spinning(busy) for _ in range(n)),
    }


SECTIONS: dict[str, Callable[[], dict[str, Runner]]] = {
    "rss": rss,
    "sample": sample,
    "phase": phase,
    "slowdown": slowdown,
}
CALLS = {"cold": 3, "thread": 2, "loop": 1}


def calls(name: str) -> int:
    return next((n for word, n in CALLS.items() if word in name), 500)


def measured(section: str, seconds: float) -> list[Json]:
    ways = SECTIONS[section]()
    samples = interleave(ways, {name: calls(name) for name in ways}, seconds=seconds)
    return samples.summary(next(iter(ways)))


def limits(sections: dict[str, list[Json]]) -> list[Limit]:
    wanted = {"rss": 500.0, "sample": 4000.0, "phase": 1000.0}
    return [
        number_limit(name, most, "ns", sections[name][0]["min_ns"], sections[name][0]["median_ns"])
        for name, most in wanted.items()
        if name in sections
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    facts = environment(options.threads) | {"psutil": psutil.__version__}
    seconds = 2.0 if options.quick else 12.0
    sections = {}
    for name in SECTIONS:
        if not name.startswith(options.only or ""):
            continue
        sections[name] = measured(name, seconds)
        print(f"{name}\n{timing_table(sections[name], sections[name][0]['name'])}\n", flush=True)
    finish("monitor", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()
