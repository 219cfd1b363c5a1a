/* rig.h -- a KV pool and its model driven together, every call of the world able to fail.
 *
 *   roll --> operation --> pool (over faulty_store.h over a store)   compared after each:
 *                     \--> model (model.h)                           lengths, bytes, sums, physical
 *
 * What an operation is made of comes from `roll`: random numbers in tests, input bytes when
 * fuzzing. A call may fail only when a fault was armed, when the budget may refuse it, or when
 * there are few mappings; then nothing may have changed. */
#ifndef MT_TESTS_KV_RIG_H
#define MT_TESTS_KV_RIG_H

#include "kit/faulty_store.h"
#include "kv/model.h"
#include "kit/memstore.h"
#include "os/port/store.h"

enum { RIG_LEASES = 5, FEW_MAPS = 40 };

typedef enum rig_store {
    RIG_LINUX,     /* lazy */
    RIG_FEW_MAPS,  /* the same, and hardly any mapping allowed */
    RIG_STRICT,    /* memstore.h */
    RIG_STRICT_8K, /* by pages of 8 KiB */
    RIG_STORES
} rig_store;

typedef struct rig_setup {
    mt_kvconfig config;
    rig_store store;
    size_t limit_blocks; /* SIZE_MAX: none */
} rig_setup;

typedef struct rig {
    rig_setup setup;
    faulty faults;
    faulty_store store;
    mt_alloc mem;
    mt_ledger *ledger;
    mt_gauge again; /* bytes that the pool maps more than once */
    bool alone;     /* no other pool reserves in the ledger */
    mt_kvpool *pool;
    mlease lease[RIG_LEASES];
    uint32_t next_id;
    size_t (*roll)(void *ctx, size_t n); /* 0 to n - 1 */
    void *roll_ctx;
    size_t done[16], refused; /* operations that succeeded, by kind, and those that did not */
} rig;

/* ---- setting up ---- */

static inline size_t
rig_page(rig_store store)
{
    return store == RIG_STRICT_8K ? 8192 : 4096;
}

static inline mt_store_ops
rig_open_store(rig *g, const mt_linux_sys *sys)
{
    mt_store_ops ops;
    size_t page = rig_page(g->setup.store);

    if (g->setup.store == RIG_LINUX || g->setup.store == RIG_FEW_MAPS)
        CHECK(mt_store_linux_new_with(&mt_alloc_libc, sys, &ops, NULL) == MT_OK);
    else
        CHECK(memstore_new(&mt_alloc_libc, sys, page, &ops, NULL) == MT_OK);
    if (g->setup.store == RIG_FEW_MAPS) ops.max_maps = FEW_MAPS;
    ops = faulty_store_over(&g->store, &ops, &g->faults);
    g->store.device = !ops.lazy;
    return ops;
}

static inline size_t
rig_limit(const rig_setup *setup, size_t page_bytes)
{
    mt_kvgeom g;

    CHECK(mt_kvgeom_init(&g, &setup->config, page_bytes, NULL) == MT_OK);
    return setup->limit_blocks == SIZE_MAX ? SIZE_MAX : setup->limit_blocks * g.block_bytes;
}

/* A pool beside others under one ledger; the limit is the ledger's. */
static inline void
rig_join(rig *g, const rig_setup *setup, mt_ledger *ledger, size_t (*roll)(void *ctx, size_t n),
         void *roll_ctx)
{
    mt_store_ops ops;

    memset(g, 0, sizeof *g);
    g->setup = *setup;
    g->faults.fail_at = -1;
    g->mem = faulty_alloc(&g->faults);
    g->roll = roll;
    g->roll_ctx = roll_ctx;
    g->next_id = 1;
    g->ledger = mt_ledger_hold(ledger);
    ops = rig_open_store(g, &mt_linux_sys_libc);
    CHECK(mt_kvpool_new(&g->mem, &ops, ledger, "pool", &setup->config, &g->again, &g->pool, NULL) ==
          MT_OK);
}

