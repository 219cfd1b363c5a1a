/* lock.h -- a mutex and a condition to wait on, as thin names over POSIX threads.
 *
 * Each lock of core is inside one object: the ledger, the pool, the record, the sampler (two), the
 * ticker, the live blocks and their journal. A thread that holds two took the pool's before the
 * ledger's, the journal's before that of the live blocks, or the sampler's `life` before the
 * ticker's. All others are taken alone. No callback into a caller runs while one is held, except
 * under the ledger's `turn` (budget/ledger.c), which makes members answer one at a time. */
#ifndef MT_BASE_LOCK_H
#define MT_BASE_LOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef pthread_mutex_t mt_lock;
typedef pthread_cond_t mt_condition;

static inline void
mt_lock_init(mt_lock *lock)
{
    pthread_mutex_init(lock, NULL); /* cannot fail for a plain mutex on Linux */
}

static inline void
mt_lock_fini(mt_lock *lock)
{
    pthread_mutex_destroy(lock);
}

static inline void
mt_lock_take(mt_lock *lock)
{
    pthread_mutex_lock(lock);
}

static inline void
mt_lock_give(mt_lock *lock)
{
    pthread_mutex_unlock(lock);
}

/* A condition whose deadlines are of mt_now_ns. Returns 0, or the errno of the call that failed. */
int mt_condition_init(mt_condition *c);

static inline void
mt_condition_fini(mt_condition *c)
{
    pthread_cond_destroy(c);
}

/* Gives the lock up until the condition is woken; false when until_ns came first. As with any
 * condition, a waiter may wake without a reason: it looks again at what it waits for.
 * pre: the lock is held, and it is again on return. */
bool mt_condition_wait(mt_condition *c, mt_lock *lock, uint64_t until_ns);

/* pre: the lock of those who wait is held. */
static inline void
mt_condition_wake_all(mt_condition *c)
{
    pthread_cond_broadcast(c);
}

#endif
