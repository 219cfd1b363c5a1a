/* reader.h -- reads a run.mem: one that was closed, one whose writer was killed, or a copy that
 * was taken while it was written. A copy is sound when the folds of the state word,
 * which is at parts.series, were the same before and after all of it was copied in ascending order.
 *
 *   file ──copy──► bytes ──mt_record_open──► view ──► rows, buckets, events, phases
 *
 * Trusts nothing: each count is held against its limit, the file's length against the counts, each
 * row, event and phase against its stamp and check, each text against UTF-8. What is not whole is
 * left out and can be counted; what is there was written so. */
#ifndef MT_RECORD_READER_H
#define MT_RECORD_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "record/layout.h"
#include "record/series.h"
#include "base/status.h"

/* Enough of a file for mt_record_peek. */
enum { MT_RECORD_PEEK = 128 };

typedef struct mt_recordview {
    const unsigned char *at; /* borrowed */
    mt_record_size size;
    mt_record_parts parts;
    const mt_record_column *columns;
    uint64_t start_wall_ns, start_clock_ns, pid, page_bytes;
    const char *command; /* arguments, each ended by a zero byte; any bytes */
    size_t command_bytes;
    bool closed; /* properly ended */
    uint64_t closed_ns;
    uint64_t signal, signal_ns; /* which signal ended the process, and when; 0: none, or unknown */
    mt_series series;
    uint64_t rows_from, rows_end;     /* numbers of the samples that rows may hold: ask each */
    uint64_t events_from, events_end; /* the same of events */
    uint64_t payloads_from; /* of events before this one, long payloads have been overwritten */
    uint64_t events_gone;   /* those that are whole but for a payload that has been overwritten */
    size_t phases;
} mt_recordview;

typedef struct mt_event_view {
    uint64_t time_ns, duration_ns, step; /* step: MT_UNKNOWN for none */
    const char *kind, *text;             /* valid UTF-8; text: NULL where there is a payload */
    size_t kind_bytes, text_bytes;
    const unsigned char *payload; /* any bytes, as they were written; NULL for a text */
    size_t payload_bytes;
} mt_event_view;

typedef struct mt_phase_view {
    const char *name;
    size_t name_bytes;
    uint64_t count, ns, peak; /* peak: MT_UNKNOWN for none */
} mt_phase_view;

/* Looks at a file's first bytes: where what lies in a record that begins so, and how long it must
 * be. MT_EFORMAT, for a later version with that version as `asked`. */
mt_status mt_record_peek(const void *head, size_t bytes, mt_record_parts *parts, mt_error *err);

/* Opens a copy, aligned to 8, that the view borrows and may write to (see mt_series_open).
 * MT_EFORMAT; for a file of another length with its length as `asked` and what it should be as
 * `limit`. *view is defined on MT_OK only. */
mt_status mt_record_open(mt_recordview *view, void *copy, size_t bytes, mt_error *err);

/* Event k, or false when it or its payload was overwritten, or it is not whole. pre: events_from <=
 * k < events_end. */
bool mt_recordview_event(const mt_recordview *view, uint64_t k, mt_event_view *out);

/* Phase i, or false when it has no passage yet or is not whole. pre: i < phases. */
bool mt_recordview_phase(const mt_recordview *view, size_t i, mt_phase_view *out);

#endif
