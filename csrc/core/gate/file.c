/* file.c -- how this file works.
 *
 * Writing knows the exact size before it begins (mt_gatehist_dump_bytes) and then goes once through
 * the history in the order that file.h draws. Reading goes the same way through a cursor that never
 * passes the end: each count is held against its maximum and against the bytes that are left before
 * memory is taken for it; then the history is made, its entries are claimed in the ring as an
 * append would, and their bytes are copied in. */
#include "gate/file.h"

#include <assert.h>
#include <string.h>

#include "gate/history_private.h"

/* The pieces of a file as file.h draws them: without padding, and little-endian as every machine is
 * on which this runs. */
typedef struct header {
    uint64_t max_entries, max_bytes;
    uint32_t trim, keep;
    int32_t dtype;
    uint32_t top_k, statistics, zero;
    uint64_t experts, appended, len;
} header;

typedef struct stats_header {
    uint64_t entries, span, marks;
} stats_header;

typedef struct index_line {
    uint32_t rows, dtype;
} index_line;

_Static_assert(sizeof(header) == 2 * 8 + 6 * 4 + 3 * 8, "a header has no padding");

static size_t
sums_bytes(size_t experts)
{
    return 16 + 16 * experts;
}

static bool
has_stats(const mt_gatehist *h)
{
    return h->config.statistics && h->experts > 0;
}

size_t
mt_gatehist_dump_bytes(const mt_gatehist *h)
{
    size_t stats = 0;

    if (has_stats(h)) stats = sizeof(stats_header) + (h->stats.marks + 1) * sums_bytes(h->experts);
    return sizeof(header) + stats + sizeof(index_line) * h->ring.len + h->ring.bytes;
}

static void
put(unsigned char **at, const void *src, size_t n)
{
    memcpy(*at, src, n);
    *at += n;
}

static void
put_sums(unsigned char **at, const mt_gatesums *sums, size_t experts)
{
    put(at, &sums->tokens, 8);
    put(at, &sums->nonfinite, 8);
    put(at, sums->importance, 8 * experts);
    put(at, sums->load, 8 * experts);
}

static void
put_stats(unsigned char **at, const mt_gatestats *s)
{
    put(at, &(stats_header){s->entries, s->span, s->marks}, sizeof(stats_header));
    put_sums(at, &s->total, s->experts);
    for (size_t i = 0; i < s->marks; i++)
        put_sums(at, &s->mark[i], s->experts);
}

void
mt_gatehist_dump(const mt_gatehist *h, void *dst)
{
    unsigned char *at = dst;
    header head = {.max_entries = h->config.max_entries,
                   .max_bytes = h->config.max_bytes,
                   .trim = (uint32_t)h->config.trim,
                   .keep = (uint32_t)h->config.keep,
                   .dtype = h->config.dtype,
                   .top_k = h->config.top_k,
                   .statistics = h->config.statistics,
                   .experts = h->experts,
                   .appended = h->ring.seq,
                   .len = h->ring.len};

    put(&at, &head, sizeof head);
    if (has_stats(h)) put_stats(&at, &h->stats);
    for (size_t i = 0; i < h->ring.len; i++) {
        const mt_slot *slot = mt_ring_slot(&h->ring, i);
        put(&at, &(index_line){slot->rows, slot->dtype}, sizeof(index_line));
    }
    for (size_t i = 0; i < h->ring.len; i++) {
        const mt_slot *slot = mt_ring_slot(&h->ring, i);
        mt_ring_read(&h->ring, slot, 0, at, slot->bytes);
        at += slot->bytes;
    }
    assert(at == (unsigned char *)dst + mt_gatehist_dump_bytes(h));
}

/* What is left to read. */
typedef struct cursor {
    const unsigned char *at;
    size_t left;
} cursor;

/* False, and nothing is taken, where so many bytes are not left. */
static bool
take(cursor *in, void *dst, size_t n)
{
    if (n > in->left) return false;
    memcpy(dst, in->at, n);
    in->at += n;
    in->left -= n;
    return true;
}

static const char *
header_fault(const header *h)
{
    bool dtype = h->dtype == MT_DTYPE_SAME || (h->dtype >= 0 && h->dtype < MT_DTYPE_COUNT &&
                                               mt_dtype_writable((mt_dtype)h->dtype));

    if (h->max_entries == 0 || h->max_bytes == 0) return "a limit of zero";
    if (h->trim > MT_TRIM_OLDEST || h->keep > MT_KEEP_TOPK || h->statistics > 1 || h->zero != 0)
        return "an unknown option";
    if (!dtype) return "an unknown dtype";
    if (h->top_k == 0 || h->top_k > MT_TOP_K_MAX) return "a top_k out of range";
    if (h->experts > MT_EXPERTS_MAX) return "more experts than possible";
    if (h->appended > UINT64_MAX / 2) return "more entries than possible"; /* it must not wrap */
    if (h->experts == 0 && h->appended > 0) return "entries without experts";
    if (h->experts > 0 && h->experts < h->top_k) return "fewer experts than top_k";
    if (h->len > h->appended || h->len > h->max_entries) return "more entries than possible";
    return NULL;
}

static bool
take_sums(cursor *in, mt_gatesums *sums, size_t experts)
{
    return take(in, &sums->tokens, 8) && take(in, &sums->nonfinite, 8) &&
           take(in, sums->importance, 8 * experts) && take(in, sums->load, 8 * experts);
}

/* The marks must be the ones that `entries` entries leave behind. */
static bool
marks_fit(const stats_header *s)
{
    if (s->span == 0 || (s->span & (s->span - 1)) != 0 || s->marks > MT_MARKS) return false;
    return s->entries / s->span == s->marks;
}

