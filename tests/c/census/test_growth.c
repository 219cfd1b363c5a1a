/* The table of what gained between looks: against a model that keeps every point, the rules one by
 * one, and an allocator that fails at each call. */
#include "kit/check.h"
#include "core/census/growth.h"
#include "kit/faulty.h"
#include "kit/rng.h"

enum { THINGS = 60, LOOKS = 40 };

static const uint64_t STEPS[] = {16, 24, 32, 48, 64, 96, 128, 192, 320};

static mt_growth_thing
list_at(uint64_t address, uint64_t length)
{
    return (mt_growth_thing){
        .address = address, .place = address * 31 + 7, .length = length, .bytes = 100 * length};
}

static uint32_t
see(mt_growth *g, mt_growth_thing thing)
{
    uint32_t watch;
    mt_error err;

    CHECK(mt_growth_see(g, &thing, &watch, &err) == MT_OK);
    return watch;
}

/* Looks at one list whose lengths are given; returns its watch of the last look. */
static uint32_t
looks(mt_growth *g, const uint64_t *lengths, size_t n, bool single)
{
    uint32_t watch = MT_GROWTH_NONE;
    mt_error err;

    for (size_t i = 0; i < n; i++) {
        mt_growth_thing thing = list_at(0x1000, lengths[i]);
        thing.single = single;
        mt_growth_begin(g, STEPS[i]);
        watch = see(g, thing);
        CHECK(mt_growth_end(g, false, &err) == MT_OK);
    }
    return watch;
}

static bool
is_named(const uint64_t *lengths, size_t n, bool single, mt_growth_gain *gain)
{
    faulty f = {.fail_at = -1};
    mt_alloc mem = faulty_alloc(&f);
    mt_growth g;
    uint32_t watch;
    bool named;

    mt_growth_init(&g, &mem);
    watch = looks(&g, lengths, n, single);
    named = watch != MT_GROWTH_NONE && mt_growth_judge(&g, watch, false, gain);
    mt_growth_fini(&g);
    CHECK(f.live == 0);
    return named;
}

#define NAMED(single, gain, ...)                                                                   \
    is_named((const uint64_t[]){__VA_ARGS__},                                                      \
             sizeof((const uint64_t[]){__VA_ARGS__}) / sizeof(uint64_t), single, gain)

static void
the_rules_name_what_only_gained(void)
{
    mt_growth_gain gain;

    CHECK(!NAMED(false, &gain, 16, 24));    /* two points */
    CHECK(NAMED(false, &gain, 16, 24, 32)); /* three, and two rises */
    CHECK(gain.since == 16 && gain.until == 32 && gain.length == 16 && gain.bytes == 1600);
    CHECK(gain.rises == 2 && !gain.fell);
    CHECK(!NAMED(false, &gain, 16, 16, 32));      /* one rise */
    CHECK(!NAMED(true, &gain, 5000, 6000, 7000)); /* a buffer needs three */
    CHECK(NAMED(true, &gain, 5000, 6000, 7000, 9000));
    CHECK(!NAMED(false, &gain, 16, 24, 8, 12));         /* it fell, and has two points since */
    CHECK(!NAMED(false, &gain, 16, 24, 8, 12, 20, 24)); /* not above its peak */
    CHECK(NAMED(false, &gain, 16, 24, 8, 12, 20, 40));  /* 40 > 1.25 x 24 */
    CHECK(gain.fell && gain.since == 32 && gain.length == 32);
    CHECK(!NAMED(false, &gain, 10, 500, 600, 610, 615, 620)); /* it has filled */
    CHECK(NAMED(false, &gain, 5, 5, 5, 6, 7, 8));             /* in lumps: from the first rise on */
    CHECK(gain.since == 32 && gain.until == 96 && gain.length == 3);
    CHECK(!NAMED(false, &gain, 0, 0, 0));
}

