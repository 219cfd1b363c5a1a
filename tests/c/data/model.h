/* model.h -- a cache of entries as a plain array in order of use, and the mt_lru beside it. */
#ifndef MT_TESTS_DATA_MODEL_H
#define MT_TESTS_DATA_MODEL_H

#include <string.h>

#include "kit/check.h"
#include "kit/faulty.h"
#include "core/data/lru.h"

enum { MODEL_MOST = 256 };

typedef struct item {
    mt_lru_entry entry;
    uint64_t id;
} item;

typedef struct rig {
    faulty faults;
    mt_alloc mem;
    mt_ledger *ledger;
    mt_member *other; /* a part that shares the ledger */
    mt_lru lru;
    item *items[MODEL_MOST]; /* the oldest first */
    size_t n;
    uint64_t evicted, ids;
} rig;

static inline mt_ledger *
ledger_of(size_t limit)
{
    mt_ledger *ledger;

    CHECK(mt_ledger_new(&mt_alloc_libc, limit, "ledger", NULL, &ledger, NULL) == MT_OK);
    return ledger;
}

static inline void
rig_begin(rig *g, size_t limit)
{
    *g = (rig){.faults = {.fail_at = -1}};
    g->mem = faulty_alloc(&g->faults);
    g->ledger = ledger_of(limit);
    CHECK(mt_ledger_join(g->ledger, "other", 0, NULL, &g->other, NULL) == MT_OK);
    mt_lru_init(&g->lru, &g->mem);
    CHECK(mt_lru_join(&g->lru, g->ledger, "cache", &(mt_lru_entry *){NULL}, NULL) == MT_OK);
}

/* The places of the model and of the cache are the same, entry by entry. */
static inline void
rig_check(const rig *g)
{
    const mt_lru_entry *at = g->lru.oldest, *before = NULL;
    size_t bytes = 0;

    for (size_t i = 0; i < g->n; i++, before = at, at = at->newer) {
        const mt_lru_entry *found = mt_lru_first(&g->lru, g->items[i]->entry.hash);
        CHECK(at == &g->items[i]->entry && at->older == before);
        for (; found != NULL && found != at; found = mt_lru_next(found))
            CHECK(found->hash == g->items[i]->entry.hash);
        CHECK(found == at);
        bytes += at->bytes;
    }
    CHECK(at == NULL && g->lru.newest == before);
    CHECK(g->lru.entries == g->n && g->lru.bytes == bytes && g->lru.evicted == g->evicted);
    CHECK(mt_member_reserved(g->lru.member) == bytes);
    CHECK(mt_ledger_used(g->lru.ledger) <= mt_ledger_limit(g->lru.ledger));
}

static inline void
model_remove(rig *g, size_t i)
{
    memmove(&g->items[i], &g->items[i + 1], (g->n - i - 1) * sizeof *g->items);
    g->n--;
}

/* What came out is gone from the model already: frees it, and counts. */
static inline size_t
rig_free(mt_lru_entry *out)
{
    size_t n = 0;

    for (; out != NULL; n++) {
        item *gone = (item *)out;
        out = out->chain;
        free(gone);
    }
    return n;
}

/* Puts an entry in, in place of the old-th unless that is none of them. */
static inline mt_status
rig_put(rig *g, uint64_t hash, size_t bytes, size_t old)
{
    item *made = malloc(sizeof *made), *replaced = old < g->n ? g->items[old] : NULL;
    size_t room = mt_ledger_limit(g->lru.ledger) - mt_ledger_used(g->lru.ledger), gone = 0;
    size_t entries = g->n;
    mt_lru_entry *out = NULL;
    mt_error err;
    mt_status st;

    *made = (item){.entry = {.hash = hash, .bytes = bytes}, .id = ++g->ids};
    st = mt_lru_put(&g->lru, &made->entry, replaced != NULL ? &replaced->entry : NULL, &out, &err);
    CHECK(st != MT_ELIMIT || room + g->lru.bytes < bytes);
    if (st != MT_OK) {
        CHECK(out == NULL);
        free(made);
        return st;
    }
    if (replaced != NULL) {
        room += replaced->entry.bytes;
        model_remove(g, old);
        gone++;
    }
    while (room < bytes) {
        room += g->items[0]->entry.bytes;
        model_remove(g, 0);
        g->evicted++;
        gone++;
    }
    CHECK(rig_free(out) == gone && g->n + gone == entries);
    CHECK(g->n < MODEL_MOST);
    g->items[g->n++] = made;
    return MT_OK;
}

static inline void
rig_touch(rig *g, size_t i)
{
    item *touched = g->items[i];

    mt_lru_touch(&g->lru, &touched->entry);
    model_remove(g, i);
    g->items[g->n++] = touched;
}

static inline void
rig_drop(rig *g, size_t i)
{
    item *dropped = g->items[i];

    mt_lru_drop(&g->lru, &dropped->entry);
    model_remove(g, i);
    free(dropped);
}

static inline void
rig_clear(rig *g)
{
    CHECK(rig_free(mt_lru_clear(&g->lru)) == g->n);
    CHECK(g->lru.buckets == NULL && g->faults.live == 0);
    g->n = 0;
}

/* Counts in a ledger of its own from now on. */
static inline mt_status
rig_move(rig *g, size_t limit)
{
    mt_ledger *ledger = ledger_of(limit);
    mt_lru_entry *out = NULL;
    mt_status st = mt_lru_join(&g->lru, ledger, "moved", &out, NULL);
    size_t bytes = g->lru.bytes, gone = 0;

    mt_ledger_drop(ledger);
    if (st != MT_OK) return st;
    while (g->n > 0 && g->items[0] != (item *)g->lru.oldest) {
        model_remove(g, 0);
        g->evicted++;
        gone++;
    }
    CHECK(rig_free(out) == gone && bytes <= limit);
    return MT_OK;
}

static inline void
rig_end(rig *g)
{
    rig_clear(g);
    CHECK(mt_member_reserved(g->lru.member) == 0);
    mt_lru_fini(&g->lru);
    mt_ledger_leave(g->other);
    mt_ledger_drop(g->ledger);
    CHECK(g->faults.live == 0);
}

#endif
