/* policy.c -- how this file works.
 *
 * A tick only adds to its clock and compares it with next[clock], the tick from which there is
 * something to decide. All the rest serves to have that number right:
 *
 *   cadence[clock]   the first tick at which any action is due by a cadence; due[clock] of an
 *                    action is a multiple of `every` x back-off of the clock
 *   pace[clock].at   the tick of the next look at memory, about 50 ms away: looks are due by time,
 *                    but a tick reads no clock, so the pace of the last ticks says how many of them
 *                    50 ms are
 *   pending.tick     of an action that waits for its verdict: the tick at which it is judged
 *   aim()            takes the lowest of these as next[clock], after whatever has changed one
 *
 * A decision (mt_policy_decide) first looks at memory if something was read: it judges the actions
 * that wait for it, then asks for those whose triggers hold. Then it asks for the actions whose
 * cadence is due and affordable, and moves their due ticks on. What was asked for stays asked for
 * until mt_policy_done, whose result gives the verdict, at once or 4 ticks later:
 *
 *   done ──► pending, a bit in `waiting` ──► judge ──► paid: back-off ends
 *                                                 └──► not paid: the budget bears its cost; twice in
 *                                                      a row: back-off doubles
 *
 * Where decisions are `together`, all ranks decide at the same multiples of clock 0. next[] then
 * depends on that count alone and not on what this rank has read, so aim() leaves it alone. */
#include "cleanup/policy.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/size.h"

#define LOOK_NS    50000000ull
#define REARM      0.95  /* of a mark: below, pressure has fallen */
#define REST       1e9   /* nanoseconds from an action to the next by a trigger, at least */
#define REST_SHARE 100.0 /* times what it took, at least as well */
#define MIB        (1ull << 20)
#define WORTH      (64 * MIB) /* fragments and idle heap that are worth an action */
#define A_TRIM     (8 * MIB)  /* idle heap that is worth a trim under pressure */

enum {
    LOOK_MOST = 256,   /* ticks from one look to the next */
    HEAP_SHARE = 4000, /* times what reading the heap took, it is not read again */
    LOOK = MT_READ_RSS | MT_READ_CGROUP | MT_READ_SYSTEM | MT_READ_DEVICES,
    LATER = 4,      /* ticks after which what may grow back is judged */
    UNPAID_ROW = 2, /* times in a row that an action may not pay before it is backed off */
    PAYS = 100,     /* an action pays that frees one part in so many */
};

static uint64_t
since(uint64_t then, uint64_t now)
{
    return now > then ? now - then : 0;
}

/* --- what a reading says ---------------------------------------------------------------------- */

/* The triggers that hold, and the pressure that is 5 % below its mark. */
typedef struct signals {
    unsigned on, fell;
    bool heap_is_small; /* or unknown: trimming would free next to nothing */
} signals;

/* Whether used is at its mark, and whether it is 5 % below. False for both where it is unknown. */
static bool
is_high(uint64_t used, uint64_t limit, double pressure, bool *fell)
{
    bool known = mt_is_number(used) && mt_is_number(limit) && limit > 0;

    *fell = known && (double)used < REARM * pressure * (double)limit;
    return known && (double)used >= pressure * (double)limit;
}

static uint64_t
taken(const mt_device_sample *d)
{
    bool known = mt_is_number(d->free) && mt_is_number(d->total) && d->free <= d->total;

    return known ? d->total - d->free : MT_UNKNOWN;
}

/* False where either is unknown. */
static bool
is_part(uint64_t bytes, uint64_t whole, double part)
{
    return mt_is_number(bytes) && mt_is_number(whole) && (double)bytes >= part * (double)whole;
}

static unsigned
signals_of_device(mt_policy *p, size_t i, const mt_device_sample *d, bool *fell)
{
    uint64_t *most = &p->allocated_most[i], peak, idle = MT_UNKNOWN;
    bool some = mt_is_number(d->reserved) && d->reserved > d->allocated;
    unsigned on = 0;

    /* The next peak needs as much as the last one, as torch counts it, or else as all looks saw. */
    if (mt_is_number(d->allocated) && (!mt_is_number(*most) || *most < d->allocated))
        *most = d->allocated;
    peak = mt_is_number(d->allocated_peak) ? d->allocated_peak : *most;
    if (mt_is_number(d->reserved) && mt_is_number(peak)) idle = since(peak, d->reserved);
    if (is_high(taken(d), d->total, p->with.pressure, fell) && some) on |= MT_WHEN_DEVICE_PRESSURE;
    if (is_part(d->inactive_split, d->reserved, 0.25) && d->inactive_split >= WORTH)
        on |= MT_WHEN_FRAGMENTED;
    if (d->total > 0 && is_part(idle, d->total, 0.25)) on |= MT_WHEN_IDLE_CACHE;
    return on;
}

