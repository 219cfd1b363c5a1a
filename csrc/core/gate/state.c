#include "gate/state.h"

#include <string.h>

#include "gate/history.h"

/* As in a file: without padding, and little-endian as every machine is on which this runs. */
typedef struct index_line {
    uint32_t rows, dtype;
} index_line;

static size_t
sums_bytes(size_t experts)
{
    return 16 + 16 * experts;
}

mt_gatestate
mt_gatehist_state(const mt_gatehist *h)
{
    mt_gatestate state = {.experts = h->experts,
                          .appended = h->ring.seq,
                          .index_bytes = sizeof(index_line) * h->ring.len,
                          .records_bytes = h->ring.bytes};

    if (!h->config.statistics || h->experts == 0) return state;
    state.counted = h->stats.entries;
    state.span = h->stats.span;
    state.sums_bytes = (h->stats.marks + 1) * sums_bytes(h->experts);
    return state;
}

static unsigned char *
state_put(unsigned char *at, const void *src, size_t n)
{
    memcpy(at, src, n);
    return at + n;
}

static unsigned char *
put_sums(unsigned char *at, const mt_gatesums *sums, size_t experts)
{
    at = state_put(at, &sums->tokens, 8);
    at = state_put(at, &sums->nonfinite, 8);
    at = state_put(at, sums->importance, 8 * experts);
    return state_put(at, sums->load, 8 * experts);
}

void
mt_gatehist_state_copy(const mt_gatehist *h, void *sums, void *index, void *records)
{
    unsigned char *line = index, *record = records, *sum = sums;

    if (h->config.statistics && h->experts > 0) {
        sum = put_sums(sum, &h->stats.total, h->experts);
        for (size_t i = 0; i < h->stats.marks; i++)
            sum = put_sums(sum, &h->stats.mark[i], h->experts);
    }
    for (size_t i = 0; i < h->ring.len; i++) {
        const mt_slot *slot = mt_ring_slot(&h->ring, i);
        line = state_put(line, &(index_line){slot->rows, slot->dtype}, sizeof(index_line));
        mt_ring_read(&h->ring, slot, 0, record, slot->bytes);
        record += slot->bytes;
    }
}

/* --- restoring ------------------------------------------------------------------------------- */

/* The marks must be the ones that `counted` entries leave behind. */
static bool
statistics_fit(const mt_gatehist *h, const mt_gatestate *from)
{
    if (!h->config.statistics) return from->sums_bytes == 0;
    if (from->span == 0 || (from->span & (from->span - 1)) != 0) return false;
    return from->counted <= from->appended && from->counted / from->span <= MT_MARKS &&
           from->sums_bytes == (from->counted / from->span + 1) * sums_bytes(from->experts);
}

static const char *
fault_of(const mt_gatehist *h, const mt_gatestate *from)
{
    size_t len = from->index_bytes / sizeof(index_line);

    if (h->ring.seq > 0) return "the history is not a new one";
    if (from->experts == 0)
        return from->appended + from->sums_bytes + from->index_bytes + from->records_bytes > 0
                   ? "entries without experts"
                   : NULL;
    if (from->experts > MT_EXPERTS_MAX) return "more experts than possible";
    if (from->experts < h->config.top_k) return "fewer experts than top_k";
    if (from->appended > UINT64_MAX / 2 || len > from->appended || len > h->config.max_entries)
        return "more entries than possible"; /* their numbers must not wrap */
    if (from->index_bytes % sizeof(index_line) != 0) return "it ends inside the index";
    return statistics_fit(h, from) ? NULL : "statistics that contradict themselves";
}

static const unsigned char *
take(const unsigned char *at, void *dst, size_t n)
{
    memcpy(dst, at, n);
    return at + n;
}

static const unsigned char *
take_sums(const unsigned char *at, mt_gatesums *sums, size_t experts)
{
    at = take(at, &sums->tokens, 8);
    at = take(at, &sums->nonfinite, 8);
    at = take(at, sums->importance, 8 * experts);
    return take(at, sums->load, 8 * experts);
}

static void
take_statistics(mt_gatestats *s, const mt_gatestate *from)
{
    const unsigned char *at = take_sums(from->sums, &s->total, s->experts);

    s->entries = from->counted;
    s->span = from->span;
    s->marks = (size_t)(from->counted / from->span);
    for (size_t i = 0; i < s->marks; i++)
        at = take_sums(at, &s->mark[i], s->experts);
}

/* Takes one entry in, whose record begins at `at`, where `left` bytes are. */
static mt_status
take_entry(mt_gatehist *h, index_line line, const unsigned char *at, size_t left, size_t *bytes,
           mt_error *err)
{
    mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)line.dtype);
    mt_slot slot;

    if (line.dtype >= MT_DTYPE_COUNT ||
        (h->config.dtype != MT_DTYPE_SAME && (int)line.dtype != h->config.dtype))
        return mt_fail_format(err, "an entry of another dtype");
    if (!mt_size_mul(line.rows, mt_gaterow_bytes(&f), bytes) || *bytes > left)
        return mt_fail_format(err, "an entry longer than the file");
    if (*bytes > h->config.max_bytes - h->ring.bytes)
        return mt_fail_format(err, "more bytes than its own limit");
    if (!mt_gaterow_valid(&f, at, line.rows))
        return mt_fail_format(err, "an expert index out of range");
    mt_ring_claim(&h->ring, (mt_slot){.bytes = *bytes, .rows = line.rows, .dtype = line.dtype});
    slot = *mt_ring_slot(&h->ring, h->ring.len - 1);
    mt_ring_write(&h->ring, &slot, 0, at, *bytes);
    return MT_OK;
}

static mt_status
take_entries(mt_gatehist *h, const mt_gatestate *from, mt_error *err)
{
    const unsigned char *lines = from->index, *at = from->records;
    size_t left = from->records_bytes, bytes = 0;
    index_line line;
    mt_status st;

    for (size_t i = 0; i < from->index_bytes / sizeof line; i++) {
        lines = take(lines, &line, sizeof line);
        if ((st = take_entry(h, line, at, left, &bytes, err)) != MT_OK) return st;
        at += bytes;
        left -= bytes;
    }
    return left > 0 ? mt_fail_format(err, "bytes after the last record") : MT_OK;
}

mt_status
mt_gatehist_restore(mt_gatehist *h, const mt_gatestate *from, mt_error *err)
{
    const char *fault = fault_of(h, from);
    mt_status st;

    if (fault != NULL) return mt_fail_format(err, fault);
    if (from->experts == 0) return MT_OK;
    st = mt_gatehist_hold(h, mt_size_min(from->records_bytes, h->config.max_bytes), err);
    if (st != MT_OK || (st = mt_gatehist_fix_experts(h, from->experts, err)) != MT_OK) return st;
    if (h->config.statistics) take_statistics(&h->stats, from);
    if ((st = take_entries(h, from, err)) != MT_OK) return st;
    h->ring.seq = from->appended;
    return MT_OK;
}
