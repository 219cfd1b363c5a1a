/* forks.h -- counts the forks that led to this process, for core/base/forks.h.
 *
 * A handler of pthread_atfork adds one in a child before other code runs there. A child of clone()
 * or vfork() that runs no such handlers is not noticed. */
#ifndef MT_OS_BASE_FORKS_H
#define MT_OS_BASE_FORKS_H

#include "core/base/forks.h"
#include "core/base/status.h"

/* For an object that is made now, in this process. *out is written on MT_OK only. MT_ENOMEM where
 * the system has no memory for the handler, which then is true of every call. Not for signal
 * handlers. */
mt_status mt_birth_now(mt_birth *out, mt_error *err);

#endif
