/* forks.h -- distinguishes a process from the children that it forks.
 *
 *   parent   forks = 0    an object of it: made after 0 forks, which is here
 *   child    forks = 1    its copy of the object: made after 0 forks, which is not here
 *
 * An object keeps the number of forks that led to the process it was made in. In a child its lock
 * may be held for ever by a thread that only the parent has, and what it maps or has open may be
 * shared with the parent, who still uses it. To compare two numbers costs two loads; getpid() is a
 * system call. os/base/forks.h counts. */
#ifndef MT_BASE_FORKS_H
#define MT_BASE_FORKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef _Atomic uint32_t mt_forks;

/* Where an object was made. All zeros: it takes no notice of forks, and is always here. */
typedef struct mt_birth {
    const mt_forks *forks; /* so far, of the process that reads it */
    uint32_t number;       /* then */
} mt_birth;

/* False in every child that was forked since. May be called in a signal handler. */
static inline bool
mt_birth_is_here(const mt_birth *birth)
{
    return birth->forks == NULL ||
           atomic_load_explicit(birth->forks, memory_order_relaxed) == birth->number;
}

#endif
