/* A record as it is written and read back, and every way in which its bytes can be wrong. */
#include "record/rig.h"

#include "core/base/utf8.h"

typedef struct rig {
    mt_record r;
    mt_record_size size;
    size_t bytes;
    unsigned char *region;
} rig;

static rig
begin(mt_record_size size, uint64_t acts)
{
    rig g = {.size = size, .bytes = mt_record_parts_of(&size).end, .region = rig_region(&size)};

    rig_init(&g.r, g.region, &size);
    for (uint64_t k = 0; k < acts; k++) {
        rig_append(&g.r, k);
        rig_event(&g.r, k);
        rig_phase(&g.r, k);
    }
    return g;
}

static void
end(rig *g)
{
    mt_record_fini(&g->r);
    free(g->region);
}

/* Opens a block of just these bytes, so that a sanitiser sees each read beyond them, and reads all
 * that is in it. */
static mt_status
open_bytes(const void *from, size_t bytes, mt_error *err)
{
    void *copy = malloc(bytes + (bytes == 0));
    mt_recordview v;
    mt_status st;

    memcpy(copy, from, bytes);
    st = mt_record_open(&v, copy, bytes, err);
    if (st == MT_OK) {
        rig_check_rows(&v, v.size.series.rows);
        rig_check_events(&v, v.size.events);
        CHECK(mt_series_used(&v.series) <= v.size.series.buckets);
        for (size_t i = 0; i < v.phases; i++) {
            mt_phase_view p;
            if (mt_recordview_phase(&v, i, &p)) CHECK(p.name_bytes > 0 && p.count + p.ns > 0);
        }
    }
    free(copy);
    return st;
}

static void
what_was_written_is_read_back(void)
{
    static const uint64_t acts[] = {0, 1, 2, 3, 4, 5, 31, 32, 33, 500};

    for (size_t i = 0; i < 2 * (sizeof acts / sizeof *acts); i++) {
        rig g = begin(i % 2 == 0 ? rig_roomy(5, 4, 3, 5) : rig_size(5, 4, 3, 5), acts[i / 2]);
        mt_recordview v;
        CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK);
        rig_check_rows(&v, 0);
        rig_check_buckets(&v.series, acts[i / 2]);
        rig_check_events(&v, 0);
        CHECK(v.rows_end == acts[i / 2] && v.events_end == acts[i / 2]);
        CHECK(rig_check_phases(&v) == acts[i / 2]);
        CHECK(v.start_wall_ns == 5 && v.start_clock_ns == 6 && v.pid == 7 && v.page_bytes == 4096);
        CHECK(v.command_bytes == 16 && memcmp(v.command, "python\0train.py", 16) == 0);
        CHECK(strcmp(v.columns[0].name, "rss") == 0 && strcmp(v.columns[1].unit, "B") == 0);
        CHECK(!v.closed);
        end(&g);
    }
}

static void
a_closed_record_says_so_and_takes_nothing_more(void)
{
    rig g = begin(rig_size(5, 4, 3, 5), 3);
    uint64_t values[RIG_COLUMNS] = {0};
    mt_record_event e = {.kind = "", .text = ""};
    mt_recordview v;

    CHECK(mt_record_close(&g.r, 99) && !mt_record_close(&g.r, 100));
    CHECK(!mt_record_append(&g.r, 0, values) && !mt_record_write_event(&g.r, &e));
    CHECK(!mt_record_phase(&g.r, "x", 1, 0, 0));
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK);
    CHECK(v.closed && v.closed_ns == 99 && v.rows_end == 3 && v.events_end == 3);
    end(&g);
    g = begin(rig_size(5, 4, 3, 5), 0);
    CHECK(mt_record_close(&g.r, 0)); /* a clock that stands at 0 */
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK && v.closed);
    end(&g);
}

