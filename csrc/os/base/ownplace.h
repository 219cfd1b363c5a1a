/* ownplace.h -- places of a table that signal handlers read, each of one process.
 *
 *   0, or another process ──take──► -pid: it is being filled ──use──► pid: handlers use it ──► 0
 *
 * A forked child has a copy of its parent's table. The parent's places mean nothing in the child,
 * whose addresses may be the same ones, so the child may take them for itself. */
#ifndef MT_OS_BASE_OWNPLACE_H
#define MT_OS_BASE_OWNPLACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

/* Whether the place is this process's and in use. May be called in a signal handler. */
static inline bool
mt_ownplace_is_used(const _Atomic long *owner)
{
    return *owner == (long)getpid();
}

/* Takes a place that no thread of this process has, to be filled before mt_ownplace_use. */
static inline bool
mt_ownplace_take(_Atomic long *owner)
{
    long self = (long)getpid(), seen = *owner;

    return seen != self && seen != -self && atomic_compare_exchange_strong(owner, &seen, -self);
}

static inline void
mt_ownplace_use(_Atomic long *owner)
{
    *owner = (long)getpid();
}

#endif
