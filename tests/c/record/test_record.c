/* What a writer refuses, and when it writes nothing. What it writes is read back in
 * tests/record/test_reader.py. */
#include "record/rig.h"

#include "core/base/utf8.h"

typedef struct rig {
    mt_record r;
    mt_record_size size;
    size_t bytes;
    unsigned char *region;
} rig;

static rig
begin(void)
{
    rig g = {.size = rig_size(5, 4, 3, 5)};

    g.bytes = mt_record_parts_of(&g.size).end;
    g.region = rig_region(&g.size);
    rig_init(&g.r, g.region, &g.size);
    for (uint64_t k = 0; k < 3; k++)
        rig_append(&g.r, k);
    return g;
}

static void
end(rig *g)
{
    mt_record_fini(&g->r);
    free(g->region);
}

static uint64_t
word(const rig *g, size_t at)
{
    return ((const uint64_t *)(const void *)g->region)[at];
}

static void
a_closed_record_says_so_and_takes_nothing_more(void)
{
    rig g = begin();
    uint64_t values[RIG_COLUMNS] = {0};
    mt_record_event e = {.kind = "", .text = ""};

    CHECK(word(&g, MT_RECORD_AT_CLOSED) == 0);
    CHECK(mt_record_close(&g.r, 99) && !mt_record_close(&g.r, 100));
    CHECK(!mt_record_append(&g.r, 0, values) && !mt_record_write_event(&g.r, &e));
    CHECK(!mt_record_phase(&g.r, "x", 1, 0, 0));
    CHECK(word(&g, MT_RECORD_AT_CLOSED) == 99 && view_samples(g.region) == 3);
    end(&g);
    g = begin();
    CHECK(mt_record_close(&g.r, 0) && word(&g, MT_RECORD_AT_CLOSED) == 1); /* a clock at 0 */
    end(&g);
}

static void
a_signal_is_marked_with_its_time_and_no_row_follows(void)
{
    rig g = begin();
    uint64_t values[RIG_COLUMNS] = {0};

    mt_record_mark_signal(g.region, 15, 77);
    CHECK(word(&g, MT_RECORD_AT_SIGNAL) == 15 && word(&g, MT_RECORD_AT_SIGNAL_NS) == 77);
    CHECK(!mt_record_append(&g.r, 78, values) && view_samples(g.region) == 3);
    end(&g);
}

static void
nothing_is_written_in_a_forked_child(void)
{
    rig g = begin();
    unsigned char *before = malloc(g.bytes);
    uint64_t values[RIG_COLUMNS] = {0};
    mt_record_event e = {.kind = "", .text = ""};
    mt_forks forks = 1;

    memcpy(before, g.region, g.bytes);
    g.r.birth = (mt_birth){&forks, 0};
    mt_lock_take(&g.r.lock); /* as another thread of the parent may have done */
    CHECK(!mt_record_append(&g.r, 0, values) && !mt_record_write_event(&g.r, &e));
    CHECK(!mt_record_phase(&g.r, "x", 1, 0, 0) && !mt_record_close(&g.r, 1));
    mt_lock_give(&g.r.lock);
    CHECK(memcmp(before, g.region, g.bytes) == 0);
    free(before);
    end(&g);
}

static void
two_columns_of_one_name_are_a_fault(void)
{
    mt_record_column two[] = {{"a", "", ""}, {"a", "B", ""}};

    CHECK(mt_record_columns_fault(two, 1) == NULL && mt_record_columns_fault(two, 2) != NULL);
    two[1].name[0] = 'b';
    CHECK(mt_record_columns_fault(two, 2) == NULL);
    memset(two[1].unit, 'x', 16);
    CHECK(mt_record_columns_fault(two, 2) != NULL);
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

static void
texts_are_cut_between_characters(void)
{
    CHECK(mt_utf8_cut("abc", 3, 5) == 3 && mt_utf8_cut("abc", 3, 2) == 2);
    CHECK(mt_utf8_cut("a\xE2\x82\xAC", 4, 3) == 1 && mt_utf8_cut("\xE2\x82\xAC", 3, 2) == 0);
}

int
main(void)
{
    RUN(a_closed_record_says_so_and_takes_nothing_more);
    RUN(a_signal_is_marked_with_its_time_and_no_row_follows);
    RUN(nothing_is_written_in_a_forked_child);
    RUN(two_columns_of_one_name_are_a_fault);
    RUN(sizes_out_of_range_have_a_fault);
    RUN(texts_are_cut_between_characters);
    CHECK_DONE();
}
