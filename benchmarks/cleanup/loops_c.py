"""Loops in C over the decisions of a cleanup policy, which is told the time and a reading."""

from __future__ import annotations

import ctypes
from functools import cache

from benchmarks.kit.harness import CSRC, compiled_with

CORE = CSRC / "core"
SOURCES = [*sorted((CORE / "cleanup").glob("*.c")), CORE / "monitor/limit.c", CORE / "port/probe.c"]
LOOPS = r"""
#include <string.h>
#include <time.h>
#include "cleanup/policy.h"

#define GIB ((uint64_t)1 << 30)
#define MS  ((uint64_t)1000000)
enum { ALL = 31, ACTIONS = 5 };

static mt_policy core;
static mt_sample x;

static void
begin(unsigned actions, uint64_t every, unsigned triggers, bool later, unsigned devices)
{
    mt_policy_setup with = {.pressure = 0.85, .max_cost = 0.003};
    mt_policy_rule rule = {.every = {every}, .triggers = triggers, .later = later};

    mt_policy_init(&core, &with, 0);
    for (unsigned i = 0; i < actions; i++)
        mt_policy_rule_set(&core, i, &rule);
    memset(&x, 0xff, sizeof x); /* MT_UNKNOWN */
    x.rss = x.priv = GIB, x.cgroup_used = 2 * GIB, x.cgroup_limit = 8 * GIB;
    x.available = 9 * GIB, x.total = 16 * GIB, x.devices = devices;
    x.device[0].allocated = 20 * GIB, x.device[0].reserved = 24 * GIB;
    x.device[0].free = 50 * GIB, x.device[0].total = 80 * GIB, x.device[0].inactive_split = GIB;
}

/* n ticks so far apart: how many asked for something. */
static long
ticks(long n, uint64_t from, uint64_t apart)
{
    long asked = 0;

    for (long i = 1; i <= n; i++) {
        uint64_t now = from + (uint64_t)i * apart;
        bool look;

        if (!mt_policy_tick(&core, 0, 1)) continue;
        look = mt_policy_reads(&core, 0, now) != 0;
        asked += mt_policy_decide(&core, 0, now, look ? &x : NULL,
                                  mt_limit_of(&x, MT_UNLIMITED)) != 0;
    }
    return asked;
}

static double
timed(long n, uint64_t from, uint64_t apart)
{
    struct timespec a, b;
    long asked;

    clock_gettime(CLOCK_MONOTONIC, &a);
    asked = ticks(n, from, apart);
    clock_gettime(CLOCK_MONOTONIC, &b);
    if (asked != 0) return -1;
    return 1e9 * (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec);
}

/* At each tick something is due, and skipped because it did not pay and is dear. */
double
by_cadence(long n)
{
    mt_policy_result dear = {.ns = (uint64_t)1000000000 * 1000000000, .host_total = 1,
                             .device_total = 1};

    begin(1, 1, 0, false, 0);
    if (ticks(1, 0, 0) != 1) return -1;
    mt_policy_done(&core, 0, 0, &dear, NULL);
    return timed(n, 0, MS);
}

/* Ticks a second apart: a look, and so a decision with all triggers, at each. */
static double
by_looks(long n, unsigned devices)
{
    begin(ACTIONS, (uint64_t)1 << 40, ALL, true, devices);
    ticks(50, 0, 1000 * MS);
    return timed(n, 50000 * MS, 1000 * MS);
}

double
by_looks_host(long n)
{
    return by_looks(n, 0);
}

double
by_looks_device(long n)
{
    return by_looks(n, 1);
}
"""


@cache
def loops() -> ctypes.CDLL:
    """Each takes how many ticks, and returns nanoseconds: -1 where it decided otherwise than it was
    to."""
    library = compiled_with(LOOPS, SOURCES)
    for name in ("by_cadence", "by_looks_host", "by_looks_device"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_long]
    return library
