/* policy_private.h -- what policy.c and policywhen.c share: the memory part of a decision. */
#ifndef MT_POLICY_PRIVATE_H
#define MT_POLICY_PRIVATE_H

#include "policy.h"

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

/* Since then, or 0 where that is not past. */
static inline uint64_t
mt_policy_since(uint64_t then, uint64_t now)
{
    return now > then ? now - then : 0;
}

#endif
