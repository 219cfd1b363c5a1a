/* file.c -- how this file works.
 *
 * Writing knows the exact size before it begins (mt_gatehist_dump_bytes) and then goes once through
 * the history in the order that file.h draws. Reading goes the same way through a cursor that never
 * passes the end: each count is held against its maximum and against the bytes that are left before
 * memory is taken for it; then the history is made, its entries are claimed in the ring as an
 * append would, and their bytes are copied in. */
#include "gate/file.h"

#include <string.h>

#include "gate/history_private.h"

enum { HEADER = 2 * 8 + 6 * 4 + 3 * 8, STATS_HEADER = 3 * 8 };

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
    size_t stats = has_stats(h) ? STATS_HEADER + (h->stats.marks + 1) * sums_bytes(h->experts) : 0;

    return HEADER + stats + 8 * h->ring.len + h->ring.bytes;
}

static void
put(unsigned char **at, const void *src, size_t n)
{
    memcpy(*at, src, n);
    *at += n;
}

static void
put_u32(unsigned char **at, uint32_t value)
{
    put(at, &value, sizeof value);
}

static void
put_u64(unsigned char **at, uint64_t value)
{
    put(at, &value, sizeof value);
}

static void
put_sums(unsigned char **at, const mt_gatesums *sums, size_t experts)
{
    put_u64(at, sums->tokens);
    put_u64(at, sums->nonfinite);
    put(at, sums->importance, 8 * experts);
    put(at, sums->load, 8 * experts);
}

static void
put_stats(unsigned char **at, const mt_gatestats *s)
{
    put_u64(at, s->entries);
    put_u64(at, s->span);
    put_u64(at, s->marks);
    put_sums(at, &s->total, s->experts);
    for (size_t i = 0; i < s->marks; i++)
        put_sums(at, &s->mark[i], s->experts);
}

static void
put_header(unsigned char **at, const mt_gatehist *h)
{
    put_u64(at, h->config.max_entries);
    put_u64(at, h->config.max_bytes);
    put_u32(at, (uint32_t)h->config.trim);
    put_u32(at, (uint32_t)h->config.keep);
    put_u32(at, (uint32_t)h->config.dtype);
    put_u32(at, h->config.top_k);
    put_u32(at, h->config.statistics);
    put_u32(at, 0);
    put_u64(at, h->experts);
    put_u64(at, h->ring.seq);
    put_u64(at, h->ring.len);
}

void
mt_gatehist_dump(const mt_gatehist *h, void *dst)
{
    unsigned char *at = dst;

    put_header(&at, h);
    if (has_stats(h)) put_stats(&at, &h->stats);
    for (size_t i = 0; i < h->ring.len; i++) {
        put_u32(&at, mt_ring_slot(&h->ring, i)->rows);
        put_u32(&at, mt_ring_slot(&h->ring, i)->dtype);
    }
    for (size_t i = 0; i < h->ring.len; i++) {
        const mt_slot *slot = mt_ring_slot(&h->ring, i);
        mt_ring_read(&h->ring, slot, 0, at, slot->bytes);
        at += slot->bytes;
    }
}

/* What is left to read. Past the end it yields zeros and remembers: one check after a group of
 * fields is enough. */
typedef struct cursor {
    const unsigned char *at;
    size_t left;
    bool short_of_bytes;
} cursor;

static void
take(cursor *in, void *dst, size_t n)
{
    if (n > in->left) {
        in->short_of_bytes = true;
        memset(dst, 0, n);
        return;
    }
    memcpy(dst, in->at, n);
    in->at += n;
    in->left -= n;
}

static uint32_t
take_u32(cursor *in)
{
    uint32_t value;

    take(in, &value, sizeof value);
    return value;
}

static uint64_t
take_u64(cursor *in)
{
    uint64_t value;

    take(in, &value, sizeof value);
    return value;
}

typedef struct header {
    mt_gatehist_config config;
    uint64_t experts, appended, len;
} header;

static const char *
config_fault(const mt_gatehist_config *c, uint32_t trim, uint32_t keep, uint32_t flag,
             uint32_t zero)
{
    bool dtype = c->dtype == MT_DTYPE_SAME || (c->dtype >= 0 && c->dtype < MT_DTYPE_COUNT &&
                                               mt_dtype_writable((mt_dtype)c->dtype));

    if (c->max_entries == 0 || c->max_bytes == 0) return "a limit of zero";
    if (trim > MT_TRIM_OLDEST || keep > MT_KEEP_TOPK || flag > 1 || zero != 0)
        return "an unknown option";
    if (!dtype) return "an unknown dtype";
    if (c->top_k == 0 || c->top_k > MT_TOP_K_MAX) return "a top_k out of range";
    return NULL;
}