static void
a_signal_is_marked_until_the_record_is_closed(void)
{
    mt_record_size size = {.series = {RIG_COLUMNS, 4, 4}, .events = 2, .phases = 2};
    size_t bytes = mt_record_parts_of(&size).end;
    unsigned char *region = malloc(bytes), *copy = malloc(bytes);
    mt_recordview v;
    mt_record r;

    rig_init(&r, region, &size);
    CHECK(mt_record_open(&v, memcpy(copy, region, bytes), bytes, NULL) == MT_OK && v.signal == 0);
    mt_record_mark_signal(region, 15, 77);
    CHECK(mt_record_open(&v, memcpy(copy, region, bytes), bytes, NULL) == MT_OK);
    CHECK(!v.closed && v.signal == 15 && v.signal_ns == 77);
    mt_record_mark_signal(region, 65, 78); /* there is none */
    CHECK(mt_record_open(&v, memcpy(copy, region, bytes), bytes, NULL) == MT_OK && v.signal == 0);
    mt_record_mark_signal(region, 15, 77);
    CHECK(mt_record_close(&r, 80));
    CHECK(mt_record_open(&v, memcpy(copy, region, bytes), bytes, NULL) == MT_OK);
    CHECK(v.closed && v.signal == 0 && v.signal_ns == 0);
    mt_record_fini(&r);
    free(copy);
    free(region);
}

static void
nothing_is_written_in_a_forked_child(void)
{
    rig g = begin(rig_size(5, 4, 3, 5), 3);
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
long_texts_are_cut_between_characters(void)
{
    rig g = begin(rig_size(2, 2, 2, 2), 0);
    char text[300];
    mt_record_event e = {.kind = text, .kind_bytes = 300, .text = text, .text_bytes = 300};
    mt_event_view seen;
    mt_recordview v;

    for (size_t i = 0; i < 300; i += 3)
        memcpy(text + i, "\xE2\x82\xAC", 3); /* a character of three bytes */
    CHECK(mt_record_write_event(&g.r, &e));
    e.kind = e.text = text + 3 - 1;
    memcpy(text + 2, "x", 1); /* now each begins one byte later */
    CHECK(mt_record_write_event(&g.r, &e) && mt_record_phase(&g.r, text + 3, 297, 1, 2));
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK);
    CHECK(mt_recordview_event(&v, 0, &seen) && seen.kind_bytes == 15 && seen.text_bytes == 192);
    CHECK(mt_recordview_event(&v, 1, &seen) && seen.kind_bytes == 16 && seen.text_bytes == 190);
    end(&g);
}

/* Of each length, with and without room for them; the reader gives back just these bytes. */
static void
payloads_of_every_length_are_read_back(void)
{
    static const size_t rooms[] = {0, 8, 192, 200, 4096, MT_RECORD_PAYLOAD, 3 * MT_RECORD_PAYLOAD};
    unsigned char *bytes = malloc(MT_RECORD_PAYLOAD);

    for (size_t i = 0; i < MT_RECORD_PAYLOAD; i++)
        bytes[i] = (unsigned char)(i * 37 + i / 251);
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        mt_record_size size = rig_size(2, 2, 4, 2);
        size_t most;
        rig g;
        size.payloads = rooms[i];
        most = mt_record_payload_most(&size);
        CHECK(most == (rooms[i] < 192 ? 192 : rooms[i] > 65536 ? 65536 : rooms[i]));
        g = begin(size, 0);
        for (size_t n = 0; n <= most; n += n < 300 || n + 9 > most ? 1 : most / 7) {
            mt_record_event e = {.kind = "peak", .kind_bytes = 4, .payload = bytes};
            mt_event_view seen;
            mt_recordview v;
            e.payload_bytes = n;
            CHECK(mt_record_write_event(&g.r, &e));
            CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK);
            CHECK(mt_recordview_event(&v, v.events_end - 1, &seen) && seen.text == NULL);
            CHECK(seen.payload_bytes == n && memcmp(seen.payload, bytes, n) == 0);
        }
        end(&g);
    }
    free(bytes);
}

/* Small events of which each has its place, and some of which the payloads fill their room: the
 * oldest are gone, and are counted. */
