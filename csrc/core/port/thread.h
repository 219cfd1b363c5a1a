/* thread.h -- a thread that wakes at stated times, and stops at once.
 *
 *   owner     start ─────────────────────────────────── stop ──┐ waits for run to return
 *               │                                        │     │
 *   thread      └─► run: wait(10) work wait(20) work wait(30)──┴─► return
 *                        ..........     ..........    .. cut short: false
 *
 * The table is what a sampler runs on; tests have one whose clock is made up and whose thread is
 * the caller. The real one waits on a condition variable by the monotonic clock, which neither
 * setting the time nor daylight saving moves. All signals that are meant for the program are
 * blocked on the thread, so that none of its handlers ever runs there.
 *
 * start, stop and close are the owner's, one at a time; now_ns may be called by anybody. */
#ifndef MT_PORT_THREAD_H
#define MT_PORT_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
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

/* The calls that can fail, each returning its errno; a table, so that tests make them. */
typedef struct mt_thread_sys {
    int (*cond_new)(pthread_cond_t *out); /* waits by CLOCK_MONOTONIC */
    int (*thread_new)(pthread_t *out, void *(*run)(void *arg), void *arg);
} mt_thread_sys;

extern const mt_thread_sys mt_thread_sys_posix;

/* `prepare` is called first on each thread, to give it a name for example; NULL: nothing. sys stays
 * valid until close. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_ticker_new(const mt_alloc *mem, const mt_thread_sys *sys, void (*prepare)(void),
                        mt_ticker_ops *out, mt_error *err);

#endif