static const char *
header_fault(const header *h)
{
    if (h->experts > MT_EXPERTS_MAX) return "more experts than possible";
    if (h->appended > UINT64_MAX / 2) return "more entries than possible"; /* it must not wrap */
    if (h->experts == 0 && h->appended > 0) return "entries without experts";
    if (h->experts > 0 && h->experts < h->config.top_k) return "fewer experts than top_k";
    if (h->len > h->appended || h->len > h->config.max_entries) return "more entries than possible";
    return NULL;
}

static mt_status
take_header(cursor *in, header *h, mt_error *err)
{
    uint32_t trim, keep, flag, zero;
    const char *fault;

    h->config.max_entries = take_u64(in);
    h->config.max_bytes = take_u64(in);
    trim = take_u32(in);
    keep = take_u32(in);
    h->config.dtype = (int)take_u32(in);
    h->config.top_k = take_u32(in);
    flag = take_u32(in);
    zero = take_u32(in);
    h->experts = take_u64(in);
    h->appended = take_u64(in);
    h->len = take_u64(in);
    if (in->short_of_bytes) return mt_fail_format(err, "it ends inside the header");
    fault = config_fault(&h->config, trim, keep, flag, zero);
    if (fault == NULL) fault = header_fault(h);
    if (fault != NULL) return mt_fail_format(err, fault);
    h->config.trim = (mt_trim)trim;
    h->config.keep = (mt_keep)keep;
    h->config.statistics = flag == 1;
    return MT_OK;
}

static void
take_sums(cursor *in, mt_gatesums *sums, size_t experts)
{
    sums->tokens = take_u64(in);
    sums->nonfinite = take_u64(in);
    take(in, sums->importance, 8 * experts);
    take(in, sums->load, 8 * experts);
}

/* The marks must be the ones that `entries` entries leave behind. */
static bool
marks_fit(const mt_gatestats *s)
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
    s->entries = take_u64(in);
    s->span = take_u64(in);
    s->marks = take_u64(in);
    if (in->short_of_bytes || s->entries > appended || !marks_fit(s)) {
        s->marks = 0;
        return mt_fail_format(err, "statistics that contradict themselves");
    }
    take_sums(in, &s->total, s->experts);
    for (size_t i = 0; i < s->marks; i++)
        take_sums(in, &s->mark[i], s->experts);
    if (in->short_of_bytes) return mt_fail_format(err, "it ends inside the statistics");
    return marks_grow(s) ? MT_OK : mt_fail_format(err, "statistics that contradict themselves");
}

/* Claims one entry after checking that its record is there and fits the budget. */
static mt_status
claim_entry(mt_gatehist *h, uint32_t rows, uint32_t dtype, size_t left, mt_error *err)
{
    mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)dtype);
    size_t bytes;

    if (dtype >= MT_DTYPE_COUNT ||
        (h->config.dtype != MT_DTYPE_SAME && (int)dtype != h->config.dtype))
        return mt_fail_format(err, "an entry of another dtype");
    if (!mt_size_mul(rows, mt_gaterow_bytes(&f), &bytes) || bytes > left - h->ring.bytes)
        return mt_fail_format(err, "an entry longer than the file");
    if (bytes > h->config.max_bytes - h->ring.bytes)
        return mt_fail_format(err, "more bytes than its own limit");
    mt_ring_claim(&h->ring, (mt_slot){.bytes = bytes, .rows = rows, .dtype = dtype});
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

    if (len > in->left / 8) return mt_fail_format(err, "it ends inside the index");
    in->at += 8 * len;
    in->left -= 8 * len;
    if ((st = mt_gatehist_hold(h, mt_size_min(in->left, h->config.max_bytes), err)) != MT_OK)
        return st;
    for (uint64_t i = 0; i < len; i++) {
        uint32_t rows = take_u32(&index), dtype = take_u32(&index);
        if ((st = claim_entry(h, rows, dtype, in->left, err)) != MT_OK) return st;
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
    header head = {0};
    mt_gatehist *h;
    mt_status st;

    if ((st = take_header(&in, &head, err)) != MT_OK) return st;
    head.config.ledger = ledger;
    head.config.owner_asks = true;
    if ((st = mt_gatehist_new(mem, vm, &head.config, &h, err)) != MT_OK) return st;
    if ((st = fill_from(&in, h, &head, err)) != MT_OK) {
        mt_gatehist_free(h);
        return st;
    }
    *out = h;
    return MT_OK;
}
