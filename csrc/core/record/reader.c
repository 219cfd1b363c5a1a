#include "record/reader.h"

#include <string.h>

#include "base/utf8.h"
#include "record/words.h"

static uint64_t
word_of(const void *record, size_t word)
{
    uint64_t value;

    memcpy(&value, (const unsigned char *)record + 8 * word, sizeof value);
    return value;
}

/* --- the fixed part --- */

static mt_record_size
size_of(const void *head)
{
    return (mt_record_size){.series = {.columns = word_of(head, MT_RECORD_AT_COLUMNS),
                                       .rows = word_of(head, MT_RECORD_AT_ROWS),
                                       .buckets = word_of(head, MT_RECORD_AT_BUCKETS)},
                            .events = word_of(head, MT_RECORD_AT_EVENTS),
                            .phases = word_of(head, MT_RECORD_AT_PHASES),
                            .payloads = word_of(head, MT_RECORD_AT_PAYLOADS)};
}

static mt_status
wrong_version(uint64_t version, mt_error *err)
{
    mt_status st = mt_fail_format(err, version > MT_RECORD_VERSION
                                           ? "a later version of the format"
                                           : "a version of the format that is not read any more");

    if (err != NULL) err->asked = version;
    return st;
}

mt_status
mt_record_peek(const void *head, size_t bytes, mt_record_parts *parts, mt_error *err)
{
    mt_record_size size;
    const char *fault;
    uint64_t version;

    if (bytes < 8 || memcmp(head, MT_RECORD_MAGIC, 8) != 0)
        return mt_fail_format(err, "it does not begin like one");
    if (bytes < MT_RECORD_PEEK) return mt_fail_format(err, "it ends inside the header");
    version = word_of(head, MT_RECORD_AT_VERSION);
    if (version != MT_RECORD_VERSION) return wrong_version(version, err);
    size = size_of(head);
    if ((fault = mt_record_size_fault(&size)) != NULL) return mt_fail_format(err, fault);
    *parts = mt_record_parts_of(&size);
    if (word_of(head, MT_RECORD_AT_BYTES) != parts->end)
        return mt_fail_format(err, "a length that does not fit its counts");
    if (word_of(head, MT_RECORD_AT_COMMAND_BYTES) > MT_RECORD_COMMAND)
        return mt_fail_format(err, "a command longer than its place");
    return MT_OK;
}

static mt_status
wrong_length(size_t bytes, size_t end, mt_error *err)
{
    mt_status st =
        mt_fail_format(err, bytes < end ? "it is cut off" : "there are bytes after its end");

    if (err != NULL) {
        err->asked = bytes;
        err->limit = end;
    }
    return st;
}

static mt_status
take_fixed(mt_recordview *v, mt_error *err)
{
    size_t columns = v->size.series.columns;
    const char *fault;

    if (word_of(v->at, MT_RECORD_AT_CRC) != mt_record_crc(v->at, columns))
        return mt_fail_format(err, "the header or the columns were changed");
    v->columns = (const void *)(v->at + v->parts.columns);
    if ((fault = mt_record_columns_fault(v->columns, columns)) != NULL)
        return mt_fail_format(err, fault);
    v->start_wall_ns = word_of(v->at, MT_RECORD_AT_START);
    v->start_clock_ns = word_of(v->at, MT_RECORD_AT_CLOCK);
    v->pid = word_of(v->at, MT_RECORD_AT_PID);
    v->page_bytes = word_of(v->at, MT_RECORD_AT_PAGE);
    v->command = (const char *)v->at + MT_RECORD_COMMAND_FROM;
    v->command_bytes = word_of(v->at, MT_RECORD_AT_COMMAND_BYTES);
    return MT_OK;
}

/* --- what changes --- */

/* Numbers that a ring of n places may hold when `end` were written. */
static uint64_t
oldest(uint64_t end, size_t n)
{
    return end > n ? end - n : 0;
}

static const uint64_t *
event_at(const mt_recordview *v, size_t slot)
{
    return (const uint64_t *)(const void *)(v->at + v->parts.events) + slot * MT_EVENT_STRIDE;
}

/* The stamp of a slot that is whole and belongs there, 0 for another. */
static uint64_t
event_stamp(const mt_recordview *v, size_t slot)
{
    const uint64_t *at = event_at(v, slot);

    if (at[0] == 0 || (at[0] - 1) % v->size.events != slot) return 0;
    return at[MT_EVENT_WORDS] == mt_words_check(at, MT_EVENT_WORDS) ? at[0] : 0;
}

/* Bytes of a long payload that a slot points to, 0 for a text or what fits into the slot. */
static uint64_t
long_payload(const uint64_t *slot)
{
    uint64_t form = slot[MT_EVENT_FORM], bytes = form & ~MT_EVENT_IS_PAYLOAD;

    if ((form & MT_EVENT_IS_PAYLOAD) == 0) return 0;
    return bytes > MT_RECORD_TEXT && bytes <= MT_RECORD_PAYLOAD ? bytes : 0;
}

/* The words of the long payload of event k, or NULL when they were overwritten or cannot be. */
static const uint64_t *
payload_at(const mt_recordview *v, uint64_t k, const uint64_t *slot)
{
    uint64_t n = (long_payload(slot) + 7) / 8, from = slot[MT_EVENT_BODY];
    uint64_t words = v->size.payloads / 8;
    const uint64_t *at = (const uint64_t *)(const void *)(v->at + v->parts.payloads);

    if (k < v->payloads_from || n > words || from > words - n) return NULL;
    return mt_words_check(at + from, n) == slot[MT_EVENT_CHECK] ? at + from : NULL;
}

