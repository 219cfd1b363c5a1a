/* rig.h -- a gate history and its model, driven together over an allocator that can fail.
 *
 * Blocks over 8 MiB are refused: hostile counts ask for them. */
#ifndef MT_TESTS_GATE_RIG_H
#define MT_TESTS_GATE_RIG_H

#include "core/gate/state.h"
#include "core/base/size.h"
#include "kit/faulty.h"
#include "gate/model.h"
#include "kit/tensor.h"

enum { RIG_BLOCK_MAX = 8 << 20 };

typedef struct rig {
    faulty fault;
    mt_alloc mem;
    mt_vmem_ops vm;
    mt_gatehist *h;
    model m;
    rng r;
} rig;

/* As faulty_get and faulty_put, but poisons no more than the first page: histories come and go by
 * the ten thousand here, each with 128 KiB of scratch. */
static inline void *
rig_get(void *ctx, size_t bytes)
{
    faulty *f = ctx;
    void *block = faulty_fails(f) || bytes > RIG_BLOCK_MAX ? NULL : malloc(bytes);

    if (block == NULL) return NULL;
    f->live++;
    return memset(block, 0xA5, mt_size_min(bytes, 4096));
}

static inline void
rig_put(void *ctx, void *block, size_t bytes)
{
    if (block == NULL) return;
    ((faulty *)ctx)->live--;
    memset(block, 0x5A, mt_size_min(bytes, 4096));
    free(block);
}

static inline mt_status
rig_reserve(void *ctx, size_t bytes, void **out, mt_error *err)
{
    if (bytes > RIG_BLOCK_MAX) return mt_fail(err, MT_ENOMEM, "reserve", 12);
    return faulty_reserve(ctx, bytes, out, err);
}

/* The tables alone; no call fails. */
static inline void
rig_prepare(rig *g, uint64_t seed)
{
    memset(g, 0, sizeof *g);
    g->fault.fail_at = -1;
    g->mem = (mt_alloc){.get = rig_get, .put = rig_put, .ctx = &g->fault};
    g->vm = faulty_vmem(&g->fault);
    g->vm.reserve = rig_reserve;
    g->r = rng_seeded(seed);
}

static inline void
rig_begin(rig *g, const mt_gatehist_config *config, uint64_t seed)
{
    rig_prepare(g, seed);
    model_init(&g->m, config);
    CHECK(mt_gatehist_new(&g->mem, &g->vm, config, &g->h, NULL) == MT_OK);
    model_agrees(&g->m, g->h);
}

/* Frees both; nothing may be left over. */
static inline void
rig_end(rig *g)
{
    mt_gatehist_free(g->h);
    model_fini(&g->m);
    CHECK(g->fault.live == 0);
}

/* Arms the n-th allocation from now on; -1 for none. */
static inline void
rig_fail(rig *g, long n)
{
    g->fault.calls = 0;
    g->fault.fail_at = n;
}

/* Pushes to both. When the real one refuses, nothing may have changed. */
static inline mt_status
rig_push_rows(rig *g, const mt_rows *rows)
{
    mt_status want = model_admit(&g->m, rows), got;
    mt_error err = {.status = MT_OK};

    got = mt_gatehist_push(g->h, rows, &err);
    CHECK(got == want || (want == MT_OK && got == MT_ENOMEM && g->fault.fail_at >= 0));
    CHECK(err.status == got);
    if (got == MT_OK) model_fill(&g->m, model_claim(&g->m, rows), rows);
    model_agrees(&g->m, g->h);
    return got;
}

static inline mt_status
rig_push(rig *g, mt_dtype dtype, size_t rows, size_t cols, layout how)
{
    tensor t = tensor_new(&g->r, dtype, rows, cols, how);
    mt_status st = rig_push_rows(g, &t.rows);

    tensor_free(&t);
    return st;
}

/* Any dtype, any layout, 0 to `most` rows. */
static inline mt_status
rig_push_any(rig *g, size_t most, size_t cols)
{
    mt_dtype dtype = (mt_dtype)rng_below(&g->r, MT_DTYPE_COUNT);
    layout how = (layout)rng_below(&g->r, LAYOUTS);

    return rig_push(g, dtype, rng_below(&g->r, most + 1), cols, how);
}

/* Any configuration with small limits; *experts suits it. */
static inline mt_gatehist_config
rig_any_config(rng *r, size_t *experts)
{
    static const int dtypes[] = {MT_DTYPE_SAME, MT_F32, MT_F64, MT_F16, MT_BF16};
    mt_gatehist_config c = {.max_entries = 1 + rng_below(r, rng_below(r, 2) ? 6 : 40),
                            .max_bytes = 1 + rng_below(r, rng_below(r, 2) ? 200 : 3000),
                            .trim = (mt_trim)rng_below(r, 2),
                            .keep = (mt_keep)rng_below(r, 2),
                            .dtype = dtypes[rng_below(r, 5)],
                            .top_k = 1 + (unsigned)rng_below(r, 3),
                            .statistics = rng_below(r, 4) != 0};

    *experts = c.top_k + rng_below(r, 9);
    return c;
}

