/* layout.h -- where what lies in a run.mem, version 1.
 *
 *   0      header, 2,048 bytes; everything is little-endian, most of it 8-byte words
 *            0  "MTRECORD"           8  version          16  bytes of the file
 *           24  columns             32  rows             40  buckets
 *           48  events              56  phases           64  start, ns since 1970
 *           72  start, ns of the monotonic clock         80  process id
 *           88  page size           96  bytes of the command
 *          104  CRC-32 of the header up to here, the command and the columns
 *          128  closed: 0, or the monotonic ns of a proper end (1 at least)
 *          136  phases in use
 *          144  0, or the signal that ended the process     152  when, monotonic ns
 *          256  command: its arguments, each ended by a zero byte; 1,792 bytes at most
 *   2048   a column each      name 32, unit 16, 16 zero bytes
 *          series             rows and buckets as in series.h
 *          an event each      stamp, time, duration, step, kind 24, text 192, check
 *          a phase each       name 40, then two times: stamp, count, ns, peak, check; 8 zero bytes
 *
 * Sizes follow from the five counts; no offset is stored. */
#ifndef MT_RECORD_LAYOUT_H
#define MT_RECORD_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "record/series.h"

#define MT_RECORD_MAGIC   "MTRECORD"
#define MT_RECORD_VERSION 1u
/* What is added up under the last name of a full phase table. */
#define MT_RECORD_OTHERS "(other phases)"

enum {
    MT_RECORD_NAME = 32, /* a column's, with the final zero byte */
    MT_RECORD_UNIT = 16,
    MT_RECORD_KIND = 24, /* an event's; these have no final zero byte where they are full */
    MT_RECORD_TEXT = 192,
    MT_RECORD_PHASE = 40,
    MT_RECORD_COMMAND = 1792,
    MT_RECORD_HEADER = 2048,
    MT_RECORD_CRC_FROM = 104,     /* bytes up to here count in the CRC, */
    MT_RECORD_COMMAND_FROM = 256, /* those of the command, and the columns */
    MT_RECORD_EVENTS_MAX = 1 << 16,
    MT_RECORD_PHASES_MAX = 1 << 12,
    MT_RECORD_SIGNALS = 64, /* the largest number of a signal */
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
       MT_RECORD_AT_CRC,
       MT_RECORD_AT_CLOSED = 16,
       MT_RECORD_AT_PHASES_USED,
       MT_RECORD_AT_SIGNAL,
       MT_RECORD_AT_SIGNAL_NS,
};

enum { /* words of a slot, without and with its check */
       MT_EVENT_WORDS = 31,
       MT_EVENT_STRIDE = 32,
       MT_PHASE_NAME_WORDS = 5,
       MT_PHASE_WORDS = 4,
       MT_PHASE_STRIDE = 16,
};

typedef struct mt_record_column { /* as it lies in the record */
    char name[MT_RECORD_NAME], unit[MT_RECORD_UNIT], zero[16];
} mt_record_column;

typedef struct mt_record_size {
    mt_series_size series;
    size_t events, phases;
} mt_record_size;

typedef struct mt_record_parts { /* offsets in bytes */
    size_t columns, series, events, phases, end;
} mt_record_parts;

/* NULL, or what is wrong with the counts as static text. */
const char *mt_record_size_fault(const mt_record_size *size);

/* pre: the counts have no fault. */
mt_record_parts mt_record_parts_of(const mt_record_size *size);

/* NULL, or what is wrong with the columns: names and units are UTF-8, ended and filled up by zero
 * bytes, and no two names are the same. */
const char *mt_record_columns_fault(const mt_record_column *columns, size_t n);

/* CRC-32 (the one of zlib and PNG) of the fixed part of a record. */
uint32_t mt_record_crc(const void *record, size_t columns);

#endif