/* Counts only grow: a window is the difference of two marks. */
static bool
grows_to(const mt_gatesums *from, const mt_gatesums *to, size_t experts)
{
    if (from->tokens > to->tokens || from->nonfinite > to->nonfinite) return false;
    for (size_t e = 0; e < experts; e++)
        if (from->load[e] > to->load[e]) return false;
    return true;
}

static bool
marks_grow(const mt_gatestats *s)
{
    for (size_t i = 0; i < s->marks; i++) {
        const mt_gatesums *next = i + 1 < s->marks ? &s->mark[i + 1] : &s->total;
        if (!grows_to(&s->mark[i], next, s->experts)) return false;
    }
    return true;
}

static mt_status
take_stats(cursor *in, mt_gatestats *s, uint64_t appended, mt_error *err)
{
    stats_header head;
    bool whole;

    if (!take(in, &head, sizeof head) || head.entries > appended || !marks_fit(&head))
        return mt_fail_format(err, "statistics that contradict themselves");
    s->entries = head.entries;
    s->span = head.span;
    s->marks = head.marks;
    whole = take_sums(in, &s->total, s->experts);
    for (size_t i = 0; i < s->marks && whole; i++)
        whole = take_sums(in, &s->mark[i], s->experts);
    if (!whole) return mt_fail_format(err, "it ends inside the statistics");
    return marks_grow(s) ? MT_OK : mt_fail_format(err, "statistics that contradict themselves");
}

/* Claims one entry after checking that its record is there and fits the budget. */
static mt_status
claim_entry(mt_gatehist *h, index_line line, size_t left, mt_error *err)
{
    mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)line.dtype);
    size_t bytes;

    if (line.dtype >= MT_DTYPE_COUNT ||
        (h->config.dtype != MT_DTYPE_SAME && (int)line.dtype != h->config.dtype))
        return mt_fail_format(err, "an entry of another dtype");
    if (!mt_size_mul(line.rows, mt_gaterow_bytes(&f), &bytes) || bytes > left - h->ring.bytes)
        return mt_fail_format(err, "an entry longer than the file");
    if (bytes > h->config.max_bytes - h->ring.bytes)
        return mt_fail_format(err, "more bytes than its own limit");
    mt_ring_claim(&h->ring, (mt_slot){.bytes = bytes, .rows = line.rows, .dtype = line.dtype});
    return MT_OK;
}

static mt_status
take_records(cursor *in, mt_gatehist *h, mt_error *err)
{
    for (size_t i = 0; i < h->ring.len; i++) {
        const mt_slot *slot = mt_ring_slot(&h->ring, i);
        mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)slot->dtype);
        unsigned char *to = mt_ring_direct(&h->ring, slot);
        if (!mt_gaterow_valid(&f, in->at, slot->rows))
            return mt_fail_format(err, "an expert index out of range");
        if (slot->bytes > 0) take(in, to, slot->bytes);
    }
    return in->left > 0 ? mt_fail_format(err, "bytes after the last record") : MT_OK;
}

static mt_status
take_entries(cursor *in, mt_gatehist *h, uint64_t len, mt_error *err)
{
    cursor index = *in;
    mt_status st;

    if (len > in->left / sizeof(index_line)) return mt_fail_format(err, "it ends inside the index");
    in->at += sizeof(index_line) * len;
    in->left -= sizeof(index_line) * len;
    if ((st = mt_gatehist_hold(h, mt_size_min(in->left, h->config.max_bytes), err)) != MT_OK)
        return st;
    for (uint64_t i = 0; i < len; i++) {
        index_line line = {0};
        (void)take(&index, &line, sizeof line);
        if ((st = claim_entry(h, line, in->left, err)) != MT_OK) return st;
    }
    return take_records(in, h, err);
}

static mt_status
fill_from(cursor *in, mt_gatehist *h, const header *head, mt_error *err)
{
    mt_status st;

    if (head->experts == 0)
        return in->left > 0 ? mt_fail_format(err, "bytes without experts") : MT_OK;
    /* 16 bytes an expert in the file before 2 KiB an expert are taken. */
    if (h->config.statistics && head->experts > in->left / 16)
        return mt_fail_format(err, "it ends inside the statistics");
    if ((st = mt_gatehist_fix_experts(h, head->experts, err)) != MT_OK) return st;
    if (has_stats(h) && (st = take_stats(in, &h->stats, head->appended, err)) != MT_OK) return st;
    if ((st = take_entries(in, h, head->len, err)) != MT_OK) return st;
    h->ring.seq = head->appended;
    return MT_OK;
}

mt_status
mt_gatehist_parse(const mt_alloc *mem, const mt_vmem_ops *vm, mt_ledger *ledger, const void *src,
                  size_t bytes, mt_gatehist **out, mt_error *err)
{
    cursor in = {.at = src, .left = bytes};
    mt_gatehist_config config;
    const char *fault;
    mt_gatehist *h;
    header head;
    mt_status st;

    if (!take(&in, &head, sizeof head)) return mt_fail_format(err, "it ends inside the header");
    if ((fault = header_fault(&head)) != NULL) return mt_fail_format(err, fault);
    config = (mt_gatehist_config){.max_entries = head.max_entries,
                                  .max_bytes = head.max_bytes,
                                  .trim = (mt_trim)head.trim,
                                  .keep = (mt_keep)head.keep,
                                  .dtype = head.dtype,
                                  .top_k = head.top_k,
                                  .statistics = head.statistics == 1,
                                  .ledger = ledger,
                                  .owner_asks = true};
    if ((st = mt_gatehist_new(mem, vm, &config, &h, err)) != MT_OK) return st;
    if ((st = fill_from(&in, h, &head, err)) != MT_OK) {
        mt_gatehist_free(h);
        return st;
    }
    *out = h;
    return MT_OK;
}
