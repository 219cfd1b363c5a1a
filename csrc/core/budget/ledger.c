/* ledger.c -- how this file works.
 *
 * Every ledger is itself a member, its `line`, of the one above it, up to the root of a tree. To
 * reserve walks from the member upwards twice under the tree's one lock: refusing() looks for a
 * ledger without room, and only where there is none all figures change. Members join and leave
 * with `turn` held as well, so that reclaim.c can call them without the lock. After fork() the
 * first use of the tree in the child makes its locks anew (mt_tree_move_in) and adds the figures
 * up again. */
#include "budget/ledger.h"

#include <assert.h>
#include <string.h>

#include "budget/private.h"
#include "base/size.h"
#include "base/utf8.h"

/* The line that counts what this one counts, one level up. */
static mt_member *
above(mt_member *m)
{
    return m->ledger == NULL ? NULL : &m->ledger->line;
}

#ifndef NDEBUG
/* True when from this member's ledger up to the root the sum of the members is what is used, and
 * within the limit: asserted after every change. pre: lock is held. */
static bool
balances(const mt_member *m)
{
    for (const mt_ledger *l = m->ledger; l != NULL; l = l->line.ledger) {
        size_t sum = 0;
        for (const mt_member *each = l->members; each != NULL; each = each->next)
            sum += each->reserved;
        if (sum != l->line.reserved || sum > l->limit) return false;
    }
    return true;
}
#endif

/* pre: lock is held, the member is in its ledger's list. */
static void
discharge(mt_member *member, size_t bytes)
{
    assert(bytes <= member->reserved);
    for (mt_member *m = member; m != NULL; m = above(m))
        m->reserved -= bytes;
    assert(balances(member));
    if (bytes > 0) mt_tree_notify_all(member->ledger->tree);
}

/* --- ledgers and members come and go --------------------------------------------------------- */

static mt_tree *
tree_new(const mt_alloc *mem)
{
    mt_tree *t = mt_alloc_zeroed(mem, 1, sizeof *t);

    if (t == NULL) return NULL;
    t->mem = mem;
    mt_lock_init(&t->lock);
    mt_lock_init(&t->turn);
    (void)mt_condition_init(&t->changed); /* cannot fail on Linux */
    return t;
}

/* The condition is not destroyed: it holds nothing, and in a child of fork() glibc would wait there
 * for threads that waited in the parent. */
static void
tree_free(mt_tree *t)
{
    mt_lock_fini(&t->turn);
    mt_lock_fini(&t->lock);
    t->mem->put(t->mem->ctx, t, sizeof *t);
}

void
mt_ledger_notice_forks(mt_ledger *ledger, const mt_birth *birth)
{
    assert(ledger->line.ledger == NULL && ledger->tree->forks == NULL);
    ledger->tree->forks = birth->forks;
    ledger->tree->where = 2 * birth->number;
}

/* Figures and lists of a ledger that was copied by fork(), and of its suballocations. */
static void
move_in_ledger(mt_ledger *ledger)
{
    size_t sum = 0;

    for (mt_member *m = ledger->members; m != NULL; m = m->next) {
        if (m->sub != NULL) move_in_ledger(m->sub); /* m is the line of it */
        m->ops = (mt_member_ops){.ctx = NULL};
        sum += m->reserved;
    }
    ledger->line.reserved = sum;
    while (ledger->queue != NULL) {
        mt_place *place = ledger->queue;
        ledger->queue = place->next;
        ledger->tree->mem->put(ledger->tree->mem->ctx, place, sizeof *place);
    }
}

void
mt_tree_move_in(mt_tree *t)
{
    uint32_t here = 2 * *t->forks, seen = t->where;

    if (seen / 2 != here / 2 && atomic_compare_exchange_strong(&t->where, &seen, here + 1)) {
        mt_lock_init(&t->lock);
        mt_lock_init(&t->turn);
        (void)mt_condition_init(&t->changed); /* cannot fail on Linux */
        move_in_ledger(t->root);
        t->where = here;
    }
    while (t->where != here)
        continue; /* another thread is at it, for a moment */
}

