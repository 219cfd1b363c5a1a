/* Histories as bytes: what is written is read back equal, and nothing else gets through. */
#include "gate/rig.h"

static const mt_gatehist_config plain = {.max_entries = 6,
                                         .max_bytes = 200,
                                         .trim = MT_TRIM_OLDEST,
                                         .keep = MT_KEEP_ALL,
                                         .dtype = MT_DTYPE_SAME,
                                         .top_k = 2,
                                         .statistics = true};
static rig rigged;

/* A history of 3 experts after `pushes` entries of any dtype. */
static rig *
begin(mt_keep keep, bool statistics, int pushes)
{
    mt_gatehist_config config = plain;

    config.keep = keep;
    config.statistics = statistics;
    rig_begin(&rigged, &config, (uint64_t)pushes);
    for (int i = 0; i < pushes; i++)
        rig_push_any(&rigged, 4, 3);
    return &rigged;
}

static void
parses_to_the_same_and_goes_on_the_same(rig *g, size_t experts)
{
    size_t bytes;
    void *dump = dump_of(g->h, &bytes);
    mt_gatehist *again;

    CHECK(parse_exactly(g, dump, bytes, &again) == MT_OK);
    model_agrees(&g->m, again);
    CHECK(same_history(g->h, again));
    for (int i = 0; i < 10; i++) {
        tensor t = tensor_new(&g->r, MT_F32, rng_below(&g->r, 4), experts, LAYOUT_PACKED);
        mt_status st = rig_push_rows(g, &t.rows);
        CHECK(mt_gatehist_push(again, &t.rows, NULL) == st);
        CHECK(same_history(g->h, again));
        tensor_free(&t);
    }
    mt_gatehist_free(again);
    free(dump);
}

static void
what_was_written_is_read_back_equal(void)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        rng r = rng_seeded(seed);
        size_t experts, pushes = rng_below(&r, seed % 9 ? 30 : 300);
        mt_gatehist_config config = rig_any_config(&r, &experts);
        rig *g = &rigged;
        rig_begin(g, &config, seed);
        for (size_t i = 0; i < pushes; i++)
            rig_push_any(g, 5, experts);
        if (seed % 7 == 0) {
            mt_gatehist_clear(g->h);
            model_clear(&g->m);
        }
        parses_to_the_same_and_goes_on_the_same(g, experts);
        rig_end(g);
    }
}

static void
statistics_that_were_reset_are_read_back(void)
{
    rig *g = begin(MT_KEEP_ALL, true, 140);

    mt_gatehist_reset_stats(g->h);
    model_reset_stats(&g->m);
    rig_push_any(g, 3, 3);
    parses_to_the_same_and_goes_on_the_same(g, 3);
    rig_end(g);
}

static void
a_slice_is_read_back_like_any_other(void)
{
    rig *g = begin(MT_KEEP_TOPK, true, 12);
    mt_gatehist *slice;

    CHECK(mt_gatehist_slice(g->h, g->m.len - 1, -2, 2, &slice, NULL) == MT_OK);
    dump_round_trips(g, slice);
    mt_gatehist_free(slice);
    rig_end(g);
}

/* Every byte is written, and none behind the last. */
static void
a_dump_is_as_long_as_it_says(void)
{
    rig *g = begin(MT_KEEP_TOPK, true, 20);
    size_t bytes = mt_gatehist_dump_bytes(g->h);
    unsigned char *one = model_block(bytes), *two = model_block(bytes);

    memset(one, 0x11, bytes + 1);
    memset(two, 0xEE, bytes + 1);
    mt_gatehist_dump(g->h, one);
    mt_gatehist_dump(g->h, two);
    CHECK(memcmp(one, two, bytes) == 0 && one[bytes] == 0x11 && two[bytes] == 0xEE);
    free(one);
    free(two);
    rig_end(g);
}