static inline void
rig_begin(rig *g, const rig_setup *setup, size_t (*roll)(void *ctx, size_t n), void *roll_ctx)
{
    size_t limit = rig_limit(setup, rig_page(setup->store));
    mt_ledger *ledger;

    CHECK(mt_ledger_new(&mt_alloc_libc, limit, "test", NULL, &ledger, NULL) == MT_OK);
    rig_join(g, setup, ledger, roll, roll_ctx);
    mt_ledger_drop(ledger);
    g->alone = true;
}

static inline size_t
rig_roll(rig *g, size_t n)
{
    return g->roll(g->roll_ctx, n);
}

static inline const mt_kvgeom *
rig_geom(const rig *g)
{
    return mt_kvpool_geom(g->pool);
}

static inline size_t
rig_layers(const rig *g)
{
    return g->setup.config.layers;
}

/* ---- what holds after every call ---- */

static inline void
sums_agree(rig *g, const mt_kvstats *s)
{
    size_t payload = 0, leases = 0, rows = 0, lingering = 0, exposed = 0;
    const mt_kvconfig *c = &g->setup.config;

    for (size_t i = 0; i < RIG_LEASES; i++) {
        const mlease *m = &g->lease[i];

        if (m->lease == NULL) continue;
        for (size_t row = 0; row < m->rows; row++)
            payload += mrow_tokens(&m->row[row], c->layers);
        leases++;
        rows += m->rows;
        lingering += m->released;
        exposed += m->exposed;
    }
    CHECK(s->payload_bytes == payload * 2 * c->layers * c->heads * rig_geom(g)->row_bytes);
    CHECK(s->leases == leases && s->rows == rows && s->lingering == lingering);
    CHECK(s->shared_bytes <= s->live_bytes && s->lingering_bytes <= s->live_bytes);
    CHECK(s->reserved_bytes == s->live_bytes + mt_size_max(s->idle_bytes, s->promised_bytes));
    CHECK(!g->alone || s->reserved_bytes == mt_ledger_used(g->ledger));
    CHECK(s->reserved_bytes <= mt_ledger_limit(g->ledger));
    CHECK(s->peak_bytes >= s->live_bytes + s->idle_bytes);
    CHECK(s->acquired + s->forked == s->released + leases - lingering);
    CHECK(s->map_calls == faulty_store_maps(&g->store));
    if (exposed > 0) return; /* pages that no advance counts */
    CHECK(s->physical_bytes <= s->live_bytes + s->idle_bytes);
    if (!g->store.under.lazy) CHECK(s->physical_bytes == s->live_bytes + s->idle_bytes);
}

static inline void
rig_agree(rig *g)
{
    mt_kvstats s;

    CHECK(mt_kvpool_check(g->pool));
    mt_kvpool_stats(g->pool, &s);
    sums_agree(g, &s);
    for (size_t i = 0; i < RIG_LEASES; i++)
        if (g->lease[i].lease != NULL) lengths_agree(&g->lease[i], rig_layers(g));
}

/* ---- faults ---- */

static inline void
rig_fail(rig *g, long n)
{
    g->faults.calls = 0;
    g->faults.fail_at = n;
}

static inline bool
rig_fired(const rig *g)
{
    return g->faults.fail_at >= 0 && g->faults.calls > g->faults.fail_at;
}

/* Whether `blocks` more must fit, whatever they are for. */
static inline bool
rig_must_fit(rig *g, size_t blocks)
{
    size_t unit = rig_geom(g)->block_bytes;
    mt_kvstats s;

    if (g->setup.limit_blocks == SIZE_MAX) return true;
    if (!g->alone) return false;
    mt_kvpool_stats(g->pool, &s);
    for (size_t i = 0; i < RIG_LEASES; i++)
        if (g->lease[i].exposed) return false; /* its idle blocks cannot be dropped */
    return s.live_bytes + s.promised_bytes + blocks * unit <= g->setup.limit_blocks * unit;
}

/* A failure has one of the reasons there are. */
static inline void
rig_reason(rig *g, mt_status st, const mt_error *err, bool must_fit)
{
    g->refused += st != MT_OK;
    if (st == MT_OK) return;
    CHECK(err->status == st);
    if (st == MT_EDEVICE)
        CHECK(rig_fired(g) && g->store.device);
    else if (st == MT_ENOMEM)
        CHECK(rig_fired(g) || g->setup.store == RIG_FEW_MAPS);
    else
        CHECK(st == MT_ELIMIT && err->asked > 0 && err->limit == mt_ledger_limit(g->ledger) &&
              (!must_fit || g->setup.store == RIG_FEW_MAPS));
}

