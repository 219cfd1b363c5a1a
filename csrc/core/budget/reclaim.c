/* reclaim.c -- the half of ledger.h that asks members: for what they hold idle, and how much. */
#include "budget/ledger.h"

#include <string.h>

#include "budget/private.h"
#include "base/size.h"

/* All members of a ledger but the asker and the line `done`, and those of its suballocations.
 * pre: turn is held, lock is not. */
static size_t
reclaim_ask(const mt_ledger *ledger, const mt_member *asker, const mt_member *done, size_t bytes)
{
    size_t given = 0;

    for (const mt_member *m = ledger->members; m != NULL && given < bytes; m = m->next) {
        if (m == asker || m == done) continue;
        if (m->sub != NULL)
            given += reclaim_ask(m->sub, asker, done, bytes - given);
        else if (m->ops.give_back != NULL)
            given += m->ops.give_back(m->ops.ctx, bytes - given);
    }
    return given;
}

static bool
has_room(const mt_ledger *ledger, size_t bytes)
{
    bool has;

    mt_tree_take(ledger->tree, &ledger->tree->lock);
    has = bytes <= mt_ledger_room(ledger);
    mt_lock_give(&ledger->tree->lock);
    return has;
}

/* What is missing until so many bytes can be reserved. */
static size_t
shortage(mt_ledger *ledger, size_t bytes)
{
    return bytes - mt_size_min(bytes, mt_ledger_available(ledger));
}

/* Where a ledger's own limit leaves no room for `bytes` after its members have given, those of its
 * parents would give in vain. */
size_t
mt_ledger_reclaim(mt_ledger *ledger, const mt_member *asker, size_t bytes)
{
    mt_tree *t = ledger->tree;
    const mt_member *done = NULL;
    size_t given = 0, missing;

    mt_tree_take(t, &t->turn);
    for (mt_ledger *l = ledger; l != NULL; l = l->line.ledger) {
        if ((missing = shortage(ledger, bytes)) == 0) break;
        given += reclaim_ask(l, asker, done, missing);
        if (!has_room(l, bytes)) break;
        done = &l->line;
    }
    mt_lock_give(&t->turn);
    return given;
}

/* What a member says is idle, at most what it has reserved: more would be a figure of another
 * moment. */
static size_t
idle_of(mt_tree *t, const mt_member *m)
{
    size_t idle = m->ops.idle == NULL ? 0 : m->ops.idle(m->ops.ctx);

    return idle == 0 ? 0 : mt_size_min(idle, mt_tree_figure(t, &m->reserved));
}

/* pre: turn is held, lock is not. */
static size_t
idle_in(const mt_ledger *ledger, const mt_member *asker)
{
    size_t sum = 0;

    for (const mt_member *m = ledger->members; m != NULL; m = m->next)
        if (m != asker) sum += m->sub != NULL ? idle_in(m->sub, asker) : idle_of(ledger->tree, m);
    return sum;
}

size_t
mt_ledger_idle(mt_ledger *ledger, const mt_member *asker)
{
    size_t sum;

    mt_tree_take(ledger->tree, &ledger->tree->turn);
    sum = idle_in(ledger, asker);
    mt_lock_give(&ledger->tree->turn);
    return sum;
}

/* Lines n, n + 1, ... without what is idle; returns the next number. pre: lock is held. */
static size_t
write_lines(const mt_ledger *ledger, size_t depth, mt_holder *out, size_t cap, size_t n)
{
    for (const mt_member *m = ledger->members; m != NULL; m = m->next) {
        if (n < cap) {
            out[n] = (mt_holder){.reserved = m->reserved,
                                 .peak = m->peak,
                                 .limit = m->sub != NULL ? m->sub->limit : SIZE_MAX,
                                 .suballocation = m->sub != NULL,
                                 .depth = depth};
            memcpy(out[n].name, m->name, sizeof m->name);
        }
        n++;
        if (m->sub != NULL) n = write_lines(m->sub, depth + 1, out, cap, n);
    }
    return n;
}

/* Fills in what is idle, in the same order from *n on, and returns the sum. pre: turn is held, lock
 * is not. */
static size_t
write_idle(const mt_ledger *ledger, mt_holder *out, size_t cap, size_t *n)
{
    size_t sum = 0;

    for (const mt_member *m = ledger->members; m != NULL; m = m->next) {
        size_t at = (*n)++;
        size_t idle = m->sub != NULL ? write_idle(m->sub, out, cap, n) : idle_of(ledger->tree, m);
        if (at < cap) out[at].idle = mt_size_min(idle, out[at].reserved);
        sum += idle;
    }
    return sum;
}

size_t
mt_ledger_report(mt_ledger *ledger, mt_holder *out, size_t cap)
{
    mt_tree *t = ledger->tree;
    size_t n, at = 0;

    mt_tree_take(t, &t->turn);
    mt_tree_take(t, &t->lock);
    n = write_lines(ledger, 0, out, cap, 0);
    mt_lock_give(&t->lock);
    write_idle(ledger, out, cap, &at);
    mt_lock_give(&t->turn);
    return n;
}
