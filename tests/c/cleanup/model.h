/* model.h -- what a policy is to answer, found the long way: from all that was ever done.
 *
 * No next tick, no running sums: each question walks through the whole history. Only when to look
 * is not asked here: a decision is given a reading or none, as the policy wanted it. */
#ifndef MT_TESTS_CLEANUP_MODEL_H
#define MT_TESTS_CLEANUP_MODEL_H

#include "kit/check.h"
#include "core/cleanup/policy.h"

enum { MODEL_CLOCKS = 3, MODEL_ACTIONS = 4, MODEL_DONE = 4096 };

typedef enum model_verdict { OPEN, PAID, UNPAID, DROPPED } model_verdict;

typedef struct model_deed {
    unsigned action, clock;
    uint64_t tick, now;
    mt_policy_result did;
    bool has_level;
    mt_policy_level after;
    model_verdict verdict;
    uint64_t order; /* of the verdicts */
} model_deed;

typedef struct model {
    mt_policy_setup with;
    mt_policy_rule rule[MODEL_ACTIONS];
    uint64_t ticks[MODEL_CLOCKS], start, decided; /* the tick of clock 0 in the last decision */
    uint64_t mark[MODEL_ACTIONS][MODEL_CLOCKS]; /* multiples from here on were not asked for yet */
    bool asked[MODEL_ACTIONS];
    unsigned why[MODEL_ACTIONS], fell[MODEL_ACTIONS];
    uint64_t skipped[MODEL_ACTIONS];
    unsigned clock;
    uint64_t heap, most[MT_SAMPLE_DEVICES];
    model_deed deed[MODEL_DONE];
    size_t deeds, since; /* those from `since` on are after the last forget */
    uint64_t verdicts;
} model;

/* --- what follows from history ---------------------------------------------------------------- */

static inline model_deed *
model_last(model *m, unsigned action)
{
    for (size_t i = m->deeds; i > m->since; i--)
        if (m->deed[i - 1].action == action) return &m->deed[i - 1];
    return NULL;
}

/* The verdict that came k-th, among those of the action since forget. */
static inline const model_deed *
model_judged(const model *m, unsigned action, uint64_t order)
{
    for (size_t i = m->since; i < m->deeds; i++) {
        const model_deed *d = &m->deed[i];
        if (d->action == action && (d->verdict == PAID || d->verdict == UNPAID) &&
            d->order == order)
            return d;
    }
    return NULL;
}

typedef struct model_state {
    uint64_t backoff;
    bool paid_last;
} model_state;

static inline model_state
model_of(const model *m, unsigned action)
{
    model_state s = {1, false};
    unsigned row = 0;

    for (uint64_t order = 0; order < m->verdicts; order++) {
        const model_deed *d = model_judged(m, action, order);
        if (d == NULL) continue;
        s.paid_last = d->verdict == PAID;
        row = s.paid_last ? 0 : row + 1;
        if (s.paid_last) s.backoff = 1;
        if (row >= 2 && s.backoff < 64) s.backoff *= 2;
    }
    return s;
}

static inline uint64_t
model_unpaid(const model *m)
{
    uint64_t sum = 0;

    for (size_t i = m->since; i < m->deeds; i++)
        if (m->deed[i].verdict == UNPAID) sum += m->deed[i].did.ns;
    return sum;
}

static inline bool
model_is_due(const model *m, unsigned action, unsigned clock)
{
    uint64_t step = m->rule[action].every[clock];

    if (step == 0) return false;
    if (!m->with.strict) step *= model_of(m, action).backoff;
    return m->ticks[clock] / step > m->mark[action][clock] / step;
}

/* --- verdicts --------------------------------------------------------------------------------- */

static inline bool
model_is_part(uint64_t freed, uint64_t total)
{
    return total != MT_UNKNOWN && total > 0 && freed * 100 >= total && freed > 0;
}

static inline uint64_t
model_freed(uint64_t before, uint64_t after)
{
    return before != MT_UNKNOWN && after != MT_UNKNOWN && before > after ? before - after : 0;
}

static inline uint64_t
model_less(uint64_t freed, uint64_t then, uint64_t now)
{
    uint64_t back = model_freed(now, then);

    return freed > back ? freed - back : 0;
}

/* A back-off that goes down forgets the multiples that it has hidden. */
static inline void
model_judge(model *m, model_deed *d, bool has_level, mt_policy_level now)
{
    uint64_t host = model_freed(d->did.host_before, d->did.host_after);
    uint64_t device = model_freed(d->did.device_before, d->did.device_after);
    bool due[MODEL_CLOCKS];

    for (unsigned c = 0; c < MODEL_CLOCKS; c++)
        due[c] = model_is_due(m, d->action, c);
    if (has_level) {
        host = model_less(host, d->after.host, now.host);
        device = model_less(device, d->after.device, now.device);
    }
    d->verdict =
        model_is_part(host, d->did.host_total) || model_is_part(device, d->did.device_total)
            ? PAID
            : UNPAID;
    d->order = m->verdicts++;
    for (unsigned c = 0; c < MODEL_CLOCKS; c++)
        if (!due[c]) m->mark[d->action][c] = m->ticks[c];
}

