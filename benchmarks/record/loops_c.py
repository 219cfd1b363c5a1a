"""C loops that the record's benchmark times: csrc/core's, and what people write instead."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from benchmarks.kit.harness import CSRC, compiled_with

FILES = [f"core/record/{name}.c" for name in ("series", "writer", "layout")]
FILES += [f"core/base/{name}.c" for name in ("alloc", "clock", "status", "utf8")]
FILES += [f"os/{n}.c" for n in ("record/file", "base/forks", "record/busguard", "record/endmark")]
LOOPS = r"""
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "core/record/writer.h"
#include "os/record/file.h"

static mt_record record;
static mt_recordfile file;
static size_t columns;
static uint64_t values[64], ticks;
static FILE *lines;

static void
format(void *region, const mt_birth *birth, void *ctx)
{
    mt_record_size size = {{columns, 8192, 1024}, 1024, 128};
    mt_record_column column[64];
    mt_record_start start = {0};
    (void)ctx;
    memset(column, 0, sizeof column);
    for (size_t c = 0; c < columns; c++)
        snprintf(column[c].name, sizeof column[c].name, "column_%zu", c);
    mt_record_init(&record, region, &size, column, &start, birth);
}

int
begin(const char *path, const char *jsonl, size_t n)
{
    static char kept[PATH_MAX];
    mt_record_size size = {{n, 8192, 1024}, 1024, 128};
    columns = n;
    lines = fopen(jsonl, "w");
    return lines == NULL || mt_recordfile_create(&mt_recordfile_sys_libc, path,
        mt_record_parts_of(&size).end, format, NULL, &file, kept, NULL) != MT_OK;
}

static double
now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

static void
next_values(void)
{
    ticks++;
    for (size_t c = 0; c < columns; c++)
        values[c] = (1ull << 32) + ticks * 4096 * (c + 1) % (1ull << 30);
}

double
append(long n)
{
    double start = now();
    while (n-- > 0) {
        next_values();
        mt_record_append(&record, ticks, values);
    }
    return now() - start;
}

double
jsonl(long n)
{
    double start = now();
    while (n-- > 0) {
        next_values();
        fprintf(lines, "{\"time_ns\":%llu", (unsigned long long)ticks);
        for (size_t c = 0; c < columns; c++)
            fprintf(lines, ",\"column_%zu\":%llu", c, (unsigned long long)values[c]);
        fputs("}\n", lines);
        fflush(lines);
    }
    return now() - start;
}

double
event(long n)
{
    static const char text[] = "a buffer of 64.0 MiB was given back to the system after 12.5 ms";
    mt_record_event e = {1, 2, 3, "cleanup", text, 7, sizeof text - 1};
    double start = now();
    while (n-- > 0)
        mt_record_write_event(&record, &e);
    return now() - start;
}

double
phase(long n)
{
    double start = now();
    while (n-- > 0)
        mt_record_phase(&record, n % 2 ? "train" : "generate", n % 2 ? 5 : 8, 5, 6);
    return now() - start;
}
"""


@cache
def loops(columns: int, folder: str) -> ctypes.CDLL:
    """The loops over a record and a JSONL file of their own."""
    library = compiled_with(LOOPS, [CSRC / name for name in FILES])
    for name in ("append", "jsonl", "event", "phase"):
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_double, [ctypes.c_long]
    paths = [os.fsencode(Path(folder, f"{kind}{columns}")) for kind in ("run", "jsonl")]
    if library.begin(*paths, ctypes.c_size_t(columns)) != 0:
        raise SystemExit(f"no record can be made in {folder}")
    return library
