/* phase.c -- how this file works.
 *
 * A phase that is open has a slot with an interval of peaks.h; its token is the slot's number plus
 * a multiple of the number of slots, so that an old token never fits a new phase. Leaving it ends
 * the interval and adds it to the row of its name. One lock is held throughout, and the one of the
 * peaks inside of it. */
#include "monitor/phase.h"

#include <assert.h>
#include <string.h>

#include "base/lock.h"
#include "port/probe.h"
#include "base/size.h"
#include "base/utf8.h"

typedef struct slot {
    mt_interval in;
    uint64_t token; /* 0: free. index + 1 + a multiple of MT_PHASE_OPEN, never used twice */
    uint64_t began;
    uint64_t entry;
    size_t row;
    bool ends;
} slot;

struct mt_phases {
    mt_alloc mem;
    mt_peaks *peaks;
    mt_lock lock;
    uint64_t entered;
    slot slots[MT_PHASE_OPEN];
    size_t most_rows;
    size_t len;
    mt_phase_row rows[];
};

static size_t
phase_block_bytes(size_t rows)
{
    size_t bytes;

    if (!mt_size_mul(rows, sizeof(mt_phase_row), &bytes)) return 0;
    return mt_size_add(bytes, sizeof(mt_phases), &bytes) ? bytes : 0;
}

