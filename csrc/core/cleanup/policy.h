/* policy.h -- when to clean up: cadences, triggers by memory, and what it costs and frees.
 *
 *   tick(clock) ──► ticks >= next?  no: nothing more               (a few ns, nearly always)
 *                        │ yes
 *                        ▼
 *   reads() ──► what to read, 0 for nothing
 *   decide(reading) ──► the actions asked for, a bit each; asked again until done
 *   done(action, what it cost and freed) ──► it paid, or is backed off
 *
 * Clocks are counters of what happens (updates, micro-batches, ends of a phase), actions are
 * numbers; what an action is, who runs it and what time it is, the caller knows. The same calls
 * give the same answers.
 *
 *   cadence   due at each multiple of `every` x back-off of a clock. It is skipped, and counted as
 *             that, where what has not paid so far, this action's last cost added, is more than
 *             max_cost of the time since the start; but never what paid last time, nor the first.
 *   trigger   by a look, which is due every 50 ms by the pace of the clock that ticks:
 *               host pressure   used >= pressure x limit; of an action that has "idle heap" as
 *                               well only with more than 8 MiB of idle heap
 *               device pressure total - free >= pressure x total, and reserved > allocated
 *               fragmented      inactive_split >= 25 % of reserved, and >= 64 MiB
 *               idle cache      reserved - allocated_peak >= 25 % of total
 *               idle heap       heap_free >= 5 % of rss, and >= 64 MiB
 *             After an action is a rest of max(1 s, 100 x its cost), times its back-off. Where
 *             pressure fell 5 % below its mark and came again, there is something new to find out,
 *             so that back-off does not count.
 *   paying    freeing 1 % of the total that its result states, of the host's or the devices'. What
 *             may grow back is judged by what is still free 4 ticks later, or when the action is
 *             due again.
 *   back-off  from the second time in a row that an action does not pay, each doubles the multiples
 *             of its cadences and its rest, up to 64 times; one that pays ends it. `strict` keeps
 *             the cadences whatever they cost: no back-off and no budget for them.
 *   together  `together` = k: decisions only at multiples of k of clock 0, of all clocks at once,
 *             and decide is to be called there even where nothing is due: other ranks may want
 *             something.
 *
 * Plain data, no lock. Times are those of one monotonic clock. */
#ifndef MT_CLEANUP_POLICY_H
#define MT_CLEANUP_POLICY_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "monitor/limit.h"
#include "port/probe.h"

enum { MT_POLICY_CLOCKS = 16, MT_POLICY_ACTIONS = 16, MT_POLICY_BACKOFF = 64 };

/* No cadence is longer, and no more ticks come at once; no clock ticks 2^62 times. */
#define MT_POLICY_EVERY ((uint64_t)1 << 48)

typedef enum mt_trigger {
    MT_WHEN_HOST_PRESSURE = 1,
    MT_WHEN_DEVICE_PRESSURE = 2,
    MT_WHEN_FRAGMENTED = 4,
    MT_WHEN_IDLE_CACHE = 8,
    MT_WHEN_IDLE_HEAP = 16,
    MT_WHEN_DUE = 32, /* a cadence; only in mt_policy_action.why */
} mt_trigger;

typedef struct mt_policy_rule {
    uint64_t every[MT_POLICY_CLOCKS]; /* 0: never; at most MT_POLICY_EVERY */
    unsigned triggers;                /* mt_trigger bits */
    bool later;                       /* what it frees may grow back: judged later */
} mt_policy_rule;

typedef struct mt_policy_setup {
    double pressure; /* part of the limit, above 0 */
    double max_cost; /* part of the time, 0 or more */
    bool strict;
    uint64_t together; /* 0: decides alone */
} mt_policy_setup;

/* What an action did. A side whose bytes are MT_UNKNOWN counts as one that freed nothing. */
typedef struct mt_policy_result {
    uint64_t ns;
    uint64_t host_before, host_after, host_total;
    uint64_t device_before, device_after, device_total;
} mt_policy_result;

/* What a process holds, by which memory that grew back is found: on the host its resident bytes, on
 * the devices all that is not free. MT_UNKNOWN where it could not be read. */
typedef struct mt_policy_level {
    uint64_t host, device;
} mt_policy_level;

typedef struct mt_policy_pending {
    unsigned clock;
    uint64_t tick; /* of that clock, at which it is judged */
    uint64_t ns, host_freed, host_total, device_freed, device_total;
    mt_policy_level after;
} mt_policy_pending;

