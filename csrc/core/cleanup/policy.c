/* policy.c -- ticks, cadences and decisions of a policy.
 *
 * How this file works. A tick only adds to its clock and compares it with next[clock], the tick
 * from which there is something to decide. All the rest serves to have that number right:
 *
 *   cadence[clock]   the first tick at which any action is due by a cadence; due[clock] of an
 *                    action is a multiple of `every` x back-off (find_cadence, mt_policy_move_due)
 *   pace[clock].at   the tick of the next look at memory, about 50 ms away: looks are due by time,
 *                    but a tick reads no clock, so the pace of the last ticks says how many of them
 *                    50 ms are (set_pace)
 *   judged_at()      the tick at which an action that was done is to be judged
 *   aim()            takes the least of these as next[clock], after whatever has changed one
 *
 * A decision (mt_policy_decide) first looks at memory if something was read: it judges actions that
 * wait for it, then asks for those whose triggers hold. Then it asks for the actions whose cadence
 * is due and affordable, and moves their due ticks on. What was asked for stays asked for until
 * mt_policy_done (backoff.c).
 *
 * Where decisions are `together`, all ranks decide at the same multiples of clock 0. next[] then
 * depends on that count alone and not on what this rank has read, so aim() leaves it alone. */
#include "cleanup/policy.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/size.h"
#include "cleanup/private.h"

#define LOOK_NS 50000000ull

enum {
    LOOK_MOST = 256,   /* ticks from one look to the next */
    HEAP_SHARE = 4000, /* times what reading the heap took, it is not read again */
    LOOK = MT_READ_RSS | MT_READ_CGROUP | MT_READ_SYSTEM | MT_READ_DEVICES,
};

/* --- when: multiples, looks, and the tick from which there is something to decide ------------- */

/* The first multiple that is not below `from`; MT_UNKNOWN for none. */
static uint64_t
multiple(uint64_t from, uint64_t of)
{
    return of == 0 ? MT_UNKNOWN : (from / of + (from % of != 0)) * of;
}

static uint64_t
policy_step_of(const mt_policy *p, const mt_policy_action *a, unsigned clock)
{
    return a->rule.every[clock] * (p->with.strict ? 1 : a->backoff);
}

static void
find_cadence(mt_policy *p, unsigned clock)
{
    uint64_t first = MT_UNKNOWN;

    for (int i = 0; i < MT_POLICY_ACTIONS; i++)
        first = mt_u64_min(first, p->action[i].due[clock]);
    p->cadence[clock] = first;
}

/* The tick of this clock at which the first of those that wait is judged. */
static uint64_t
judged_at(const mt_policy *p, unsigned clock)
{
    uint64_t first = MT_UNKNOWN;

    for (unsigned i = 0, left = p->waiting; left != 0; i++, left >>= 1)
        if (left & 1 && p->action[i].pending.clock == clock)
            first = mt_u64_min(first, p->action[i].pending.tick);
    return first;
}

/* Sets the tick of the next decision, but where ranks decide together: see above. */
static void
aim(mt_policy *p, unsigned clock)
{
    uint64_t next = mt_u64_min(p->cadence[clock], p->pace[clock].at);

    if (p->with.together > 0) return;
    if (p->waiting != 0) next = mt_u64_min(next, judged_at(p, clock));
    if (p->asked != 0) next = mt_u64_min(next, p->ticks[clock] + 1);
    p->next[clock] = next;
}

void
mt_policy_aim_all(mt_policy *p)
{
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++)
        aim(p, c);
}

void
mt_policy_move_due(mt_policy *p, mt_policy_action *a)
{
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++) {
        a->due[c] = multiple(mt_u64_min(a->due[c], p->ticks[c] + 1), policy_step_of(p, a, c));
        find_cadence(p, c);
    }
}

/* The next look 50 ms from here by the pace since the last one. */
static void
set_pace(mt_policy *p, unsigned clock, uint64_t now)
{
    mt_policy_pace *w = &p->pace[clock];
    double ns = (double)mt_policy_since(w->at_ns, now), ticks = (double)(p->ticks[clock] - w->tick);
    uint64_t most = mt_u64_min(LOOK_MOST, 2 * w->gap);
    double gap = ns > 0 ? (double)LOOK_NS * ticks / ns : LOOK_MOST;

    w->gap = gap < 1 ? 1 : (uint64_t)fmin(gap, (double)most);
    w->tick = p->ticks[clock];
    w->at_ns = now;
    w->at = w->tick + w->gap;
}

