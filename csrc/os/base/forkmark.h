/* forkmark.h -- a byte that tells a process from the children that it forks.
 *
 *   parent   mark ──► [1]        a handler of pthread_atfork writes the zero
 *   child    mark ──► [0]
 *
 * What maps memory that parent and child share must leave it alone in the child: the parent still
 * uses it. Reading the byte costs a load, getpid() a system call. What a child of clone() or vfork()
 * that runs no such handlers does is not noticed. */
#ifndef MT_OS_BASE_FORKMARK_H
#define MT_OS_BASE_FORKMARK_H

#include <stdbool.h>
#include <stddef.h>

#include "core/base/lock.h"
#include "core/base/status.h"

typedef const volatile unsigned char mt_forkmark;

/* *out is written on MT_OK only. MT_ENOMEM. Not for signal handlers, as fork() in one is not. */
mt_status mt_forkmark_new(mt_forkmark **out, mt_error *err);
void mt_forkmark_free(mt_forkmark *mark); /* NULL is ignored */

/* False in every child forked since the mark was made. */
static inline bool
mt_forkmark_is_home(mt_forkmark *mark)
{
    return *mark != 0;
}

/* As many bytes of zeros, which a child has as zeros again: for figures of what a process alone
 * does. As forkmark_new; NULL is ignored. */
mt_status mt_forkmark_zeros(size_t bytes, void **out, mt_error *err);
void mt_forkmark_free_zeros(void *page);

/* The same for what core makes its own in a child. */
extern const mt_home_ops mt_home_linux;

#endif
