/* thread.h -- mt_ticker_ops by a POSIX thread that waits on a condition by the monotonic clock.
 *
 * All signals that are meant for the program are blocked on the thread, so that none of its
 * handlers ever runs there. */
#ifndef MT_OS_PORT_THREAD_H
#define MT_OS_PORT_THREAD_H

#include <pthread.h>

#include "core/base/alloc.h"
#include "core/port/thread.h"

/* The calls that can fail, each returning its errno; a table, so that tests make them. */
typedef struct mt_thread_sys {
    int (*condition_init)(pthread_cond_t *out); /* waits by CLOCK_MONOTONIC */
    int (*thread_new)(pthread_t *out, void *(*run)(void *), void *arg);
} mt_thread_sys;

extern const mt_thread_sys mt_thread_sys_posix;

/* `prepare` is called first on each thread, to give it a name for example; NULL: nothing. sys stays
 * valid until close. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_ticker_new(const mt_alloc *mem, const mt_thread_sys *sys, void (*prepare)(void),
                        mt_ticker_ops *out, mt_error *err);

/* Names the calling thread "memtools", by which top, gdb and /proc/<pid>/task show it. */
void mt_thread_name(void);

#endif
