/* wait.c -- the part of ledger.h that waits for room. */
#include "budget/ledger.h"

#include <assert.h>

#include "base/clock.h"
#include "base/size.h"
#include "budget/private.h"

/* Wakes all who wait. pre: lock is held. */
void
mt_tree_notify_all(mt_tree *t)
{
    atomic_fetch_add_explicit(&t->changes, 1, memory_order_release);
    mt_condition_wake_all(&t->changed);
}

uint64_t
mt_ledger_changes(mt_ledger *ledger)
{
    return atomic_load_explicit(&ledger->tree->changes, memory_order_acquire);
}

void
mt_ledger_notify(mt_ledger *ledger)
{
    mt_tree_take(ledger->tree, &ledger->tree->lock);
    mt_tree_notify_all(ledger->tree);
    mt_lock_give(&ledger->tree->lock);
}

bool
mt_ledger_wait(mt_ledger *ledger, uint64_t seen, uint64_t ns)
{
    const uint64_t century = 100ull * 366 * 24 * 3600 * 1000000000; /* what is longer has no end */
    uint64_t until = mt_now_ns() + mt_u64_min(ns, century);
    mt_tree *t = ledger->tree;
    bool changed;

    mt_tree_take(t, &t->lock);
    while (mt_ledger_changes(ledger) == seen)
        if (!mt_condition_wait(&t->changed, &t->lock, until)) break;
    changed = mt_ledger_changes(ledger) != seen;
    mt_lock_give(&t->lock);
    return changed;
}

uint64_t
mt_ledger_enter(mt_ledger *ledger)
{
    mt_tree *t = ledger->tree;
    mt_place *p = t->mem->get(t->mem->ctx, sizeof *p), **at = &ledger->queue;
    uint64_t ticket;

    if (p == NULL) return 0;
    mt_tree_take(t, &t->lock);
    ticket = ++t->tickets;
    *p = (mt_place){.ticket = ticket};
    while (*at != NULL)
        at = &(*at)->next;
    *at = p;
    mt_lock_give(&t->lock);
    return ticket;
}

bool
mt_ledger_is_first(mt_ledger *ledger, uint64_t ticket)
{
    bool first;

    mt_tree_take(ledger->tree, &ledger->tree->lock);
    first = ledger->queue == NULL ? ticket == 0 : ledger->queue->ticket == ticket;
    mt_lock_give(&ledger->tree->lock);
    return first;
}

/* Leaving the queue counts as a change, because the next one in it is first now and has to look. */
void
mt_ledger_quit(mt_ledger *ledger, uint64_t ticket)
{
    mt_tree *t = ledger->tree;
    mt_place **at = &ledger->queue, *p = NULL;

    if (ticket == 0) return;
    mt_tree_take(t, &t->lock);
    while (*at != NULL && (*at)->ticket != ticket)
        at = &(*at)->next;
    assert(*at != NULL);
    p = *at;
    *at = p->next;
    mt_tree_notify_all(t);
    mt_lock_give(&t->lock);
    t->mem->put(t->mem->ctx, p, sizeof *p);
}