static void
the_oldest_payloads_go_and_are_counted(void)
{
    mt_record_size size = rig_size(2, 2, 64, 2);
    unsigned char bytes[1000];
    mt_recordview v;
    rig g;

    size.payloads = 4096; /* four */
    g = begin(size, 0);
    for (unsigned k = 0; k < 40; k++) {
        mt_record_event e = {.kind = "peak", .kind_bytes = 4, .payload = bytes};
        e.payload_bytes = k % 2 ? 100 : sizeof bytes;
        memset(bytes, (int)k, sizeof bytes);
        CHECK(mt_record_write_event(&g.r, &e));
    }
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK);
    CHECK(v.events_from == 0 && v.events_end == 40 && v.events_gone == 16);
    for (unsigned k = 0; k < 40; k++) {
        mt_event_view e;
        CHECK(mt_recordview_event(&v, k, &e) == (k % 2 || k >= 32));
        if (k % 2 || k >= 32) CHECK(e.payload[0] == k && e.payload[e.payload_bytes - 1] == k);
    }
    end(&g);
}

/* Whole slots that say of their payload what cannot be, or what is of others. */
static void
a_forged_payload_is_left_out(void)
{
    static const struct {
        uint64_t form, place;
    } forged[] = {{MT_EVENT_IS_PAYLOAD | 65537, 0},
                  {MT_EVENT_IS_PAYLOAD | UINT32_MAX, 0},
                  {UINT64_MAX, 0},
                  {MT_EVENT_IS_PAYLOAD << 1, 0},
                  {193, 0},
                  {UINT32_MAX, 0},
                  {MT_EVENT_IS_PAYLOAD | 1024, 1},
                  {MT_EVENT_IS_PAYLOAD | 1025, 0},
                  {MT_EVENT_IS_PAYLOAD | 193, UINT64_MAX},
                  {MT_EVENT_IS_PAYLOAD | 193, UINT64_MAX / 8},
                  {MT_EVENT_IS_PAYLOAD | 193, 128},
                  {MT_EVENT_IS_PAYLOAD | 193, 1}};

    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        rig g = begin(rig_roomy(5, 4, 3, 4), 3);
        uint64_t *slot = (uint64_t *)(void *)(g.region + g.r.parts.events) + MT_EVENT_STRIDE;
        mt_event_view e;
        mt_recordview v;
        slot[MT_EVENT_FORM] = forged[i].form;
        slot[MT_EVENT_BODY] = forged[i].place;
        slot[MT_EVENT_WORDS] = mt_words_check(slot, MT_EVENT_WORDS);
        CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK);
        CHECK(mt_recordview_event(&v, 0, &e) && !mt_recordview_event(&v, 1, &e));
        CHECK(open_bytes(g.region, g.bytes, NULL) == MT_OK);
        end(&g);
    }
}

/* Many events that all point to one payload: no more is given out than there is room for. */
static void
payloads_that_overlap_are_given_out_once(void)
{
    mt_record_size size = rig_size(2, 2, 64, 2);
    mt_recordview v;
    mt_event_view e;
    size_t total = 0;
    rig g;

    size.payloads = 1024;
    g = begin(size, 64);
    for (uint64_t k = 0; k < 64; k++) {
        uint64_t *slot = (uint64_t *)(void *)(g.region + g.r.parts.events) + k * MT_EVENT_STRIDE;
        slot[MT_EVENT_FORM] = MT_EVENT_IS_PAYLOAD | 512;
        slot[MT_EVENT_BODY] = 0;
        slot[MT_EVENT_CHECK] =
            mt_words_check((uint64_t *)(void *)(g.region + g.r.parts.payloads), 64);
        slot[MT_EVENT_WORDS] = mt_words_check(slot, MT_EVENT_WORDS);
    }
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK && v.events_gone == 62);
    for (uint64_t k = 0; k < 64; k++)
        if (mt_recordview_event(&v, k, &e)) total += e.payload_bytes;
    CHECK(total == 1024);
    end(&g);
}