/* Remembers of the reading what later ones need. */
static signals
signals_of(mt_policy *p, const mt_sample *x, mt_limit limit)
{
    bool fell, any_device = false, all_fell = true;
    signals out = {0};

    if (mt_is_number(x->heap_free)) p->heap_free = x->heap_free;
    if (is_high(limit.used, limit.bytes, p->with.pressure, &fell)) out.on |= MT_WHEN_HOST_PRESSURE;
    if (fell) out.fell |= MT_WHEN_HOST_PRESSURE;
    if (is_part(p->heap_free, x->rss, 0.05) && p->heap_free >= WORTH) out.on |= MT_WHEN_IDLE_HEAP;
    out.heap_is_small = !mt_is_number(p->heap_free) || p->heap_free <= A_TRIM;
    for (size_t i = 0; i < x->devices; i++) {
        out.on |= signals_of_device(p, i, &x->device[i], &fell);
        if (taken(&x->device[i]) == MT_UNKNOWN) continue;
        any_device = true;
        all_fell = all_fell && fell;
    }
    if (any_device && all_fell) out.fell |= MT_WHEN_DEVICE_PRESSURE;
    return out;
}

mt_policy_level
mt_policy_level_of(const mt_sample *x)
{
    mt_policy_level out = {mt_sample_process(x), MT_UNKNOWN};

    for (size_t i = 0; i < x->devices; i++) {
        uint64_t bytes = taken(&x->device[i]);

        if (bytes == MT_UNKNOWN) bytes = x->device[i].reserved;
        if (!mt_is_number(bytes)) continue;
        out.device = mt_is_number(out.device) ? out.device + bytes : bytes;
    }
    return out;
}

/* The triggers that an action is to be done for now: those that hold, and do not rest. */
static unsigned
reasons_for(const mt_policy_action *a, const signals *s, uint64_t now)
{
    double past = (double)since(a->ended_ns, now);
    double rest = fmax(REST, REST_SHARE * (double)a->last_ns);
    unsigned reasons = s->on & a->rule.triggers;

    if (a->rule.triggers & MT_WHEN_IDLE_HEAP && s->heap_is_small)
        reasons &= ~(unsigned)MT_WHEN_HOST_PRESSURE;
    if (!a->tried || past >= rest * (double)a->backoff) return reasons;
    return past >= rest ? reasons & a->fell : 0;
}

/* --- when: multiples, looks, and the tick from which there is something to decide ------------- */

/* The first multiple that is not below `from`; MT_UNKNOWN for none. */
static uint64_t
multiple(uint64_t from, uint64_t of)
{
    return of == 0 ? MT_UNKNOWN : (from / of + (from % of != 0)) * of;
}

/* Makes the action's cadence due at its first multiple that is not below `from`. */
static void
set_due(mt_policy *p, mt_policy_action *a, unsigned clock, uint64_t from)
{
    a->due[clock] = multiple(from, a->rule.every[clock] * (p->with.strict ? 1 : a->backoff));
    p->cadence[clock] = MT_UNKNOWN;
    for (int i = 0; i < MT_POLICY_ACTIONS; i++)
        p->cadence[clock] = mt_u64_min(p->cadence[clock], p->action[i].due[clock]);
}

/* Sets the tick of the next decision, but where ranks decide together: see above. */
static void
aim(mt_policy *p, unsigned clock)
{
    uint64_t next = mt_u64_min(p->cadence[clock], p->pace[clock].at);

    if (p->with.together > 0) return;
    for (unsigned i = 0, left = p->waiting; left != 0; i++, left >>= 1)
        if (left & 1 && p->action[i].pending.clock == clock)
            next = mt_u64_min(next, p->action[i].pending.tick);
    if (p->asked != 0) next = mt_u64_min(next, p->ticks[clock] + 1);
    p->next[clock] = next;
}

static void
aim_all(mt_policy *p)
{
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++)
        aim(p, c);
}

/* From another back-off on: what is due stays due if it is at a multiple of the new step. */
static void
set_backoff(mt_policy *p, mt_policy_action *a, uint64_t to)
{
    a->backoff = to;
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++)
        set_due(p, a, c, mt_u64_min(a->due[c], p->ticks[c] + 1));
}

