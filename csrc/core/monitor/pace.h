/* pace.h -- when a sampler looks next, and at what.
 *
 *   used / limit   0 ------------------ 3/4 ---------- 1
 *   interval       asked for ...........\______________ 1 ms
 *                  and shorter anywhere while memory rises so fast that the limit is near in time
 *
 * What is expensive is read rarely, one at a time: swap, the heap's counters, the children and
 * shared memory. Away from the limit each of these waits 1,000 times as long as its last reading
 * took (0.1 % of a core), and an ordinary sample 200 times as long as samples take (0.5 %): less
 * than 1 % of a core together, whatever they cost. Near the limit it is 200 times (0.5 %) and 30
 * times (3.3 %), less than 6 %. Children whose number has changed, or whose memory has grown by
 * more than 5 %, are read again after 50 times (2 %). To find out what forked children have alone
 * has an allowance of its own (see os/monitor/children.h) and does not count here. An interval below
 * 10 ms is an explicit request for more samples, which may cost more: at 1.5 ms and below as much as
 * near the limit, and in between in proportion.
 *
 * Plain data, no lock: the sampling thread's. Times are those of one monotonic clock. */
#ifndef MT_MONITOR_PACE_H
#define MT_MONITOR_PACE_H

#include <stdbool.h>
#include <stdint.h>

enum { MT_PACE_RARE = 4 };

typedef struct mt_pace {
    uint64_t interval_ns; /* asked for */
    uint64_t wait_ns;     /* kept now */
    uint64_t cost_ns;     /* processor time of a sample, smoothed */
    uint64_t next_ns;
    uint64_t used, used_at; /* at the last sample; MT_UNKNOWN: none yet */
    bool near;              /* the limit, at the last sample: the interval is shorter for it */
    uint64_t due[MT_PACE_RARE];
} mt_pace;

/* Everything is due at once. pre: interval_ns > 0. */
void mt_pace_init(mt_pace *p, uint64_t interval_ns, uint64_t now);

/* The rare reading (one of MT_READ_SWAP, MT_READ_HEAP, MT_READ_CHILDREN, MT_READ_SHM) that is due,
 * the one that waits longest; 0 for none. */
unsigned mt_pace_due(const mt_pace *p, uint64_t now);
/* It was read, and took that much processor time. changed: it differs so much from the reading
 * before that it is read again soon. */
void mt_pace_rare(mt_pace *p, unsigned what, uint64_t now, uint64_t cost_ns, bool changed);

/* A sample was taken: returns when to take the next. used and limit are MT_UNKNOWN where they are.
 * Where the time is over already, because the process was stopped or the machine is busy, what was
 * missed is left out. */
uint64_t mt_pace_next(mt_pace *p, uint64_t now, uint64_t cost_ns, uint64_t used, uint64_t limit);

#endif
