/* history.c -- how this file works.
 *
 * An append has three steps. admit() checks the shape, reserves memory and scratch, and is all
 * that can fail. claim() evicts old entries and gives the record its place in the ring. fill()
 * writes it: rows go through in chunks that fit the scratch buffers, each packed, narrowed to the
 * record's type, encoded and counted. Reading decodes records by chunks as well. */
#include "gate/gate.h"

#include <assert.h>
#include <string.h>

#include "gate/history.h"
#include "base/size.h"

/* Each call of the ledger reserves at least this many bytes, unless fewer are left of max_bytes. */
enum { LEDGER_STEP = 64 << 10 };

/* Rows of a chunk; never 0. pre: experts are known. */
static size_t
chunk_rows(const mt_gatehist *h)
{
    return mt_size_max(1, MT_CHUNK / h->experts);
}

/* What a dtype is widened to before it is counted or ordered. */
static mt_gate_width
width_of(mt_dtype dtype)
{
    return dtype == MT_F64 ? MT_GATE_F64 : MT_GATE_F32;
}

/* A new member has reserved nothing, so not a byte of the arena may be touched yet. It has no
 * functions by which others could ask it to give back: its records are what a history is for. */
static mt_status
join_ledger(mt_gatehist *h, const char *name, mt_error *err)
{
    if (h->config.ledger == NULL) return MT_OK;
    h->ring.bound = 0;
    h->refused_more = SIZE_MAX; /* nothing was refused yet */
    return mt_ledger_join(h->config.ledger, name, 0, NULL, &h->member, err);
}

/* Makes an empty history that reports of its ledger call so. */
static mt_status
new_named(const mt_alloc *mem, const mt_vmem_ops *vm, const mt_gatehist_config *config,
          const char *name, mt_gatehist **out, mt_error *err)
{
    mt_gatehist *h = mt_alloc_zeroed(mem, 1, sizeof *h);
    mt_status st;

    if (h == NULL) return mt_fail(err, MT_ENOMEM, "mt_gatehist_new", 0);
    h->mem = mem;
    h->vm = vm;
    h->config = *config;
    mt_gatestats_init(&h->stats, mem, config->top_k);
    st = mt_ring_init(&h->ring, vm, config->max_entries, config->max_bytes, err);
    if (st == MT_OK) st = join_ledger(h, name, err);
    if (st != MT_OK) {
        mt_gatehist_free(h);
        return st;
    }
    *out = h;
    return MT_OK;
}

mt_status
mt_gatehist_new(const mt_alloc *mem, const mt_vmem_ops *vm, const mt_gatehist_config *config,
                mt_gatehist **out, mt_error *err)
{
    return new_named(mem, vm, config, "GateHistory", out, err);
}

/* Gives the scratch and the statistics' storage back: both are sized for the experts. */
static void
forget_experts(mt_gatehist *h)
{
    if (h->scratch_bytes > 0) h->mem->put(h->mem->ctx, h->raw, h->scratch_bytes);
    h->scratch_bytes = 0;
    mt_gatestats_fini(&h->stats);
    h->experts = 0;
}

void
mt_gatehist_free(mt_gatehist *h)
{
    if (h == NULL) return;
    forget_experts(h);
    mt_ring_fini(&h->ring);
    mt_ledger_leave(h->member); /* last: it releases what was given back just now */
    h->mem->put(h->mem->ctx, h, sizeof *h);
}

/* The scratch holds a chunk of rows four times over: raw, value, wide and coded. */
static mt_status
reserve_scratch(mt_gatehist *h, size_t experts, mt_error *err)
{
    size_t elements = mt_size_max(MT_CHUNK, experts), bytes;

    if (!mt_size_mul(elements, 8 + 8 + 4 + 12, &bytes))
        return mt_fail(err, MT_EOVERFLOW, "mt_gatehist_admit", 0);
    h->raw = h->mem->get(h->mem->ctx, bytes);
    if (h->raw == NULL) return mt_fail(err, MT_ENOMEM, "mt_gatehist_admit", 0);
    h->value = h->raw + 8 * elements;
    h->wide = (float *)(void *)(h->value + 8 * elements);
    h->coded = (unsigned char *)h->wide + 4 * elements;
    h->scratch_bytes = bytes;
    return MT_OK;
}

