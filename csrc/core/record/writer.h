/* writer.h -- writes a run.mem into a region of memory that outlives the process.
 *
 *   sampler thread ──► append ─┐
 *   any thread     ──► event  ─┼─ one lock ──► [ header | columns | series | events | phases |
 *   any thread     ──► phase  ─┘                 payloads ]   a file's mapping: stored is kept
 *
 * A writer killed at any instruction leaves a record that memtools/_record/reader.py reads, without
 * the one row, event or phase that was in flight. How: series.h for samples; layout.h for events,
 * whose slot has no stamp while it is written; a phase has two halves, of which the older is
 * written.
 *
 * Thread-safe, but for new and fini. Nothing is allocated. In a process forked after the start all
 * calls do nothing and return false: the region is its parent's, or not there at all. */
#ifndef MT_RECORD_WRITER_H
#define MT_RECORD_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/forks.h"
#include "base/lock.h"
#include "record/layout.h"
#include "record/series.h"

typedef struct mt_record_start {
    uint64_t wall_ns;  /* since 1970 */
    uint64_t clock_ns; /* of the clock that all times of the record are of, at the same moment */
    uint64_t pid, page_bytes;
    const char *command; /* arguments, each ended by a zero byte; cut at MT_RECORD_COMMAND */
    size_t command_bytes;
} mt_record_start;

typedef struct mt_record_event {
    uint64_t time_ns, duration_ns;
    uint64_t step; /* MT_UNKNOWN: none */
    const char *kind, *text;
    size_t kind_bytes, text_bytes; /* valid UTF-8; longer ones are cut between characters */
    const void *payload;           /* any bytes, in place of the text; NULL: the text counts */
    size_t payload_bytes;          /* at most what mt_record_payload_most says */
} mt_record_event;

typedef struct mt_record {
    mt_lock lock;
    mt_birth birth;    /* a child that was forked since writes nothing */
    unsigned char *at; /* NULL once it is closed */
    mt_record_size size;
    mt_record_parts parts;
    mt_series series;
    uint64_t events;     /* ever */
    size_t phases;       /* in use */
    size_t next_payload; /* where the next one begins, in words of the payloads */
} mt_record;

/* Makes an empty record of a region of parts.end bytes, aligned to 8; writes all of it, what makes
 * it valid last. Children that are forked after `birth` write
 * nothing. pre: the counts and the columns have no fault. */
void mt_record_init(mt_record *r, void *region, const mt_record_size *size,
                    const mt_record_column *columns, const mt_record_start *start,
                    const mt_birth *birth);

/* Each returns false, and does nothing, when the record is closed or in a forked child. A phase is
 * one more passage: its time is added, its peak counts when it is the largest (MT_UNKNOWN: none).
 * A name that finds the table full counts under MT_RECORD_OTHERS. append reads one value per
 * column, and takes no row once a signal is marked: the process is about to end. */
bool mt_record_append(mt_record *r, uint64_t time_ns, const uint64_t *values);
bool mt_record_write_event(mt_record *r, const mt_record_event *event);
bool mt_record_phase(mt_record *r, const char *name, size_t name_bytes, uint64_t ns, uint64_t peak);

/* Bytes of the longest payload that a record of that size takes. */
size_t mt_record_payload_most(const mt_record_size *size);

/* Says by which signal the process ends, in the record that mt_record_init made at `region`. For a
 * signal handler: two stores and no lock, whatever was interrupted. Closing the record takes it
 * back. */
void mt_record_mark_signal(void *region, uint64_t number, uint64_t time_ns);

/* Marks the record as properly ended and lets the region go: no call touches it afterwards.
 * Returns false, having done nothing, when it was closed before or in a forked child. */
bool mt_record_close(mt_record *r, uint64_t time_ns);

/* pre: no call runs. */
void mt_record_fini(mt_record *r);

#endif