/* Which events' payloads may be whole. Payloads do not overlap: where those of newer events alone
 * need all the room, an older one was overwritten, so that no more than the room is ever looked at.
 */
static void
find_payloads(mt_recordview *v)
{
    uint64_t used = 0;

    v->payloads_from = v->events_from;
    for (uint64_t k = v->events_end; k-- > v->events_from;) {
        size_t slot = k % v->size.events;
        uint64_t bytes = long_payload(event_at(v, slot));
        if (bytes == 0 || event_stamp(v, slot) != k + 1) continue;
        used += (bytes + 7) / 8 * 8;
        if (used > v->size.payloads && v->payloads_from == v->events_from) v->payloads_from = k + 1;
        v->events_gone += payload_at(v, k, event_at(v, slot)) == NULL;
    }
}

static void
find_events(mt_recordview *v)
{
    for (size_t slot = 0; slot < v->size.events; slot++) {
        uint64_t stamp = event_stamp(v, slot);
        if (stamp > v->events_end) v->events_end = stamp;
    }
    v->events_from = oldest(v->events_end, v->size.events);
    find_payloads(v);
}

/* In a copy of a record that was being written, rows may be newer than the state says. */
static void
find_rows(mt_recordview *v)
{
    const mt_series *s = &v->series;

    v->rows_end = s->samples;
    for (size_t i = 0; i < s->size.rows; i++) {
        uint64_t stamp = mt_series_stamp(s, i);
        if (stamp > v->rows_end) v->rows_end = stamp;
    }
    v->rows_from = oldest(v->rows_end, s->size.rows);
}

mt_status
mt_record_open(mt_recordview *view, void *copy, size_t bytes, mt_error *err)
{
    mt_recordview v = {.at = copy};
    uint64_t phases;
    mt_status st;

    if ((st = mt_record_peek(copy, bytes, &v.parts, err)) != MT_OK) return st;
    if (bytes != v.parts.end) return wrong_length(bytes, v.parts.end, err);
    v.size = size_of(copy);
    if ((st = take_fixed(&v, err)) != MT_OK) return st;
    v.closed_ns = word_of(copy, MT_RECORD_AT_CLOSED);
    v.closed = v.closed_ns != 0;
    v.signal = word_of(copy, MT_RECORD_AT_SIGNAL);
    v.signal_ns = word_of(copy, MT_RECORD_AT_SIGNAL_NS);
    if (v.closed || v.signal > MT_RECORD_SIGNALS) v.signal = v.signal_ns = 0;
    phases = word_of(copy, MT_RECORD_AT_PHASES_USED);
    if (phases > v.size.phases) return mt_fail_format(err, "more phases than possible");
    v.phases = phases;
    st = mt_series_open(&v.series, (char *)copy + v.parts.series, &v.size.series, err);
    if (st != MT_OK) return st;
    find_rows(&v);
    find_events(&v);
    *view = v;
    return MT_OK;
}

bool
mt_recordview_event(const mt_recordview *v, uint64_t k, mt_event_view *out)
{
    size_t slot = k % v->size.events;
    const uint64_t *at = event_at(v, slot), *body = at + MT_EVENT_BODY;
    uint64_t form = at[MT_EVENT_FORM], bytes = form & ~MT_EVENT_IS_PAYLOAD;
    mt_event_view e = {.time_ns = at[1], .duration_ns = at[2], .step = at[3]};

    if (event_stamp(v, slot) != k + 1) return false;
    e.kind = (const char *)(at + MT_EVENT_KIND);
    e.kind_bytes = mt_utf8_field(e.kind, MT_RECORD_KIND);
    if (!mt_utf8_valid(e.kind, e.kind_bytes)) return false;
    if ((form & MT_EVENT_IS_PAYLOAD) != 0) {
        if (bytes > MT_RECORD_TEXT) body = payload_at(v, k, at);
        if (body == NULL || bytes > MT_RECORD_PAYLOAD) return false;
        e.payload = (const unsigned char *)body;
        e.payload_bytes = bytes;
    } else {
        if (form > MT_RECORD_TEXT) return false;
        e.text = (const char *)body;
        e.text_bytes = bytes;
        if (!mt_utf8_valid(e.text, e.text_bytes)) return false;
    }
    *out = e;
    return true;
}

static bool
half_is_whole(const uint64_t *half)
{
    return half[0] != 0 &&
           half[MT_RECORD_PHASE_WORDS] == mt_words_check(half, MT_RECORD_PHASE_WORDS);
}

bool
mt_recordview_phase(const mt_recordview *v, size_t i, mt_phase_view *out)
{
    const uint64_t *at =
        (const uint64_t *)(const void *)(v->at + v->parts.phases) + i * MT_RECORD_PHASE_STRIDE;
    const uint64_t *a = at + MT_RECORD_PHASE_NAME_WORDS, *b = a + MT_RECORD_PHASE_WORDS + 1, *half;
    const char *name = (const char *)at;
    size_t bytes = mt_utf8_field(name, MT_RECORD_PHASE);

    half = half_is_whole(a) ? a : b;
    if (half_is_whole(b) && b[0] > half[0]) half = b;
    if (!half_is_whole(half) || bytes == 0 || !mt_utf8_valid(name, bytes)) return false;
    *out = (mt_phase_view){
        .name = name, .name_bytes = bytes, .count = half[1], .ns = half[2], .peak = half[3]};
    return true;
}