mt_status
mt_gatehist_fix_experts(mt_gatehist *h, size_t experts, mt_error *err)
{
    mt_status st;

    assert(h->ring.seq == 0);
    forget_experts(h); /* admitted once, but then never claimed: a device failed in between */
    if ((st = reserve_scratch(h, experts, err)) != MT_OK) return st;
    if (h->config.statistics && (st = mt_gatestats_reserve(&h->stats, experts, err)) != MT_OK) {
        forget_experts(h);
        return st;
    }
    h->experts = experts;
    return MT_OK;
}

static mt_dtype
record_dtype(const mt_gatehist *h, const mt_rows *rows)
{
    return h->config.dtype == MT_DTYPE_SAME ? rows->dtype : (mt_dtype)h->config.dtype;
}

static bool
record_bytes(const mt_gatehist *h, const mt_rows *shape, size_t *out)
{
    mt_gaterow_format f = mt_gatehist_format(h, shape->cols, record_dtype(h, shape));

    return mt_size_mul(shape->rows, mt_gaterow_bytes(&f), out);
}

/* Reserves at least `least` bytes more, and a whole step where the ledger has room for it. With
 * `asks` the others in the ledger are asked to give back where it has not even room for `least`. */
static mt_status
reserve_more(mt_gatehist *h, size_t least, bool asks, mt_error *err)
{
    size_t step = mt_size_max(LEDGER_STEP, h->ring.bound / 8 / LEDGER_STEP * LEDGER_STEP);
    size_t more = mt_size_min(mt_size_max(least, step), h->ring.capacity - h->ring.bound);
    mt_status st = mt_member_reserve(h->member, more, err);

    if (st != MT_OK) st = mt_member_reserve(h->member, more = least, err);
    if (st != MT_OK && asks && mt_ledger_reclaim(h->config.ledger, h->member, least) > 0)
        st = mt_member_reserve(h->member, least, err);
    if (st == MT_OK) h->ring.bound += more;
    return st;
}

mt_status
mt_gatehist_hold(mt_gatehist *h, size_t bytes, mt_error *err)
{
    assert(bytes <= h->ring.capacity);
    return bytes <= h->ring.bound ? MT_OK : reserve_more(h, bytes - h->ring.bound, false, err);
}

/* True where the ledger refused as few bytes as `more` before, and nothing was released since. */
static bool
is_refused(const mt_gatehist *h, size_t more)
{
    return more >= h->refused_more && mt_ledger_changes(h->config.ledger) == h->refused;
}

/* Reserves what a record of so many bytes needs beside those that are held. Where the ledger
 * refuses, but the record fits into what is reserved already, claim() evicts entries for it. */
static mt_status
hold_record(mt_gatehist *h, size_t bytes, mt_error *err)
{
    bool fits_alone = bytes <= h->ring.bound, owner_asks = h->config.owner_asks, refused;
    size_t need = mt_size_min(h->ring.bytes + bytes, h->ring.capacity);
    mt_gatehist_lack lack;
    uint64_t seen;

    if (need <= h->ring.bound) return MT_OK;
    refused = is_refused(h, need - h->ring.bound);
    if (fits_alone && refused) return MT_OK;
    seen = mt_ledger_changes(h->config.ledger);
    if (reserve_more(h, need - h->ring.bound, !owner_asks, err) == MT_OK) return MT_OK;
    lack = (mt_gatehist_lack){need - h->ring.bound, seen};
    if (owner_asks && !refused) {
        h->lack = lack;
        return mt_fail(err, MT_EAGAIN, "mt_gatehist_admit", 0);
    }
    mt_gatehist_asked(h, lack);
    return fits_alone ? MT_OK : MT_ELIMIT;
}

mt_gatehist_lack
mt_gatehist_lacks(const mt_gatehist *h)
{
    return h->lack;
}

void
mt_gatehist_asked(mt_gatehist *h, mt_gatehist_lack lack)
{
    h->refused = lack.seen;
    h->refused_more = lack.bytes;
}