static void
its_gain_is_that_since_it_is_so_fast(void)
{
    mt_growth_gain gain;

    CHECK(NAMED(false, &gain, 10, 11, 11, 11, 11, 11, 11, 12, 140)); /* it begins late */
    CHECK(gain.since == 192 && gain.until == 320 && gain.length == 128);
    CHECK(NAMED(false, &gain, 10, 11, 11, 11, 11, 43, 75, 139)); /* and goes on at one a step */
    CHECK(gain.since == 64 && gain.until == 192 && gain.length == 128);
    CHECK(
        NAMED(false, &gain, 10, 11, 11, 11, 11, 11, 42, 106)); /* for 96 steps: it may be a lump */
    CHECK(gain.since == 16 && gain.length == 96);
    CHECK(NAMED(false, &gain, 10, 12, 14, 18, 22, 30, 38, 54, 140)); /* not twice as fast */
    CHECK(gain.since == 16 && gain.length == 130);
}

/* What has a bound may fill: its gain is that of the later half. */
static void
what_may_fill_is_named_though_it_slows_down(void)
{
    static const uint64_t lengths[] = {10, 500, 600, 610, 615, 620};
    mt_growth_gain gain;
    mt_growth g;
    uint32_t watch;

    mt_growth_init(&g, &mt_alloc_libc);
    watch = looks(&g, lengths, 6, false);
    CHECK(!mt_growth_judge(&g, watch, false, &gain));
    CHECK(mt_growth_judge(&g, watch, true, &gain) && gain.slows);
    CHECK(gain.since == 48 && gain.until == 96 && gain.length == 10);
    mt_growth_fini(&g);
    mt_growth_init(&g, &mt_alloc_libc);
    watch = looks(&g, (const uint64_t[]){10, 500, 600, 610, 610, 610}, 6, false);
    CHECK(!mt_growth_judge(&g, watch, true, &gain)); /* it is full */
    mt_growth_fini(&g);
}

/* Whether a list is named that is empty at two looks and then gains in lumps. */
static bool
gains_from_nothing(bool known_empty, mt_growth_gain *gain)
{
    static const uint64_t lengths[] = {0, 0, 16, 16, 32};
    uint32_t watch = MT_GROWTH_NONE;
    bool named;
    mt_growth g;
    mt_error err;

    mt_growth_init(&g, &mt_alloc_libc);
    for (size_t i = 0; i < 5; i++) {
        mt_growth_thing thing = list_at(0x1000, lengths[i]);
        thing.known_empty = known_empty;
        mt_growth_begin(&g, STEPS[i]);
        watch = see(&g, thing);
        CHECK(mt_growth_end(&g, false, &err) == MT_OK);
    }
    named = watch != MT_GROWTH_NONE && mt_growth_judge(&g, watch, false, gain);
    mt_growth_fini(&g);
    return named;
}

static void
the_first_entry_of_what_was_known_to_be_empty_is_a_gain(void)
{
    mt_growth_gain gain;

    CHECK(!gains_from_nothing(false, &gain));
    CHECK(gains_from_nothing(true, &gain));
    CHECK(gain.since == 24 && gain.until == 64 && gain.length == 32 && gain.rises == 2);
}

/* A list that is made anew each time is known by its place, once it weighs enough. */
static void
what_is_made_anew_is_known_by_its_place(void)
{
    mt_growth g;
    mt_error err;
    mt_growth_gain gain;
    uint32_t watch = MT_GROWTH_NONE;

    mt_growth_init(&g, &mt_alloc_libc);
    for (size_t i = 0; i < 4; i++) {
        mt_growth_thing thing = list_at(0x1000 * (i % 3 + 1), 100 * (i + 1));
        thing.place = 77;
        mt_growth_begin(&g, STEPS[i]);
        watch = see(&g, thing);
        CHECK(mt_growth_end(&g, false, &err) == MT_OK);
    }
    CHECK(watch != MT_GROWTH_NONE && mt_growth_judge(&g, watch, false, &gain) && gain.rises == 3);
    mt_growth_fini(&g);
}

