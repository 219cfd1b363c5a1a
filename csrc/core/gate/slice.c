/* slice.c -- the half of history.h that reads records: copies, statistics of the newest, slices. */
#include "gate/history.h"

#include <assert.h>
#include <string.h>

#include "gate/history_private.h"

/* Decodes rows [first, first + rows) of a record to packed memory. The record's rows are read into
 * h->coded first: they may wrap around the ring's end. */
static void
decode_chunk(const mt_gatehist *h, const mt_slot *slot, size_t first, size_t rows, void *dst)
{
    mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)slot->dtype);
    size_t row = mt_gaterow_bytes(&f);

    if (f.keep == MT_KEEP_ALL) {
        mt_ring_read(&h->ring, slot, first * row, dst, rows * row);
        return;
    }
    mt_ring_read(&h->ring, slot, first * row, h->coded, rows * row);
    mt_gaterow_decode(&f, h->coded, rows, dst);
}

void
mt_gatehist_copy(const mt_gatehist *h, size_t i, void *dst)
{
    const mt_slot *slot = mt_ring_slot(&h->ring, i);
    size_t step = h->config.keep == MT_KEEP_ALL ? slot->rows : mt_gatehist_chunk_rows(h);
    size_t row = h->experts * mt_dtype_size((mt_dtype)slot->dtype);

    for (size_t first = 0; first < slot->rows; first += step)
        decode_chunk(h, slot, first, mt_size_min(step, slot->rows - first),
                     (unsigned char *)dst + first * row);
}

/* What was kept of each row, as it was kept: the zeros that a reader sees for the other gates would
 * be among the largest where gates are negative. */
static void
recount_kept(const mt_gatehist *h, const mt_slot *slot, size_t first, size_t rows, mt_gatestats *s)
{
    mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)slot->dtype);
    size_t row = mt_gaterow_bytes(&f);
    uint32_t experts[MT_TOP_K_MAX];
    double gates[MT_TOP_K_MAX];

    mt_ring_read(&h->ring, slot, first * row, h->coded, rows * row);
    for (size_t r = 0; r < rows; r++) {
        const void *kept = mt_gaterow_kept(&f, h->coded, r, experts);
        memcpy(h->raw, kept, f.top_k * mt_dtype_size(f.dtype)); /* aligned from here on */
        if (f.dtype == MT_F64) {
            memcpy(gates, h->raw, f.top_k * sizeof *gates);
        } else {
            mt_widen_f32(f.dtype, h->raw, h->wide, f.top_k);
            mt_narrow_f32(MT_F64, h->wide, gates, f.top_k);
        }
        mt_gatescan_kept(gates, experts, f.top_k, &s->total);
    }
}

static void
recount_entry(const mt_gatehist *h, size_t i, mt_gatestats *s)
{
    const mt_slot *slot = mt_ring_slot(&h->ring, i);
    size_t step = mt_gatehist_chunk_rows(h);

    for (size_t first = 0; first < slot->rows; first += step) {
        size_t rows = mt_size_min(step, slot->rows - first);
        if (h->config.keep == MT_KEEP_TOPK) {
            recount_kept(h, slot, first, rows, s);
            continue;
        }
        decode_chunk(h, slot, first, rows, h->raw);
        mt_gatehist_count(h, h->raw, (mt_dtype)slot->dtype, rows, s);
    }
    mt_gatestats_end_entry(s);
}

void
mt_gatehist_recount(const mt_gatehist *h, size_t n, mt_gatestats *s)
{
    assert(n <= h->ring.len);
    for (size_t i = h->ring.len - n; i < h->ring.len; i++)
        recount_entry(h, i, s);
}

/* The record's bytes as they are: nothing is decoded, so nothing is rounded twice. */
static void
adopt_entry(mt_gatehist *to, const mt_gatehist *from, size_t i)
{
    mt_slot slot = *mt_ring_slot(&from->ring, i);

    assert(to->ring.seq == to->ring.len); /* nothing was dropped: the newest lies in one piece */
    mt_ring_claim(&to->ring, slot);
    if (slot.bytes == 0) return;
    mt_ring_read(&from->ring, &slot, 0,
                 mt_ring_direct(&to->ring, mt_ring_slot(&to->ring, to->ring.len - 1)), slot.bytes);
}

/* Makes room for these entries of another history. */
static mt_status
prepare_slice(mt_gatehist *slice, const mt_gatehist *h, size_t start, ptrdiff_t step, size_t count,
              mt_error *err)
{
    size_t bytes = 0;
    mt_status st;

    for (size_t i = 0; i < count; i++)
        bytes += mt_ring_slot(&h->ring, start + (size_t)((ptrdiff_t)i * step))->bytes;
    if ((st = mt_gatehist_hold(slice, bytes, err)) != MT_OK || h->experts == 0) return st;
    return mt_gatehist_fix_experts(slice, h->experts, err);
}

/* A history of these entries, without statistics. */
static mt_status
adopt_entries(const mt_gatehist *h, const char *name, size_t start, ptrdiff_t step, size_t count,
              mt_gatehist **out, mt_error *err)
{
    mt_status st = mt_gatehist_new_named(h->mem, h->vm, &h->config, name, out, err);

    assert(step != 0 && (count == 0 || start < h->ring.len));
    if (st != MT_OK) return st;
    if ((st = prepare_slice(*out, h, start, step, count, err)) != MT_OK) {
        mt_gatehist_free(*out);
        return st;
    }
    for (size_t i = 0; i < count; i++)
        adopt_entry(*out, h, start + (size_t)((ptrdiff_t)i * step));
    return MT_OK;
}

mt_status
mt_gatehist_slice(const mt_gatehist *h, size_t start, ptrdiff_t step, size_t count,
                  mt_gatehist **out, mt_error *err)
{
    mt_gatehist *slice;
    mt_status st = adopt_entries(h, "GateHistory slice", start, step, count, &slice, err);

    if (st != MT_OK) return st;
    if (h->config.statistics) mt_gatehist_recount(slice, count, &slice->stats);
    *out = slice;
    return MT_OK;
}

mt_status
mt_gatehist_clone(const mt_gatehist *h, mt_gatehist **out, mt_error *err)
{
    mt_gatehist *clone;
    mt_status st = adopt_entries(h, "GateHistory", 0, 1, h->ring.len, &clone, err);

    if (st != MT_OK) return st;
    if (h->config.statistics) mt_gatestats_copy(&clone->stats, &h->stats);
    clone->ring.seq = h->ring.seq;
    *out = clone;
    return MT_OK;
}

static bool
slot_is_sound(const mt_gatehist *h, const mt_slot *slot)
{
    mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)slot->dtype);

    return slot->dtype < MT_DTYPE_COUNT && slot->bytes == slot->rows * mt_gaterow_bytes(&f);
}

bool
mt_gatehist_check(const mt_gatehist *h)
{
    if (!mt_ring_check(&h->ring) || h->ring.len > h->ring.seq) return false;
    if (h->ring.bytes > h->config.max_bytes || h->ring.len > h->config.max_entries) return false;
    if (h->member == NULL ? h->ring.bound != h->ring.capacity
                          : h->ring.bound != mt_member_reserved(h->member))
        return false;
    for (size_t i = 0; i < h->ring.len; i++)
        if (!slot_is_sound(h, mt_ring_slot(&h->ring, i))) return false;
    return true;
}