/* The documented layout, written out: files of today are read by tomorrow's version. */
static void
the_bytes_are_the_documented_ones(void)
{
    static const unsigned char golden[] = {
        6,   0,   0, 0, 0,    0,    0,    0,    200, 0,
        0,   0,   0, 0, 0,    0, /* max_entries, max_bytes */
        1,   0,   0, 0, 1,    0,    0,    0,    255, 255,
        255, 255, 2, 0, 0,    0,             /* trim, keep, dtype, top_k */
        1,   0,   0, 0, 0,    0,    0,    0, /* statistics, 0 */
        3,   0,   0, 0, 0,    0,    0,    0,    1,   0,
        0,   0,   0, 0, 0,    0,             /* experts, appended */
        1,   0,   0, 0, 0,    0,    0,    0, /* len */
        1,   0,   0, 0, 0,    0,    0,    0,    1,   0,
        0,   0,   0, 0, 0,    0,             /* entries, span */
        1,   0,   0, 0, 0,    0,    0,    0, /* marks */
        1,   0,   0, 0, 0,    0,    0,    0,    0,   0,
        0,   0,   0, 0, 0,    0, /* total: tokens, nonfinite */
        0,   0,   0, 0, 0,    0,    0xE0, 0x3F, 0,   0,
        0,   0,   0, 0, 0,    0,                /* importance 0.5, 0, */
        0,   0,   0, 0, 0,    0,    0xF0, 0x3F, /* 1 */
        1,   0,   0, 0, 0,    0,    0,    0,    0,   0,
        0,   0,   0, 0, 0,    0,             /* load 1, 0, */
        1,   0,   0, 0, 0,    0,    0,    0, /* 1 */
        1,   0,   0, 0, 0,    0,    0,    0,    0,   0,
        0,   0,   0, 0, 0,    0, /* mark 0: the same */
        0,   0,   0, 0, 0,    0,    0xE0, 0x3F, 0,   0,
        0,   0,   0, 0, 0,    0,                /* */
        0,   0,   0, 0, 0,    0,    0xF0, 0x3F, /* */
        1,   0,   0, 0, 0,    0,    0,    0,    0,   0,
        0,   0,   0, 0, 0,    0,                           /* */
        1,   0,   0, 0, 0,    0,    0,    0,               /* */
        1,   0,   0, 0, 0,    0,    0,    0,               /* rows, dtype */
        2,   0,   0, 0, 0x80, 0x3F, 0,    0,    0,   0x3F, /* experts 2 and 0: 1.0, 0.5 */
    };
    const float x[] = {0.5f, 0.0f, 1.0f};
    mt_rows rows = mt_rows_packed(x, MT_F32, 1, 3);
    rig *g = begin(MT_KEEP_TOPK, true, 0);
    size_t bytes;
    void *dump;

    rig_push_rows(g, &rows);
    dump = dump_of(g->h, &bytes);
    CHECK(bytes == sizeof golden && memcmp(dump, golden, bytes) == 0);
    free(dump);
    rig_end(g);
}

/* Calls `with` for histories of every kind: fresh, with few entries, with many marks. */
static void
for_every_kind(void (*with)(rig *g, unsigned char *dump, size_t bytes))
{
    static const int pushes[] = {0, 9, 130};

    for (int kind = 0; kind < 3 * 4; kind++) {
        rig *g = begin((mt_keep)(kind & 1), kind & 2, pushes[kind / 4]);
        size_t bytes;
        unsigned char *dump = dump_of(g->h, &bytes);
        with(g, dump, bytes);
        free(dump);
        rig_end(g);
    }
}

static void
refuses_every_prefix(rig *g, unsigned char *dump, size_t bytes)
{
    mt_gatehist *h;

    for (size_t n = 0; n < bytes; n++)
        CHECK(parse_exactly(g, dump, n, &h) == MT_EFORMAT);
}

static void
every_truncation_is_refused(void)
{
    for_every_kind(refuses_every_prefix);
}

static void
refuses_one_byte_more(rig *g, unsigned char *dump, size_t bytes)
{
    unsigned char *longer = model_block(bytes);
    mt_gatehist *h;

    memcpy(longer, dump, bytes);
    CHECK(parse_exactly(g, longer, bytes + 1, &h) == MT_EFORMAT);
    free(longer);
}

static void
a_byte_after_the_end_is_refused(void)
{
    for_every_kind(refuses_one_byte_more);
}

static void
parses_soundly_or_not_at_all(rig *g, const unsigned char *dump, size_t bytes)
{
    mt_gatehist *h;
    mt_status st = parse_exactly(g, dump, bytes, &h);

    if (st == MT_OK) {
        parsed_is_sound(g, h, dump, bytes);
        mt_gatehist_free(h);
    } else {
        CHECK(st == MT_EFORMAT || st == MT_ENOMEM || st == MT_EOVERFLOW);
    }
}

