/* A series against all samples it ever saw, and regions that no writer left. */
#include "record/rig.h"

#include "core/record/words.h"
#include "kit/rng.h"

static void *
copy_of(const mt_series *s)
{
    size_t bytes = mt_series_bytes(&s->size);
    void *copy = malloc(bytes);

    CHECK(copy != NULL);
    memcpy(copy, s->state, bytes);
    return copy;
}

static void
append(mt_series *s, uint64_t k)
{
    uint64_t values[RIG_COLUMNS];

    for (size_t c = 0; c < RIG_COLUMNS; c++)
        values[c] = rig_value(k, c);
    mt_series_append(s, rig_time(k), values);
}

static void
agrees(const mt_series *s, uint64_t samples)
{
    void *copy = copy_of(s);
    mt_series again;

    CHECK(mt_series_open(&again, copy, &s->size, NULL) == MT_OK);
    rig_check_buckets(s, samples);
    rig_check_buckets(&again, samples);
    for (uint64_t k = 0; k < samples; k++) {
        const uint64_t *row = mt_series_row(&again, k);
        CHECK((row != NULL) == (k + s->size.rows >= samples));
        CHECK(row == NULL || (row[0] == rig_time(k) && row[3] == rig_value(k, 2)));
    }
    CHECK(mt_series_row(&again, samples) == NULL);
    free(copy);
}

static void
every_length_holds_the_whole_time_line(void)
{
    static const mt_series_size sizes[] = {{3, 1, 2}, {3, 5, 4}, {3, 16, 10}, {3, 3, 64}};

    for (size_t i = 0; i < 4; i++) {
        void *region = malloc(mt_series_bytes(&sizes[i]));
        mt_series s;
        memset(region, 0xA5, mt_series_bytes(&sizes[i]));
        mt_series_init(&s, region, &sizes[i]);
        agrees(&s, 0);
        for (uint64_t k = 0; k < 300; k++) {
            append(&s, k);
            agrees(&s, k + 1);
        }
        free(region);
    }
}

/* A writer that was killed leaves rows that are not counted: they are added, also across a fold. */
static void
rows_that_were_not_counted_are_added(void)
{
    const mt_series_size size = {3, 8, 4};
    void *region = malloc(mt_series_bytes(&size)), *before;
    mt_series s, again;

    mt_series_init(&s, region, &size);
    for (uint64_t k = 0; k < 100; k++) {
        before = copy_of(&s);
        append(&s, k);
        memcpy((char *)before + 64, (char *)region + 64, 8 * 8 * (3 + 3)); /* the rows alone */
        CHECK(mt_series_open(&again, before, &size, NULL) == MT_OK);
        rig_check_buckets(&again, k + 1);
        free(before);
    }
    free(region);
}

static void
any_words_are_sound_or_refused(void)
{
    const mt_series_size size = {3, 8, 4};
    void *region = malloc(mt_series_bytes(&size));
    rng r = rng_seeded(7);
    mt_series s;

    mt_series_init(&s, region, &size);
    for (uint64_t k = 0; k < 21; k++)
        append(&s, k);
    for (int i = 0; i < 20000; i++) {
        uint64_t *copy = copy_of(&s);
        mt_extent x[RIG_COLUMNS];
        mt_series again;
        for (size_t n = 1 + rng_below(&r, 3); n > 0; n--)
            copy[rng_below(&r, 2) ? 0 : rng_below(&r, mt_series_bytes(&size) / 8)] =
                rng_next(&r) >> rng_below(&r, 64);
        if (mt_series_open(&again, copy, &size, NULL) == MT_OK) {
            CHECK(mt_series_used(&again) <= size.buckets);
            for (size_t b = 0; b < mt_series_used(&again); b++) {
                CHECK(mt_series_bucket(&again, b, x).samples <= mt_series_width(&again));
                CHECK(x[0].least <= x[0].last && x[0].last <= x[0].most);
            }
        }
        free(copy);
    }
    free(region);
}

static mt_status
open_with_state(uint64_t state)
{
    const mt_series_size size = {1, 1, 4};
    uint64_t *region = calloc(1, mt_series_bytes(&size));
    mt_error err = {.detail = NULL};
    mt_series s;
    mt_status st;

    *region = state;
    st = mt_series_open(&s, region, &size, &err);
    CHECK(st == MT_OK || err.detail != NULL);
    free(region);
    return st;
}

static void
states_that_no_append_leaves_are_refused(void)
{
    CHECK(open_with_state(0) == MT_OK && open_with_state(4) == MT_OK);
    CHECK(open_with_state(5) == MT_EFORMAT); /* five samples in four buckets of one */
    CHECK(open_with_state((1ull << 56) + 3) == MT_EFORMAT); /* folded before it was full */
    CHECK(open_with_state((1ull << 56) + 4) == MT_OK && open_with_state((1ull << 56) + 8) == MT_OK);
    CHECK(open_with_state((1ull << 56) + 9) == MT_EFORMAT);
    CHECK(open_with_state((40ull << 56) + (1ull << 42)) == MT_OK);
    CHECK(open_with_state((41ull << 56) + (1ull << 43)) == MT_EFORMAT);
    CHECK(open_with_state(UINT64_MAX) == MT_EFORMAT);
}

/* A full series of the largest kind is not folded once more by a row that says so. */
static void
the_last_fold_is_the_last(void)
{
    const mt_series_size size = {1, 1, 4};
    uint64_t *region = calloc(1, mt_series_bytes(&size)), k = 1ull << 42;
    mt_series s;

    region[0] = 40ull << 56 | k;
    region[8] = k + 1;
    region[11] = mt_words_check(region + 8, 3);
    CHECK(mt_series_open(&s, region, &size, NULL) == MT_OK && s.folds == 40);
    free(region);
}

static void
sizes_out_of_range_have_a_fault(void)
{
    static const mt_series_size wrong[] = {
        {0, 1, 2},        {65, 1, 2},          {1, 0, 2},
        {1, 1, 0},        {1, 1, 3},           {1, (1 << 24) + 1, 2},
        {1, 1, 1},        {1, 1, 65538},       {SIZE_MAX, 1, 2},
        {1, SIZE_MAX, 2}, {1, 1, SIZE_MAX - 1}};
    const mt_series_size most = {64, 1 << 24, 1 << 16};

    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(mt_series_fault(&wrong[i]) != NULL);
    CHECK(mt_series_fault(&most) == NULL);
}

int
main(void)
{
    RUN(every_length_holds_the_whole_time_line);
    RUN(rows_that_were_not_counted_are_added);
    RUN(any_words_are_sound_or_refused);
    RUN(states_that_no_append_leaves_are_refused);
    RUN(the_last_fold_is_the_last);
    RUN(sizes_out_of_range_have_a_fault);
    CHECK_DONE();
}
