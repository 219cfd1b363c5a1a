/* rig.h -- members of a ledger that hold something idle, for the tests of it. */
#ifndef MT_TESTS_BUDGET_RIG_H
#define MT_TESTS_BUDGET_RIG_H

#include "kit/check.h"
#include "core/budget/ledger.h"
#include "core/base/lock.h"
#include "core/base/size.h"

/* A part with a cache: what it has reserved, `idle` of it to spare. */
typedef struct part {
    mt_lock lock;
    mt_member *member;
    size_t idle;
    size_t asked; /* calls of give_back */
    int *order;   /* where the next number of an asked part goes; NULL: not noted */
    int number;
} part;

static inline size_t
part_idle(void *ctx)
{
    part *p = ctx;
    size_t idle;

    mt_lock_take(&p->lock);
    idle = p->idle;
    mt_lock_give(&p->lock);
    return idle;
}

static inline size_t
part_give_back(void *ctx, size_t bytes)
{
    part *p = ctx;
    size_t given;

    mt_lock_take(&p->lock);
    given = mt_size_min(bytes, p->idle);
    p->idle -= given;
    p->asked++;
    if (p->order != NULL) *p->order = *p->order * 10 + p->number;
    mt_member_release(p->member, given); /* pool's lock, then ledger's: the order of lock.h */
    mt_lock_give(&p->lock);
    return given;
}

static inline void
part_join(part *p, mt_ledger *ledger, const char *name, int rank)
{
    mt_member_ops ops = {.idle = part_idle, .give_back = part_give_back, .ctx = p};

    *p = (part){.idle = 0};
    mt_lock_init(&p->lock);
    CHECK(mt_ledger_join(ledger, name, rank, &ops, &p->member, NULL) == MT_OK);
}

static inline void
part_leave(part *p)
{
    mt_ledger_leave(p->member);
    mt_lock_fini(&p->lock);
}

/* Reserves `bytes`, of them `idle` to spare. */
static inline void
part_take(part *p, size_t bytes, size_t idle)
{
    CHECK(mt_member_reserve(p->member, bytes, NULL) == MT_OK);
    mt_lock_take(&p->lock);
    p->idle += idle;
    mt_lock_give(&p->lock);
}

static inline mt_ledger *
make_ledger(const mt_alloc *mem, size_t limit, const char *name, mt_ledger *parent)
{
    mt_ledger *ledger;

    CHECK(mt_ledger_new(mem, limit, name, parent, &ledger, NULL) == MT_OK);
    return ledger;
}

#endif
