/* model.h -- a gate history as one would write it without a thought for time or memory: an
 * array of entries, each with its own bytes, and sums by the naive definitions.
 *
 * What the real one must do is written down here once more, in other words: which entries go, which
 * gates of a row are kept, what is counted. */
#ifndef MT_TESTS_GATE_MODEL_H
#define MT_TESTS_GATE_MODEL_H

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "kit/check.h"
#include "core/gate/gate.h"

enum { MODEL_ENTRIES = 128 };

typedef struct model_entry {
    uint64_t number;
    size_t rows;
    mt_dtype dtype;
    bool filled;
    unsigned char *bytes; /* packed rows of dtype */
    bool *top;            /* [rows * experts], the top_k of each row as it came */
} model_entry;

typedef struct model_sums {
    uint64_t entries, tokens, nonfinite;
    double *importance, *magnitude; /* [experts]; magnitude sums what has no sign, for tolerances */
    uint64_t *load;
} model_sums;

typedef struct model {
    mt_gatehist_config config;
    size_t experts; /* 0 until the first entry */
    model_entry entry[MODEL_ENTRIES];
    size_t len;
    uint64_t appended;
    model_sums sums;
} model;

static inline void *
model_block(size_t bytes)
{
    void *block = calloc(1, bytes + 1);

    if (block == NULL) abort();
    return block;
}

static inline model_sums
model_sums_new(size_t experts)
{
    return (model_sums){.importance = model_block(8 * experts),
                        .magnitude = model_block(8 * experts),
                        .load = model_block(8 * experts)};
}

static inline void
model_sums_free(model_sums *s)
{
    free(s->importance);
    free(s->magnitude);
    free(s->load);
    *s = (model_sums){.entries = 0};
}

static inline void
model_init(model *m, const mt_gatehist_config *config)
{
    memset(m, 0, sizeof *m);
    m->config = *config;
    CHECK(config->max_entries <= MODEL_ENTRIES);
}

static inline void
model_drop_oldest(model *m)
{
    free(m->entry[0].bytes);
    free(m->entry[0].top);
    memmove(m->entry, m->entry + 1, --m->len * sizeof *m->entry);
}

static inline void
model_clear(model *m)
{
    while (m->len > 0)
        model_drop_oldest(m);
}

static inline void
model_fini(model *m)
{
    model_clear(m);
    model_sums_free(&m->sums);
}

/* What a record costs: every gate, or top_k pairs of an index and a gate. */
static inline size_t
model_record_bytes(const model *m, size_t rows, size_t experts, mt_dtype dtype)
{
    size_t size = mt_dtype_size(dtype), index = 4;

    if (m->config.keep == MT_KEEP_ALL) return rows * experts * size;
    if (experts - 1 <= 0xFFFF) index = 2;
    if (experts - 1 <= 0xFF) index = 1;
    return rows * m->config.top_k * (index + size);
}

static inline size_t
model_bytes(const model *m)
{
    size_t sum = 0;

    for (size_t i = 0; i < m->len; i++)
        sum += model_record_bytes(m, m->entry[i].rows, m->experts, m->entry[i].dtype);
    return sum;
}

static inline mt_dtype
model_dtype(const model *m, mt_dtype comes)
{
    return m->config.dtype == MT_DTYPE_SAME ? comes : (mt_dtype)m->config.dtype;
}

/* What admit() must answer when there is memory enough. */
static inline mt_status
model_admit(const model *m, const mt_rows *t)
{
    if (m->appended > 0 && t->cols != m->experts) return MT_ESHAPE;
    if (t->cols < m->config.top_k) return MT_ESHAPE;
    if (model_record_bytes(m, t->rows, t->cols, model_dtype(m, t->dtype)) > m->config.max_bytes)
        return MT_ELIMIT;
    return MT_OK;
}

/* A limit is hit when the new entry would go over it. Oldest: the oldest go until no limit is hit.
 * Half: the oldest go until, with the new entry, each limit that was hit is half used (one entry at
 * least); a limit that was not hit keeps its value. */
static inline void
model_make_room(model *m, size_t bytes)
{
    size_t entries = m->config.max_entries, limit = m->config.max_bytes;
    bool count_hit = m->len + 1 > entries, bytes_hit = model_bytes(m) + bytes > limit;

    if (m->config.trim == MT_TRIM_HALF) {
        if (count_hit) entries = entries < 2 ? 1 : entries / 2;
        if (bytes_hit) limit = limit / 2;
    }
    if (!count_hit && !bytes_hit) return;
    while (m->len > 0 && (m->len + 1 > entries || model_bytes(m) + bytes > limit))
        model_drop_oldest(m);
}

