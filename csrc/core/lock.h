/* lock.h -- a mutex, as a thin name over POSIX threads.
 *
 * Core has few locks, each inside one object: the ledger's, the pool's and the record's. The order
 * is pool, then ledger; the record's is taken alone. No call back into a caller is made while one
 * is held. */
#ifndef MT_LOCK_H
#define MT_LOCK_H

#include <pthread.h>

typedef pthread_mutex_t mt_lock;

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

#endif