mt_status
mt_gatehist_admit(mt_gatehist *h, const mt_rows *shape, mt_error *err)
{
    size_t bytes;
    mt_status st;

    if (h->ring.seq > 0 && shape->cols != h->experts)
        return mt_fail_shape(err, MT_SHAPE_EXPERTS, shape->cols, h->experts);
    if (shape->cols > MT_EXPERTS_MAX)
        return mt_fail_shape(err, MT_SHAPE_COLUMNS, shape->cols, MT_EXPERTS_MAX);
    if (shape->cols < h->config.top_k)
        return mt_fail_shape(err, MT_SHAPE_TOP_K, shape->cols, h->config.top_k);
    if (shape->rows > UINT32_MAX) return mt_fail_shape(err, MT_SHAPE_ROWS, shape->rows, UINT32_MAX);
    if (!record_bytes(h, shape, &bytes)) return mt_fail(err, MT_EOVERFLOW, "mt_gatehist_admit", 0);
    if (bytes > h->config.max_bytes)
        return mt_fail_limit(err, bytes, h->ring.bytes, h->config.max_bytes);
    if (h->member != NULL && (st = hold_record(h, bytes, err)) != MT_OK) return st;
    return h->experts == shape->cols ? MT_OK : mt_gatehist_fix_experts(h, shape->cols, err);
}

/* How many entries must go so that one more fits in `entries` entries and `limit` bytes. */
static size_t
surplus(const mt_ring *r, size_t bytes, size_t entries, size_t limit)
{
    size_t n = 0, live = r->bytes;

    while (n < r->len && (r->len - n >= entries || live + bytes > limit))
        live -= mt_ring_slot(r, n++)->bytes;
    return n;
}

/* MT_TRIM_HALF does what people write by hand, `if len(h) > limit: h = h[-limit // 2:]`: after the
 * append, half of the limit that was hit is occupied, the new entry included. Where a ledger has
 * refused more, what is held there is the limit. */
static void
evict(mt_gatehist *h, size_t bytes)
{
    mt_ring *r = &h->ring;
    bool by_count = r->len == h->config.max_entries;
    bool by_bytes = bytes > r->bound - r->bytes;
    size_t entries = h->config.max_entries, limit = r->bound;

    if (!by_count && !by_bytes) return;
    if (h->config.trim == MT_TRIM_HALF && by_count) entries /= 2;
    if (h->config.trim == MT_TRIM_HALF && by_bytes) limit /= 2;
    mt_ring_drop(r, surplus(r, bytes, entries, limit));
}

uint64_t
mt_gatehist_claim(mt_gatehist *h, const mt_rows *shape)
{
    size_t bytes = 0;
    bool fits = record_bytes(h, shape, &bytes);

    assert(fits && shape->cols == h->experts);
    (void)fits;
    evict(h, bytes);
    return mt_ring_claim(&h->ring, (mt_slot){.bytes = bytes,
                                             .rows = (uint32_t)shape->rows,
                                             .dtype = (uint32_t)record_dtype(h, shape)});
}

/* The slot of an entry number, or NULL when it was evicted. */
static const mt_slot *
find(const mt_ring *r, uint64_t number)
{
    uint64_t oldest = r->seq - r->len;

    assert(number < r->seq);
    return number < oldest ? NULL : mt_ring_slot(r, (size_t)(number - oldest));
}

/* A chunk of n elements as float32 or float64, whichever its dtype calls for. */
static const void *
widened(const mt_gatehist *h, const void *raw, mt_dtype dtype, size_t n)
{
    if (dtype == MT_F32 || dtype == MT_F64) return raw;
    mt_widen_f32(dtype, raw, h->wide, n);
    return h->wide;
}

/* A chunk of n elements in the record's dtype. */
static const void *
narrowed(mt_gatehist *h, const void *raw, mt_dtype from, mt_dtype to, size_t n)
{
    if (from == to) return raw;
    mt_widen_f32(from, raw, h->wide, n);
    mt_narrow_f32(to, h->wide, h->value, n);
    return h->value;
}

static void
write_chunk(mt_gatehist *h, const mt_slot *slot, const void *raw, mt_dtype dtype, size_t first,
            size_t rows)
{
    mt_gaterow_format f = mt_gatehist_format(h, h->experts, (mt_dtype)slot->dtype);
    size_t row = mt_gaterow_bytes(&f), n = rows * h->experts;
    const void *record = narrowed(h, raw, dtype, f.dtype, n);

    if (f.keep == MT_KEEP_TOPK) {
        mt_gaterow_encode(&f, record, widened(h, raw, dtype, n), width_of(dtype), rows, h->coded);
        record = h->coded;
    }
    mt_ring_write(&h->ring, slot, first * row, record, rows * row);
}

/* Adds packed rows of any dtype to s, by way of the scratch. raw is not h->wide. */
static void
count_rows(const mt_gatehist *h, const void *raw, mt_dtype dtype, size_t rows, mt_gatestats *s)
{
    const void *wide = widened(h, raw, dtype, rows * h->experts);

    mt_gatestats_add(s, wide, width_of(dtype), rows);
}

