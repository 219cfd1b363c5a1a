/* steps.h -- one operation after another on a KV pool and its model, each as `roll` decides. */
#ifndef MT_TESTS_KV_STEPS_H
#define MT_TESTS_KV_STEPS_H

#include "kv/rig.h"

/* Geometries with few tokens a block: head-major, the same with parts of 3 pages, token-major by
 * layer, by 2 of 3 layers, by all 3 with parts of 3 pages, and one token a block. */
static inline mt_kvconfig
steps_config(size_t which)
{
    static const mt_kvconfig all[] = {
        {2, 2, 256, 4, 22, 4, MT_KV_HEAD_MAJOR, 1},  {2, 1, 384, 4, 35, 3, MT_KV_HEAD_MAJOR, 1},
        {3, 2, 128, 4, 22, 4, MT_KV_TOKEN_MAJOR, 1}, {3, 1, 128, 2, 22, 4, MT_KV_TOKEN_MAJOR, 2},
        {3, 2, 64, 4, 22, 3, MT_KV_TOKEN_MAJOR, 3},  {2, 1, 1024, 4, 9, 5, MT_KV_HEAD_MAJOR, 1},
    };

    return all[which % (sizeof all / sizeof *all)];
}

enum { STEPS_CONFIGS = 6 };

/* A lease that is in use. */
static inline mlease *
steps_any(rig *g)
{
    size_t first = rig_roll(g, RIG_LEASES);

    for (size_t i = 0; i < RIG_LEASES; i++) {
        mlease *m = &g->lease[(first + i) % RIG_LEASES];

        if (m->lease != NULL && !m->released) return m;
    }
    return NULL;
}

/* Mostly what fits. */
static inline size_t
steps_count(rig *g, const mrow *r, size_t layers)
{
    size_t left = g->setup.config.max_tokens - mrow_tokens(r, layers);
    size_t count = rig_roll(g, 3) ? rig_roll(g, 4) : rig_roll(g, 12);

    return rig_roll(g, 30) == 0 ? count : mt_size_min(count, left);
}

static inline void
steps_counts(rig *g, const mlease *m, size_t counts[MODEL_ROWS], bool uniform)
{
    size_t least = SIZE_MAX;

    for (size_t row = 0; row < m->rows; row++) {
        counts[row] = steps_count(g, &m->row[row], rig_layers(g));
        least = mt_size_min(least, counts[row]);
    }
    for (size_t row = 0; uniform && row < m->rows; row++)
        counts[row] = least;
}

/* All layers as a model's forward does, or one of them alone. */
static inline mt_status
steps_update(rig *g, mlease *m)
{
    bool uniform = rig_roll(g, 2) != 0;
    size_t counts[MODEL_ROWS] = {0}, one = rig_roll(g, 4 * rig_layers(g));
    mt_status st = MT_OK;

    steps_counts(g, m, counts, uniform);
    for (size_t layer = 0; st == MT_OK && layer < rig_layers(g); layer++)
        if (one >= rig_layers(g) || one == layer) st = rig_update(g, m, layer, counts, uniform);
    return st;
}

static inline mt_status
steps_abandon(rig *g, mlease *m)
{
    size_t counts[MODEL_ROWS] = {0};

    for (size_t row = 0; row < m->rows; row++)
        counts[row] = mt_size_min(rig_roll(g, 7), g->setup.config.max_tokens -
                                                      mrow_tokens(&m->row[row], rig_layers(g)));
    return rig_abandon(g, m, rig_roll(g, rig_layers(g)), counts);
}

static inline mt_status
steps_crop(rig *g, mlease *m)
{
    size_t lengths[MODEL_ROWS], all = rig_roll(g, g->setup.config.max_tokens + 1);
    bool ragged = rig_roll(g, 2) != 0;

    for (size_t row = 0; row < m->rows; row++)
        lengths[row] = ragged ? rig_roll(g, g->setup.config.max_tokens + 1) : all;
    rig_crop(g, m, lengths);
    return MT_OK;
}

static inline mt_status
steps_reorder(rig *g, mlease *m)
{
    size_t index[MODEL_ROWS], n = rig_roll(g, 2) ? m->rows : 1 + rig_roll(g, m->max_rows);

    for (size_t i = 0; i < n; i++)
        index[i] = rig_roll(g, m->rows);
    return rig_reorder(g, m, index, n);
}

static inline mt_status
steps_fork(rig *g, mlease *m)
{
    mlease *to = rig_free_place(g);
    size_t n = 1 + rig_roll(g, g->setup.config.max_rows);

    if (to == NULL) return MT_OK;
    if (rig_roll(g, 8)) n = mt_size_max(1, mt_size_min(n, g->setup.config.max_rows / m->rows));
    m->writable = 0; /* what it could write to is shared now */
    return rig_fork(g, to, m, n, rig_roll(g, g->setup.config.max_tokens + 4));
}