/* What a cut look left out is neither gone nor shorter. */
static void
a_cut_look_forgets_nothing(void)
{
    mt_growth_gain gain;
    mt_growth g;
    mt_error err;

    for (int cut = 0; cut < 2; cut++) {
        uint32_t watch;
        mt_growth_init(&g, &mt_alloc_libc);
        (void)looks(&g, (const uint64_t[]){16, 24, 32}, 3, false);
        mt_growth_begin(&g, 40);
        CHECK(mt_growth_end(&g, cut == 1, &err) == MT_OK);
        mt_growth_begin(&g, 48);
        watch = see(&g, list_at(0x1000, 48));
        CHECK((watch != MT_GROWTH_NONE && mt_growth_judge(&g, watch, false, &gain)) == (cut == 1));
        if (cut == 1) CHECK(gain.since == 16 && gain.length == 32);
        mt_growth_give_up(&g);
        mt_growth_fini(&g);
    }
}

/* A batch that gets longer lies in the place of the last one, and is another. */
static void
a_buffer_with_other_contents_begins_anew(void)
{
    /* what it begins with and ends with at each look, and whether it is named */
    static const struct {
        uint64_t begin[5], end[5];
        bool named;
    } cases[] = {
        {{1, 1, 1, 1, 1}, {2, 3, 4, 5, 6}, true},   {{1, 2, 3, 4, 5}, {7, 7, 7, 7, 7}, true},
        {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}, true}, /* not known */
        {{1, 2, 3, 4, 5}, {6, 7, 8, 9, 10}, false}, {{1, 1, 1, 1, 2}, {3, 4, 5, 6, 7}, false},
    };

    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        uint32_t watch = MT_GROWTH_NONE;
        mt_growth_gain gain;
        mt_growth g;
        mt_error err;
        mt_growth_init(&g, &mt_alloc_libc);
        for (size_t i = 0; i < 5; i++) {
            mt_growth_thing thing = list_at(0, 5000 * (i + 1));
            thing.place = 55;
            thing.single = true;
            mt_growth_begin(&g, STEPS[i]);
            watch = see(&g, thing);
            if (watch != MT_GROWTH_NONE)
                mt_growth_sign(&g, watch, cases[k].begin[i], cases[k].end[i]);
            CHECK(mt_growth_end(&g, false, &err) == MT_OK);
        }
        CHECK(mt_growth_judge(&g, watch, false, &gain) == cases[k].named);
        mt_growth_fini(&g);
    }
}

/* --- against a model ---------------------------------------------------------------------------- */

typedef struct model {
    uint64_t lengths[LOOKS]; /* at each look since it was last shorter */
    size_t n, rises;
    uint64_t peak;
    bool grew;
} model;

static void
add(model *m, uint64_t length)
{
    uint64_t before = m->n > 0 ? m->lengths[m->n - 1] : 0;

    if (m->n > 0 && m->grew && length < before) {
        if (before > m->peak) m->peak = before;
        m->n = m->rises = 0;
    } else if (m->n > 0 && !m->grew && length <= before) {
        m->n = 0; /* not watched: its series is the look before alone */
    } else if (m->n > 0) {
        m->rises += length > before;
        m->grew = true;
    }
    m->lengths[m->n++] = length;
}

