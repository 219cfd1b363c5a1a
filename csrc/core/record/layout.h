/* layout.h -- where what lies in a run.mem, version 2.
 *
 *   0      header, 2,048 bytes; everything is little-endian, most of it 8-byte words
 *            0  "MTRECORD"           8  version          16  bytes of the file
 *           24  columns             32  rows             40  buckets
 *           48  events              56  phases           64  start, ns since 1970
 *           72  start, ns of the monotonic clock         80  process id
 *           88  page size           96  bytes of the command
 *          104  bytes for payloads
 *          112  CRC-32 of the header up to here, the command and the columns
 *          128  closed: 0, or the monotonic ns of a proper end (1 at least)
 *          136  phases in use
 *          144  0, or the signal that ended the process     152  when, monotonic ns
 *          256  command: its arguments, each ended by a zero byte; 1,792 bytes at most
 *   2048   a column each      name 32, unit 16, 16 zero bytes
 *          series             rows and buckets as in series.h
 *          an event each      stamp, time, duration, step, kind 16, form, body 192, check
 *          a phase each       name 40, then two times: stamp, count, ns, peak, check; 8 zero bytes
 *          payloads           those that do not fit into the body of their event
 *
 * Sizes follow from the six counts; no offset of a part is stored.
 *
 * The body of an event is a text (a sentence, or a name), or a payload: the fields of a typed
 * event, bytes that only the program that wrote them understands. The form says which, and how
 * long it is. A payload of more than 192 bytes, up to 64 KiB, stands among the payloads:
 *
 *   events     | 7 "a sentence" | 8 [fields] | 9 o--+-------- | 10 o--+---------- |
 *                                                   |                 |
 *                              .--------------------+-----------------'
 *                              |                    |
 *   payloads   | payload of 10 | rest of 6's | payload of 9        | not used yet |
 *                              ^ here the next one goes, over what is left of the oldest
 *
 * A long payload is written first, in one piece, at the next free word (at the beginning where it
 * does not fit before the end), and over the oldest ones. Then the slot of its event is replaced as
 * any other: its body holds where the payload begins and the check of its words. So:
 *
 * - A writer that is killed while it writes a payload leaves no event that points to it.
 * - A payload that has been overwritten, in part or whole, has another check than its event says.
 *   The event is gone then as one is whose slot was overwritten; a reader counts how many.
 * - A reader that copies the file while it is written sees, for each event, the payload that
 *   belongs to it or one that has another check: never the parts of two. */
#ifndef MT_RECORD_LAYOUT_H
#define MT_RECORD_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "record/series.h"

#define MT_RECORD_MAGIC   "MTRECORD"
#define MT_RECORD_VERSION 2u
/* What is added up under the last name of a full phase table. */
#define MT_RECORD_OTHERS "(other phases)"

enum {
    MT_RECORD_NAME = 32, /* a column's, with the final zero byte */
    MT_RECORD_UNIT = 16,
    MT_RECORD_KIND = 16, /* an event's; these have no final zero byte where they are full */
    MT_RECORD_TEXT = 192,
    MT_RECORD_PHASE = 40,
    MT_RECORD_COMMAND = 1792,
    MT_RECORD_HEADER = 2048,
    MT_RECORD_COMMAND_FROM = 256,
    MT_RECORD_PAYLOAD = 1 << 16, /* bytes of the longest payload */
    MT_RECORD_PAYLOADS_MAX = 1 << 24,
    MT_RECORD_EVENTS_MAX = 1 << 16,
    MT_RECORD_PHASES_MAX = 1 << 12,
};

enum { /* words of the header */
       MT_RECORD_AT_VERSION = 1,
       MT_RECORD_AT_BYTES,
       MT_RECORD_AT_COLUMNS,
       MT_RECORD_AT_ROWS,
       MT_RECORD_AT_BUCKETS,
       MT_RECORD_AT_EVENTS,
       MT_RECORD_AT_PHASES,
       MT_RECORD_AT_START,
       MT_RECORD_AT_CLOCK,
       MT_RECORD_AT_PID,
       MT_RECORD_AT_PAGE,
       MT_RECORD_AT_COMMAND_BYTES,
       MT_RECORD_AT_PAYLOADS,
       MT_RECORD_AT_CRC,
       MT_RECORD_AT_CLOSED = 16,
       MT_RECORD_AT_PHASES_USED,
       MT_RECORD_AT_SIGNAL,
       MT_RECORD_AT_SIGNAL_NS,
};

enum { /* words of a slot, without and with its check */
       MT_EVENT_WORDS = 31,
       MT_EVENT_STRIDE = 32,
       MT_EVENT_KIND = 4,  /* here in a slot the kind begins, */
       MT_EVENT_FORM = 6,  /* bytes of the body, and whether it is a payload */
       MT_EVENT_BODY = 7,  /* a text or a payload; of one among the payloads: its first word, */
       MT_EVENT_CHECK = 8, /* and the check of its words */
       MT_RECORD_PHASE_NAME_WORDS = 5,
       MT_RECORD_PHASE_WORDS = 4,
       MT_RECORD_PHASE_STRIDE = 16,
};

typedef struct mt_record_column { /* as it lies in the record */
    char name[MT_RECORD_NAME], unit[MT_RECORD_UNIT], zero[16];
} mt_record_column;

/* Set in the form of an event whose body is a payload. */
#define MT_EVENT_IS_PAYLOAD ((uint64_t)1 << 32)

typedef struct mt_record_size {
    mt_series_size series;
    size_t events, phases;
    size_t payloads; /* bytes, a multiple of 8; 0: payloads of more than 192 bytes are refused */
} mt_record_size;

typedef struct mt_record_parts { /* offsets in bytes */
    size_t columns, series, events, phases, payloads, end;
} mt_record_parts;

/* NULL, or what is wrong with the counts as static text. */
const char *mt_record_size_fault(const mt_record_size *size);

/* pre: the counts have no fault. */
mt_record_parts mt_record_parts_of(const mt_record_size *size);

/* NULL, or what is wrong with the columns: names and units end with a zero byte, and no two names
 * are the same. pre: they are UTF-8, filled up by zero bytes. */
const char *mt_record_columns_fault(const mt_record_column *columns, size_t n);

/* CRC-32 (the one of zlib and PNG) of the fixed part of a record: of the header up to the CRC, the
 * command and the columns. */
uint32_t mt_record_crc(const void *record, size_t columns);

#endif
