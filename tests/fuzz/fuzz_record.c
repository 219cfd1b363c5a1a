/* The reader on bytes from nowhere, and on a true record with a few edits under a right CRC.
 *
 *   byte 0 even: the rest is opened as it is
 *   byte 0 odd:  the next bytes build a small record, with room for payloads or
 *                without; what is left edits it */
#include "record/rig.h"
#include "core/base/utf8.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
read_all_of(const mt_recordview *v)
{
    mt_extent x[MT_SERIES_COLUMNS_MAX];
    mt_event_view e;
    mt_phase_view p;
    uint64_t sum = 0, payloads = 0;

    for (uint64_t k = v->rows_from; k < v->rows_end; k++) {
        const uint64_t *row = mt_series_row(&v->series, k);
        for (size_t c = 0; row != NULL && c <= v->size.series.columns; c++)
            sum += row[c];
    }
    CHECK(mt_series_used(&v->series) <= v->size.series.buckets);
    for (size_t i = 0; i < mt_series_used(&v->series); i++) {
        CHECK(mt_series_bucket(&v->series, i, x).samples <= mt_series_width(&v->series));
        for (size_t c = 0; c < v->size.series.columns; c++)
            CHECK(x[c].least <= x[c].last && x[c].last <= x[c].most);
    }
    for (uint64_t k = v->events_from; k < v->events_end; k++)
        if (mt_recordview_event(v, k, &e)) {
            CHECK(mt_utf8_valid(e.kind, e.kind_bytes) && (e.text == NULL) != (e.payload == NULL));
            CHECK(e.text == NULL || mt_utf8_valid(e.text, e.text_bytes));
            for (size_t i = 0; e.payload != NULL && i < e.payload_bytes; i++)
                sum += e.payload[i];
            if (e.payload_bytes > MT_RECORD_TEXT) payloads += e.payload_bytes;
        }
    CHECK(payloads <= v->size.payloads);
    for (size_t i = 0; i < v->phases; i++)
        if (mt_recordview_phase(v, i, &p)) CHECK(mt_utf8_valid(p.name, p.name_bytes));
    CHECK(sum != 1 || v->rows_end > 0); /* so that no read is left out */
}

/* A block of just these bytes, so that the sanitiser sees each read beyond them. */
static void
open_bytes(const uint8_t *bytes, size_t size)
{
    void *copy = malloc(size + (size == 0));
    mt_recordview v;
    mt_error err = {.detail = NULL};

    if (size > 0) memcpy(copy, bytes, size);
    if (mt_record_open(&v, copy, size, &err) == MT_OK)
        read_all_of(&v);
    else
        CHECK(err.detail != NULL);
    free(copy);
}

static uint64_t
any_number(input *in)
{
    static const uint64_t corners[] = {0,
                                       1,
                                       2,
                                       3,
                                       63,
                                       64,
                                       65,
                                       1 << 16,
                                       1 << 24,
                                       UINT64_MAX,
                                       UINT64_MAX - 1,
                                       1ull << 56,
                                       40ull << 56,
                                       41ull << 56,
                                       1ull << 63,
                                       (1ull << 57) - 1};

    return corners[input_below(in, 16)] + input_below(in, 4);
}

/* A word somewhere, mostly where something is; then what the reader checks is made right. */
static void
edit(input *in, const mt_record *r, uint64_t *words)
{
    const size_t parts[] = {
        0, r->parts.columns, r->parts.series, r->parts.events, r->parts.phases, r->parts.payloads};
    size_t at = parts[input_below(in, 6)] / 8 + input_pair(in) % 96, slot;

    if (at >= r->parts.end / 8) return;
    words[at] = input_below(in, 2) ? any_number(in) : words[at] + input_below(in, 9) - 4;
    if (at >= r->parts.events / 8 && at < r->parts.phases / 8) {
        slot = r->parts.events / 8 + (at - r->parts.events / 8) / MT_EVENT_STRIDE * MT_EVENT_STRIDE;
        words[slot + MT_EVENT_WORDS] = mt_words_check(words + slot, MT_EVENT_WORDS);
    }
    words[MT_RECORD_AT_CRC] = mt_record_crc(words, r->size.series.columns);
}

static void
open_an_edited_record(input *in)
{
    mt_record_size size = rig_size(1 + input_below(in, 6), 2 + 2 * input_below(in, 3),
                                   1 + input_below(in, 4), 1 + input_below(in, 4));
    void *region;
    mt_record r;

    size.payloads = input_below(in, 4) == 0 ? 0 : RIG_PAYLOADS;
    region = rig_region(&size);
    rig_init(&r, region, &size);
    for (uint64_t k = 0, n = input_byte(in); k < n; k++) {
        rig_append(&r, k);
        if (k % 4 == 0) rig_event(&r, k / 4);
        if (k % 8 == 0) rig_phase(&r, k / 8);
    }
    for (int i = 0; i < 16 && in->left > 0; i++) {
        edit(in, &r, region);
        open_bytes(region, r.parts.end);
    }
    mt_record_fini(&r);
    free(region);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};

    if (input_byte(&in) % 2 == 0)
        open_bytes(in.at, in.left);
    else
        open_an_edited_record(&in);
    check_cases++;
    return 0;
}
