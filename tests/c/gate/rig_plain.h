/* rig_plain.h -- what the two files of gate-history cases start from. */
#ifndef MT_TESTS_GATE_RIG_PLAIN_H
#define MT_TESTS_GATE_RIG_PLAIN_H

#include "gate/rig.h"

static const mt_gatehist_config plain = {.max_entries = 100,
                                         .max_bytes = 4 << 20,
                                         .trim = MT_TRIM_HALF,
                                         .keep = MT_KEEP_ALL,
                                         .dtype = MT_DTYPE_SAME,
                                         .top_k = 1,
                                         .statistics = true};
static rig rigged;

static inline rig *
begin_with(mt_gatehist_config config, uint64_t seed)
{
    rig_begin(&rigged, &config, seed);
    return &rigged;
}

static inline rig *
begin(uint64_t seed)
{
    return begin_with(plain, seed);
}

/* float32 rows of 4 experts: 16 bytes a row. */
static inline void
push_rows(rig *g, size_t rows)
{
    CHECK(rig_push(g, MT_F32, rows, 4, LAYOUT_PACKED) == MT_OK);
}

#endif
