/* lru.c -- how this file works.
 *
 * An entry is in two structures at once: in a bucket, chosen by its hash, and in the order of use.
 * take_in() and take_out() change both. Making room is the one operation that has steps: entries are
 * taken from the old end of the order until what they counted, and what the ledger still gives, is
 * enough for the new one. Nothing is released meanwhile, so no other part of the ledger can take it
 * away, and a refusal at the end puts every entry back where it was. */
#include "data/lru.h"

#include <assert.h>
#include <stdbool.h>

enum { FIRST_BITS = 4 };

static size_t
buckets_n(const mt_lru *lru)
{
    return (size_t)1 << lru->bits;
}

/* Hashes of numbers are the numbers, so that one multiplication spreads them: its upper bits are the
 * best ones. */
static mt_lru_entry **
bucket_of(const mt_lru *lru, uint64_t hash)
{
    return &lru->buckets[hash * UINT64_C(0x9E3779B97F4A7C15) >> (64 - lru->bits)];
}

/* --- one entry ------------------------------------------------------------------------------- */

static void
link_newest(mt_lru *lru, mt_lru_entry *entry)
{
    entry->newer = NULL;
    entry->older = lru->newest;
    if (lru->newest != NULL)
        lru->newest->newer = entry;
    else
        lru->oldest = entry;
    lru->newest = entry;
}

static void
unlink_order(mt_lru *lru, mt_lru_entry *entry)
{
    if (entry->newer != NULL)
        entry->newer->older = entry->older;
    else
        lru->newest = entry->older;
    if (entry->older != NULL)
        entry->older->newer = entry->newer;
    else
        lru->oldest = entry->newer;
}

/* Undoes unlink_order(), whose last call it was that is not undone: the neighbours are as then. */
static void
relink_order(mt_lru *lru, mt_lru_entry *entry)
{
    if (entry->newer != NULL)
        entry->newer->older = entry;
    else
        lru->newest = entry;
    if (entry->older != NULL)
        entry->older->newer = entry;
    else
        lru->oldest = entry;
}

static void
into_bucket(mt_lru *lru, mt_lru_entry *entry)
{
    mt_lru_entry **bucket = bucket_of(lru, entry->hash);

    entry->chain = *bucket;
    *bucket = entry;
    lru->entries++;
    lru->bytes += entry->bytes;
    lru->changes++;
}

static void
out_of_bucket(mt_lru *lru, mt_lru_entry *entry)
{
    mt_lru_entry **at = bucket_of(lru, entry->hash);

    while (*at != entry)
        at = &(*at)->chain;
    *at = entry->chain;
    lru->entries--;
    lru->bytes -= entry->bytes;
    lru->changes++;
}

/* The bytes stay reserved. */
static void
take_out(mt_lru *lru, mt_lru_entry *entry, mt_lru_entry **out)
{
    unlink_order(lru, entry);
    out_of_bucket(lru, entry);
    entry->chain = *out;
    *out = entry;
}

/* --- the table ------------------------------------------------------------------------------- */

/* Makes room for one more entry. */
static mt_status
grow(mt_lru *lru, mt_error *err)
{
    mt_lru larger = *lru;

    if (lru->buckets != NULL && lru->entries < buckets_n(lru)) return MT_OK;
    larger.bits = lru->buckets == NULL ? FIRST_BITS : lru->bits + 1;
    larger.buckets =
        (mt_lru_entry **)mt_alloc_zeroed(lru->mem, buckets_n(&larger), sizeof *larger.buckets);
    if (larger.buckets == NULL) return mt_fail(err, MT_ENOMEM, "mt_lru_put", 0);
    for (mt_lru_entry *entry = lru->oldest; entry != NULL; entry = entry->newer) {
        mt_lru_entry **bucket = bucket_of(&larger, entry->hash);
        entry->chain = *bucket;
        *bucket = entry;
    }
    if (lru->buckets != NULL)
        lru->mem->put(lru->mem->ctx, (void *)lru->buckets, buckets_n(lru) * sizeof(mt_lru_entry *));
    *lru = larger;
    return MT_OK;
}

static void
forget_table(mt_lru *lru)
{
    if (lru->buckets != NULL)
        lru->mem->put(lru->mem->ctx, (void *)lru->buckets, buckets_n(lru) * sizeof *lru->buckets);
    lru->buckets = NULL;
    lru->bits = 0;
}

void
mt_lru_init(mt_lru *lru, const mt_alloc *mem)
{
    *lru = (mt_lru){.mem = mem};
}

void
mt_lru_fini(mt_lru *lru)
{
    assert(lru->entries == 0 && lru->bytes == 0);
    forget_table(lru);
    mt_ledger_leave(lru->member);
    mt_ledger_drop(lru->ledger);
    mt_lru_init(lru, lru->mem);
}