/* Every byte, but of many marks, which are all alike, only some. */
static void
survives_every_flip(rig *g, unsigned char *dump, size_t bytes)
{
    static const unsigned char flips[] = {0x01, 0x10, 0x80, 0xFF};

    for (size_t i = 0; i < bytes; i += i < 400 || i + 200 > bytes ? 1 : 61)
        for (size_t f = i % 2; f < sizeof flips; f += i < 100 ? 1 : 3) {
            dump[i] ^= flips[f];
            parses_soundly_or_not_at_all(g, dump, bytes);
            dump[i] ^= flips[f];
        }
}

static void
every_flipped_byte_is_sound_or_refused(void)
{
    for_every_kind(survives_every_flip);
}

typedef struct edit {
    size_t at;
    size_t width;
    uint64_t value;
} edit;

/* A history of 9 entries of 3 experts with statistics, with one field replaced. */
static mt_status
parse_edited(edit e)
{
    rig *g = begin(MT_KEEP_ALL, true, 9);
    size_t bytes;
    unsigned char *dump = dump_of(g->h, &bytes);
    mt_gatehist *h;
    mt_status st;

    memcpy(dump + e.at, &e.value, e.width);
    st = parse_exactly(g, dump, bytes, &h);
    if (st == MT_OK) parsed_is_sound(g, h, dump, bytes);
    mt_gatehist_free(h);
    free(dump);
    rig_end(g);
    return st;
}

enum { INDEX = 64 + 24 + (9 + 1) * (16 + 16 * 3) }; /* where the entries' rows and dtypes begin */

static void
fields_that_make_no_sense_are_refused(void)
{
    static const edit edits[] = {
        {0, 8, 0},                      /* max_entries: none */
        {0, 8, 5},                      /* fewer than there are */
        {8, 8, 0},                      /* max_bytes: none */
        {8, 8, 1},                      /* fewer than there are */
        {16, 4, 2},                     /* trim */
        {16, 4, UINT32_MAX},            /* */
        {20, 4, 2},                     /* keep */
        {24, 4, MT_F8_E4M3FN},          /* dtype: not one to record in */
        {24, 4, MT_DTYPE_COUNT},        /* */
        {24, 4, 0x80000000u},           /* */
        {24, 4, (uint32_t)-2},          /* */
        {24, 4, MT_BF16},               /* not that of the entries */
        {28, 4, 0},                     /* top_k */
        {28, 4, 4},                     /* more than experts */
        {28, 4, MT_TOP_K_MAX + 1},      /* */
        {32, 4, 0},                     /* statistics are there but not announced */
        {32, 4, 2},                     /* */
        {36, 4, 1},                     /* must be 0 */
        {40, 8, 0},                     /* experts */
        {40, 8, 2},                     /* */
        {40, 8, 4},                     /* */
        {40, 8, UINT32_MAX},            /* */
        {40, 8, (uint64_t)1 << 32},     /* */
        {40, 8, UINT64_MAX},            /* */
        {48, 8, 5},                     /* appended: fewer than there are */
        {48, 8, UINT64_MAX},            /* the next number would be 0 again */
        {56, 8, 5},                     /* len: fewer than there are */
        {56, 8, 7},                     /* more than max_entries */
        {56, 8, UINT64_MAX},            /* */
        {56, 8, (uint64_t)1 << 61},     /* times 8 is 0 */
        {48, 8, 8},                     /* fewer than were counted */
        {64, 8, 8},                     /* entries counted */
        {64, 8, UINT64_MAX},            /* */
        {72, 8, 0},                     /* span */
        {72, 8, 3},                     /* */
        {80, 8, 8},                     /* marks */
        {80, 8, MT_MARKS + 1},          /* */
        {80, 8, UINT64_MAX},            /* */
        {INDEX, 4, UINT32_MAX},         /* rows of an entry */
        {INDEX, 4, 1000},               /* */
        {INDEX + 4, 4, MT_DTYPE_COUNT}, /* its dtype */
        {INDEX + 4, 4, UINT32_MAX},     /* */
        {INDEX + 5 * 8, 4, 0x55555556}, /* rows of the last: times 12 is 8 and 2^32 */
        {INDEX + 5 * 8 + 4, 4, MT_F8_E5M2 + 1000},
    };

    CHECK(parse_edited((edit){0, 0, 0}) == MT_OK);
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++)
        CHECK(parse_edited(edits[i]) == MT_EFORMAT);
}