mt_status
mt_phases_new(const mt_alloc *mem, mt_peaks *peaks, size_t rows, mt_phases **out, mt_error *err)
{
    size_t bytes = phase_block_bytes(rows);
    mt_phases *ph;

    assert(rows > 1);
    if (bytes == 0) return mt_fail(err, MT_EOVERFLOW, "mt_phases_new", 0);
    if ((ph = mt_alloc_zeroed(mem, 1, bytes)) == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    ph->mem = *mem;
    ph->peaks = mt_peaks_hold(peaks);
    ph->most_rows = rows;
    mt_lock_init(&ph->lock);
    *out = ph;
    return MT_OK;
}

void
mt_phases_free(mt_phases *ph)
{
    mt_alloc mem;

    if (ph == NULL) return;
    for (size_t i = 0; i < MT_PHASE_OPEN; i++) {
        if (ph->slots[i].token != 0) mt_peaks_end(ph->peaks, &ph->slots[i].in);
    }
    mt_peaks_drop(ph->peaks);
    mt_lock_fini(&ph->lock);
    mem = ph->mem;
    mem.put(mem.ctx, ph, phase_block_bytes(ph->most_rows));
}

/* --- rows ------------------------------------------------------------------------------------ */

static bool
is_named(const mt_phase_row *row, const char *name, size_t len)
{
    return memcmp(row->name, name, len) == 0 && row->name[len] == 0;
}

/* The name's row, made where there is room, else that of all others. */
static size_t
row_of(mt_phases *ph, const char *name, size_t len)
{
    mt_phase_row *row;
    size_t i;

    len = mt_utf8_cut(name, len, MT_PHASE_NAME - 1);
    for (i = 0; i < ph->len; i++) {
        if (is_named(&ph->rows[i], name, len)) return i;
    }
    if (i == ph->most_rows) return i - 1;
    if (i == ph->most_rows - 1) {
        name = MT_PHASE_OTHERS;
        len = sizeof MT_PHASE_OTHERS - 1;
    }
    row = &ph->rows[ph->len++];
    memcpy(row->name, name, len);
    row->peak = row->most_rise = MT_UNKNOWN;
    row->last = (mt_phase_seen){MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, false};
    return i;
}

static void
phase_raise_to(uint64_t *most, uint64_t seen)
{
    if (*most == MT_UNKNOWN || (seen != MT_UNKNOWN && *most < seen)) *most = seen;
}

static void
phase_count(mt_phase_row *row, const mt_phase_seen *seen)
{
    assert(row->open > 0);
    row->open--;
    row->count++;
    row->total_ns += seen->ns;
    phase_raise_to(&row->most_ns, seen->ns);
    phase_raise_to(&row->peak, seen->peak);
    if (seen->peak != MT_UNKNOWN && seen->entry != MT_UNKNOWN)
        phase_raise_to(&row->most_rise, seen->peak > seen->entry ? seen->peak - seen->entry : 0);
    row->inexact += !seen->exact;
    row->last = *seen;
}

/* --- phases ---------------------------------------------------------------------------------- */

static slot *
phase_free_slot(mt_phases *ph)
{
    for (size_t i = 0; i < MT_PHASE_OPEN; i++) {
        if (ph->slots[i].token == 0) return &ph->slots[i];
    }
    return NULL;
}

mt_status
mt_phases_enter(mt_phases *ph, const char *name, size_t len, bool ends, uint64_t *token,
                mt_error *err)
{
    slot *s;

    mt_lock_take(&ph->lock);
    if ((s = phase_free_slot(ph)) == NULL) {
        mt_lock_give(&ph->lock);
        return mt_fail_limit(err, 1, MT_PHASE_OPEN, MT_PHASE_OPEN);
    }
    s->token = ++ph->entered * MT_PHASE_OPEN + (uint64_t)(s - ph->slots);
    s->ends = ends;
    s->row = row_of(ph, name, len);
    ph->rows[s->row].open++;
    s->began = mt_peaks_time_ns(ph->peaks);
    s->entry = ends ? mt_peaks_now(ph->peaks) : MT_UNKNOWN;
    mt_peaks_begin(ph->peaks, &s->in);
    *token = s->token;
    mt_lock_give(&ph->lock);
    return MT_OK;
}

/* What memory was at the ends is a peak's lower bound as well. */
static mt_phase_seen
seen_by(mt_phases *ph, slot *s)
{
    mt_phase_seen seen = {.entry = s->entry, .exit = MT_UNKNOWN};

    mt_peaks_end(ph->peaks, &s->in);
    if (s->ends) seen.exit = mt_peaks_now(ph->peaks);
    seen.ns = mt_peaks_time_ns(ph->peaks) - s->began;
    seen.peak = s->in.peak;
    seen.exact = s->in.exact;
    if (seen.entry != MT_UNKNOWN) phase_raise_to(&seen.peak, seen.entry);
    if (seen.exit != MT_UNKNOWN) phase_raise_to(&seen.peak, seen.exit);
    return seen;
}

mt_status
mt_phases_leave(mt_phases *ph, uint64_t token, mt_phase_seen *out, mt_error *err)
{
    slot *s = &ph->slots[token % MT_PHASE_OPEN];

    mt_lock_take(&ph->lock);
    if (token == 0 || s->token != token) {
        mt_lock_give(&ph->lock);
        return mt_fail_shape(err, "a phase that is not open", 0, 0);
    }
    *out = seen_by(ph, s);
    phase_count(&ph->rows[s->row], out);
    s->token = 0;
    mt_lock_give(&ph->lock);
    return MT_OK;
}

size_t
mt_phases_rows(mt_phases *ph, mt_phase_row *out, size_t n)
{
    size_t len;

    mt_lock_take(&ph->lock);
    len = ph->len;
    if (n > 0) memcpy(out, ph->rows, mt_size_min(n, len) * sizeof *out);
    mt_lock_give(&ph->lock);
    return len;
}

bool
mt_phases_current(mt_phases *ph, char out[MT_PHASE_NAME])
{
    const slot *last = NULL;

    mt_lock_take(&ph->lock);
    for (const slot *s = ph->slots; s != ph->slots + MT_PHASE_OPEN; s++) {
        if (s->token != 0 && (last == NULL || s->token > last->token)) last = s;
    }
    if (last != NULL) memcpy(out, ph->rows[last->row].name, MT_PHASE_NAME);
    mt_lock_give(&ph->lock);
    return last != NULL;
}