/* Slices both and compares; the slice takes one more entry to show that it is alive. */
static inline void
rig_slice(rig *g, size_t start, ptrdiff_t step, size_t count)
{
    rig s = {.r = g->r};
    mt_status st = mt_gatehist_slice(g->h, start, step, count, &s.h, NULL);

    if (st != MT_OK) {
        CHECK(st == MT_ENOMEM && g->fault.fail_at >= 0);
        return;
    }
    model_slice(&g->m, start, step, count, &s.m);
    model_agrees(&s.m, s.h);
    if (g->m.experts > 0 && g->fault.fail_at < 0) rig_push_any(&s, 2, g->m.experts);
    mt_gatehist_free(s.h);
    model_fini(&s.m);
    model_agrees(&g->m, g->h);
}

static inline bool
same_sums(const mt_gatesums *a, const mt_gatesums *b, size_t experts)
{
    return a->tokens == b->tokens && a->nonfinite == b->nonfinite &&
           memcmp(a->importance, b->importance, 8 * experts) == 0 &&
           memcmp(a->load, b->load, 8 * experts) == 0;
}

static inline bool
same_stats(const mt_gatestats *a, const mt_gatestats *b)
{
    if (a->experts != b->experts || a->entries != b->entries || a->span != b->span) return false;
    if (a->marks != b->marks || a->top_k != b->top_k) return false;
    if (a->experts == 0) return true;
    for (size_t i = 0; i < a->marks; i++)
        if (!same_sums(&a->mark[i], &b->mark[i], a->experts)) return false;
    return same_sums(&a->total, &b->total, a->experts);
}

static inline bool
same_config(const mt_gatehist_config *a, const mt_gatehist_config *b)
{
    return a->max_entries == b->max_entries && a->max_bytes == b->max_bytes && a->trim == b->trim &&
           a->keep == b->keep && a->dtype == b->dtype && a->top_k == b->top_k &&
           a->statistics == b->statistics;
}

static inline bool
same_entry(const mt_gatehist *a, const mt_gatehist *b, size_t i)
{
    mt_rows x = mt_gatehist_shape(a, i), y = mt_gatehist_shape(b, i);
    size_t bytes = x.rows * x.cols * mt_dtype_size(x.dtype);
    unsigned char *left, *right;
    bool same;

    if (x.dtype != y.dtype || x.rows != y.rows || x.cols != y.cols) return false;
    left = model_block(bytes);
    right = model_block(bytes);
    mt_gatehist_copy(a, i, left);
    mt_gatehist_copy(b, i, right);
    same = memcmp(left, right, bytes) == 0;
    free(left);
    free(right);
    return same;
}

/* True when nothing that can be seen tells the two histories apart. */
static inline bool
same_history(const mt_gatehist *a, const mt_gatehist *b)
{
    if (!same_config(mt_gatehist_configuration(a), mt_gatehist_configuration(b))) return false;
    if (mt_gatehist_len(a) != mt_gatehist_len(b)) return false;
    if (mt_gatehist_bytes(a) != mt_gatehist_bytes(b)) return false;
    if (mt_gatehist_appended(a) != mt_gatehist_appended(b)) return false;
    if (mt_gatehist_experts(a) != mt_gatehist_experts(b)) return false;
    for (size_t i = 0; i < mt_gatehist_len(a); i++)
        if (!same_entry(a, b, i)) return false;
    return same_stats(mt_gatehist_stats(a), mt_gatehist_stats(b));
}

/* A block of just these bytes, so that a sanitiser sees a read beyond them. */
static inline void *
block_of(size_t bytes)
{
    void *block = malloc(bytes);

    if (block == NULL && bytes > 0) abort();
    return block;
}

/* The state of h in blocks, which state_free() frees. */
static inline mt_gatestate
state_of(const mt_gatehist *h)
{
    mt_gatestate s = mt_gatehist_state(h);
    void *sums = block_of(s.sums_bytes), *index = block_of(s.index_bytes),
         *records = block_of(s.records_bytes);

    mt_gatehist_state_copy(h, sums, index, records);
    s.sums = sums;
    s.index = index;
    s.records = records;
    return s;
}

static inline void
state_free(mt_gatestate *s)
{
    free((void *)s->sums);
    free((void *)s->index);
    free((void *)s->records);
}

/* A new history with this state. What is refused leaves nothing behind. */
static inline mt_status
restore_new(rig *g, const mt_gatehist_config *config, const mt_gatestate *state, mt_gatehist **out)
{
    long live = g->fault.live;
    mt_error err = {.status = MT_OK};
    mt_status st;

    *out = NULL;
    if ((st = mt_gatehist_new(&g->mem, &g->vm, config, out, &err)) != MT_OK) return st;
    st = mt_gatehist_restore(*out, state, &err);
    CHECK(mt_gatehist_check(*out));
    CHECK(err.status == st && (st != MT_EFORMAT || err.detail != NULL));
    if (st == MT_OK) return st;
    mt_gatehist_free(*out);
    *out = NULL;
    CHECK(g->fault.live == live);
    return st;
}

/* h taken apart and put together is h. */
static inline void
state_round_trips(rig *g, const mt_gatehist *h)
{
    mt_gatehist_config config = *mt_gatehist_configuration(h);
    mt_gatestate state = state_of(h);
    mt_gatehist *again;

    config.ledger = NULL;
    CHECK(restore_new(g, &config, &state, &again) == MT_OK);
    CHECK(same_history(h, again));
    mt_gatehist_free(again);
    state_free(&state);
}

#endif
