/* ledger.h -- one budget that several parts share: who has reserved how much of it.
 *
 *   ledger "20 GiB" ─┬─ member "KVPool"       reserved 6.0 GiB, of it idle 2.0
 *                    ├─ member "GateHistory"  reserved 0.1 GiB
 *                    └─ ledger "rollouts 4 GiB" (a suballocation) ── member ...
 *
 * A part reserves before it takes memory and releases after it gave it back. When a reservation
 * does not fit, the part (holding no lock of its own) calls mt_ledger_reclaim, which asks the other
 * members, in the order of rank, then of joining, to give back what they hold idle; then it tries
 * again. A suballocation has a limit of its own, and what its members reserve is reserved in its
 * parent too. The sum of the members is the ledger's used, at every moment; builds with assertions
 * check that at every change.
 *
 * A child of fork() has a copy of the ledger that counts what the child does, on top of what its
 * parent's members had reserved. Those are not asked there: what they hold is the parent's. For
 * that, a ledger without a parent gets the means to notice (mt_ledger_notice_forks).
 *
 * Thread-safe. A member's give_back and idle are called with no ledger lock held except one that
 * serialises reclaims, reports, joining and leaving. So they may take their own lock and release in
 * the ledger; they must not reclaim, report, join or leave, and must not wait for a lock under
 * which another thread does that (an interpreter's lock is one). */
#ifndef MT_BUDGET_LEDGER_H
#define MT_BUDGET_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/forks.h"
#include "base/alloc.h"
#include "base/lock.h"
#include "base/status.h"

typedef struct mt_ledger mt_ledger;
typedef struct mt_member mt_member;

enum { MT_NAME_BYTES = 48 }; /* with the final 0; longer names are cut */

/* How a member answers; both may be NULL for one that never holds anything idle. */
typedef struct mt_member_ops {
    size_t (*idle)(void *ctx);                    /* bytes that give_back could release now */
    size_t (*give_back)(void *ctx, size_t bytes); /* releases idle bytes, at least this many where
                                                   * it can; returns how many */
    void *ctx;
} mt_member_ops;

typedef struct mt_holder { /* one line of a report */
    char name[MT_NAME_BYTES];
    size_t reserved, idle, peak;
    size_t limit;       /* of a suballocation; SIZE_MAX for a part */
    size_t depth;       /* 0 for a member of the ledger itself, 1 for one of its suballocation's */
    bool suballocation; /* its members' lines follow, one deeper */
} mt_holder;

/* A ledger of `limit` bytes (SIZE_MAX: no limit), with one reference. With a parent it is a
 * suballocation and keeps the parent alive. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_ledger_new(const mt_alloc *mem, size_t limit, const char *name, mt_ledger *parent,
                        mt_ledger **out, mt_error *err);
/* From now on the ledger and its suballocations make their locks again in a child of fork(), at the
 * first use there. pre: no parent, no other thread uses it yet; birth->forks is not NULL. */
void mt_ledger_notice_forks(mt_ledger *ledger, const mt_birth *birth);
/* References; the last drop frees it. Members hold one each. NULL is ignored by drop.
 * pre of drop: as of leave. */
mt_ledger *mt_ledger_hold(mt_ledger *ledger);
void mt_ledger_drop(mt_ledger *ledger);

/* A new member that has reserved nothing. Members of a lower rank are asked first. Another thread
 * may ask the new one before this call returns, so *out is written before the member joins; it is
 * written on MT_OK only. MT_ENOMEM. */
mt_status mt_ledger_join(mt_ledger *ledger, const char *name, int rank, const mt_member_ops *ops,
                         mt_member **out, mt_error *err);
/* Releases what the member has reserved and frees it; waits for a give_back of it that runs. After
 * it none runs. NULL is ignored. pre: no lock is held that its give_back takes. */
void mt_ledger_leave(mt_member *member);

/* Reserves, in this ledger and its parents, or changes nothing: MT_ELIMIT with asked, and used and
 * limit of the ledger that refuses. Does not ask other members. bytes may be 0. */
mt_status mt_member_reserve(mt_member *member, size_t bytes, mt_error *err);
/* pre: bytes <= what is reserved. */
void mt_member_release(mt_member *member, size_t bytes);
size_t mt_member_reserved(const mt_member *member);
mt_ledger *mt_member_ledger(const mt_member *member);

/* Asks the other members of this ledger, then of its parents, in order, until `bytes` can be
 * reserved here; returns what they gave. `asker` itself is not asked, nor are parents while this
 * ledger's own limit would refuse `bytes` all the same. */
size_t mt_ledger_reclaim(mt_ledger *ledger, const mt_member *asker, size_t bytes);

size_t mt_ledger_limit(const mt_ledger *ledger);
const char *mt_ledger_name(const mt_ledger *ledger);
mt_ledger *mt_ledger_parent(const mt_ledger *ledger); /* borrowed; NULL for none */
size_t mt_ledger_used(mt_ledger *ledger);
size_t mt_ledger_peak(mt_ledger *ledger); /* the most that was ever used */
/* What can be reserved now: the least of limit - used over this ledger and its parents. */
size_t mt_ledger_available(mt_ledger *ledger);
/* What the members other than `asker` hold idle, in this ledger (not its parents). */
size_t mt_ledger_idle(mt_ledger *ledger, const mt_member *asker);
/* Fills at most `cap` lines in the order of asking, those of suballocations behind their own, and
 * returns how many there are. Reserved and peak are of one moment, idle is of a moment later. */
size_t mt_ledger_report(mt_ledger *ledger, mt_holder *out, size_t cap);

/* Waiting for room. `changes` counts releases and notices; wait returns true once it is no longer
 * `seen`, false after `ns`. A part that makes something idle without releasing it calls notify. Changes
 * in a suballocation count in its parents, and a parent's in its suballocations. */
uint64_t mt_ledger_changes(mt_ledger *ledger);
void mt_ledger_notify(mt_ledger *ledger);
bool mt_ledger_wait(mt_ledger *ledger, uint64_t seen, uint64_t ns);

/* The queue of threads that wait in this ledger: first come, first served. enter gives a ticket; only
 * the holder of the oldest may try. quit is owed, also after a timeout, and counts as a change.
 * Without memory for a place enter gives 0: it is first while the queue is empty. */
uint64_t mt_ledger_enter(mt_ledger *ledger);
bool mt_ledger_is_first(mt_ledger *ledger, uint64_t ticket);
void mt_ledger_quit(mt_ledger *ledger, uint64_t ticket);

#endif
