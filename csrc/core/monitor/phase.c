/* phase.c -- how this file works.
 *
 * A phase that is open has a slot with an interval of peaks.h; its token is the slot's number plus
 * a multiple of the number of slots, so that an old token never fits a new phase. Leaving it ends
 * the interval and adds it to the row of its name. */
#include "monitor/phase.h"

#include <assert.h>
#include <string.h>

#include "port/probe.h"
#include "base/clock.h"
#include "base/size.h"
#include "base/utf8.h"

typedef struct slot {
    mt_interval in;
    uint64_t token; /* 0: free. index + 1 + a multiple of MT_PHASE_OPEN, never used twice */
    uint64_t began;
    size_t row;
} slot;

struct mt_phases {
    mt_alloc mem;
    mt_peaks *peaks;
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
    mem = ph->mem;
    mem.put(mem.ctx, ph, phase_block_bytes(ph->most_rows));
}

/* --- rows ------------------------------------------------------------------------------------ */

/* The name's row, made where there is room, else that of all others. */
static size_t
row_of(mt_phases *ph, const char *name, size_t len)
{
    mt_phase_row *row;
    size_t i;

    len = mt_utf8_cut(name, len, MT_PHASE_NAME - 1);
    for (i = 0; i < ph->len; i++) {
        row = &ph->rows[i];
        if (memcmp(row->name, name, len) == 0 && row->name[len] == 0) return i;
    }
    if (i == ph->most_rows) return i - 1;
    if (i == ph->most_rows - 1) {
        name = MT_PHASE_OTHERS;
        len = sizeof MT_PHASE_OTHERS - 1;
    }
    row = &ph->rows[ph->len++];
    memcpy(row->name, name, len);
    row->peak = MT_UNKNOWN;
    return i;
}

/* --- phases ---------------------------------------------------------------------------------- */

uint64_t
mt_phases_enter(mt_phases *ph, const char *name, size_t len)
{
    slot *s = ph->slots;

    while (s->token != 0)
        if (++s == ph->slots + MT_PHASE_OPEN) return 0;
    s->token = ++ph->entered * MT_PHASE_OPEN + (uint64_t)(s - ph->slots);
    s->row = row_of(ph, name, len);
    s->began = mt_now_ns();
    mt_peaks_begin(ph->peaks, &s->in);
    return s->token;
}

bool
mt_phases_leave(mt_phases *ph, uint64_t token, mt_phase_seen *out)
{
    slot *s = &ph->slots[token % MT_PHASE_OPEN];
    mt_phase_row *row = &ph->rows[s->row];

    if (token == 0 || s->token != token) return false;
    mt_peaks_end(ph->peaks, &s->in);
    *out = (mt_phase_seen){s->in.peak, mt_now_ns() - s->began, s->in.exact};
    row->count++;
    row->total_ns += out->ns;
    row->most_ns = mt_u64_max(row->most_ns, out->ns);
    if (out->peak != MT_UNKNOWN && (row->peak == MT_UNKNOWN || row->peak < out->peak))
        row->peak = out->peak;
    row->inexact += !out->exact;
    s->token = 0;
    return true;
}

size_t
mt_phases_rows(mt_phases *ph, mt_phase_row *out, size_t n)
{
    if (n > 0) memcpy(out, ph->rows, mt_size_min(n, ph->len) * sizeof *out);
    return ph->len;
}

bool
mt_phases_current(mt_phases *ph, char out[MT_PHASE_NAME])
{
    const slot *last = NULL;

    for (const slot *s = ph->slots; s != ph->slots + MT_PHASE_OPEN; s++) {
        if (s->token != 0 && (last == NULL || s->token > last->token)) last = s;
    }
    if (last != NULL) memcpy(out, ph->rows[last->row].name, MT_PHASE_NAME);
    return last != NULL;
}