typedef struct mt_policy_action {
    mt_policy_rule rule;
    uint64_t due[MT_POLICY_CLOCKS]; /* the tick at which each cadence is due; MT_UNKNOWN: never */
    unsigned why;                   /* of the last decision that asked for it */
    bool tried, paid_last;
    unsigned unpaid_row; /* times in a row */
    unsigned fell;       /* pressure triggers that went 5 % below their mark since it was done */
    uint64_t ended_ns;   /* when it was done last, if it was tried */
    mt_policy_pending pending;
    uint64_t last_ns; /* what it took when it was done last */
    uint64_t paid;    /* times that it paid */
    uint64_t skipped; /* cadences that the budget did not allow */
    uint64_t backoff; /* 1 to MT_POLICY_BACKOFF */
} mt_policy_action;

typedef struct mt_policy_pace {
    uint64_t at;   /* the tick of the next look; MT_UNKNOWN: none is wanted */
    uint64_t gap;  /* ticks from the last one to that */
    uint64_t tick; /* of the last one, and its time */
    uint64_t at_ns;
} mt_policy_pace;

typedef struct mt_policy {
    uint64_t ticks[MT_POLICY_CLOCKS];
    uint64_t next[MT_POLICY_CLOCKS]; /* the tick from which there is something to decide */
    mt_policy_setup with;
    uint64_t start_ns, unpaid_ns; /* since then */
    uint64_t looks, looked_ns;    /* how many, and when the last one was; MT_UNKNOWN: none yet */
    uint64_t heap_ns;             /* from when the heap may be read again */
    unsigned asked;               /* a bit for each action that is to be done */
    unsigned waiting;             /* a bit for each that is to be judged yet */
    unsigned triggers;            /* of all rules */
    unsigned clock;               /* of the last decision */
    uint64_t heap_free;           /* as read last, nothing was done since then; MT_UNKNOWN */
    uint64_t allocated_most[MT_SAMPLE_DEVICES]; /* of all looks */
    uint64_t cadence[MT_POLICY_CLOCKS];         /* the first tick at which any is due */
    mt_policy_pace pace[MT_POLICY_CLOCKS];
    mt_policy_action action[MT_POLICY_ACTIONS];
} mt_policy;

/* No rules yet: nothing is ever due. */
void mt_policy_init(mt_policy *p, const mt_policy_setup *with, uint64_t now_ns);
/* Restarts time, budget and back-off, as if no action had been tried, and withdraws what is asked
 * for. Rules, ticks and the figures of actions stay. */
void mt_policy_forget(mt_policy *p, uint64_t now_ns);
/* Gives an action a rule; its cadences are due at their next multiples. By a rule without cadence
 * and trigger the action is never asked for. */
void mt_policy_rule_set(mt_policy *p, unsigned action, const mt_policy_rule *rule);

/* Counts n ticks at once; true when there is something to decide. What became due several times is
 * due once. pre: clock < MT_POLICY_CLOCKS, n <= MT_POLICY_EVERY. */
static inline bool
mt_policy_tick(mt_policy *p, unsigned clock, uint64_t n)
{
    assert(clock < MT_POLICY_CLOCKS && n <= MT_POLICY_EVERY);
    return (p->ticks[clock] += n) >= p->next[clock];
}

/* After a tick that returned true: what to read for the decision, mt_read bits; 0 for nothing.
 * MT_READ_HEAP only when that has rested. */
unsigned mt_policy_reads(const mt_policy *p, unsigned clock, uint64_t now_ns);
/* What to read for a look that the caller asks for now, whatever the pace is. */
unsigned mt_policy_reads_now(const mt_policy *p, uint64_t now_ns);
/* Notes that the heap was read and how long that took. It is not read again for 4000 times as long,
 * because the program waits meanwhile, and all looks together are to cost it less than 0.2 %. */
void mt_policy_heap_read(mt_policy *p, uint64_t now_ns, uint64_t cost_ns);

/* The actions asked for, those included that were before and are not done. `reading` is NULL where
 * nothing was to be read; `limit` counts only with it. */
unsigned mt_policy_decide(mt_policy *p, unsigned clock, uint64_t now_ns, const mt_sample *reading,
                          mt_limit limit);
/* Notes that an action was done, asked for or not. `after` is a reading after it, for an action that
 * is judged later; NULL: it is judged at once. */
void mt_policy_done(mt_policy *p, unsigned action, uint64_t now_ns, const mt_policy_result *r,
                    const mt_policy_level *after);

mt_policy_level mt_policy_level_of(const mt_sample *x);

#endif
