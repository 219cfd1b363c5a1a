/* forks.h -- counts the forks that led to this process, for core/base/forks.h.
 *
 * A handler of pthread_atfork adds one in a child before other code runs there. A child of clone()
 * or vfork() that runs no such handlers is not noticed. */
#ifndef MT_OS_BASE_FORKS_H
#define MT_OS_BASE_FORKS_H

#include "core/base/forks.h"

/* Installs the handler, once. False where the system has no memory for it. */
bool mt_forks_count(void);

/* For an object that is made now, in this process. Installs the handler if that is not done yet. Not
 * for signal handlers. */
mt_birth mt_birth_now(void);

#endif