/* Statistics of 9 entries with a mark every third of them: consistent, but no history has them. */
static void
a_span_that_never_comes_about_is_refused(void)
{
    rig *g = begin(MT_KEEP_ALL, true, 9);
    size_t bytes, gone = 6 * (16 + 16 * 3);
    unsigned char *dump = dump_of(g->h, &bytes);
    mt_gatehist *h;

    dump[72] = dump[80] = 3; /* span, marks */
    memmove(dump + INDEX - gone, dump + INDEX, bytes - INDEX);
    CHECK(parse_exactly(g, dump, bytes - gone, &h) == MT_EFORMAT);
    free(dump);
    rig_end(g);
}

/* Entries without rows take no bytes, so that only the limit itself can refuse them. */
static void
more_entries_than_the_limit_are_refused(void)
{
    rig *g = begin(MT_KEEP_ALL, false, 0);
    size_t bytes;
    unsigned char *dump;
    mt_gatehist *h;

    for (int i = 0; i < 4; i++)
        rig_push(g, MT_F32, 0, 3, LAYOUT_PACKED);
    dump = dump_of(g->h, &bytes);
    for (unsigned char limit = 1; limit < 6; limit++) {
        dump[0] = limit;
        CHECK(parse_exactly(g, dump, bytes, &h) == (limit < 4 ? MT_EFORMAT : MT_OK));
        mt_gatehist_free(h);
    }
    free(dump);
    rig_end(g);
}

static void
limits_that_no_machine_has_are_no_memory_rather_than_a_crash(void)
{
    CHECK(parse_edited((edit){0, 8, UINT64_MAX}) == MT_EOVERFLOW);
    CHECK(parse_edited((edit){8, 8, UINT64_MAX}) == MT_EOVERFLOW);
    CHECK(parse_edited((edit){0, 8, (uint64_t)1 << 40}) == MT_ENOMEM);
    CHECK(parse_edited((edit){8, 8, (uint64_t)1 << 50}) == MT_ENOMEM);
}

/* Both places of the index in a top-k record of 3 experts. */
static void
an_expert_that_does_not_exist_is_refused(void)
{
    rig *g = begin(MT_KEEP_TOPK, false, 0);
    const float x[] = {0.5f, 0.0f, 1.0f};
    mt_rows rows = mt_rows_packed(x, MT_F32, 1, 3);
    size_t bytes;
    unsigned char *dump;
    mt_gatehist *h;

    rig_push_rows(g, &rows);
    dump = dump_of(g->h, &bytes);
    for (unsigned expert = 0; expert < 256; expert++)
        for (size_t k = 0; k < 2; k++) {
            unsigned char was = dump[bytes - 10 + k];
            dump[bytes - 10 + k] = (unsigned char)expert;
            CHECK(parse_exactly(g, dump, bytes, &h) == (expert < 3 ? MT_OK : MT_EFORMAT));
            mt_gatehist_free(h);
            dump[bytes - 10 + k] = was;
        }
    free(dump);
    rig_end(g);
}

static void
a_failed_parse_leaves_nothing(void)
{
    rig *g = begin(MT_KEEP_ALL, true, 9);
    size_t bytes;
    void *dump = dump_of(g->h, &bytes);
    mt_gatehist *h;
    long n = 0;

    for (;; n++) {
        mt_status st;
        rig_fail(g, n);
        st = parse_exactly(g, dump, bytes, &h);
        if (st == MT_OK) break;
        CHECK(st == MT_ENOMEM);
    }
    CHECK(n == 5 && same_history(g->h, h));
    mt_gatehist_free(h);
    free(dump);
    rig_end(g);
}

int
main(void)
{
    RUN(what_was_written_is_read_back_equal);
    RUN(statistics_that_were_reset_are_read_back);
    RUN(a_slice_is_read_back_like_any_other);
    RUN(a_dump_is_as_long_as_it_says);
    RUN(the_bytes_are_the_documented_ones);
    RUN(every_truncation_is_refused);
    RUN(a_byte_after_the_end_is_refused);
    RUN(every_flipped_byte_is_sound_or_refused);
    RUN(fields_that_make_no_sense_are_refused);
    RUN(a_span_that_never_comes_about_is_refused);
    RUN(more_entries_than_the_limit_are_refused);
    RUN(limits_that_no_machine_has_are_no_memory_rather_than_a_crash);
    RUN(an_expert_that_does_not_exist_is_refused);
    RUN(a_failed_parse_leaves_nothing);
    CHECK_DONE();
}
