/* ledger.c -- how this file works.
 *
 * Every ledger is itself a member, its `line`, of the one above it, up to the root of a tree. To
 * reserve walks from the member upwards twice under the tree's one lock: refusing() looks for a
 * ledger without room, and only where there is none all figures change. Members join and leave
 * with `turn` held as well, so that others can be asked to give back without the lock. After fork()
 * the first use of the tree in the child makes its locks again (move_in) and adds the figures up. */
#include "budget/ledger.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "base/clock.h"
#include "base/size.h"
#include "base/utf8.h"

/* What a ledger and all its suballocations share: one lock for every figure, so that a reservation
 * that counts in several of them is one step for every reader.
 *
 * Lists change with turn and lock held, in this order: either is enough to walk them. Members are
 * called with turn alone. All of this holds within one process: tree_take makes the tree a
 * child's own at its first use there. */
typedef struct mt_tree {
    const mt_alloc *mem;
    mt_ledger *root;
    const mt_forks *forks;  /* NULL: forks are not noticed */
    _Atomic uint32_t where; /* 2 x the number of forks at which it was made, or moved in; 1 more
                             * while it is being moved in */
    mt_lock lock;
    mt_lock turn; /* reclaims, reports, joining and leaving: one at a time */
    mt_condition changed;
    _Atomic uint64_t changes; /* written under lock */
    uint64_t tickets;         /* given so far */
    size_t ledgers;
} mt_tree;

typedef struct mt_place { /* in the queue of waiting threads */
    uint64_t ticket;
    struct mt_place *next;
} mt_place;

struct mt_member {
    mt_ledger *ledger; /* that it is a member of; NULL for the line of a root */
    mt_ledger *sub;    /* the ledger whose line this is; NULL for a part */
    mt_member_ops ops;
    int rank;
    size_t reserved, peak;
    mt_member *next; /* by rank, then by age */
    char name[MT_NAME_BYTES];
};

struct mt_ledger {
    mt_tree *tree;
    mt_member line; /* of the whole: what it has reserved is what is used; a member of the parent */
    size_t limit;
    size_t references;
    mt_member *members;
    mt_place *queue; /* oldest first */
};

static size_t
room_of(const mt_ledger *ledger)
{
    return ledger->limit - ledger->line.reserved;
}

/* --- the tree and its locks --- */

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

/* Makes a tree that was copied by fork() this process's own: fresh locks, no waiting thread, the
 * parent's members silent, and sums that agree although a thread of the parent may have been
 * halfway through a change. Of several threads one does it, and the others wait for it. */
static void
move_in(mt_tree *t)
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

/* Takes one of the tree's locks; where both are taken, turn is first. */
static void
tree_take(mt_tree *t, mt_lock *lock)
{
    if (t->forks != NULL && t->where != 2 * *t->forks) move_in(t);
    mt_lock_take(lock);
}

/* One figure, read under the lock. */
static size_t
figure(mt_tree *t, const size_t *at)
{
    size_t value;

    tree_take(t, &t->lock);
    value = *at;
    mt_lock_give(&t->lock);
    return value;
}

/* Wakes all waiting threads. pre: lock is held. */
static void
notify_all(mt_tree *t)
{
    atomic_fetch_add_explicit(&t->changes, 1, memory_order_release);
    mt_condition_wake_all(&t->changed);
}

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
    if (bytes > 0) notify_all(member->ledger->tree);
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

    tree_take(t, &t->turn);
    tree_take(t, &t->lock);
    while (*at != NULL && (*at)->rank <= m->rank)
        at = &(*at)->next;
    m->next = *at;
    *at = m;
    m->ledger->references++;
    mt_lock_give(&t->lock);
    mt_lock_give(&t->turn);
}

/* Takes a member out, once no reclaim asks it any more. The reference stays to be dropped. */
static void
unlink_member(mt_member *m)
{
    mt_tree *t = m->ledger->tree;
    mt_member **at = &m->ledger->members;

    tree_take(t, &t->turn);
    tree_take(t, &t->lock);
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
    tree_take(t, &t->lock);
    t->ledgers++;
    mt_lock_give(&t->lock);
    if (parent != NULL) link_member(&ledger->line);
    *out = ledger;
    return MT_OK;
}

