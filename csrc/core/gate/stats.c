#include "gate/stats.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"

void
mt_gatestats_init(mt_gatestats *s, const mt_alloc *mem, unsigned top_k)
{
    *s = (mt_gatestats){.mem = mem, .top_k = top_k, .span = 1};
}

void
mt_gatestats_fini(mt_gatestats *s)
{
    size_t cells = s->experts * (MT_MARKS + 1);

    if (s->experts == 0) return;
    s->mem->put(s->mem->ctx, s->doubles, cells * sizeof *s->doubles);
    s->mem->put(s->mem->ctx, s->counts, cells * sizeof *s->counts);
    s->experts = 0;
}

mt_status
mt_gatestats_reserve(mt_gatestats *s, size_t experts, mt_error *err)
{
    size_t bytes;

    assert(experts > 0 && (s->experts == 0 || s->experts == experts));
    if (s->experts == experts) return MT_OK;
    if (!mt_size_mul(experts, (MT_MARKS + 1) * sizeof *s->doubles, &bytes))
        return mt_fail(err, MT_EOVERFLOW, "mt_gatestats_reserve", 0);
    s->doubles = s->mem->get(s->mem->ctx, bytes);
    s->counts = s->mem->get(s->mem->ctx, bytes);
    if (s->doubles == NULL || s->counts == NULL) {
        s->mem->put(s->mem->ctx, s->doubles, bytes);
        s->mem->put(s->mem->ctx, s->counts, bytes);
        return mt_fail(err, MT_ENOMEM, "mt_gatestats_reserve", 0);
    }
    s->experts = experts;
    s->total.importance = s->doubles; /* each block: the totals, then the marks */
    s->total.load = s->counts;
    for (size_t i = 0; i < MT_MARKS; i++) {
        s->mark[i].importance = s->doubles + (i + 1) * experts;
        s->mark[i].load = s->counts + (i + 1) * experts;
    }
    memset(s->doubles, 0, experts * sizeof *s->doubles); /* the totals: a mark is written whole */
    memset(s->counts, 0, experts * sizeof *s->counts);
    return MT_OK;
}

void
mt_gatestats_add(mt_gatestats *s, const void *x, mt_gate_width width, size_t rows)
{
    assert(s->experts > 0 && s->top_k <= s->experts);
    mt_gatescan(x, width, rows, s->experts, s->top_k, &s->total);
}

void
mt_gatesums_copy(mt_gatesums *to, const mt_gatesums *from, size_t experts)
{
    to->tokens = from->tokens;
    to->nonfinite = from->nonfinite;
    if (experts == 0) return; /* there are no arrays */
    memcpy(to->importance, from->importance, experts * sizeof *to->importance);
    memcpy(to->load, from->load, experts * sizeof *to->load);
}

/* Marks 1, 3, 5, ... are the multiples of twice the span. */
static void
halve_marks(mt_gatestats *s)
{
    for (size_t i = 0; i < MT_MARKS / 2; i++)
        mt_gatesums_copy(&s->mark[i], &s->mark[2 * i + 1], s->experts);
    s->marks = MT_MARKS / 2;
    s->span *= 2;
}

void
mt_gatestats_end_entry(mt_gatestats *s)
{
    assert(s->marks == s->entries / s->span && s->marks <= MT_MARKS);
    s->entries++;
    if (s->entries % s->span != 0) return;
    if (s->marks == MT_MARKS) {
        halve_marks(s); /* entries is now 64 whole spans and a half */
        return;
    }
    mt_gatesums_copy(&s->mark[s->marks++], &s->total, s->experts);
}

void
mt_gatestats_reset(mt_gatestats *s)
{
    s->entries = 0;
    s->marks = 0;
    s->span = 1;
    s->total.tokens = s->total.nonfinite = 0;
    if (s->experts == 0) return;
    memset(s->total.importance, 0, s->experts * sizeof *s->total.importance);
    memset(s->total.load, 0, s->experts * sizeof *s->total.load);
}

void
mt_gatestats_copy(mt_gatestats *to, const mt_gatestats *from)
{
    assert(to->experts == from->experts);
    to->entries = from->entries;
    to->span = from->span;
    to->marks = from->marks;
    mt_gatesums_copy(&to->total, &from->total, from->experts);
    for (size_t i = 0; i < from->marks; i++)
        mt_gatesums_copy(&to->mark[i], &from->mark[i], from->experts);
}

size_t
mt_gatestats_windows(const mt_gatestats *s)
{
    return s->marks + (s->entries > s->marks * s->span);
}

void
mt_gatestats_window(const mt_gatestats *s, size_t i, mt_gatesums *out, uint64_t *entries)
{
    const mt_gatesums *end = i < s->marks ? &s->mark[i] : &s->total;

    assert(i < mt_gatestats_windows(s));
    mt_gatesums_copy(out, end, s->experts);
    *entries = i < s->marks ? s->span : s->entries - s->marks * s->span;
    if (i == 0) return;
    out->tokens -= s->mark[i - 1].tokens;
    out->nonfinite -= s->mark[i - 1].nonfinite;
    for (size_t e = 0; e < s->experts; e++) {
        out->importance[e] -= s->mark[i - 1].importance[e];
        out->load[e] -= s->mark[i - 1].load[e];
    }
}
