/* private.h -- what the files of the ledger share: ledger.c reserves, reclaim.c asks and
 * reports, wait.c waits. */
#ifndef MT_BUDGET_PRIVATE_H
#define MT_BUDGET_PRIVATE_H

#include <stdatomic.h>

#include "budget/ledger.h"
#include "base/forks.h"
#include "base/lock.h"

/* What a ledger and all its suballocations share: one lock for every figure, so that a reservation
 * that counts in several of them is one step for whoever looks.
 *
 * Lists change with turn and lock held, in this order: either is enough to walk them. Members are
 * called with turn alone. All of this holds within one process: mt_tree_take makes the tree a
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

typedef struct mt_place { /* in the queue of those who wait */
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

static inline size_t
mt_ledger_room(const mt_ledger *ledger)
{
    return ledger->limit - ledger->line.reserved;
}

/* Makes a tree that was copied by fork() this process's own: fresh locks, nobody waiting, the
 * parent's members silent, and sums that agree although a thread of the parent may have been
 * halfway through a change. Of several threads one does it, and the others wait for it. */
void mt_tree_move_in(mt_tree *t);

/* Takes one of the tree's locks; where both are taken, turn is first. */
static inline void
mt_tree_take(mt_tree *t, mt_lock *lock)
{
    if (t->forks != NULL && t->where != 2 * *t->forks) mt_tree_move_in(t);
    mt_lock_take(lock);
}

/* One figure, read under the lock. */
static inline size_t
mt_tree_figure(mt_tree *t, const size_t *at)
{
    size_t value;

    mt_tree_take(t, &t->lock);
    value = *at;
    mt_lock_give(&t->lock);
    return value;
}

/* Wakes all who wait. pre: lock is held. */
void mt_tree_notify_all(mt_tree *t);

#endif