static inline mt_status
steps_acquire(rig *g)
{
    mlease *to = rig_free_place(g);
    size_t rows = rig_roll(g, 20) ? 1 + rig_roll(g, g->setup.config.max_rows) : 0;

    if (to == NULL) return MT_OK;
    return rig_acquire(g, to, rows + (rig_roll(g, 20) == 0 ? 5 : 0),
                       rig_roll(g, g->setup.config.max_tokens + 4));
}

/* Whether what advance_all would add is known: written just now, or zeros. */
static inline bool
steps_may_advance_all(const rig *g, const mlease *m, size_t layers)
{
    if (m->exposed && m->writable < g->setup.config.max_tokens) return false;
    for (size_t row = 0; row < m->rows; row++)
        for (size_t layer = 0; layer < layers; layer++)
            if (m->row[row].scribbled > m->writable &&
                m->row[row].scribbled > m->row[row].len[layer])
                return false;
    return true;
}

/* Code that writes into the views: open or expose, write, say how much it was. */
static inline mt_status
steps_in_place(rig *g, mlease *m)
{
    static uint32_t ids[MODEL_ROWS][MODEL_LAYERS];
    size_t counts[MODEL_ROWS] = {0}, how = rig_roll(g, 6);
    mt_status st = MT_OK;

    if (how < 3)
        st = rig_reserve(g, m, rig_roll(g, g->setup.config.max_tokens + 1), rig_roll(g, 2) != 0);
    if (how == 3 && g->store.under.lazy) st = rig_expose(g, m);
    if (st != MT_OK || !steps_may_advance_all(g, m, rig_layers(g))) return st;
    steps_counts(g, m, counts, rig_roll(g, 2) != 0);
    for (size_t row = 0; row < m->rows; row++)
        for (size_t layer = 0; layer < rig_layers(g); layer++)
            ids[row][layer] = rig_scribble(g, m, row, layer, counts[row], rig_roll(g, 3));
    return rig_advance_all(g, m, counts, ids);
}

/* Code that writes over tokens which rows hold. */
static inline mt_status
steps_overwrite(rig *g, mlease *m)
{
    mt_status st = MT_OK;

    if (!m->owned) st = rig_reserve(g, m, rig_roll(g, g->setup.config.max_tokens + 1), true);
    for (size_t row = 0; st == MT_OK && m->owned && row < m->rows; row++)
        rig_overwrite(g, m, row, rig_roll(g, rig_layers(g)), rig_roll(g, 22));
    return st;
}

static inline mt_status
steps_trim(rig *g)
{
    size_t unit = rig_geom(g)->block_bytes, target = rig_roll(g, 2) ? rig_roll(g, 20) * unit : 0;
    mt_kvstats before, after;
    size_t given;

    mt_kvpool_stats(g->pool, &before);
    given = mt_kvpool_trim(g->pool, target);
    mt_kvpool_stats(g->pool, &after);
    CHECK(given == before.idle_bytes - after.idle_bytes && after.live_bytes == before.live_bytes);
    return MT_OK;
}

/* Something else than an append. */
static inline mt_status
steps_other(rig *g, mlease *m)
{
    switch (rig_roll(g, 16)) {
    case 0:
    case 1:
        return steps_crop(g, m);
    case 2:
    case 3:
        return steps_reorder(g, m);
    case 4:
    case 5:
        return steps_fork(g, m);
    case 6:
    case 11:
        return steps_in_place(g, m);
    case 12:
        return steps_abandon(g, m);
    case 14:
    case 15:
        return steps_overwrite(g, m);
    case 7:
        return steps_trim(g);
    case 8:
        rig_look(g, m, rig_roll(g, rig_layers(g)), rig_roll(g, g->setup.config.max_tokens + 1),
                 true);
        return MT_OK;
    case 9:
    case 10:
        rig_end_of(g, &g->lease[rig_roll(g, RIG_LEASES)]);
        return MT_OK;
    default:
        rig_release(g, m, true);
        return MT_OK;
    }
}

/* One operation; now and then a call of the world fails in it. */
static inline void
steps_one(rig *g)
{
    mlease *m = steps_any(g);

    rig_fail(g, rig_roll(g, 4) == 0 ? (long)rig_roll(g, 12) : -1);
    if (m == NULL || rig_roll(g, 6) == 0)
        (void)steps_acquire(g);
    else if (rig_roll(g, 2))
        (void)steps_update(g, m);
    else
        (void)steps_other(g, m);
    rig_fail(g, -1);
    rig_agree(g);
    rig_glance(g);
}

#endif