static inline uint64_t
rig_copied(rig *g)
{
    mt_kvstats s;

    mt_kvpool_stats(g->pool, &s);
    return s.copied;
}

/* A call failed: views from before may show zeros, and code that writes through them by itself, if
 * not into an exposed lease, has to ask for room again. */
static inline void
rig_after_failure(mlease *m)
{
    memset(m->seen, 0, sizeof m->seen);
    m->owned = false;
    if (!m->exposed) m->writable = 0;
}

/* Where mappings are short, other layers' views show the old blocks until their turn. */
static inline void
rig_after_copy(rig *g, mlease *m, size_t layer, uint64_t copied)
{
    const mt_kvgeom *geom = rig_geom(g);

    if (g->setup.store != RIG_FEW_MAPS || rig_copied(g) == copied) return;
    for (size_t i = 0; i < rig_layers(g); i++)
        if (mt_kvgeom_unit(geom, i) != mt_kvgeom_unit(geom, layer)) m->seen[i] = 0;
}

/* ---- looking ---- */

/* Shows [0, view) of a layer and compares. A show may be refused: cleaning can take a block. */
static inline void
rig_look(rig *g, mlease *m, size_t layer, size_t view, bool whole)
{
    size_t most = mt_size_max(view, mlease_tokens(m, rig_layers(g)));
    bool fits = rig_must_fit(g, m->rows * mt_kvgeom_blocks(rig_geom(g), most));
    uint64_t copied = rig_copied(g);
    mt_error err = {0};
    mt_status st = mt_kvlease_show(m->lease, layer, view, &err);

    rig_reason(g, st, &err, fits);
    if (st != MT_OK) {
        rig_after_failure(m);
        return;
    }
    rig_after_copy(g, m, layer, copied);
    m->seen[layer] = mt_size_max(m->seen[layer], view);
    layer_agrees(m, layer, view, whole);
}

/* What was seen stays as it was, without another call. */
static inline void
rig_glance(rig *g)
{
    for (size_t i = 0; i < RIG_LEASES; i++)
        for (size_t layer = 0; g->lease[i].lease != NULL && layer < rig_layers(g); layer++)
            layer_agrees(&g->lease[i], layer, g->lease[i].seen[layer], false);
}

static inline void
rig_look_at_all(rig *g, bool whole)
{
    rig_glance(g);
    for (size_t i = 0; i < RIG_LEASES; i++) {
        mlease *m = &g->lease[i];

        for (size_t layer = 0; m->lease != NULL && !m->released && layer < rig_layers(g); layer++)
            rig_look(g, m, layer,
                     whole ? mlease_tokens(m, rig_layers(g)) : mlease_longest(m, layer), whole);
    }
    rig_agree(g);
}

/* ---- the operations: on the pool, and when they succeed on the model ---- */

static inline mlease *
rig_free_place(rig *g)
{
    for (size_t i = 0; i < RIG_LEASES; i++)
        if (g->lease[i].lease == NULL) return &g->lease[i];
    return NULL;
}

static inline mt_status
rig_acquire(rig *g, mlease *m, size_t rows, size_t tokens)
{
    size_t hint = mt_size_min(tokens, g->setup.config.max_tokens);
    bool must = rig_must_fit(g, rows * mt_kvgeom_blocks(rig_geom(g), hint));
    bool would = mt_kvpool_would_fit(g->pool, rows, hint, 0);
    mt_kvlease *lease = NULL;
    mt_error err = {0};
    mt_status st = mt_kvpool_acquire(g->pool, rows, tokens, &lease, &err);

    if (rows == 0 || rows > g->setup.config.max_rows) {
        CHECK(st == MT_ESHAPE && err.asked == rows && err.limit == g->setup.config.max_rows);
        CHECK(!would && lease == NULL);
        return st;
    }
    rig_reason(g, st, &err, must);
    CHECK(would == (st != MT_ELIMIT) || rig_fired(g));
    CHECK((st == MT_OK) == (lease != NULL));
    if (st == MT_OK) *m = (mlease){.lease = lease, .rows = rows, .max_rows = rows};
    return st;
}