/* Cuts a name that is too long, between two characters of UTF-8. */
static void
set_name(mt_member *m, const char *name)
{
    size_t n = mt_utf8_cut(name, strlen(name), MT_NAME_BYTES - 1);

    memcpy(m->name, name, n);
    m->name[n] = '\0';
}

/* Puts a member behind those of its rank, and counts a reference to the ledger. */
static void
link_member(mt_member *m)
{
    mt_tree *t = m->ledger->tree;
    mt_member **at = &m->ledger->members;

    mt_tree_take(t, &t->turn);
    mt_tree_take(t, &t->lock);
    while (*at != NULL && (*at)->rank <= m->rank)
        at = &(*at)->next;
    m->next = *at;
    *at = m;
    m->ledger->references++;
    mt_lock_give(&t->lock);
    mt_lock_give(&t->turn);
}

/* Takes a member out, once nobody asks it any more. The reference stays to be dropped. */
static void
unlink_member(mt_member *m)
{
    mt_tree *t = m->ledger->tree;
    mt_member **at = &m->ledger->members;

    mt_tree_take(t, &t->turn);
    mt_tree_take(t, &t->lock);
    discharge(m, m->reserved);
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    assert(balances(m));
    mt_lock_give(&t->lock);
    mt_lock_give(&t->turn);
}

mt_status
mt_ledger_new(const mt_alloc *mem, size_t limit, const char *name, mt_ledger *parent,
              mt_ledger **out, mt_error *err)
{
    mt_ledger *ledger;
    mt_tree *t;

    if (parent != NULL) mem = parent->tree->mem; /* one for the whole tree: any drop may free it */
    if ((ledger = mt_alloc_zeroed(mem, 1, sizeof *ledger)) == NULL)
        return mt_fail(err, MT_ENOMEM, "mt_ledger_new", 0);
    if ((t = parent != NULL ? parent->tree : tree_new(mem)) == NULL) {
        mem->put(mem->ctx, ledger, sizeof *ledger);
        return mt_fail(err, MT_ENOMEM, "mt_ledger_new", 0);
    }
    ledger->tree = t;
    if (parent == NULL) t->root = ledger;
    ledger->limit = limit;
    ledger->references = 1;
    ledger->line.ledger = parent;
    ledger->line.sub = ledger;
    set_name(&ledger->line, name);
    mt_tree_take(t, &t->lock);
    t->ledgers++;
    mt_lock_give(&t->lock);
    if (parent != NULL) link_member(&ledger->line);
    *out = ledger;
    return MT_OK;
}

mt_ledger *
mt_ledger_hold(mt_ledger *ledger)
{
    mt_tree_take(ledger->tree, &ledger->tree->lock);
    ledger->references++;
    mt_lock_give(&ledger->tree->lock);
    return ledger;
}

static bool
last_reference(mt_ledger *ledger)
{
    bool last;

    mt_tree_take(ledger->tree, &ledger->tree->lock);
    assert(ledger->references > 0);
    last = --ledger->references == 0;
    mt_lock_give(&ledger->tree->lock);
    return last;
}

/* pre: it is in no list. The tree goes with its last ledger. */
static void
ledger_free(mt_ledger *ledger)
{
    mt_tree *t = ledger->tree;
    const mt_alloc *mem = t->mem;
    bool last;

    assert(ledger->members == NULL && ledger->queue == NULL && ledger->line.reserved == 0);
    mem->put(mem->ctx, ledger, sizeof *ledger);
    mt_tree_take(t, &t->lock);
    last = --t->ledgers == 0;
    mt_lock_give(&t->lock);
    if (last) tree_free(t);
}