/* The next look comes 50 ms from here by the pace since the last one. */
static void
set_pace(mt_policy *p, unsigned clock, uint64_t now)
{
    mt_policy_pace *w = &p->pace[clock];
    double ns = (double)since(w->at_ns, now), ticks = (double)(p->ticks[clock] - w->tick);
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
        set_backoff(p, a, 1);
    }
    start_looks(p, now);
    aim_all(p);
}

void
mt_policy_rule_set(mt_policy *p, unsigned action, const mt_policy_rule *rule)
{
    mt_policy_action *a = &p->action[action];
    bool looked = p->triggers != 0, is_empty = rule->triggers == 0;

    assert(action < MT_POLICY_ACTIONS && rule->triggers < MT_WHEN_DUE);
    a->rule = *rule;
    for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++) {
        assert(rule->every[c] <= MT_POLICY_EVERY);
        is_empty = is_empty && rule->every[c] == 0;
        set_due(p, a, c, p->ticks[c] + 1);
    }
    if (is_empty) {
        p->asked &= ~(1u << action);
        p->waiting &= ~(1u << action);
    }
    p->triggers = 0;
    for (int i = 0; i < MT_POLICY_ACTIONS; i++)
        p->triggers |= p->action[i].rule.triggers;
    if (looked != (p->triggers != 0)) start_looks(p, p->start_ns);
    aim_all(p);
}

/* --- what to read ----------------------------------------------------------------------------- */

/* True for an action that waits, where its 4 ticks are over or it is due again. */
static bool
is_judged_now(const mt_policy *p, unsigned i, unsigned clock)
{
    const mt_policy_action *a = &p->action[i];
    bool due = a->due[clock] <= p->ticks[clock];

    if (!(p->waiting >> i & 1)) return false;
    for (unsigned c = 0; p->with.together > 0 && c < MT_POLICY_CLOCKS; c++)
        due = due || a->due[c] <= p->ticks[c];
    return due || p->ticks[a->pending.clock] >= a->pending.tick;
}

unsigned
mt_policy_reads_now(const mt_policy *p, uint64_t now)
{
    bool heap = p->triggers & MT_WHEN_IDLE_HEAP && now >= p->heap_ns;

    return heap ? LOOK | MT_READ_HEAP : LOOK;
}

/* A look is due every 50 ms, whichever clocks tick. Half of that is near enough, because a decision
 * can only come with a tick. */
unsigned
mt_policy_reads(const mt_policy *p, unsigned clock, uint64_t now)
{
    bool paced = p->ticks[clock] >= p->pace[clock].at && since(p->looked_ns, now) >= LOOK_NS / 2;

    if (p->triggers != 0 && (p->with.together > 0 || p->looked_ns == MT_UNKNOWN || paced))
        return mt_policy_reads_now(p, now);
    for (unsigned i = 0; p->waiting >> i != 0; i++)
        if (is_judged_now(p, i, clock)) return LOOK;
    return 0;
}

void
mt_policy_heap_read(mt_policy *p, uint64_t now, uint64_t cost)
{
    p->heap_ns = now + HEAP_SHARE * cost;
}

/* --- what actions cost and freed -------------------------------------------------------------- */

static uint64_t
fallen(uint64_t before, uint64_t now)
{
    return mt_is_number(before) && mt_is_number(now) ? since(now, before) : 0;
}

/* Whether the part of the freed bytes that has not been taken again pays; all of them where it is
 * unknown what has been taken. */
static bool
pays(uint64_t freed, uint64_t total, uint64_t then, uint64_t now)
{
    uint64_t left = since(fallen(now, then), freed);

    return mt_is_number(total) && total > 0 && left > 0 && (double)left * PAYS >= (double)total;
}

/* Judges an action that waits for it, by what the process has now. Each number of bytes may be
 * unknown: then all that was freed on that side is still away. */
static void
judge(mt_policy *p, unsigned i, mt_policy_level now)
{
    mt_policy_action *a = &p->action[i];
    const mt_policy_pending *was = &a->pending;

    assert(i < MT_POLICY_ACTIONS && p->waiting >> i & 1);
    p->waiting &= ~(1u << i);
    a->paid_last = pays(was->host_freed, was->host_total, was->after.host, now.host) ||
                   pays(was->device_freed, was->device_total, was->after.device, now.device);
    if (a->paid_last) {
        a->paid++;
        a->unpaid_row = 0;
        if (a->backoff != 1) set_backoff(p, a, 1);
        return;
    }
    p->unpaid_ns += was->ns;
    if (++a->unpaid_row >= UNPAID_ROW && a->backoff < MT_POLICY_BACKOFF)
        set_backoff(p, a, 2 * a->backoff);
}