static void
phases_without_room_count_as_others(void)
{
    rig g = begin(rig_size(2, 2, 2, 3), 0);
    static const char *const names[] = {"a", "b", "c", "d", "b", "c"};
    static const uint64_t counts[] = {1, 2, 3};
    mt_phase_view p;
    mt_recordview v;

    for (uint64_t i = 0; i < 6; i++)
        CHECK(mt_record_phase(&g.r, names[i], 1, 10, i));
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK && v.phases == 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK(mt_recordview_phase(&v, i, &p) && p.count == counts[i] && p.ns == 10 * counts[i]);
        CHECK(i < 2 ? p.name[0] == names[i][0] : strcmp(p.name, MT_RECORD_OTHERS) == 0);
    }
    CHECK(p.peak == 5);
    end(&g);
}

static void
every_other_length_is_refused(void)
{
    rig g = begin(rig_roomy(5, 4, 3, 4), 40);
    unsigned char *longer = malloc(g.bytes + 9);
    mt_error err;

    memcpy(longer, g.region, g.bytes);
    memset(longer + g.bytes, 0, 9);
    for (size_t n = 0; n <= g.bytes + 9; n++) {
        bool whole = n == g.bytes;
        CHECK(open_bytes(longer, n, &err) == (whole ? MT_OK : MT_EFORMAT));
        if (!whole)
            CHECK(err.detail != NULL && (n < 128 || (err.asked == n && err.limit == g.bytes)));
    }
    free(longer);
    end(&g);
}

/* In the fixed part each flip is refused; elsewhere it may cost what it hits, and no more. */
static void
every_flipped_bit_is_refused_or_left_out(void)
{
    rig g = begin(rig_roomy(5, 4, 3, 4), 40);

    for (size_t i = 0; i < g.bytes; i++)
        for (size_t bit = i % 3; bit < 8; bit += 3) {
            bool fixed = i < 8 * (MT_RECORD_AT_CRC + 1) || i >= 256;
            mt_status st;
            g.region[i] ^= (unsigned char)(1u << bit);
            st = open_bytes(g.region, g.bytes, NULL);
            CHECK(st == MT_OK || st == MT_EFORMAT);
            if (fixed && i < g.r.parts.series) CHECK(st == MT_EFORMAT);
            g.region[i] ^= (unsigned char)(1u << bit);
        }
    end(&g);
}

typedef struct edit {
    size_t word;
    uint64_t value;
} edit;

/* Fields that make no sense, under a CRC that is right. */
static void
a_forged_header_is_refused(void)
{
    static const edit edits[] = {{0, 0},
                                 {1, 0},
                                 {1, 3},
                                 {1, UINT64_MAX},
                                 {2, 0},
                                 {2, 8},
                                 {3, 0},
                                 {3, 2},
                                 {3, 65},
                                 {3, UINT64_MAX},
                                 {4, 0},
                                 {4, 6},
                                 {4, UINT64_MAX},
                                 {5, 3},
                                 {5, UINT64_MAX},
                                 {6, 0},
                                 {6, UINT64_MAX},
                                 {7, 0},
                                 {7, UINT64_MAX},
                                 {12, 1793},
                                 {12, UINT64_MAX},
                                 {13, 4},
                                 {13, 8},
                                 {13, 1 << 25},
                                 {13, UINT64_MAX - 7},
                                 {17, 5},
                                 {17, UINT64_MAX},
                                 {256, 0},
                                 {256, 'a' | 0xFFu << 8},
                                 {257, 0x20u << 24},
                                 {260, UINT64_MAX},
                                 {263, 1}};

    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        rig g = begin(rig_roomy(5, 4, 3, 4), 9);
        uint64_t *words = (uint64_t *)(void *)g.region;
        mt_error err = {.detail = NULL};
        words[edits[i].word] = edits[i].value;
        if (edits[i].word == 257) memset(g.region + 2048, 'x', 32); /* a name without an end */
        words[MT_RECORD_AT_CRC] = mt_record_crc(g.region, RIG_COLUMNS);
        CHECK(open_bytes(g.region, g.bytes, &err) == MT_EFORMAT && err.detail != NULL);
        CHECK(edits[i].word != 1 || err.asked == edits[i].value);
        end(&g);
    }
}

