/* backoff.c -- what actions of a policy cost and freed: verdicts, and the back-off by them.
 *
 *   mt_policy_done ──► pending, a bit in `waiting` ──► mt_policy_judge ──► paid: back-off ends
 *                      at once, or 4 ticks later            └─► not paid: the budget bears its cost;
 *                      where it may grow back                   twice in a row: back-off doubles */
#include "cleanup/private.h"

#include <assert.h>

enum {
    LATER = 4,      /* ticks after which what may grow back is judged */
    UNPAID_ROW = 2, /* times in a row that an action may not pay before it is backed off */
    PAYS = 100,     /* an action pays that frees one part in so many */
};

static bool
pays(uint64_t freed, uint64_t total)
{
    return mt_is_number(total) && total > 0 && freed > 0 && (double)freed * PAYS >= (double)total;
}

static void
set_backoff(mt_policy *p, mt_policy_action *a, uint64_t to)
{
    if (a->backoff == to) return;
    a->backoff = to;
    mt_policy_move_due(p, a);
}

static void
backoff_judge(mt_policy *p, mt_policy_action *a, bool paid, uint64_t ns)
{
    a->paid_last = paid;
    if (paid) {
        a->paid++;
        a->unpaid_row = 0;
        set_backoff(p, a, 1);
        return;
    }
    p->unpaid_ns += ns;
    if (++a->unpaid_row >= UNPAID_ROW)
        set_backoff(p, a, a->backoff < MT_POLICY_BACKOFF ? 2 * a->backoff : a->backoff);
    assert(a->backoff >= 1 && a->backoff <= MT_POLICY_BACKOFF);
}

/* The part of the freed bytes that has not been taken again; all of them where that is unknown. */
static uint64_t
still_away(uint64_t freed, uint64_t then, uint64_t now)
{
    uint64_t again = mt_is_number(then) && mt_is_number(now) && now > then ? now - then : 0;

    return freed > again ? freed - again : 0;
}

void
mt_policy_judge(mt_policy *p, unsigned i, mt_policy_level now)
{
    mt_policy_action *a = &p->action[i];
    const mt_policy_pending *was = &a->pending;
    uint64_t host = still_away(was->host_freed, was->after.host, now.host);
    uint64_t device = still_away(was->device_freed, was->after.device, now.device);

    assert(i < MT_POLICY_ACTIONS && p->waiting >> i & 1);
    p->waiting &= ~(1u << i);
    backoff_judge(p, a, pays(host, was->host_total) || pays(device, was->device_total), was->ns);
}

static uint64_t
freed(uint64_t before, uint64_t now)
{
    return mt_is_number(before) && mt_is_number(now) && before > now ? before - now : 0;
}

static mt_policy_pending
pending_of(const mt_policy *p, const mt_policy_result *r, const mt_policy_level *level)
{
    return (mt_policy_pending){.clock = p->clock,
                               .tick = p->ticks[p->clock] + LATER,
                               .ns = r->ns,
                               .host_freed = freed(r->host_before, r->host_after),
                               .host_total = r->host_total,
                               .device_freed = freed(r->device_before, r->device_after),
                               .device_total = r->device_total,
                               .after = *level};
}

/* An action that still waits from the last time is judged first, by what the process held when this
 * run of it began: no decision may have come in between. */
void
mt_policy_done(mt_policy *p, unsigned action, uint64_t now, const mt_policy_result *r,
               const mt_policy_level *level)
{
    mt_policy_action *a = &p->action[action];
    mt_policy_level none = {MT_UNKNOWN, MT_UNKNOWN};
    mt_policy_pending this = pending_of(p, r, level != NULL ? level : &none);

    assert(action < MT_POLICY_ACTIONS);
    if (p->waiting >> action & 1) {
        mt_policy_level before = this.after;

        if (mt_is_number(before.host)) before.host += this.host_freed;
        if (mt_is_number(before.device)) before.device += this.device_freed;
        mt_policy_judge(p, action, before);
    }
    a->tried = true;
    a->ended_ns = now;
    a->fell = 0;
    a->last_ns = r->ns;
    p->asked &= ~(1u << action);
    p->heap_free = MT_UNKNOWN;
    a->pending = this;
    p->waiting |= 1u << action;
    if (!a->rule.later || level == NULL) mt_policy_judge(p, action, none);
    mt_policy_aim_all(p);
}
