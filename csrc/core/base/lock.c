#define _POSIX_C_SOURCE 200809L /* pthread_condattr_setclock */
#include "base/lock.h"

#include <time.h>

enum { SECOND_NS = 1000000000 };

int
mt_condition_init(mt_condition *c)
{
    pthread_condattr_t attr;
    int fault = pthread_condattr_init(&attr);

    if (fault != 0) return fault;
    fault = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (fault == 0) fault = pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
    return fault;
}

bool
mt_condition_wait(mt_condition *c, mt_lock *lock, uint64_t until_ns)
{
    struct timespec at = {(time_t)(until_ns / SECOND_NS), (long)(until_ns % SECOND_NS)};

    return pthread_cond_timedwait(c, lock, &at) == 0;
}
