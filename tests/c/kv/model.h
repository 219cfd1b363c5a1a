/* model.h -- KV caches as plain arrays: which token stands where, and how its bytes look.
 *
 *   row    id[layer][t]     a number for each token, 0 for a token of zeros
 *   bytes  (id, layer, K or V, head)  ->  row_bytes of noise that no other such quadruple has
 *
 * A token's bytes are noise throughout; reading compares both ends of every piece, and all of it
 * where `whole` is asked for. */
#ifndef MT_TESTS_KV_MODEL_H
#define MT_TESTS_KV_MODEL_H

#include <string.h>

#include "kit/check.h"
#include "core/base/size.h"
#include "core/kv/kv.h"
#include "kit/rng.h"

enum { MODEL_LAYERS = 4, MODEL_TOKENS = 40, MODEL_ROWS = 6 };

typedef struct mrow {
    size_t len[MODEL_LAYERS];
    uint32_t id[MODEL_LAYERS][MODEL_TOKENS];
    size_t scribbled; /* tokens before this may hold what was written in place, with no advance */
} mrow;

typedef struct mlease {
    mt_kvlease *lease; /* NULL: none */
    size_t rows, max_rows;
    mrow row[MODEL_ROWS];
    size_t writable; /* tokens that may be written in place: reserved, or exposed */
    bool owned; /* the tokens it holds were reserved: no other row shows what is written there */
    bool exposed;
    bool released;             /* and held: lingering */
    size_t seen[MODEL_LAYERS]; /* tokens [0, seen) are in sight without another call */
} mlease;

/* ---- bytes ---- */

static inline uint64_t
token_word(uint32_t id, size_t layer, size_t which, size_t head, size_t i)
{
    uint64_t x = (uint64_t)id << 32 | layer << 24 | which << 20 | head << 12 | i;

    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
    return id == 0 ? 0 : x | 1;
}

/* pre: row_bytes is a multiple of 8. */
static inline void
token_fill(char *at, size_t row_bytes, uint32_t id, size_t layer, size_t which, size_t head)
{
    for (size_t i = 0; i < row_bytes / 8; i++) {
        uint64_t word = token_word(id, layer, which, head, i);

        memcpy(at + 8 * i, &word, 8);
    }
}

static inline bool
token_is(const char *at, size_t row_bytes, uint32_t id, size_t layer, size_t which, size_t head,
         bool whole)
{
    size_t n = row_bytes / 8, step = whole || n == 1 ? 1 : n - 1;

    for (size_t i = 0; i < n; i += step) {
        uint64_t word = token_word(id, layer, which, head, i), got;

        memcpy(&got, at + 8 * i, 8);
        if (got != word) return false;
    }
    return true;
}

static inline char *
token_at(const mt_kvlease *lease, size_t row, size_t layer, size_t which, size_t head, size_t t)
{
    const mt_kvgeom *g = mt_kvlease_geom(lease);

    return (char *)mt_kvlease_base(lease) + row * g->slot_bytes +
           mt_kvgeom_offset(g, layer, which) + head * g->head_stride + t * g->token_bytes;
}

/* Writes one token of one layer where it belongs, all heads of K and V. */
static inline void
token_write(const mt_kvlease *lease, size_t row, size_t layer, size_t t, uint32_t id)
{
    const mt_kvgeom *g = mt_kvlease_geom(lease);

    for (size_t i = 0; i < 2 * g->config.heads; i++)
        token_fill(token_at(lease, row, layer, i % 2, i / 2, t), g->row_bytes, id, layer, i % 2,
                   i / 2);
}

static inline bool
token_shows(const mt_kvlease *lease, size_t row, size_t layer, size_t t, uint32_t id, bool whole)
{
    const mt_kvgeom *g = mt_kvlease_geom(lease);

    for (size_t i = 0; i < 2 * g->config.heads; i++)
        if (!token_is(token_at(lease, row, layer, i % 2, i / 2, t), g->row_bytes, id, layer, i % 2,
                      i / 2, whole))
            return false;
    return true;
}

/* ---- rows ---- */

/* Over layers. */
static inline size_t
mrow_tokens(const mrow *r, size_t layers)
{
    size_t most = 0;

    for (size_t layer = 0; layer < layers; layer++)
        most = mt_size_max(most, r->len[layer]);
    return most;
}

/* Over rows. */
static inline size_t
mlease_longest(const mlease *m, size_t layer)
{
    size_t most = 0;

    for (size_t row = 0; row < m->rows; row++)
        most = mt_size_max(most, m->row[row].len[layer]);
    return most;
}

static inline size_t
mlease_tokens(const mlease *m, size_t layers)
{
    size_t most = 0;

    for (size_t layer = 0; layer < layers; layer++)
        most = mt_size_max(most, mlease_longest(m, layer));
    return most;
}

static inline void
mrow_crop(mrow *r, size_t layers, size_t length)
{
    for (size_t layer = 0; layer < layers; layer++)
        r->len[layer] = mt_size_min(r->len[layer], length);
}

/* After an append views show the tokens that they showed; of what follows those, nothing is known
 * but what the call itself promised. */
static inline void
mlease_append(mlease *m, size_t layers)
{
    for (size_t layer = 0; layer < layers; layer++)
        for (size_t row = 0; row < m->rows; row++)
            m->seen[layer] = mt_size_min(m->seen[layer], m->row[row].len[layer]);
}

static inline void
mlease_reorder(mlease *m, const size_t *index, size_t n)
{
    mrow old[MODEL_ROWS];

    memcpy(old, m->row, sizeof old);
    for (size_t row = 0; row < n; row++) {
        m->row[row] = old[index[row]];
        m->row[row].scribbled = mt_size_max(old[row].scribbled, old[index[row]].scribbled);
    }
    m->rows = n;
    m->writable = 0;
    m->owned = false;
}

/* ---- comparing ---- */

static inline void
lengths_agree(const mlease *m, size_t layers)
{
    CHECK(mt_kvlease_rows(m->lease) == m->rows && mt_kvlease_max_rows(m->lease) == m->max_rows);
    for (size_t layer = 0; layer < layers; layer++) {
        for (size_t row = 0; row < m->rows; row++)
            CHECK(mt_kvlease_length(m->lease, layer, row) == m->row[row].len[layer]);
        CHECK(mt_kvlease_longest(m->lease, layer) == mlease_longest(m, layer));
    }
    for (size_t row = 0; row < m->rows; row++)
        CHECK(mt_kvlease_row_tokens(m->lease, row) == mrow_tokens(&m->row[row], layers));
}

/* Tokens [0, view) of all rows in this layer: the rows' own, then zeros. pre: shown, or room. */
static inline void
layer_agrees(const mlease *m, size_t layer, size_t view, bool whole)
{
    for (size_t row = 0; row < m->rows; row++) {
        const mrow *r = &m->row[row];

        for (size_t t = 0; t < view; t++) {
            if (t >= r->len[layer] && t < r->scribbled) continue;
            CHECK(token_shows(m->lease, row, layer, t, t < r->len[layer] ? r->id[layer][t] : 0,
                              whole));
        }
    }
}

#endif