static void
start_looks(mt_policy *p, uint64_t now)
{
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++) {
        uint64_t at = p->triggers == 0 ? MT_UNKNOWN : p->ticks[c] + 1;

        p->pace[c] = (mt_policy_pace){.at = at, .gap = 1, .tick = p->ticks[c], .at_ns = now};
    }
}

/* --- life ------------------------------------------------------------------------------------- */

void
mt_policy_init(mt_policy *p, const mt_policy_setup *with, uint64_t now)
{
    assert(with->pressure > 0 && with->max_cost >= 0);
    *p = (mt_policy){.with = *with, .heap_free = MT_UNKNOWN};
    memset(p->next, 0xff, sizeof p->next); /* MT_UNKNOWN is all ones */
    if (with->together > 0) p->next[0] = with->together;
    mt_policy_forget(p, now);
}

void
mt_policy_forget(mt_policy *p, uint64_t now)
{
    p->start_ns = now;
    p->unpaid_ns = 0;
    p->asked = p->waiting = 0;
    p->looked_ns = MT_UNKNOWN;
    memset(p->allocated_most, 0xff, sizeof p->allocated_most);
    for (int i = 0; i < MT_POLICY_ACTIONS; i++) {
        mt_policy_action *a = &p->action[i];

        a->tried = a->paid_last = false;
        a->unpaid_row = a->fell = 0;
        a->backoff = 1;
        mt_policy_move_due(p, a);
    }
    start_looks(p, now);
    mt_policy_aim_all(p);
}

static unsigned
all_triggers(const mt_policy *p)
{
    unsigned all = 0;

    for (int i = 0; i < MT_POLICY_ACTIONS; i++)
        all |= p->action[i].rule.triggers;
    return all;
}

static bool
is_empty(const mt_policy_rule *rule)
{
    for (int c = 0; c < MT_POLICY_CLOCKS; c++)
        if (rule->every[c] > 0) return false;
    return rule->triggers == 0;
}

void
mt_policy_rule_set(mt_policy *p, unsigned action, const mt_policy_rule *rule)
{
    mt_policy_action *a = &p->action[action];
    bool looked = p->triggers != 0;

    assert(action < MT_POLICY_ACTIONS && rule->triggers < MT_WHEN_DUE);
    a->rule = *rule;
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++) {
        assert(rule->every[c] <= MT_POLICY_EVERY);
        a->due[c] = multiple(p->ticks[c] + 1, policy_step_of(p, a, c));
        find_cadence(p, c);
    }
    if (is_empty(rule)) {
        p->asked &= ~(1u << action);
        p->waiting &= ~(1u << action);
    }
    p->triggers = all_triggers(p);
    if (looked != (p->triggers != 0)) start_looks(p, p->start_ns);
    mt_policy_aim_all(p);
}

/* --- what to read ----------------------------------------------------------------------------- */

/* A look is due every 50 ms, whichever clocks tick. Half of that is near enough, because a decision
 * can only come with a tick. */
static bool
is_look_due(const mt_policy *p, unsigned clock, uint64_t now)
{
    if (p->triggers == 0) return false;
    if (p->with.together > 0 || p->looked_ns == MT_UNKNOWN) return true;
    return p->ticks[clock] >= p->pace[clock].at &&
           mt_policy_since(p->looked_ns, now) >= LOOK_NS / 2;
}

static bool
is_cadence_due(const mt_policy *p, const mt_policy_action *a, unsigned clock)
{
    bool due = a->due[clock] <= p->ticks[clock];

    for (unsigned c = 0; p->with.together > 0 && c < MT_POLICY_CLOCKS; c++)
        due = due || a->due[c] <= p->ticks[c];
    return due;
}

/* True for an action that waits, where its 4 ticks are over or it is due again. */
static bool
is_judged_now(const mt_policy *p, unsigned i, unsigned clock)
{
    const mt_policy_action *a = &p->action[i];

    if (!(p->waiting >> i & 1)) return false;
    return p->ticks[a->pending.clock] >= a->pending.tick || is_cadence_due(p, a, clock);
}