static inline uint64_t
model_claim(model *m, const mt_rows *t)
{
    mt_dtype dtype = model_dtype(m, t->dtype);
    model_entry new = {.number = m->appended, .rows = t->rows, .dtype = dtype};

    if (m->appended == 0) {
        m->experts = t->cols;
        model_sums_free(&m->sums);
        m->sums = model_sums_new(t->cols);
    }
    new.bytes = model_block(t->rows * t->cols * mt_dtype_size(dtype));
    new.top = model_block(t->rows * t->cols);
    model_make_room(m, model_record_bytes(m, t->rows, t->cols, dtype));
    m->entry[m->len++] = new;
    return m->appended++;
}

static inline const void *
model_element(const mt_rows *t, size_t r, size_t c)
{
    ptrdiff_t at = (ptrdiff_t)r * t->row_stride + (ptrdiff_t)c * t->col_stride;

    return (const unsigned char *)t->data + at * (ptrdiff_t)mt_dtype_size(t->dtype);
}

/* One element as float32. test_dtype holds mt_widen_f32 to the definition; for 8-bit types it
 * builds a table at every call, so that table is kept here. */
static inline float
model_widen(const void *at, mt_dtype dtype)
{
    static float table[MT_DTYPE_COUNT][256];
    unsigned char code[256];
    float x;

    if (mt_dtype_size(dtype) > 1) {
        mt_widen_f32(dtype, at, &x, 1);
        return x;
    }
    if (table[dtype][1] == 0) { /* code 1 is zero in none of them */
        for (unsigned i = 0; i < 256; i++)
            code[i] = (unsigned char)i;
        mt_widen_f32(dtype, code, table[dtype], 256);
    }
    return table[dtype][*(const unsigned char *)at];
}

/* Exact for every dtype. */
static inline double
model_value(const void *at, mt_dtype dtype)
{
    double wide;

    if (dtype != MT_F64) return (double)model_widen(at, dtype);
    memcpy(&wide, at, sizeof wide);
    return wide;
}

static inline void
model_convert(const void *from, mt_dtype a, void *to, mt_dtype b)
{
    float x;

    if (a == b) {
        memcpy(to, from, mt_dtype_size(a));
        return;
    }
    x = model_widen(from, a);
    mt_narrow_f32(b, &x, to, 1);
}

/* Marks the k largest of a row: NaN before everything, of equal ones the first. */
static inline void
model_mark_top(const double *row, size_t experts, size_t k, bool *top)
{
    memset(top, 0, experts);
    for (; k > 0; k--) {
        size_t best = experts;
        for (size_t e = 0; e < experts; e++) {
            bool better =
                best == experts || row[e] > row[best] || (isnan(row[e]) && !isnan(row[best]));
            if (!top[e] && better) best = e;
        }
        top[best] = true;
    }
}

static inline void
model_count_row(model_sums *s, const double *row, size_t experts, const bool *top)
{
    s->tokens++;
    for (size_t e = 0; e < experts; e++)
        if (!isfinite(row[e])) {
            s->nonfinite++;
            return;
        }
    for (size_t e = 0; e < experts; e++) {
        s->importance[e] += row[e];
        s->magnitude[e] += fabs(row[e]);
        s->load[e] += top[e];
    }
}

static inline void
model_count(model_sums *s, const mt_rows *t, unsigned top_k, const bool *kept)
{
    double *row = model_block(8 * t->cols);
    bool *top = model_block(t->cols);

    for (size_t r = 0; r < t->rows; r++) {
        for (size_t c = 0; c < t->cols; c++)
            row[c] = model_value(model_element(t, r, c), t->dtype);
        if (kept == NULL) model_mark_top(row, t->cols, top_k, top);
        model_count_row(s, row, t->cols, kept == NULL ? top : kept + r * t->cols);
    }
    s->entries++;
    free(row);
    free(top);
}

static inline void
model_write(const model *m, model_entry *to, const mt_rows *t)
{
    size_t size = mt_dtype_size(to->dtype);
    double *row = model_block(8 * t->cols);
    bool *top = model_block(t->cols);

    for (size_t r = 0; r < t->rows; r++) {
        for (size_t c = 0; c < t->cols; c++)
            row[c] = model_value(model_element(t, r, c), t->dtype);
        model_mark_top(row, t->cols, m->config.top_k, top);
        memcpy(to->top + r * t->cols, top, t->cols);
        for (size_t c = 0; c < t->cols; c++)
            if (m->config.keep == MT_KEEP_ALL || top[c])
                model_convert(model_element(t, r, c), t->dtype,
                              to->bytes + (r * t->cols + c) * size, to->dtype);
    }
    to->filled = true;
    free(row);
    free(top);
}

/* The entry of a number, or NULL when it is gone. */
static inline model_entry *
model_find(model *m, uint64_t number)
{
    for (size_t i = 0; i < m->len; i++)
        if (m->entry[i].number == number) return &m->entry[i];
    return NULL;
}

