/* limit.h -- what limits the memory of this process, and how much of that is used.
 *
 * It is the lowest of the limit that was given, that of the control group and what the machine has.
 * What counts as used follows from it: the bytes of the job for a given limit (this process, its
 * descendants and their shared memory, in memory or swapped out), the group's for the group's, all
 * that is not available for the machine. The group's figure and the machine's have the job's shared
 * memory and descendants already. A page counts once in each of them. */
#ifndef MT_MONITOR_LIMIT_H
#define MT_MONITOR_LIMIT_H

#include <stdbool.h>
#include <stdint.h>

#include "port/probe.h"

typedef struct mt_limit {
    uint64_t bytes;   /* MT_UNKNOWN: nothing limits memory that could be found */
    uint64_t used;    /* MT_UNKNOWN where that could not be read */
    const char *from; /* "given", "cgroup", "machine"; "" for none */
} mt_limit;

/* By a reading of MT_READ_RSS, MT_READ_CGROUP and MT_READ_SYSTEM, with MT_READ_SWAP,
 * MT_READ_CHILDREN and MT_READ_SHM where these are to count against a given limit. `given` is in
 * bytes; MT_UNLIMITED: none is. */
mt_limit mt_limit_of(const mt_sample *x, uint64_t given);

/* What of a device cannot be had for a new tensor, which is what counts against its size: what is
 * allocated, and what neither is free nor reserved by this process's allocator, but others have.
 * MT_UNKNOWN where one of the figures is. */
uint64_t mt_device_used(const mt_device_sample *d);

/* False for MT_UNKNOWN and MT_UNLIMITED. */
static inline bool
mt_is_number(uint64_t bytes)
{
    return bytes < MT_UNLIMITED;
}

#endif