static inline mt_status
rig_fork(rig *g, mlease *to, mlease *parent, size_t n, size_t tokens)
{
    size_t rows = parent->rows * n, hint = mt_size_min(tokens, g->setup.config.max_tokens);
    bool must = rig_must_fit(g, rows * mt_kvgeom_blocks(rig_geom(g), hint));
    mt_kvlease *lease = NULL;
    mt_error err = {0};
    mt_status st = mt_kvlease_fork(parent->lease, n, tokens, &lease, &err);

    if (rows == 0 || rows > g->setup.config.max_rows) {
        CHECK(st == MT_ESHAPE && lease == NULL);
        return st;
    }
    rig_reason(g, st, &err, must);
    CHECK((st == MT_OK) == (lease != NULL));
    parent->owned = false;
    if (st != MT_OK && g->setup.store == RIG_FEW_MAPS) rig_after_failure(parent);
    if (st != MT_OK) return st;
    *to = (mlease){.lease = lease, .rows = rows, .max_rows = rows};
    for (size_t row = 0; row < rows; row++) {
        to->row[row] = parent->row[row / n];
        to->row[row].scribbled = 0;
    }
    return MT_OK;
}

/* Strides of [rows, H, t, D]: packed, heads inside, or with gaps. */
static inline mt_kvsource
rig_source(rig *g, const char *data, size_t most)
{
    size_t heads = g->setup.config.heads, bytes = rig_geom(g)->row_bytes, how = rig_roll(g, 3);
    size_t token = how == 1 ? heads * bytes : how == 2 ? bytes + 16 : bytes;
    size_t head = how == 1 ? bytes : most * token;

    return (mt_kvsource){.data = data,
                         .row_stride = (ptrdiff_t)((how == 1 ? 1 : heads) * most * token),
                         .head_stride = (ptrdiff_t)head,
                         .token_stride = (ptrdiff_t)token};
}

/* The new tokens as a tensor, each row's first counts[row] of `most`. */
static inline mt_kvsource
rig_tensor(rig *g, const mlease *m, size_t layer, size_t which, const size_t *counts, size_t most,
           uint32_t first_id, char *block)
{
    mt_kvsource s = rig_source(g, block, most);

    for (size_t row = 0; row < m->rows; row++)
        for (size_t i = 0; i < g->setup.config.heads * counts[row]; i++) {
            size_t head = i % g->setup.config.heads, t = i / g->setup.config.heads;
            ptrdiff_t at = (ptrdiff_t)row * s.row_stride + (ptrdiff_t)head * s.head_stride +
                           (ptrdiff_t)t * s.token_stride;

            token_fill(block + at, rig_geom(g)->row_bytes,
                       first_id + (uint32_t)(row * MODEL_TOKENS + t), layer, which, head);
        }
    return s;
}

static inline void
rig_write(rig *g, const mlease *m, size_t layer, const mt_kvstep *step, const size_t *counts,
          size_t most, uint32_t first_id)
{
    size_t bytes = m->rows * g->setup.config.heads * most * (rig_geom(g)->row_bytes + 16) + 1;
    char *k = malloc(bytes), *v = malloc(bytes);
    mt_kvsource from[2];

    CHECK(k != NULL && v != NULL);
    from[0] = rig_tensor(g, m, layer, 0, counts, most, first_id, k);
    from[1] = rig_tensor(g, m, layer, 1, counts, most, first_id, v);
    mt_kvlease_write(m->lease, layer, step, &from[0], &from[1]);
    free(k);
    free(v);
}

/* room and write, and then the caller gives up: nothing of it may ever show. pre: it fits. */
static inline mt_status
rig_abandon(rig *g, mlease *m, size_t layer, const size_t *counts)
{
    mt_kvstep step = {.counts = counts};
    size_t most = 1;
    mt_error err = {0};
    mt_status st = mt_kvlease_room(m->lease, layer, &step, &err);

    rig_reason(g, st, &err, false);
    memset(m->seen, 0, sizeof m->seen);
    if (st != MT_OK) return st;
    m->writable = 0;
    for (size_t row = 0; row < m->rows; row++)
        most = mt_size_max(most, counts[row]);
    rig_write(g, m, layer, &step, counts, most, g->next_id);
    g->next_id += MODEL_ROWS * MODEL_TOKENS;
    return MT_OK;
}