static inline void
model_fill(model *m, uint64_t number, const mt_rows *t)
{
    model_entry *entry = model_find(m, number);

    if (entry != NULL) model_write(m, entry, t);
    if (m->config.statistics) model_count(&m->sums, t, m->config.top_k, NULL);
}

static inline bool
model_all_filled(const model *m)
{
    for (size_t i = 0; i < m->len; i++)
        if (!m->entry[i].filled) return false;
    return true;
}

static inline void
model_reset_stats(model *m)
{
    model_sums_free(&m->sums);
    m->sums = model_sums_new(m->experts);
}

static inline mt_rows
model_rows(const model *m, size_t i)
{
    const model_entry *e = &m->entry[i];

    return mt_rows_packed(e->bytes, e->dtype, e->rows, m->experts);
}

/* What a record of the top_k knows of an entry: which they were. A full record does not. */
static inline const bool *
model_kept(const model *m, size_t i)
{
    return m->config.keep == MT_KEEP_TOPK ? m->entry[i].top : NULL;
}

/* The sums of the last n entries as they were kept. */
static inline model_sums
model_recount(const model *m, size_t n)
{
    model_sums s = model_sums_new(m->experts);

    for (size_t i = m->len - n; i < m->len; i++) {
        mt_rows t = model_rows(m, i);
        model_count(&s, &t, m->config.top_k, model_kept(m, i));
    }
    return s;
}

/* A model of the slice, with statistics of just its entries. */
static inline void
model_slice(const model *m, size_t start, ptrdiff_t step, size_t count, model *out)
{
    model_init(out, &m->config);
    out->experts = m->experts;
    out->sums = model_sums_new(m->experts);
    for (size_t i = 0; i < count; i++) {
        size_t at = (size_t)((ptrdiff_t)start + (ptrdiff_t)i * step);
        mt_rows t = model_rows(m, at);
        size_t bytes = t.rows * t.cols * mt_dtype_size(t.dtype);
        model_entry *to = &out->entry[out->len++];
        *to = (model_entry){out->appended++,
                            t.rows,
                            t.dtype,
                            true,
                            model_block(bytes),
                            model_block(t.rows * t.cols)};
        memcpy(to->bytes, t.data, bytes);
        memcpy(to->top, m->entry[at].top, t.rows * t.cols);
        if (m->config.statistics) model_count(&out->sums, &t, m->config.top_k, model_kept(m, at));
    }
}

static inline void
sums_agree(const model_sums *m, const mt_gatestats *s)
{
    CHECK(s->entries == m->entries && s->total.tokens == m->tokens);
    CHECK(s->total.nonfinite == m->nonfinite);
    for (size_t e = 0; e < s->experts; e++) {
        CHECK(s->total.load[e] == m->load[e]);
        CHECK(fabs(s->total.importance[e] - m->importance[e]) <= 1e-12 * m->magnitude[e]);
    }
}

static inline void
entry_agrees(const model *m, const mt_gatehist *h, size_t i)
{
    mt_rows want = model_rows(m, i), got = mt_gatehist_shape(h, i);
    size_t bytes = want.rows * want.cols * mt_dtype_size(want.dtype);
    unsigned char *copy = model_block(bytes);

    CHECK(got.data == NULL && got.dtype == want.dtype);
    CHECK(got.rows == want.rows && got.cols == want.cols && mt_rows_is_packed(&got));
    copy[bytes] = 0xEE;
    if (m->entry[i].filled) {
        mt_gatehist_copy(h, i, copy);
        CHECK(memcmp(copy, want.data, bytes) == 0 && copy[bytes] == 0xEE);
    }
    free(copy);
}

/* Everything that can be seen of h is what the model says. */
static inline void
model_agrees(const model *m, const mt_gatehist *h)
{
    CHECK(mt_gatehist_check(h));
    CHECK(mt_gatehist_len(h) == m->len && mt_gatehist_appended(h) == m->appended);
    CHECK(mt_gatehist_bytes(h) == model_bytes(m));
    CHECK(mt_gatehist_len(h) <= m->config.max_entries);
    CHECK(mt_gatehist_bytes(h) <= mt_gatehist_extent(h));
    CHECK(mt_gatehist_extent(h) <= m->config.max_bytes);
    CHECK(m->appended == 0 || mt_gatehist_experts(h) == m->experts);
    for (size_t i = 0; i < m->len; i++)
        entry_agrees(m, h, i);
    if (m->appended > 0 && m->config.statistics) sums_agree(&m->sums, mt_gatehist_stats(h));
    if (m->appended == 0 || !m->config.statistics)
        CHECK(mt_gatehist_stats(h)->entries == 0 && mt_gatehist_stats(h)->total.tokens == 0);
}

#endif