/* The last reference to a suballocation may be the last reason for its parent to be. */
void
mt_ledger_drop(mt_ledger *ledger)
{
    while (ledger != NULL && last_reference(ledger)) {
        mt_ledger *parent = ledger->line.ledger;
        if (parent != NULL) unlink_member(&ledger->line);
        ledger_free(ledger);
        ledger = parent;
    }
}

mt_status
mt_ledger_join(mt_ledger *ledger, const char *name, int rank, const mt_member_ops *ops,
               mt_member **out, mt_error *err)
{
    mt_member *m = mt_alloc_zeroed(ledger->tree->mem, 1, sizeof *m);

    if (m == NULL) return mt_fail(err, MT_ENOMEM, "mt_ledger_join", 0);
    m->ledger = ledger;
    m->rank = rank;
    if (ops != NULL) m->ops = *ops;
    set_name(m, name);
    *out = m; /* first: it may be asked before this call is over */
    link_member(m);
    return MT_OK;
}

void
mt_ledger_leave(mt_member *member)
{
    const mt_alloc *mem;
    mt_ledger *ledger;

    if (member == NULL) return;
    ledger = member->ledger;
    mem = ledger->tree->mem;
    unlink_member(member);
    mem->put(mem->ctx, member, sizeof *member);
    mt_ledger_drop(ledger);
}

/* --- reserving ------------------------------------------------------------------------------- */

/* The innermost ledger that has no room for it, or NULL. pre: lock is held. */
static mt_ledger *
refusing(const mt_member *member, size_t bytes)
{
    mt_ledger *l = member->ledger;

    while (l != NULL && bytes <= mt_ledger_room(l))
        l = l->line.ledger;
    return l;
}

mt_status
mt_member_reserve(mt_member *member, size_t bytes, mt_error *err)
{
    mt_tree *t = member->ledger->tree;
    mt_status st = MT_OK;
    mt_ledger *no;

    mt_tree_take(t, &t->lock);
    if ((no = refusing(member, bytes)) != NULL)
        st = mt_fail_limit(err, bytes, no->line.reserved, no->limit);
    for (mt_member *m = no == NULL ? member : NULL; m != NULL; m = above(m)) {
        m->reserved += bytes;
        m->peak = mt_size_max(m->peak, m->reserved);
    }
    assert(balances(member));
    mt_lock_give(&t->lock);
    return st;
}

void
mt_member_release(mt_member *member, size_t bytes)
{
    mt_tree *t = member->ledger->tree;

    mt_tree_take(t, &t->lock);
    discharge(member, bytes);
    mt_lock_give(&t->lock);
}

size_t
mt_member_reserved(const mt_member *member)
{
    return mt_tree_figure(member->ledger->tree, &member->reserved);
}

mt_ledger *
mt_member_ledger(const mt_member *member)
{
    return member->ledger;
}

/* --- figures --------------------------------------------------------------------------------- */

size_t
mt_ledger_limit(const mt_ledger *ledger)
{
    return ledger->limit;
}

const char *
mt_ledger_name(const mt_ledger *ledger)
{
    return ledger->line.name;
}

mt_ledger *
mt_ledger_parent(const mt_ledger *ledger)
{
    return ledger->line.ledger;
}

size_t
mt_ledger_used(mt_ledger *ledger)
{
    return mt_tree_figure(ledger->tree, &ledger->line.reserved);
}

size_t
mt_ledger_peak(mt_ledger *ledger)
{
    return mt_tree_figure(ledger->tree, &ledger->line.peak);
}

size_t
mt_ledger_available(mt_ledger *ledger)
{
    size_t least = SIZE_MAX;

    mt_tree_take(ledger->tree, &ledger->tree->lock);
    for (const mt_ledger *l = ledger; l != NULL; l = l->line.ledger)
        least = mt_size_min(least, mt_ledger_room(l));
    mt_lock_give(&ledger->tree->lock);
    return least;
}
