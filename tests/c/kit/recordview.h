/* recordview.h -- what a region holds that an mt_record has written, for tests of those who write
 * one. The reader that trusts nothing is memtools/_record/reader.py. */
#ifndef MT_TESTS_KIT_RECORDVIEW_H
#define MT_TESTS_KIT_RECORDVIEW_H

#include <stddef.h>
#include <stdint.h>

#include "core/record/layout.h"
#include "core/record/words.h"

static inline mt_record_size
view_size(const uint64_t *region)
{
    return (mt_record_size){.series = {.columns = region[MT_RECORD_AT_COLUMNS],
                                       .rows = region[MT_RECORD_AT_ROWS],
                                       .buckets = region[MT_RECORD_AT_BUCKETS]},
                            .events = region[MT_RECORD_AT_EVENTS],
                            .phases = region[MT_RECORD_AT_PHASES],
                            .payloads = region[MT_RECORD_AT_PAYLOADS]};
}

/* Number k of a ring of `count` slots, each of `words` words and their check; NULL when it is not
 * whole. */
static inline const uint64_t *
view_slot(const uint64_t *ring, size_t count, size_t words, uint64_t k)
{
    const uint64_t *slot = ring + k % count * (words + 1);

    return slot[0] == k + 1 && slot[words] == mt_words_check(slot, words) ? slot : NULL;
}

/* How many samples were taken. */
static inline uint64_t
view_samples(const void *region)
{
    mt_record_size size = view_size(region);
    uint64_t state = ((const uint64_t *)region)[mt_record_parts_of(&size).series / 8];

    return state & (((uint64_t)1 << MT_SERIES_FOLDS_AT) - 1);
}

/* Row k from its time on. */
static inline const uint64_t *
view_row(const void *region, uint64_t k)
{
    mt_record_size size = view_size(region);
    const uint64_t *rows = (const uint64_t *)region + mt_record_parts_of(&size).series / 8 + 8;
    const uint64_t *row = view_slot(rows, size.series.rows, 2 + size.series.columns, k);

    return row == NULL ? NULL : row + 1;
}

static inline const uint64_t *
view_event(const void *region, uint64_t k)
{
    mt_record_size size = view_size(region);
    const uint64_t *events = (const uint64_t *)region + mt_record_parts_of(&size).events / 8;

    return view_slot(events, size.events, MT_EVENT_WORDS, k);
}

/* The body of an event that fits into its slot, and its length. */
static inline const char *
view_body(const uint64_t *event, size_t *bytes)
{
    *bytes = (size_t)(event[MT_EVENT_FORM] & ~MT_EVENT_IS_PAYLOAD);
    return (const char *)(event + MT_EVENT_BODY);
}

#endif