/* An action that still waits from the last time is judged first, by what the process held when this
 * run of it began: no decision may have come in between. */
void
mt_policy_done(mt_policy *p, unsigned action, uint64_t now, const mt_policy_result *r,
               const mt_policy_level *level)
{
    const mt_policy_level none = {MT_UNKNOWN, MT_UNKNOWN};
    mt_policy_action *a = &p->action[action];
    mt_policy_pending this = {.clock = p->clock,
                              .tick = p->ticks[p->clock] + LATER,
                              .ns = r->ns,
                              .host_freed = fallen(r->host_before, r->host_after),
                              .host_total = r->host_total,
                              .device_freed = fallen(r->device_before, r->device_after),
                              .device_total = r->device_total,
                              .after = level != NULL ? *level : none};

    assert(action < MT_POLICY_ACTIONS);
    if (p->waiting >> action & 1) {
        mt_policy_level before = this.after;

        if (mt_is_number(before.host)) before.host += this.host_freed;
        if (mt_is_number(before.device)) before.device += this.device_freed;
        judge(p, action, before);
    }
    a->tried = true;
    a->ended_ns = now;
    a->fell = 0;
    a->last_ns = r->ns;
    p->asked &= ~(1u << action);
    p->heap_free = MT_UNKNOWN;
    a->pending = this;
    p->waiting |= 1u << action;
    if (!a->rule.later || level == NULL) judge(p, action, none);
    aim_all(p);
}

/* --- decisions -------------------------------------------------------------------------------- */

static void
ask(mt_policy *p, unsigned i, unsigned why)
{
    if (!(p->asked >> i & 1)) p->action[i].why = 0;
    p->action[i].why |= why;
    p->asked |= 1u << i;
}

/* An action whose last run did not pay is asked for by its cadence only within the budget. */
static void
look_at_cadence(mt_policy *p, unsigned clock, uint64_t now)
{
    for (unsigned i = 0; i < MT_POLICY_ACTIONS; i++) {
        mt_policy_action *a = &p->action[i];
        double budget = p->with.max_cost * (double)since(p->start_ns, now);

        if (a->due[clock] > p->ticks[clock]) continue;
        set_due(p, a, clock, p->ticks[clock] + 1);
        if (p->asked >> i & 1 || p->with.strict || !a->tried || a->paid_last ||
            (double)(p->unpaid_ns + a->last_ns) <= budget)
            ask(p, i, MT_WHEN_DUE);
        else
            a->skipped++;
    }
}

/* An action that waits to be judged is judged before its next run, because it may be backed off. */
static void
look_at_memory(mt_policy *p, unsigned clock, uint64_t now, const mt_sample *x, mt_limit limit)
{
    signals found = signals_of(p, x, limit);
    mt_policy_level level = mt_policy_level_of(x);

    p->looks++;
    p->looked_ns = now;
    for (unsigned i = 0; p->waiting >> i != 0; i++)
        if (is_judged_now(p, i, clock)) judge(p, i, level);
    for (unsigned i = 0; i < MT_POLICY_ACTIONS; i++) {
        mt_policy_action *a = &p->action[i];
        unsigned reasons;

        a->fell |= found.fell;
        reasons = reasons_for(a, &found, now);
        if (reasons != 0 && p->waiting >> i & 1) {
            judge(p, i, level);
            reasons &= reasons_for(a, &found, now);
        }
        if (reasons != 0) ask(p, i, reasons);
    }
}

unsigned
mt_policy_decide(mt_policy *p, unsigned clock, uint64_t now, const mt_sample *reading,
                 mt_limit limit)
{
    unsigned asked = p->asked, waiting = p->waiting;

    assert(clock < MT_POLICY_CLOCKS);
    p->clock = clock;
    if (reading != NULL) look_at_memory(p, clock, now, reading, limit);
    if (p->with.together > 0) {
        for (unsigned c = 0; c < MT_POLICY_CLOCKS; c++)
            if (p->cadence[c] <= p->ticks[c]) look_at_cadence(p, c, now);
        /* Counted from this tick, so that all ranks decide equally often. */
        p->next[0] = multiple(p->ticks[0] + 1, p->with.together);
        return p->asked;
    }
    if (p->cadence[clock] <= p->ticks[clock]) look_at_cadence(p, clock, now);
    if (p->pace[clock].at <= p->ticks[clock]) set_pace(p, clock, now);
    if (asked != p->asked || waiting != p->waiting)
        aim_all(p);
    else
        aim(p, clock);
    return p->asked;
}
