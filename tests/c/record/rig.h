/* rig.h -- a record whose content follows from numbers: what is written k-th is a function of
 * k, so that whoever reads it can tell a wrong word from a right one. */
#ifndef MT_TESTS_RECORD_RIG_H
#define MT_TESTS_RECORD_RIG_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kit/check.h"
#include "core/record/writer.h"
#include "core/record/reader.h"
#include "core/record/words.h"

static const mt_record_column rig_columns[] = {
    {"rss", "B", ""}, {"cgroup", "B", ""}, {"psi", "", ""}};
enum { RIG_COLUMNS = 3 };

/* No reading every few samples, and none at all at first. */
static inline uint64_t
rig_value(uint64_t k, size_t c)
{
    if ((k + c) % 5 == 0 || (c == 2 && k < 9)) return MT_UNKNOWN;
    return (k * 7919 + c * 104729) % 10007;
}

static inline uint64_t
rig_time(uint64_t k)
{
    return 1000 + 10 * k;
}

static inline void
rig_append(mt_record *r, uint64_t k)
{
    uint64_t values[RIG_COLUMNS];

    for (size_t c = 0; c < RIG_COLUMNS; c++)
        values[c] = rig_value(k, c);
    CHECK(mt_record_append(r, rig_time(k), values));
}

static inline size_t
rig_text(char to[MT_RECORD_TEXT], uint64_t k)
{
    return (size_t)snprintf(
        to, MT_RECORD_TEXT, "event %llu, m\xC3\xA9moire, %.*s", (unsigned long long)k,
        (int)(k % 80),
        "--------------------------------------------------------------------------------");
}

enum { RIG_PAYLOADS = 1024, RIG_PAYLOAD = 600 }; /* bytes for all, and of the longest */

/* Bytes of the payload of event k, in a record that has room for payloads; 0: it has a text. */
static inline size_t
rig_payload(unsigned char to[RIG_PAYLOAD], uint64_t k)
{
    size_t bytes = k % 4 == 0 ? 0 : 1 + (size_t)(k * 197) % (RIG_PAYLOAD - 1);

    for (size_t i = 0; i < bytes; i++)
        to[i] = (unsigned char)(k * 31 + i * 7);
    return bytes;
}

static inline void
rig_event(mt_record *r, uint64_t k)
{
    unsigned char payload[RIG_PAYLOAD];
    char text[MT_RECORD_TEXT];
    mt_record_event e = {.time_ns = rig_time(k), .duration_ns = k, .step = k % 3 ? k : MT_UNKNOWN};

    e.kind = k % 2 ? "leak" : "a kind of 16 b.!";
    e.kind_bytes = strlen(e.kind);
    e.payload_bytes = r->size.payloads > 0 ? rig_payload(payload, k) : 0;
    e.payload = e.payload_bytes > 0 ? payload : NULL;
    e.text = text;
    e.text_bytes = rig_text(text, k);
    CHECK(mt_record_write_event(r, &e));
}

/* Whether the payload of event k is overwritten once `end` events were written: by a model that
 * follows each payload from the first on. */
static inline bool
rig_is_gone(const mt_record_size *size, uint64_t k, uint64_t end)
{
    unsigned char payload[RIG_PAYLOAD];
    size_t next = 0, first = 0, last = 0; /* bytes of the payloads; those of event k */
    bool gone = false;

    if (size->payloads == 0 || end > 1000) return false; /* a forged number */
    for (uint64_t i = 0; i < end; i++) {
        size_t n = (rig_payload(payload, i) + 7) / 8 * 8;
        if (n <= MT_RECORD_TEXT) continue;
        if (next + n > size->payloads) next = 0;
        if (i == k) {
            first = next;
            last = next + n;
        } else if (i > k) {
            gone = gone || (next < last && next + n > first);
        }
        next += n;
    }
    return gone;
}

/* Passage k of one of three phases. */
static inline void
rig_phase(mt_record *r, uint64_t k)
{
    static const char *const names[] = {"train", "eval", "generate"};

    CHECK(mt_record_phase(r, names[k % 3], strlen(names[k % 3]), 100 + k, k % 4 ? k : MT_UNKNOWN));
}

static inline mt_record_size
rig_size(size_t rows, size_t buckets, size_t events, size_t phases)
{
    return (mt_record_size){
        .series = {RIG_COLUMNS, rows, buckets}, .events = events, .phases = phases};
}

/* With room for some payloads. */
static inline mt_record_size
rig_roomy(size_t rows, size_t buckets, size_t events, size_t phases)
{
    mt_record_size size = rig_size(rows, buckets, events, phases);

    size.payloads = RIG_PAYLOADS;
    return size;
}

static inline void
rig_init(mt_record *r, void *region, const mt_record_size *size)
{
    const char command[] = "python\0train.py";
    mt_record_start start = {.wall_ns = 5,
                             .clock_ns = 6,
                             .pid = 7,
                             .page_bytes = 4096,
                             .command = command,
                             .command_bytes = sizeof command};

    mt_record_init(r, region, size, rig_columns, &start, &(mt_birth){0});
}

