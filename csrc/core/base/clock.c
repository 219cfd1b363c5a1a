#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "base/clock.h"

#include <time.h>

static uint64_t
read_clock(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint64_t
mt_now_ns(void)
{
    return read_clock(CLOCK_MONOTONIC);
}

uint64_t
mt_wall_ns(void)
{
    return read_clock(CLOCK_REALTIME);
}

uint64_t
mt_thread_cpu_ns(void)
{
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}