static void
lengths_and_peaks_like_a_model(void)
{
    rng r = rng_seeded(3);
    mt_error err;

    for (int round = 0; round < 60; round++) {
        model models[THINGS] = {{.n = 0}};
        faulty f = {.fail_at = -1};
        mt_alloc mem = faulty_alloc(&f);
        mt_growth g;
        mt_growth_init(&g, &mem);
        for (uint64_t look = 1; look <= LOOKS / 2; look++) {
            mt_growth_begin(&g, 8 * look);
            for (uint64_t i = 0; i < THINGS; i++) {
                uint64_t before = models[i].n > 0 ? models[i].lengths[models[i].n - 1] : 1;
                uint64_t length = before + rng_next(&r) % 4 - (rng_next(&r) % 9 == 0);
                uint32_t watch = see(&g, list_at(0x1000 + 16 * i, length + (length == 0)));
                add(&models[i], length + (length == 0));
                CHECK((watch != MT_GROWTH_NONE) == models[i].grew);
                if (watch == MT_GROWTH_NONE) continue;
                CHECK(g.watches[watch].rises == models[i].rises);
                CHECK(g.watches[watch].peak == models[i].peak);
                CHECK(g.watches[watch].points_n == models[i].n);
                CHECK(g.watches[watch].points[0].length == models[i].lengths[0]);
            }
            CHECK(mt_growth_end(&g, false, &err) == MT_OK);
            CHECK(mt_growth_known(&g, 0x1000) != NULL && mt_growth_known(&g, 0x1008) == NULL);
        }
        mt_growth_fini(&g);
        CHECK(f.live == 0);
    }
}

static void
many_points_are_thinned(void)
{
    mt_growth g;
    mt_error err;
    mt_growth_gain gain;
    uint32_t watch = MT_GROWTH_NONE;

    mt_growth_init(&g, &mt_alloc_libc);
    for (uint64_t i = 1; i <= 500; i++) {
        mt_growth_begin(&g, i);
        watch = see(&g, list_at(0x1000, i));
        CHECK(mt_growth_end(&g, false, &err) == MT_OK);
        if (i < 3) continue;
        CHECK(mt_growth_judge(&g, watch, false, &gain));
        CHECK(gain.since == 1 && gain.until == i && gain.length == i - 1 && gain.rises == i - 1);
        CHECK(g.watches[watch].points_n <= MT_GROWTH_POINTS);
    }
    mt_growth_fini(&g);
}

/* A look of some things, given up where memory ends. */
static bool
one_look(mt_growth *g, uint64_t step)
{
    uint32_t watch;
    mt_error err;

    mt_growth_begin(g, step);
    for (uint64_t i = 0; i < 90; i++) {
        mt_growth_thing thing = list_at(0x1000 + 16 * i, 50 + step);
        if (mt_growth_see(g, &thing, &watch, &err) == MT_OK) continue;
        mt_growth_give_up(g);
        return false;
    }
    if (mt_growth_end(g, false, &err) == MT_OK) return true;
    mt_growth_give_up(g);
    return false;
}

static void
no_memory_at_any_call(void)
{
    for (long fail_at = 0;; fail_at++) {
        faulty f = {.fail_at = -1};
        mt_alloc mem = faulty_alloc(&f);
        bool well = true;
        mt_growth g;
        mt_growth_init(&g, &mem);
        CHECK(one_look(&g, 16));
        f.calls = 0;
        f.fail_at = fail_at;
        well = one_look(&g, 24) && well;
        f.fail_at = -1;
        CHECK(one_look(&g, 32) && one_look(&g, 48));
        mt_growth_fini(&g);
        CHECK(f.live == 0);
        if (well) break;
    }
}

int
main(void)
{
    RUN(the_rules_name_what_only_gained);
    RUN(its_gain_is_that_since_it_is_so_fast);
    RUN(what_may_fill_is_named_though_it_slows_down);
    RUN(the_first_entry_of_what_was_known_to_be_empty_is_a_gain);
    RUN(what_is_made_anew_is_known_by_its_place);
    RUN(a_buffer_with_other_contents_begins_anew);
    RUN(a_cut_look_forgets_nothing);
    RUN(lengths_and_peaks_like_a_model);
    RUN(many_points_are_thinned);
    RUN(no_memory_at_any_call);
    CHECK_DONE();
}