/* A region of its own for `size`, filled with what memory may hold. */
static inline void *
rig_region(const mt_record_size *size)
{
    size_t bytes = mt_record_parts_of(size).end;
    void *region = malloc(bytes);

    CHECK(region != NULL);
    memset(region, 0xA5, bytes);
    return region;
}

/* The rows are those that were written, all but at most `lost` of the newest. */
static inline void
rig_check_rows(const mt_recordview *v, uint64_t lost)
{
    uint64_t missing = 0, most = v->rows_end < v->size.series.rows ? 0 : lost;

    for (uint64_t k = v->rows_from; k < v->rows_end; k++) {
        const uint64_t *row = mt_series_row(&v->series, k);
        if (row == NULL) {
            missing++;
            continue;
        }
        CHECK(row[0] == rig_time(k));
        for (size_t c = 0; c < RIG_COLUMNS; c++)
            CHECK(row[1 + c] == rig_value(k, c));
    }
    CHECK(missing <= most);
}

static inline mt_extent
rig_extent(uint64_t from, uint64_t end, size_t c)
{
    mt_extent x = {MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN};

    for (uint64_t k = from; k < end; k++) {
        uint64_t v = rig_value(k, c);
        if (v == MT_UNKNOWN) continue;
        if (x.least == MT_UNKNOWN || v < x.least) x.least = v;
        if (x.most == MT_UNKNOWN || v > x.most) x.most = v;
        x.last = v;
    }
    return x;
}

/* The buckets are exactly those of the first `samples` samples. */
static inline void
rig_check_buckets(const mt_series *s, uint64_t samples)
{
    uint64_t width = mt_series_width(s), from = 0;
    size_t used = mt_series_used(s);

    CHECK(s->samples == samples);
    CHECK(used <= s->size.buckets && (width == 1 || used >= s->size.buckets / 2));
    for (size_t i = 0; i < used; i++, from += width) {
        uint64_t end = from + width < samples ? from + width : samples;
        mt_extent x[RIG_COLUMNS];
        mt_bucket b = mt_series_bucket(s, i, x);
        CHECK(b.samples == end - from && b.first_ns == rig_time(from));
        CHECK(b.last_ns == rig_time(end - 1));
        for (size_t c = 0; c < RIG_COLUMNS; c++) {
            mt_extent y = rig_extent(from, end, c);
            CHECK(x[c].least == y.least && x[c].most == y.most && x[c].last == y.last);
        }
    }
    CHECK(from >= samples);
}

static inline void
rig_check_events(const mt_recordview *v, uint64_t lost)
{
    uint64_t missing = 0, gone = 0, most = v->events_end < v->size.events ? 0 : lost;

    for (uint64_t k = v->events_from; k < v->events_end; k++) {
        unsigned char payload[RIG_PAYLOAD];
        char text[MT_RECORD_TEXT];
        size_t n = rig_text(text, k), bytes = v->size.payloads > 0 ? rig_payload(payload, k) : 0;
        mt_event_view e;
        if (!mt_recordview_event(v, k, &e)) {
            missing++;
            gone += rig_is_gone(&v->size, k, v->events_end);
            continue;
        }
        CHECK(e.time_ns == rig_time(k) && e.duration_ns == k);
        CHECK(e.step == (k % 3 ? k : MT_UNKNOWN));
        CHECK(e.kind_bytes == (k % 2 ? 4 : MT_RECORD_KIND));
        if (bytes > 0)
            CHECK(e.payload_bytes == bytes && memcmp(e.payload, payload, bytes) == 0);
        else
            CHECK(e.text_bytes == n && memcmp(e.text, text, n) == 0);
        CHECK((bytes > 0) == (e.payload != NULL) && (bytes == 0) == (e.text != NULL));
        CHECK(!rig_is_gone(&v->size, k, v->events_end));
    }
    CHECK(gone <= v->events_gone && missing >= v->events_gone);
    CHECK(missing - v->events_gone <= most);
    /* Of what is gone beyond the model's, a payload in flight has taken the place. */
    if (lost == 0) CHECK(missing == gone && v->events_gone == gone);
}

/* After `passages` of all, or one more: each phase is as it was after some whole passage. */
static inline uint64_t
rig_check_phases(const mt_recordview *v)
{
    uint64_t total = 0;

    for (size_t i = 0; i < v->phases; i++) {
        uint64_t ns = 0, peak = 0;
        mt_phase_view p;
        if (!mt_recordview_phase(v, i, &p)) continue;
        for (uint64_t n = 0, k = i; n < p.count; n++, k += 3) {
            ns += 100 + k;
            if (k % 4) peak = k;
        }
        CHECK(p.ns == ns && (peak == 0 ? p.peak == MT_UNKNOWN : p.peak == peak));
        total += p.count;
    }
    return total;
}

#endif
