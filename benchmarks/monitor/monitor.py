"""Costs of the memory monitor's readings and phases, beside the usual ways of taking them.

`rss` is resident bytes alone, `sample` what a monitor reads at each step, `phase` a block of code
with its peak. The `bare` ways read the same kernel files in a plain loop in C, without parsing and
without Python: nothing can be faster.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

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


def bare(*paths: str) -> Runner:
    function = compiled(BARE).bare
    function.restype = ctypes.c_double
    three = [path.encode() for path in (*paths, "", "", "")[:3]]
    return lambda n: checked(function(*three, ctypes.c_long(n)))


def bare_mark() -> Runner:
    function = compiled(BARE).mark
    function.restype = ctypes.c_double
    return lambda n: checked(function(ctypes.c_long(n)))


def checked(took: float) -> float:
    if took < 0:
        raise SystemExit("a file that the bare loop reads does not exist")
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
        "psutil memory_info().rss": statement("p.memory_info().rss", p=psutil.Process()),
    }


def sample() -> dict[str, Runner]:
    return {
        "Probe.read()": statement("read()", read=PROBE.read),
        "bare preads, C": bare(*usage_files()),
    }


def phase() -> dict[str, Runner]:
    return {
        "enter and leave": statement("leave(enter('a'))", enter=PROBE.enter, leave=PROBE.leave),
        "bare reset and getrusage, C": bare_mark(),
    }


SECTIONS: dict[str, Callable[[], dict[str, Runner]]] = {
    "rss": rss,
    "sample": sample,
    "phase": phase,
}


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
    sections: dict[str, list[Json]] = {}
    for name in SECTIONS:
        if not name.startswith(options.only or ""):
            continue
        ways = SECTIONS[name]()
        sections[name] = interleave(ways, 500, seconds=seconds).summary(next(iter(ways)))
        print(timing_table(name, sections[name]), flush=True)
    finish("monitor", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()