unsigned
mt_policy_reads_now(const mt_policy *p, uint64_t now)
{
    bool heap = p->triggers & MT_WHEN_IDLE_HEAP && now >= p->heap_ns;

    return heap ? LOOK | MT_READ_HEAP : LOOK;
}

unsigned
mt_policy_reads(const mt_policy *p, unsigned clock, uint64_t now)
{
    if (is_look_due(p, clock, now)) return mt_policy_reads_now(p, now);
    for (unsigned i = 0; p->waiting >> i != 0; i++)
        if (is_judged_now(p, i, clock)) return LOOK;
    return 0;
}

void
mt_policy_heap_read(mt_policy *p, uint64_t now, uint64_t cost)
{
    p->heap_ns = now + HEAP_SHARE * cost;
}

/* --- decisions -------------------------------------------------------------------------------- */

static void
policy_ask(mt_policy *p, unsigned i, unsigned why)
{
    if (!(p->asked >> i & 1)) p->action[i].why = 0;
    p->action[i].why |= why;
    p->asked |= 1u << i;
}

/* Whether this action may run by its cadence, within the budget of actions that do not pay. */
static bool
is_affordable(const mt_policy *p, const mt_policy_action *a, uint64_t now)
{
    if (p->with.strict || !a->tried || a->paid_last) return true;
    return (double)(p->unpaid_ns + a->last_ns) <=
           p->with.max_cost * (double)mt_policy_since(p->start_ns, now);
}

static void
look_at_cadence(mt_policy *p, unsigned clock, uint64_t now)
{
    for (unsigned i = 0; i < MT_POLICY_ACTIONS; i++) {
        mt_policy_action *a = &p->action[i];

        if (a->due[clock] > p->ticks[clock]) continue;
        a->due[clock] = multiple(p->ticks[clock] + 1, policy_step_of(p, a, clock));
        if (p->asked >> i & 1 || is_affordable(p, a, now))
            policy_ask(p, i, MT_WHEN_DUE);
        else
            a->skipped++;
    }
    find_cadence(p, clock);
}

/* An action that waits to be judged is judged before it is asked for once more: it may turn out to
 * be backed off. */
static void
look_at_triggers(mt_policy *p, const mt_sample *x, const mt_policy_signals *s, uint64_t now)
{
    for (unsigned i = 0; i < MT_POLICY_ACTIONS; i++) {
        mt_policy_action *a = &p->action[i];
        unsigned reasons;

        a->fell |= s->fell;
        reasons = mt_policy_rested(a, mt_policy_reasons(a, s), now);
        if (reasons != 0 && p->waiting >> i & 1) {
            mt_policy_judge(p, i, mt_policy_level_of(x));
            reasons = mt_policy_rested(a, reasons, now);
        }
        if (reasons != 0) policy_ask(p, i, reasons);
    }
}

static void
policy_look_once(mt_policy *p, unsigned clock, uint64_t now, const mt_sample *x, mt_limit limit)
{
    mt_policy_signals signals = mt_policy_signals_of(p, x, limit);

    p->looks++;
    p->looked_ns = now;
    for (unsigned i = 0; p->waiting >> i != 0; i++)
        if (is_judged_now(p, i, clock)) mt_policy_judge(p, i, mt_policy_level_of(x));
    look_at_triggers(p, x, &signals, now);
}

/* Together: the next multiple counts from this tick, so that all ranks decide equally often. */
static void
decide_together(mt_policy *p, uint64_t now)
{
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++)
        if (p->cadence[c] <= p->ticks[c]) look_at_cadence(p, c, now);
    p->next[0] = multiple(p->ticks[0] + 1, p->with.together);
}

unsigned
mt_policy_decide(mt_policy *p, unsigned clock, uint64_t now, const mt_sample *reading,
                 mt_limit limit)
{
    unsigned asked = p->asked, waiting = p->waiting;

    assert(clock < MT_POLICY_CLOCKS);
    p->clock = clock;
    if (reading != NULL) policy_look_once(p, clock, now, reading, limit);
    if (p->with.together > 0) {
        decide_together(p, now);
        return p->asked;
    }
    if (p->cadence[clock] <= p->ticks[clock]) look_at_cadence(p, clock, now);
    if (p->pace[clock].at <= p->ticks[clock]) set_pace(p, clock, now);
    if (asked != p->asked || waiting != p->waiting)
        mt_policy_aim_all(p);
    else
        aim(p, clock);
    return p->asked;
}
