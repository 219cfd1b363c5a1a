/* rig.h -- a record whose content follows from numbers: what is written k-th is a function of
 * k, so that whoever reads it can tell a wrong word from a right one. */
#ifndef MT_TESTS_RECORD_RIG_H
#define MT_TESTS_RECORD_RIG_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kit/check.h"
#include "core/record/writer.h"
#include "kit/recordview.h"

static const mt_record_column rig_columns[] = {
    {"rss", "B", ""}, {"cgroup", "B", ""}, {"psi", "", ""}};
enum { RIG_COLUMNS = 3 };

/* No reading every few samples, and none at all at first. */
static inline uint64_t
rig_value(uint64_t k, size_t c)
{
    if ((k + c) % 5 == 0 || (c == 2 && k < 9)) return MT_UNKNOWN;
    return (k * 7919 + c * 104729) % 10007;
}

static inline uint64_t
rig_time(uint64_t k)
{
    return 1000 + 10 * k;
}

static inline void
rig_append(mt_record *r, uint64_t k)
{
    uint64_t values[RIG_COLUMNS];

    for (size_t c = 0; c < RIG_COLUMNS; c++)
        values[c] = rig_value(k, c);
    CHECK(mt_record_append(r, rig_time(k), values));
}

static inline mt_record_size
rig_size(size_t rows, size_t buckets, size_t events, size_t phases)
{
    return (mt_record_size){
        .series = {RIG_COLUMNS, rows, buckets}, .events = events, .phases = phases};
}

static inline void
rig_init(mt_record *r, void *region, const mt_record_size *size)
{
    const char command[] = "python\0train.py";
    mt_record_start start = {.wall_ns = 5,
                             .clock_ns = 6,
                             .pid = 7,
                             .page_bytes = 4096,
                             .command = command,
                             .command_bytes = sizeof command};

    mt_record_init(r, region, size, rig_columns, &start, &(mt_birth){0});
}

/* A region of its own for `size`, filled with what memory may hold. */
static inline void *
rig_region(const mt_record_size *size)
{
    size_t bytes = mt_record_parts_of(size).end;
    void *region = malloc(bytes);

    CHECK(region != NULL);
    memset(region, 0xA5, bytes);
    return region;
}

#endif