mt_ledger *
mt_ledger_hold(mt_ledger *ledger)
{
    tree_take(ledger->tree, &ledger->tree->lock);
    ledger->references++;
    mt_lock_give(&ledger->tree->lock);
    return ledger;
}

static bool
last_reference(mt_ledger *ledger)
{
    bool last;

    tree_take(ledger->tree, &ledger->tree->lock);
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
    tree_take(t, &t->lock);
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

    while (l != NULL && bytes <= room_of(l))
        l = l->line.ledger;
    return l;
}

mt_status
mt_member_reserve(mt_member *member, size_t bytes, mt_error *err)
{
    mt_tree *t = member->ledger->tree;
    mt_status st = MT_OK;
    mt_ledger *no;

    tree_take(t, &t->lock);
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

    tree_take(t, &t->lock);
    discharge(member, bytes);
    mt_lock_give(&t->lock);
}

size_t
mt_member_reserved(const mt_member *member)
{
    return figure(member->ledger->tree, &member->reserved);
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
    return figure(ledger->tree, &ledger->line.reserved);
}

size_t
mt_ledger_peak(mt_ledger *ledger)
{
    return figure(ledger->tree, &ledger->line.peak);
}

size_t
mt_ledger_available(mt_ledger *ledger)
{
    size_t least = SIZE_MAX;

    tree_take(ledger->tree, &ledger->tree->lock);
    for (const mt_ledger *l = ledger; l != NULL; l = l->line.ledger)
        least = mt_size_min(least, room_of(l));
    mt_lock_give(&ledger->tree->lock);
    return least;
}

/* --- asking the others, and reports --- */

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

/* Where a ledger's own limit leaves no room for `bytes` after its members have given, those of its
 * parents would give for nothing. */
size_t
mt_ledger_reclaim(mt_ledger *ledger, const mt_member *asker, size_t bytes)
{
    mt_tree *t = ledger->tree;
    const mt_member *done = NULL;
    size_t given = 0, missing;

    tree_take(t, &t->turn);
    for (mt_ledger *l = ledger; l != NULL; l = l->line.ledger) {
        if ((missing = bytes - mt_size_min(bytes, mt_ledger_available(ledger))) == 0) break;
        given += reclaim_ask(l, asker, done, missing);
        if (bytes > l->limit - mt_ledger_used(l)) break;
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

    return idle == 0 ? 0 : mt_size_min(idle, figure(t, &m->reserved));
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

    tree_take(ledger->tree, &ledger->tree->turn);
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

    tree_take(t, &t->turn);
    tree_take(t, &t->lock);
    n = write_lines(ledger, 0, out, cap, 0);
    mt_lock_give(&t->lock);
    write_idle(ledger, out, cap, &at);
    mt_lock_give(&t->turn);
    return n;
}

/* --- waiting for room --- */

uint64_t
mt_ledger_changes(mt_ledger *ledger)
{
    return atomic_load_explicit(&ledger->tree->changes, memory_order_acquire);
}

void
mt_ledger_notify(mt_ledger *ledger)
{
    tree_take(ledger->tree, &ledger->tree->lock);
    notify_all(ledger->tree);
    mt_lock_give(&ledger->tree->lock);
}

bool
mt_ledger_wait(mt_ledger *ledger, uint64_t seen, uint64_t ns)
{
    const uint64_t century = 100ull * 366 * 24 * 3600 * 1000000000; /* what is longer has no end */
    uint64_t until = mt_now_ns() + mt_u64_min(ns, century);
    mt_tree *t = ledger->tree;
    bool changed;

    tree_take(t, &t->lock);
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
    tree_take(t, &t->lock);
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

    tree_take(ledger->tree, &ledger->tree->lock);
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
    tree_take(t, &t->lock);
    while (*at != NULL && (*at)->ticket != ticket)
        at = &(*at)->next;
    assert(*at != NULL);
    p = *at;
    *at = p->next;
    notify_all(t);
    mt_lock_give(&t->lock);
    t->mem->put(t->mem->ctx, p, sizeof *p);
}
