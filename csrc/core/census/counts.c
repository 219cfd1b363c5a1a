#include "census/counts.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"

void
mt_counts_init(mt_counts *t, const mt_alloc *mem)
{
    *t = (mt_counts){.mem = mem};
}

static void
counts_put(const mt_counts *t, void *block, size_t count, size_t size)
{
    t->mem->put(t->mem->ctx, block, count * size);
}

void
mt_counts_fini(mt_counts *t)
{
    counts_put(t, t->lines, t->lines_cap, sizeof *t->lines);
    mt_index_drop(&t->index, t->mem);
    counts_put(t, t->words, t->words_cap, sizeof *t->words);
    mt_counts_init(t, t->mem);
}

static uint64_t
counts_hash_of(const int64_t *key, size_t words)
{
    uint64_t h = words;

    for (size_t i = 0; i < words; i++) {
        h = (h ^ (uint64_t)key[i]) * UINT64_C(0x9E3779B97F4A7C15);
        h ^= h >> 29;
    }
    return h;
}

/* Room for one line more whose key has so many words. */
static mt_status
counts_make_room(mt_counts *t, size_t words, mt_error *err)
{
    size_t need = t->words_n + words;
    int64_t *keys = mt_alloc_grown(t->mem, t->words, &t->words_cap, need, sizeof *keys);
    mt_counts_line *lines;

    if (keys == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    t->words = keys;
    lines = mt_alloc_grown(t->mem, t->lines, &t->lines_cap, t->n + 1, sizeof *lines);
    if (lines == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    t->lines = lines;
    return mt_index_make_room(&t->index, t->mem) ? MT_OK : mt_fail(err, MT_ENOMEM, "malloc", 0);
}

static size_t
counts_find(const mt_counts *t, const int64_t *key, size_t words, uint64_t hash)
{
    size_t at = mt_index_half(hash);
    uint32_t i;

    while ((i = mt_index_next(&t->index, hash, &at)) != MT_INDEX_NONE)
        if (t->lines[i].words == words &&
            memcmp(t->words + t->lines[i].key, key, words * sizeof *key) == 0)
            return i;
    return SIZE_MAX;
}

mt_status
mt_counts_line_of(mt_counts *t, const int64_t *key, size_t words, size_t *out, mt_error *err)
{
    uint64_t hash = counts_hash_of(key, words);
    size_t line = counts_find(t, key, words, hash);
    mt_status st;

    assert(words > 0 && words < 1 << 16);
    if (line == SIZE_MAX) {
        if ((st = counts_make_room(t, words, err)) != MT_OK) return st;
        line = t->n++;
        t->lines[line] = (mt_counts_line){.key = t->words_n, .words = words};
        memcpy(t->words + t->words_n, key, words * sizeof *key);
        t->words_n += words;
        assert(t->n <= t->lines_cap && t->words_n <= t->words_cap);
        mt_index_add(&t->index, hash, (uint32_t)line);
    }
    *out = line;
    return MT_OK;
}

const int64_t *
mt_counts_key(const mt_counts *t, size_t line)
{
    assert(line < t->n);
    return t->words + t->lines[line].key;
}

int
mt_counts_compare(const mt_counts *t, size_t line, size_t other)
{
    const int64_t *a = mt_counts_key(t, line), *b = mt_counts_key(t, other);
    size_t words = mt_size_min(t->lines[line].words, t->lines[other].words);

    for (size_t i = 0; i < words; i++)
        if (a[i] != b[i]) return a[i] < b[i] ? -1 : 1;
    return (t->lines[line].words > words) - (t->lines[other].words > words);
}