static inline void
model_done(model *m, unsigned action, uint64_t now, const mt_policy_result *did,
           const mt_policy_level *after)
{
    model_deed *last = model_last(m, action), *d = &m->deed[m->deeds];
    mt_policy_level before = {MT_UNKNOWN, MT_UNKNOWN};

    CHECK(m->deeds < MODEL_DONE);
    if (after != NULL && after->host != MT_UNKNOWN)
        before.host = after->host + model_freed(did->host_before, did->host_after);
    if (after != NULL && after->device != MT_UNKNOWN)
        before.device = after->device + model_freed(did->device_before, did->device_after);
    if (last != NULL && last->verdict == OPEN) model_judge(m, last, true, before);
    *d = (model_deed){.action = action, .clock = m->clock, .tick = m->ticks[m->clock]};
    d->now = now;
    d->did = *did;
    if (after != NULL) d->after = *after;
    m->deeds++;
    m->asked[action] = false;
    m->fell[action] = 0;
    m->heap = MT_UNKNOWN;
    if (after == NULL || !m->rule[action].later) model_judge(m, d, false, before);
}

/* --- triggers --------------------------------------------------------------------------------- */

static inline bool
model_high(uint64_t used, uint64_t limit, double part)
{
    return used != MT_UNKNOWN && limit != MT_UNKNOWN && limit > 0 &&
           (double)used >= part * (double)limit;
}

static inline unsigned
model_device(model *m, size_t i, const mt_device_sample *d)
{
    bool known = d->free != MT_UNKNOWN && d->total != MT_UNKNOWN && d->free <= d->total;
    uint64_t peak;
    unsigned on = 0;

    if (d->allocated != MT_UNKNOWN && (m->most[i] == MT_UNKNOWN || m->most[i] < d->allocated))
        m->most[i] = d->allocated;
    peak = d->allocated_peak != MT_UNKNOWN ? d->allocated_peak : m->most[i];
    if (d->reserved == MT_UNKNOWN) return 0;
    if (known && model_high(d->total - d->free, d->total, m->with.pressure) &&
        d->reserved > d->allocated)
        on |= MT_WHEN_DEVICE_PRESSURE;
    if (d->inactive_split != MT_UNKNOWN && d->inactive_split >= 64u << 20 &&
        d->inactive_split * 4 >= d->reserved)
        on |= MT_WHEN_FRAGMENTED;
    if (peak != MT_UNKNOWN && d->reserved > peak && d->total != MT_UNKNOWN && d->total > 0 &&
        (d->reserved - peak) * 4 >= d->total)
        on |= MT_WHEN_IDLE_CACHE;
    return on;
}

static inline bool
model_devices_fell(const model *m, const mt_sample *x)
{
    size_t known = 0, low = 0;

    for (size_t i = 0; i < x->devices; i++) {
        const mt_device_sample *d = &x->device[i];
        if (d->free == MT_UNKNOWN || d->total == MT_UNKNOWN || d->free > d->total) continue;
        known++;
        low += d->total > 0 && !model_high(d->total - d->free, d->total, 0.95 * m->with.pressure);
    }
    return known > 0 && low == known;
}

static inline unsigned
model_signals(model *m, const mt_sample *x, mt_limit limit, unsigned *fell)
{
    unsigned on = 0;

    *fell = 0;
    if (x->heap_free != MT_UNKNOWN) m->heap = x->heap_free;
    if (model_high(limit.used, limit.bytes, m->with.pressure)) on |= MT_WHEN_HOST_PRESSURE;
    if (limit.used != MT_UNKNOWN && limit.bytes != MT_UNKNOWN && limit.bytes > 0 &&
        !model_high(limit.used, limit.bytes, 0.95 * m->with.pressure))
        *fell |= MT_WHEN_HOST_PRESSURE;
    for (size_t i = 0; i < x->devices; i++)
        on |= model_device(m, i, &x->device[i]);
    if (model_devices_fell(m, x)) *fell |= MT_WHEN_DEVICE_PRESSURE;
    if (m->heap != MT_UNKNOWN && m->heap >= 64u << 20 && x->rss != MT_UNKNOWN &&
        m->heap * 20 >= x->rss)
        on |= MT_WHEN_IDLE_HEAP;
    return on;
}

/* --- decisions -------------------------------------------------------------------------------- */

static inline unsigned
model_rested(model *m, unsigned action, unsigned on, uint64_t now)
{
    const model_deed *last = model_last(m, action);
    double rest, since;

    on &= m->rule[action].triggers;
    if (m->rule[action].triggers & MT_WHEN_IDLE_HEAP &&
        (m->heap == MT_UNKNOWN || m->heap <= 8u << 20))
        on &= ~(unsigned)MT_WHEN_HOST_PRESSURE;
    if (last == NULL) return on;
    rest = 100.0 * (double)last->did.ns > 1e9 ? 100.0 * (double)last->did.ns : 1e9;
    since = now > last->now ? (double)(now - last->now) : 0;
    if (since >= rest * (double)model_of(m, action).backoff) return on;
    return since >= rest ? on & m->fell[action] : 0;
}

