/* thread.h -- a thread that wakes at stated times, and stops at once.
 *
 *   owner     start ─────────────────────────────────── stop ──┐ waits for run to return
 *               │                                        │     │
 *   thread      └─► run: wait(10) work wait(20) work wait(30)──┴─► return
 *                        ..........     ..........    .. cut short: false
 *
 * The table is what a sampler runs on: os/port/thread.h makes a real one; tests have one whose
 * clock is made up and whose thread is the caller.
 *
 * start, stop and close are the owner's, one at a time; any thread may call now_ns. */
#ifndef MT_PORT_THREAD_H
#define MT_PORT_THREAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct mt_ticker_ops {
    /* Runs run(arg) on a thread of its own. pre: none runs. MT_ENOMEM; MT_EAGAIN when the system
     * gives no thread. */
    mt_status (*start)(void *ctx, void (*run)(void *arg), void *arg, mt_error *err);
    /* On that thread: sleeps until the clock shows at_ns. False, and at once, after stop. */
    bool (*wait)(void *ctx, uint64_t at_ns);
    /* Ends the waiting and returns when run has returned; nothing where none runs. */
    void (*stop)(void *ctx);
    uint64_t (*now_ns)(void *ctx);
    uint64_t (*cpu_ns)(void *ctx); /* that the calling thread has used, ever */
    /* pre: none runs. NULL ctx is ignored. */
    void (*close)(void *ctx);
    void *ctx;
} mt_ticker_ops;

#endif