static void
two_columns_of_one_name_are_a_fault(void)
{
    mt_record_column two[] = {{"a", "", ""}, {"a", "B", ""}};

    CHECK(mt_record_columns_fault(two, 1) == NULL && mt_record_columns_fault(two, 2) != NULL);
    two[1].name[0] = 'b';
    CHECK(mt_record_columns_fault(two, 2) == NULL);
    two[1].unit[15] = 'x';
    memset(two[1].unit, 'x', 15);
    CHECK(mt_record_columns_fault(two, 2) != NULL);
}

/* A slot that is whole but of no text that anybody can read, or of another place. */
static void
a_forged_event_is_left_out(void)
{
    rig g = begin(rig_size(5, 4, 3, 4), 3);
    uint64_t *slot = (uint64_t *)(void *)(g.region + g.r.parts.events) + MT_EVENT_STRIDE;
    mt_event_view e;
    mt_recordview v;

    memset(slot + 4, 0xFF, 8);
    slot[MT_EVENT_WORDS] = mt_words_check(slot, MT_EVENT_WORDS);
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK && v.events_end == 3);
    CHECK(mt_recordview_event(&v, 0, &e) && !mt_recordview_event(&v, 1, &e));
    slot[0] = 1; /* that is the number of the slot before */
    slot[MT_EVENT_WORDS] = mt_words_check(slot, MT_EVENT_WORDS);
    CHECK(mt_record_open(&v, g.region, g.bytes, NULL) == MT_OK);
    CHECK(!mt_recordview_event(&v, 1, &e));
    slot[0] = UINT64_MAX - 1; /* the newest by far */
    slot[MT_EVENT_WORDS] = mt_words_check(slot, MT_EVENT_WORDS);
    CHECK(open_bytes(g.region, g.bytes, NULL) == MT_OK);
    end(&g);
}

static void
only_utf8_is_valid(void)
{
    static const struct {
        const char *text;
        bool valid;
    } texts[] = {{"", true},
                 {"abc", true},
                 {"\xC3\xA9", true},
                 {"\xE2\x82\xAC", true},
                 {"\xF0\x9F\x98\x80", true},
                 {"\xED\x9F\xBF", true},
                 {"\xF4\x8F\xBF\xBF", true},
                 {"\x80", false},
                 {"\xC3", false},
                 {"\xC0\x80", false},
                 {"\xC1\xBF", false},
                 {"\xE0\x80\x80", false},
                 {"\xED\xA0\x80", false},
                 {"\xF0\x80\x80\x80", false},
                 {"\xF4\x90\x80\x80", false},
                 {"\xF5\x80\x80\x80", false},
                 {"\xE2\x82", false},
                 {"\xE2\x28\xA1", false},
                 {"a\xFF", false}};

    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        CHECK(mt_utf8_valid(texts[i].text, strlen(texts[i].text)) == texts[i].valid);
    CHECK(!mt_utf8_valid("a\0b", 3));
    CHECK(mt_utf8_cut("abc", 3, 5) == 3 && mt_utf8_cut("abc", 3, 2) == 2);
    CHECK(mt_utf8_cut("a\xE2\x82\xAC", 4, 3) == 1 && mt_utf8_cut("\xE2\x82\xAC", 3, 2) == 0);
}

int
main(void)
{
    RUN(what_was_written_is_read_back);
    RUN(a_signal_is_marked_until_the_record_is_closed);
    RUN(a_closed_record_says_so_and_takes_nothing_more);
    RUN(nothing_is_written_in_a_forked_child);
    RUN(long_texts_are_cut_between_characters);
    RUN(payloads_of_every_length_are_read_back);
    RUN(the_oldest_payloads_go_and_are_counted);
    RUN(a_forged_payload_is_left_out);
    RUN(payloads_that_overlap_are_given_out_once);
    RUN(phases_without_room_count_as_others);
    RUN(every_other_length_is_refused);
    RUN(every_flipped_bit_is_refused_or_left_out);
    RUN(a_forged_header_is_refused);
    RUN(two_columns_of_one_name_are_a_fault);
    RUN(a_forged_event_is_left_out);
    RUN(only_utf8_is_valid);
    CHECK_DONE();
}