/* room, write, advance. `uniform`: the step is given as one count. */
static inline mt_status
rig_update(rig *g, mlease *m, size_t layer, const size_t *counts, bool uniform)
{
    mt_kvstep step = {.count = counts[0], .counts = uniform ? NULL : counts};
    size_t view = 0, most = 0, all = mlease_tokens(m, rig_layers(g));
    uint32_t first_id = g->next_id;
    uint64_t copied = rig_copied(g);
    mt_error err = {0};
    mt_status st;
    bool must;

    for (size_t row = 0; row < m->rows; row++) {
        most = mt_size_max(most, counts[row]);
        view = mt_size_max(view, m->row[row].len[layer] + counts[row]);
    }
    must = rig_must_fit(g, m->rows * mt_kvgeom_blocks(rig_geom(g), mt_size_max(view, all)));
    st = mt_kvlease_room(m->lease, layer, &step, &err);
    if (view > g->setup.config.max_tokens) {
        CHECK(st == MT_ESHAPE && err.limit == g->setup.config.max_tokens && err.asked > err.limit);
        return st;
    }
    rig_reason(g, st, &err, must);
    if (st != MT_OK) {
        rig_after_failure(m);
        return st;
    }
    rig_after_copy(g, m, layer, copied);
    mlease_append(m, rig_layers(g));
    if (most > 0) rig_write(g, m, layer, &step, counts, most, first_id);
    mt_kvlease_advance(m->lease, layer, &step);
    g->next_id += MODEL_ROWS * MODEL_TOKENS;
    for (size_t row = 0; row < m->rows; row++)
        for (size_t t = 0; t < counts[row]; t++)
            m->row[row].id[layer][m->row[row].len[layer]++] =
                first_id + (uint32_t)(row * MODEL_TOKENS + t);
    m->seen[layer] = mt_size_max(m->seen[layer], view);
    layer_agrees(m, layer, view, false);
    return MT_OK;
}

static inline void
rig_crop(rig *g, mlease *m, const size_t *lengths)
{
    mt_kvlease_crop(m->lease, lengths);
    for (size_t row = 0; row < m->rows; row++)
        mrow_crop(&m->row[row], rig_layers(g), lengths[row]);
    memset(m->seen, 0, sizeof m->seen);
    m->writable = 0;
}

static inline mt_status
rig_reorder(rig *g, mlease *m, const size_t *index, size_t n)
{
    bool must = rig_must_fit(g, 2 * n), device = g->store.device;
    mt_error err = {0};
    mt_status st;

    g->store.device = false; /* rows that are copied over each other have no way back */
    st = mt_kvlease_reorder(m->lease, index, n, &err);
    g->store.device = device;
    rig_reason(g, st, &err, must);
    if (st != MT_OK && g->setup.store == RIG_FEW_MAPS) rig_after_failure(m);
    if (st != MT_OK) return st;
    mlease_reorder(m, index, n);
    memset(m->seen, 0, sizeof m->seen);
    return MT_OK;
}

static inline mt_status
rig_reserve(rig *g, mlease *m, size_t tokens, bool held)
{
    size_t most = mt_size_max(tokens, mlease_tokens(m, rig_layers(g)));
    bool must = rig_must_fit(g, m->rows * mt_kvgeom_blocks(rig_geom(g), most));
    mt_error err = {0};
    mt_status st = mt_kvlease_reserve(m->lease, tokens, held, &err);

    rig_reason(g, st, &err, must);
    memset(m->seen, 0, sizeof m->seen);
    if (st != MT_OK) return st;
    m->writable = mt_size_max(m->writable, tokens);
    m->owned |= held;
    for (size_t layer = 0; layer < rig_layers(g); layer++) {
        m->seen[layer] = tokens;
        layer_agrees(m, layer, tokens, true);
    }
    return MT_OK;
}