static inline void
model_ask(model *m, unsigned action, unsigned why)
{
    m->why[action] = m->asked[action] ? m->why[action] | why : why;
    m->asked[action] = true;
}

static inline bool
model_any_due(const model *m, unsigned action, unsigned clock)
{
    for (unsigned c = 0; c < MODEL_CLOCKS; c++)
        if ((c == clock || m->with.together > 0) && model_is_due(m, action, c)) return true;
    return false;
}

static inline bool
model_is_judged(model *m, unsigned action, unsigned clock)
{
    const model_deed *d = model_last(m, action);

    return d != NULL && d->verdict == OPEN &&
           (m->ticks[d->clock] >= d->tick + 4 || model_any_due(m, action, clock));
}

static inline void
model_look(model *m, unsigned clock, uint64_t now, const mt_sample *x, mt_limit limit)
{
    mt_policy_level level = mt_policy_level_of(x);
    unsigned fell, on = model_signals(m, x, limit, &fell);

    for (unsigned a = 0; a < MODEL_ACTIONS; a++)
        if (model_is_judged(m, a, clock)) model_judge(m, model_last(m, a), true, level);
    for (unsigned a = 0; a < MODEL_ACTIONS; a++) {
        model_deed *d = model_last(m, a);
        unsigned why;

        m->fell[a] |= fell;
        why = model_rested(m, a, on, now);
        if (why != 0 && d != NULL && d->verdict == OPEN) {
            model_judge(m, d, true, level);
            why = model_rested(m, a, why, now);
        }
        if (why != 0) model_ask(m, a, why);
    }
}

static inline bool
model_may(model *m, unsigned action, uint64_t now)
{
    const model_deed *last = model_last(m, action);

    if (m->with.strict || m->asked[action] || last == NULL) return true;
    if (model_of(m, action).paid_last) return true;
    return (double)(model_unpaid(m) + last->did.ns) <=
           m->with.max_cost * (now > m->start ? (double)(now - m->start) : 0);
}

static inline unsigned
model_decide(model *m, unsigned clock, uint64_t now, const mt_sample *x, mt_limit limit)
{
    unsigned mask = 0;

    m->clock = clock;
    m->decided = m->ticks[0];
    if (x != NULL) model_look(m, clock, now, x, limit);
    for (unsigned c = 0; c < MODEL_CLOCKS; c++)
        for (unsigned a = 0; a < MODEL_ACTIONS; a++) {
            if ((c != clock && m->with.together == 0) || !model_is_due(m, a, c)) continue;
            m->mark[a][c] = m->ticks[c];
            if (model_may(m, a, now))
                model_ask(m, a, MT_WHEN_DUE);
            else
                m->skipped[a]++;
        }
    for (unsigned a = 0; a < MODEL_ACTIONS; a++)
        mask |= m->asked[a] ? 1u << a : 0;
    return mask;
}

/* Whether a tick of this clock has to lead to a decision, whatever the looks want. */
static inline bool
model_wants(model *m, unsigned clock)
{
    uint64_t k = m->with.together;

    if (k > 0) return clock == 0 && m->ticks[0] / k > m->decided / k;
    for (unsigned a = 0; a < MODEL_ACTIONS; a++) {
        const model_deed *d = model_last(m, a);
        if (m->asked[a] || model_is_due(m, a, clock)) return true;
        if (d != NULL && d->verdict == OPEN && d->clock == clock && model_is_judged(m, a, clock))
            return true;
    }
    return false;
}

/* --- what else is called ---------------------------------------------------------------------- */

static inline void
model_forget(model *m, uint64_t now)
{
    for (unsigned a = 0; a < MODEL_ACTIONS; a++) {
        for (unsigned c = 0; c < MODEL_CLOCKS; c++)
            if (!model_is_due(m, a, c)) m->mark[a][c] = m->ticks[c];
        m->asked[a] = false;
        m->fell[a] = 0;
    }
    m->since = m->deeds;
    m->start = now;
    for (int i = 0; i < MT_SAMPLE_DEVICES; i++)
        m->most[i] = MT_UNKNOWN;
}

static inline void
model_rule(model *m, unsigned action, const mt_policy_rule *rule)
{
    model_deed *last = model_last(m, action);
    bool empty = rule->triggers == 0;

    m->rule[action] = *rule;
    for (unsigned c = 0; c < MODEL_CLOCKS; c++) {
        m->mark[action][c] = m->ticks[c];
        empty = empty && rule->every[c] == 0;
    }
    if (!empty) return;
    m->asked[action] = false;
    if (last != NULL && last->verdict == OPEN) last->verdict = DROPPED;
}

static inline void
model_init(model *m, const mt_policy_setup *with, uint64_t now)
{
    *m = (model){.with = *with, .heap = MT_UNKNOWN};
    model_forget(m, now);
}

#endif
