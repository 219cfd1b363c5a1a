/* parallel.h -- a pool of threads that belongs to another library, as a table.
 *
 * A training process has one pool already, torch's. A second would fight it for the cores. */
#ifndef MT_PORT_PARALLEL_H
#define MT_PORT_PARALLEL_H

#include <stdint.h>

typedef struct mt_parallel_ops {
    /* Calls task(arg, begin, end) for parts that make up [0, n), on several threads at a time, and
     * returns when all calls have. May do it all in one call on the caller's own thread. */
    void (*run)(void *ctx, int64_t n, void (*task)(void *arg, int64_t begin, int64_t end),
                void *arg);
    void *ctx;
} mt_parallel_ops;

#endif