static inline mt_status
rig_expose(rig *g, mlease *m)
{
    mt_error err = {0};
    mt_status st = mt_kvlease_expose(m->lease, &err);

    rig_reason(g, st, &err, false);
    memset(m->seen, 0, sizeof m->seen);
    if (st != MT_OK) return st;
    m->exposed = true;
    m->writable = g->setup.config.max_tokens;
    for (size_t layer = 0; layer < rig_layers(g); layer++) {
        m->seen[layer] = m->writable;
        layer_agrees(m, layer, m->writable, true);
    }
    return MT_OK;
}

/* Code writes into the views by itself, past the rows' lengths and past what it will advance over.
 */
static inline uint32_t
rig_scribble(rig *g, mlease *m, size_t row, size_t layer, size_t count, size_t extra)
{
    mrow *r = &m->row[row];
    size_t end = mt_size_min(r->len[layer] + count + extra, m->writable);
    uint32_t first_id = g->next_id;

    g->next_id += MODEL_TOKENS;
    for (size_t t = r->len[layer]; t < end; t++)
        token_write(m->lease, row, layer, t, first_id + (uint32_t)(t - r->len[layer]));
    r->scribbled = mt_size_max(r->scribbled, end);
    return first_id;
}

/* Code writes over a token that the row holds. Only this row shows it. pre: owned. */
static inline void
rig_overwrite(rig *g, mlease *m, size_t row, size_t layer, size_t t)
{
    mrow *r = &m->row[row];

    if (t >= r->len[layer]) return;
    rig_look(g, m, layer, mlease_longest(m, layer), false);
    if (!m->owned) return; /* the look failed */
    r->id[layer][t] = g->next_id++;
    token_write(m->lease, row, layer, t, r->id[layer][t]);
}

/* pre: what is to be advanced over was written by rig_scribble, with ids[row][layer] first. */
static inline mt_status
rig_advance_all(rig *g, mlease *m, const size_t *counts, uint32_t ids[MODEL_ROWS][MODEL_LAYERS])
{
    mt_kvstep step = {.counts = counts};
    uint64_t copied = rig_copied(g);
    mt_error err = {0};
    mt_status st = mt_kvlease_advance_all(m->lease, &step, &err);

    if (st == MT_ESHAPE) return st;
    rig_reason(g, st, &err, false);
    m->owned = false; /* new tokens may be zeros that no page holds */
    mlease_append(m, rig_layers(g));
    if (st != MT_OK || (g->setup.store == RIG_FEW_MAPS && rig_copied(g) != copied))
        memset(m->seen, 0, sizeof m->seen);
    if (st != MT_OK) return st;
    for (size_t row = 0; row < m->rows; row++)
        for (size_t layer = 0; layer < rig_layers(g); layer++)
            for (size_t i = 0; i < counts[row]; i++) {
                size_t t = m->row[row].len[layer]++;

                m->row[row].id[layer][t] = t < m->writable ? ids[row][layer] + (uint32_t)i : 0;
            }
    return MT_OK;
}

/* Held, it lingers until rig_end_of. */
static inline void
rig_release(rig *g, mlease *m, bool held)
{
    (void)g;
    if (held) mt_kvlease_hold(m->lease);
    mt_kvlease_release(m->lease);
    if (held)
        m->released = true;
    else
        *m = (mlease){.lease = NULL};
}

static inline void
rig_end_of(rig *g, mlease *m)
{
    if (m->released) {
        mt_kvlease_unhold(m->lease);
        *m = (mlease){.lease = NULL};
    } else if (m->lease != NULL) {
        rig_release(g, m, false);
    }
}

/* Ends all leases and the pool; nothing may be left over. */
static inline void
rig_end(rig *g)
{
    for (size_t i = 0; i < RIG_LEASES; i++)
        rig_end_of(g, &g->lease[i]);
    rig_agree(g);
    mt_kvpool_close(g->pool);
    CHECK(mt_gauge_read(&g->again) == 0 && g->again.once == 0);
    CHECK(!g->store.open && (!g->alone || mt_ledger_used(g->ledger) == 0));
    mt_ledger_drop(g->ledger);
    CHECK(g->faults.live == 0);
}

#endif
