#include "record/series.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"
#include "record/words.h"

enum { STATE_WORDS = 8, LINE = 64 };

static size_t
row_words(const mt_series_size *size)
{
    return 1 + 1 + size->columns + 1;
}

static size_t
bucket_words(const mt_series_size *size)
{
    return 2 + 3 * size->columns;
}

const char *
mt_series_fault(const mt_series_size *size)
{
    if (size->columns < 1 || size->columns > MT_SERIES_COLUMNS_MAX)
        return "a number of columns outside 1 to 64";
    if (size->rows < 1 || size->rows > MT_SERIES_ROWS_MAX)
        return "a number of rows outside 1 to 16,777,216";
    if (size->buckets < 2 || size->buckets > MT_SERIES_BUCKETS_MAX || size->buckets % 2 != 0)
        return "a number of buckets that is not even and 2 to 65,536";
    return NULL;
}

size_t
mt_series_bytes(const mt_series_size *size)
{
    size_t words = STATE_WORDS + size->rows * row_words(size);

    words += 2 * size->buckets * bucket_words(size);
    return (8 * words + LINE - 1) / LINE * LINE;
}

void
mt_series_init(mt_series *s, void *region, const mt_series_size *size)
{
    assert(mt_series_fault(size) == NULL);
    s->size = *size;
    s->state = region;
    s->row = s->state + STATE_WORDS;
    s->bank[0] = s->row + size->rows * row_words(size);
    s->bank[1] = s->bank[0] + size->buckets * bucket_words(size);
    s->samples = 0;
    s->folds = 0;
    memset(region, 0, mt_series_bytes(size));
}

static uint64_t *
bucket_at(const mt_series *s, unsigned folds, size_t i)
{
    return s->bank[folds & 1] + i * bucket_words(&s->size);
}

/* Pairs of the full bank become the first half of the other. Nothing that counts is touched, and
 * doing it again comes to the same. MT_UNKNOWN is the largest number: the minimum needs no test for
 * it, and + 1 makes it the smallest where the maximum is looked for. */
static void
fold(mt_series *s)
{
    size_t words = bucket_words(&s->size);

    for (size_t i = 0; i < s->size.buckets / 2; i++) {
        const uint64_t *a = bucket_at(s, s->folds, 2 * i), *b = a + words;
        uint64_t *to = bucket_at(s, s->folds + 1, i);
        mt_word_put(to, a[0]);
        mt_word_put(to + 1, b[1]);
        for (size_t w = 2; w < words; w += 3) {
            mt_word_put(to + w, mt_u64_min(a[w], b[w]));
            mt_word_put(to + w + 1, a[w + 1] + 1 > b[w + 1] + 1 ? a[w + 1] : b[w + 1]);
            mt_word_put(to + w + 2, b[w + 2] != MT_UNKNOWN ? b[w + 2] : a[w + 2]);
        }
    }
    s->folds++;
    mt_word_put(s->state, (uint64_t)s->folds << MT_SERIES_FOLDS_AT | s->samples);
}

static void
widen_bucket(uint64_t *at, size_t columns, uint64_t time_ns, const uint64_t *values)
{
    mt_word_put(at + 1, time_ns);
    for (size_t c = 0; c < columns; c++) {
        uint64_t *x = at + 2 + 3 * c, v = values[c];
        if (v == MT_UNKNOWN) continue;
        if (v < x[0]) mt_word_put(x, v);
        if (v + 1 > x[1] + 1) mt_word_put(x + 1, v);
        mt_word_put(x + 2, v);
    }
}

void
mt_series_append(mt_series *s, uint64_t time_ns, const uint64_t *values)
{
    size_t columns = s->size.columns;
    uint64_t *row = s->row + (size_t)(s->samples % s->size.rows) * row_words(&s->size);
    uint64_t width = (uint64_t)1 << s->folds, *bucket, sum;

    mt_word_put(row, 0);
    sum = (s->samples + 1) * mt_check_factor(0) + time_ns * mt_check_factor(1);
    mt_word_put(row + 1, time_ns);
    for (size_t c = 0; c < columns; c++) {
        mt_word_put(row + 2 + c, values[c]);
        sum += values[c] * mt_check_factor(2 + c);
    }
    mt_word_put(row + 2 + columns, sum);
    mt_word_put(row, s->samples + 1);

    if (s->samples == s->size.buckets * width) {
        fold(s);
        width *= 2;
    }
    bucket = bucket_at(s, s->folds, (size_t)(s->samples >> s->folds));
    if ((s->samples & (width - 1)) == 0) {
        mt_word_put(bucket, time_ns);
        mt_word_put(bucket + 1, time_ns);
        for (size_t w = 0; w < 3 * columns; w++)
            mt_word_put(bucket + 2 + w, values[w / 3]);
    } else {
        widen_bucket(bucket, columns, time_ns, values);
    }
    s->samples++;
    mt_word_put(s->state, (uint64_t)s->folds << MT_SERIES_FOLDS_AT | s->samples);
}
