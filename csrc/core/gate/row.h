/* row.h -- the bytes of one recorded entry: all gates of its rows, or the largest of each.
 *
 *   MT_KEEP_ALL    row: [ gate 0 | gate 1 | ... | gate E-1 ]
 *   MT_KEEP_TOPK   row: [ expert .. expert | gate .. gate ]   top_k of each, largest first;
 *                  experts are 1, 2 or 4 bytes wide, as E needs
 *
 * Rows follow each other without padding. Pure functions of a format; nothing is allocated. */
#ifndef MT_GATE_ROW_H
#define MT_GATE_ROW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "gate/scan.h"

typedef enum mt_keep { MT_KEEP_ALL = 0, MT_KEEP_TOPK = 1 } mt_keep;

typedef struct mt_gaterow_format {
    mt_keep keep;
    unsigned top_k;
    size_t experts;
    mt_dtype dtype;
} mt_gaterow_format;

/* Bytes of one row's record. */
size_t mt_gaterow_bytes(const mt_gaterow_format *f);

/* Encodes packed rows for MT_KEEP_TOPK. `values` holds the rows in f->dtype; `order` holds the same
 * rows in `width`, by which the largest are chosen. */
void mt_gaterow_encode(const mt_gaterow_format *f, const void *values, const void *order,
                       mt_gate_width width, size_t rows, void *dst);

/* Decodes rows of an MT_KEEP_TOPK record to packed [rows, experts] of f->dtype; gates that were not
 * kept are zero. pre: valid. */
void mt_gaterow_decode(const mt_gaterow_format *f, const void *record, size_t rows, void *dst);

/* The experts that row `row` of an MT_KEEP_TOPK record kept, largest gate first, to experts[top_k],
 * and their gates, packed in f->dtype but not aligned. */
const void *mt_gaterow_kept(const mt_gaterow_format *f, const void *record, size_t row,
                            uint32_t *experts);

/* True when decoding stays inside a row: for records that came from a file. */
bool mt_gaterow_valid(const mt_gaterow_format *f, const void *record, size_t rows);

#endif