mt_status
mt_lru_join(mt_lru *lru, mt_ledger *ledger, const char *name, mt_lru_entry **out, mt_error *err)
{
    mt_member *member;
    mt_status st = mt_ledger_join(ledger, name, 0, NULL, &member, err);

    if (st != MT_OK) return st;
    while (mt_member_reserve(member, lru->bytes, NULL) != MT_OK) { /* 0 bytes always can be */
        lru->evicted++;
        take_out(lru, lru->oldest, out);
    }
    mt_ledger_hold(ledger);
    mt_ledger_leave(lru->member);
    mt_ledger_drop(lru->ledger);
    lru->ledger = ledger;
    lru->member = member;
    return MT_OK;
}

/* --- what callers do ------------------------------------------------------------------------- */

static mt_lru_entry *
of_hash(mt_lru_entry *entry, uint64_t hash)
{
    while (entry != NULL && entry->hash != hash)
        entry = entry->chain;
    return entry;
}

mt_lru_entry *
mt_lru_first(const mt_lru *lru, uint64_t hash)
{
    return lru->buckets == NULL ? NULL : of_hash(*bucket_of(lru, hash), hash);
}

mt_lru_entry *
mt_lru_next(const mt_lru_entry *entry)
{
    return of_hash(entry->chain, entry->hash);
}

/* Whether `bytes` more can be reserved at all, if every entry went: what evicts all of them in vain
 * would take as long as they are many. */
static bool
could_fit(mt_lru *lru, size_t bytes, mt_error *err)
{
    size_t available = mt_ledger_available(lru->ledger);

    if (available >= bytes || available + lru->bytes >= bytes) return true;
    if (mt_member_reserve(lru->member, bytes, err) != MT_OK) return false; /* says who refuses */
    mt_member_release(lru->member, bytes);
    return true;
}

/* Puts back what make_room() took out, the last one first. */
static void
put_back(mt_lru *lru, mt_lru_entry *taken)
{
    while (taken != NULL) {
        mt_lru_entry *entry = taken;
        taken = entry->chain;
        relink_order(lru, entry);
        into_bucket(lru, entry);
        lru->evicted--;
    }
}

/* Reserves `bytes` beside `free` that are reserved already and counted by nobody, at the cost of the
 * oldest entries but `old`. *taken: those that went. */
static mt_status
make_room(mt_lru *lru, size_t bytes, const mt_lru_entry *old, mt_lru_entry **taken, mt_error *err)
{
    size_t free = old == NULL ? 0 : old->bytes;
    mt_status st;

    while (free < bytes && (st = mt_member_reserve(lru->member, bytes - free, err)) != MT_OK) {
        mt_lru_entry *next = lru->oldest == old && old != NULL ? old->newer : lru->oldest;
        if (next == NULL) {
            put_back(lru, *taken);
            *taken = NULL;
            return st;
        }
        free += next->bytes;
        lru->evicted++;
        take_out(lru, next, taken);
    }
    if (free > bytes) mt_member_release(lru->member, free - bytes);
    return MT_OK;
}

mt_status
mt_lru_put(mt_lru *lru, mt_lru_entry *entry, mt_lru_entry *old, mt_lru_entry **out, mt_error *err)
{
    mt_lru_entry *taken = NULL;
    mt_status st;

    assert(lru->member != NULL);
    if (!could_fit(lru, entry->bytes, err)) return MT_ELIMIT;
    if ((st = grow(lru, err)) != MT_OK) return st;
    if ((st = make_room(lru, entry->bytes, old, &taken, err)) != MT_OK) return st;
    if (old != NULL) take_out(lru, old, &taken);
    while (taken != NULL) {
        mt_lru_entry *next = taken->chain;
        taken->chain = *out;
        *out = taken;
        taken = next;
    }
    link_newest(lru, entry);
    into_bucket(lru, entry);
    assert(mt_member_reserved(lru->member) == lru->bytes);
    return MT_OK;
}

void
mt_lru_touch(mt_lru *lru, mt_lru_entry *entry)
{
    if (entry == lru->newest) return;
    unlink_order(lru, entry);
    link_newest(lru, entry);
}

void
mt_lru_drop(mt_lru *lru, mt_lru_entry *entry)
{
    unlink_order(lru, entry);
    out_of_bucket(lru, entry);
    mt_member_release(lru->member, entry->bytes);
}

mt_lru_entry *
mt_lru_clear(mt_lru *lru)
{
    mt_lru_entry *out = NULL;
    size_t bytes = lru->bytes;

    while (lru->newest != NULL)
        take_out(lru, lru->newest, &out);
    if (bytes > 0) mt_member_release(lru->member, bytes);
    forget_table(lru);
    return out;
}