/* Rows [first, first + count) packed: where they lie, or gathered into scratch. */
static const void *
packed_chunk(mt_gatehist *h, const mt_rows *rows, size_t first, size_t count)
{
    size_t row = rows->cols * mt_dtype_size(rows->dtype);

    if (mt_rows_is_packed(rows)) return (const unsigned char *)rows->data + first * row;
    mt_rows_pack(rows, first, count, h->raw);
    return h->raw;
}

/* True when the record is the tensor's own bytes, which lie in one piece, and nothing else is to see
 * them. */
static bool
plain_copy(const mt_gatehist *h, const mt_slot *slot, const mt_rows *rows)
{
    return slot != NULL && h->config.keep == MT_KEEP_ALL && slot->dtype == rows->dtype &&
           !h->config.statistics && mt_rows_is_packed(rows);
}

void
mt_gatehist_fill(mt_gatehist *h, uint64_t number, const mt_rows *rows)
{
    const mt_slot *slot = find(&h->ring, number);
    size_t step = plain_copy(h, slot, rows) ? rows->rows : chunk_rows(h);

    assert(rows->cols == h->experts && (slot == NULL || slot->rows == rows->rows));
    for (size_t first = 0; first < rows->rows; first += step) {
        size_t count = mt_size_min(step, rows->rows - first);
        const void *raw = packed_chunk(h, rows, first, count);

        if (slot != NULL) write_chunk(h, slot, raw, rows->dtype, first, count);
        if (h->config.statistics) count_rows(h, raw, rows->dtype, count, &h->stats);
    }
    if (h->config.statistics) mt_gatestats_end_entry(&h->stats);
}

mt_status
mt_gatehist_push(mt_gatehist *h, const mt_rows *rows, mt_error *err)
{
    mt_status st = mt_gatehist_admit(h, rows, err);

    if (st == MT_OK) mt_gatehist_fill(h, mt_gatehist_claim(h, rows), rows);
    return st;
}

/* --- reading --------------------------------------------------------------------------------- */

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
    size_t step = h->config.keep == MT_KEEP_ALL ? slot->rows : chunk_rows(h);
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
    size_t step = chunk_rows(h);

    for (size_t first = 0; first < slot->rows; first += step) {
        size_t rows = mt_size_min(step, slot->rows - first);
        if (h->config.keep == MT_KEEP_TOPK) {
            recount_kept(h, slot, first, rows, s);
            continue;
        }
        decode_chunk(h, slot, first, rows, h->raw);
        count_rows(h, h->raw, (mt_dtype)slot->dtype, rows, s);
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
    mt_status st;

    assert(step != 0 && (count == 0 || start < h->ring.len));
    *out = NULL;
    if ((st = new_named(h->mem, h->vm, &h->config, name, out, err)) != MT_OK) return st;
    assert(*out != NULL);
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

/* --- what it holds --------------------------------------------------------------------------- */

const mt_gatehist_config *
mt_gatehist_configuration(const mt_gatehist *h)
{
    return &h->config;
}

size_t
mt_gatehist_len(const mt_gatehist *h)
{
    return h->ring.len;
}

size_t
mt_gatehist_bytes(const mt_gatehist *h)
{
    return h->ring.bytes;
}

size_t
mt_gatehist_extent(const mt_gatehist *h)
{
    return h->ring.extent;
}

size_t
mt_gatehist_experts(const mt_gatehist *h)
{
    return h->experts;
}

uint64_t
mt_gatehist_appended(const mt_gatehist *h)
{
    return h->ring.seq;
}

const mt_gatestats *
mt_gatehist_stats(const mt_gatehist *h)
{
    return &h->stats;
}

void
mt_gatehist_reset_stats(mt_gatehist *h)
{
    mt_gatestats_reset(&h->stats);
}

void
mt_gatehist_clear(mt_gatehist *h)
{
    if (h->member == NULL) {
        mt_ring_drop(&h->ring, h->ring.len);
        return;
    }
    mt_ring_vacate(&h->ring);
    mt_member_release(h->member, h->ring.bound);
    h->ring.bound = 0;
}

mt_rows
mt_gatehist_shape(const mt_gatehist *h, size_t i)
{
    const mt_slot *slot = mt_ring_slot(&h->ring, i);

    return mt_rows_packed(NULL, (mt_dtype)slot->dtype, slot->rows, h->experts);
}
