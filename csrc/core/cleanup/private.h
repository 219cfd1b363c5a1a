/* private.h -- what the parts of a policy share.
 *
 *   policy.c       ticks, cadences and decisions
 *   triggers.c     what a reading says: triggers, and rests
 *   backoff.c      what was done: verdicts and back-off */
#ifndef MT_CLEANUP_PRIVATE_H
#define MT_CLEANUP_PRIVATE_H

#include "cleanup/policy.h"

/* What a reading says: the triggers that hold, and the pressure that is 5 % below its mark. */
typedef struct mt_policy_signals {
    unsigned on, fell;
    bool heap_is_small; /* or unknown: trimming would free next to nothing */
} mt_policy_signals;

/* Remembers of the reading what later ones need. */
mt_policy_signals mt_policy_signals_of(mt_policy *p, const mt_sample *x, mt_limit limit);

/* The triggers that an action is to be done for, which may rest. */
unsigned mt_policy_reasons(const mt_policy_action *a, const mt_policy_signals *s);

/* Those of `reasons` whose rest is over. */
unsigned mt_policy_rested(const mt_policy_action *a, unsigned reasons, uint64_t now_ns);

/* Judges what waits for it, by what a process has now. Each of its bytes may be unknown: then all
 * that was freed on that side is still away. */
void mt_policy_judge(mt_policy *p, unsigned action, mt_policy_level now);

/* From another back-off on: what is due stays due if it is at a multiple of the new step. */
void mt_policy_move_due(mt_policy *p, mt_policy_action *a);

/* Finds for each clock the tick from which there is something to decide. */
void mt_policy_aim_all(mt_policy *p);

/* Since then, or 0 where that is not past. */
static inline uint64_t
mt_policy_since(uint64_t then, uint64_t now)
{
    return now > then ? now - then : 0;
}

#endif
