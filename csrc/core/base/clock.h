/* clock.h -- the clocks of the system, each as one number of nanoseconds. */
#ifndef MT_BASE_CLOCK_H
#define MT_BASE_CLOCK_H

#include <stdint.h>

/* The monotonic clock, which neither setting the time nor daylight saving moves: every duration,
 * deadline and time stamp is of it. May be called in a signal handler. */
uint64_t mt_now_ns(void);

/* The time of day, since 1970. A user or a daemon may set it. */
uint64_t mt_wall_ns(void);

/* Processor time that the calling thread has used since it began. */
uint64_t mt_thread_cpu_ns(void);

#endif
