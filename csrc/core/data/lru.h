/* lru.h -- the entries of a cache that is bounded by bytes: found by hash, and evicted in order of use.
 *
 *   buckets  [ . ][ ● ][ . ][ ● ]        order   oldest ◄──► ... ◄──► newest
 *                   │         └► entry ► entry      │                   └ put() and touch() put here
 *                   └► entry                        └ put() evicts from here until the new one fits
 *
 * The bytes of all entries are reserved in a ledger, the cache's own or a shared one, before an entry
 * is in. So they never exceed its limit. put() changes all or nothing: an entry that does not fit,
 * though all others were evicted, evicts none.
 *
 * Entries are the caller's memory, as are their keys: the caller goes through the entries of a hash by
 * first() and next(), and compares keys itself. `changes` tells it whether the entries are still those
 * that they were before a comparison. Entries that put() and clear() take out come back as a list
 * linked by `chain`.
 *
 * No lock: the caller serialises. The ledger has its own. */
#ifndef MT_DATA_LRU_H
#define MT_DATA_LRU_H

#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/status.h"
#include "budget/ledger.h"

typedef struct mt_lru_entry {
    struct mt_lru_entry *newer, *older; /* in order of use; NULL at the ends */
    struct mt_lru_entry *chain; /* the next of the bucket, or of a list of entries taken out */
    uint64_t hash;              /* the caller's, of the key */
    size_t bytes;               /* the caller's: what the entry counts */
} mt_lru_entry;

/* All members but the functions' are to be read only. */
typedef struct mt_lru {
    const mt_alloc *mem;
    mt_lru_entry **buckets; /* NULL before the first entry */
    unsigned bits;          /* there are 2^bits buckets */
    mt_lru_entry *newest, *oldest;
    size_t entries, bytes;
    uint64_t changes;  /* entries that came or went, ever */
    uint64_t evicted;  /* entries that were taken out to make room, ever */
    mt_ledger *ledger; /* NULL before join() */
    mt_member *member;
} mt_lru;

void mt_lru_init(mt_lru *lru, const mt_alloc *mem);
/* pre: no entry is in. */
void mt_lru_fini(mt_lru *lru);

/* Counts in this ledger from now on, and no longer in the one before. Evicts the oldest entries that
 * do not fit there: they are put before *out. pre: the ledger's lock may be taken. MT_ENOMEM, and
 * nothing changed. */
mt_status mt_lru_join(mt_lru *lru, mt_ledger *ledger, const char *name, mt_lru_entry **out,
                      mt_error *err);

/* The entries of one hash, in any order; NULL for none, or no further one. */
mt_lru_entry *mt_lru_first(const mt_lru *lru, uint64_t hash);
mt_lru_entry *mt_lru_next(const mt_lru_entry *entry);

/* Takes an entry in as the newest, in place of `old` where that is not NULL, and evicts the oldest
 * ones for which there is no room beside it. What went out is put before *out: `old` as well, which
 * counts as none evicted. MT_ELIMIT with asked, used and limit, or MT_ENOMEM, and nothing changed.
 * pre: joined; hash and bytes of `entry` are set; `old` is in. */
mt_status mt_lru_put(mt_lru *lru, mt_lru_entry *entry, mt_lru_entry *old, mt_lru_entry **out,
                     mt_error *err);

/* Makes an entry that is in the newest. */
void mt_lru_touch(mt_lru *lru, mt_lru_entry *entry);

/* Takes an entry out that is in. */
void mt_lru_drop(mt_lru *lru, mt_lru_entry *entry);

/* Takes all entries out: a list linked by `chain`, NULL where there was none. */
mt_lru_entry *mt_lru_clear(mt_lru *lru);

#endif
