/* growth.c -- how this file works.
 *
 * A look is begin, see for each thing, end. see() finds the thing in the rows of the look before, by
 * its address first and then by its place, adds a point to the watch that the row names or begins a
 * watch where the thing is longer than in that row, and writes rows for the look after. end() frees
 * the watches that were not seen, and lets the new rows take the place of the old ones. judge() reads
 * the points of one watch. */
#include "census/growth.h"

#include <assert.h>
#include <string.h>

void
mt_growth_init(mt_growth *g, const mt_alloc *mem)
{
    *g = (mt_growth){.mem = mem, .unused = MT_GROWTH_NONE};
}

static void
growth_rows_put(const mt_growth *g, void *block, size_t count, size_t size)
{
    g->mem->put(g->mem->ctx, block, count * size);
}

static void
drop_rows(const mt_growth *g, mt_growth_rows *rows)
{
    growth_rows_put(g, rows->at, rows->cap, sizeof *rows->at);
    mt_index_drop(&rows->index, g->mem);
    *rows = (mt_growth_rows){.n = 0};
}

void
mt_growth_fini(mt_growth *g)
{
    drop_rows(g, &g->last);
    drop_rows(g, &g->now);
    for (size_t i = 0; i < g->watches_n; i++)
        growth_rows_put(g, g->watches[i].points, g->watches[i].points_cap,
                        sizeof *g->watches[i].points);
    growth_rows_put(g, g->watches, g->watches_cap, sizeof *g->watches);
    mt_growth_init(g, g->mem);
}

/* --- rows ------------------------------------------------------------------------------------- */

/* Addresses and places are keys of one table: the lowest bit distinguishes them. */
static uint64_t
key_of(uint64_t word, unsigned is_place)
{
    uint64_t h = word * UINT64_C(0x9E3779B97F4A7C15);

    if (word == 0) return 0;
    h ^= h >> 32;
    return (h & ~UINT64_C(1)) | is_place | 2;
}

static const mt_growth_row *
growth_rows_find(const mt_growth_rows *rows, uint64_t key)
{
    size_t at = mt_index_half(key);
    uint32_t i;

    while (key != 0 && (i = mt_index_next(&rows->index, key, &at)) != MT_INDEX_NONE)
        if (rows->at[i].key == key) return &rows->at[i];
    return NULL;
}

/* The first of two things of one key stays. */
static bool
add_row(const mt_growth *g, mt_growth_rows *rows, mt_growth_row row)
{
    mt_growth_row *at;

    if (row.key == 0 || growth_rows_find(rows, row.key) != NULL) return true;
    at = mt_alloc_grown(g->mem, rows->at, &rows->cap, rows->n + 1, sizeof *at);
    if (at == NULL) return false;
    rows->at = at;
    if (!mt_index_make_room(&rows->index, g->mem)) return false;
    mt_index_add(&rows->index, row.key, (uint32_t)rows->n);
    rows->at[rows->n++] = row;
    return true;
}

const mt_growth_row *
mt_growth_known(const mt_growth *g, uint64_t address)
{
    return growth_rows_find(&g->last, key_of(address, 0));
}

/* --- watches ---------------------------------------------------------------------------------- */

/* Every second point between the first and the last goes. */
static void
thin(mt_growth_watch *w)
{
    size_t n = 1;

    for (size_t i = 2; i + 1 < w->points_n; i += 2)
        w->points[n++] = w->points[i];
    w->points[n++] = w->points[w->points_n - 1];
    w->points_n = n;
}

static bool
add_point(const mt_growth *g, mt_growth_watch *w, mt_growth_point point)
{
    mt_growth_point *points;

    if (w->points_n == MT_GROWTH_POINTS) thin(w);
    points = mt_alloc_grown(g->mem, w->points, &w->points_cap, w->points_n + 1, sizeof *points);
    if (points == NULL) return false;
    w->points = points;
    points[w->points_n++] = point;
    return true;
}

static void
free_watch(mt_growth *g, uint32_t i)
{
    mt_growth_watch *w = &g->watches[i];

    growth_rows_put(g, w->points, w->points_cap, sizeof *w->points);
    *w = (mt_growth_watch){.rises = g->unused}; /* a free one names the next that is free */
    g->unused = i;
}

static uint32_t
new_watch(mt_growth *g)
{
    uint32_t i = g->unused;
    mt_growth_watch *watches;

    if (i != MT_GROWTH_NONE) {
        g->unused = g->watches[i].rises;
        g->watches[i].rises = 0;
        return i;
    }
    if (g->watches_n >= MT_GROWTH_NONE - 1) return MT_GROWTH_NONE;
    watches =
        mt_alloc_grown(g->mem, g->watches, &g->watches_cap, g->watches_n + 1, sizeof *watches);
    if (watches == NULL) return MT_GROWTH_NONE;
    g->watches = watches;
    g->watches[g->watches_n] = (mt_growth_watch){.rises = 0};
    return (uint32_t)g->watches_n++;
}

/* A thing that is longer than the row of the look before says. */
static bool
begin_watch(mt_growth *g, const mt_growth_row *before, const mt_growth_thing *thing, uint32_t *out)
{
    uint32_t i = new_watch(g);
    mt_growth_watch *w;

    if (i == MT_GROWTH_NONE) return false;
    w = &g->watches[i];
    w->single = thing->single;
    if (!add_point(g, w, (mt_growth_point){g->last_step, before->length, before->bytes}) ||
        !add_point(g, w, (mt_growth_point){g->step, thing->length, thing->bytes})) {
        free_watch(g, i);
        return false;
    }
    w->rises = 1;
    *out = i;
    return true;
}

/* The newest point is the first one now. */
static void
begin_anew(mt_growth_watch *w)
{
    w->points[0] = w->points[w->points_n - 1];
    w->points_n = 1;
    w->rises = 0;
}

static bool
growth_rows_go_on(mt_growth *g, mt_growth_watch *w, const mt_growth_thing *thing)
{
    uint64_t before = w->points[w->points_n - 1].length;

    if (!add_point(g, w, (mt_growth_point){g->step, thing->length, thing->bytes})) return false;
    if (thing->length >= before) {
        w->rises += thing->length > before;
        return true;
    }
    if (before > w->peak) w->peak = before;
    begin_anew(w);
    return true;
}

/* --- a look ----------------------------------------------------------------------------------- */

void
mt_growth_begin(mt_growth *g, uint64_t step)
{
    assert(g->looks == 0 || step > g->step);
    drop_rows(g, &g->now);
    g->step = step;
    g->looks++;
}

/* The row of the look before that this thing is, or NULL. */
static const mt_growth_row *
row_before(const mt_growth *g, const mt_growth_thing *thing)
{
    const mt_growth_row *row = growth_rows_find(&g->last, key_of(thing->address, 0));

    if (row == NULL && thing->bytes >= MT_GROWTH_LEAST_BYTES)
        row = growth_rows_find(&g->last, key_of(thing->place, 1));
    /* Two things may claim one row: who came first has it. */
    if (row != NULL && row->watch != MT_GROWTH_NONE && g->watches[row->watch].look == g->looks)
        return NULL;
    return row;
}

mt_status
mt_growth_see(mt_growth *g, const mt_growth_thing *thing, uint32_t *watch, mt_error *err)
{
    uint64_t by_address = key_of(thing->address, 0), by_place = key_of(thing->place, 1);
    const mt_growth_row *before = row_before(g, thing);
    uint32_t i = before == NULL ? MT_GROWTH_NONE : before->watch;
    bool is_new = before == NULL || before->key != by_address, well = true;

    *watch = MT_GROWTH_NONE;
    if (i != MT_GROWTH_NONE)
        well = growth_rows_go_on(g, &g->watches[i], thing);
    else if (before != NULL && thing->length > before->length)
        well = begin_watch(g, before, thing, &i);
    if (well && i != MT_GROWTH_NONE) {
        g->watches[i].look = g->looks;
        g->watches[i].address_key = by_address;
        g->watches[i].place_key = by_place;
        *watch = i;
    }
    if (well && (thing->length > 0 || thing->known_empty || i != MT_GROWTH_NONE)) {
        mt_growth_row row = {.length = thing->length, .bytes = thing->bytes, .watch = i};
        row.key = by_address;
        well = add_row(g, &g->now, row);
        row.key = by_place;
        if (well && ((is_new && thing->bytes >= MT_GROWTH_LEAST_BYTES) || i != MT_GROWTH_NONE))
            well = add_row(g, &g->now, row);
    }
    return well ? MT_OK : mt_fail(err, MT_ENOMEM, "malloc", 0);
}

void
mt_growth_sign(mt_growth *g, uint32_t watch, uint64_t begin, uint64_t end)
{
    mt_growth_watch *w = &g->watches[watch];
    /* Bytes at the end of what has grown are others in any case, unless it grew at its beginning. */
    bool is_other = w->begin != 0 && begin != w->begin && end != w->end;

    assert(watch < g->watches_n && w->look == g->looks);
    if (is_other) begin_anew(w);
    w->begin = begin;
    w->end = end;
}

/* A watch that a look left out stays findable by the rows of its last point. */
static bool
carry(mt_growth *g, uint32_t i)
{
    const mt_growth_watch *w = &g->watches[i];
    const mt_growth_point *last = &w->points[w->points_n - 1];
    mt_growth_row row = {.length = last->length, .bytes = last->bytes, .watch = i};

    row.key = w->address_key;
    if (!add_row(g, &g->now, row)) return false;
    row.key = w->place_key;
    return add_row(g, &g->now, row);
}

mt_status
mt_growth_end(mt_growth *g, bool cut, mt_error *err)
{
    for (size_t i = 0; i < g->watches_n; i++) {
        const mt_growth_watch *w = &g->watches[i];
        if (w->look == g->looks || w->look == 0) continue;
        if (!cut)
            free_watch(g, (uint32_t)i);
        else if (!carry(g, (uint32_t)i))
            return mt_fail(err, MT_ENOMEM, "malloc", 0);
    }
    drop_rows(g, &g->last);
    g->last = g->now;
    g->last_step = g->step;
    g->now = (mt_growth_rows){.n = 0};
    return MT_OK;
}

void
mt_growth_give_up(mt_growth *g)
{
    drop_rows(g, &g->now);
}

/* --- who only gained -------------------------------------------------------------------------- */

/* How many more a step between two points. */
static double
pace(const mt_growth_point *from, const mt_growth_point *to)
{
    return (double)(to->length - from->length) / (double)(to->step - from->step);
}

/* Where the gain began to be what it is now: the point from which on no interval had less than half of
 * it. `first`, where the mean since `first` is close to it, where it is that of a single interval and
 * not twice the mean, and where it has been so for a few steps only: what comes in lumps does not speed
 * up by each of them. */
static const mt_growth_point *
since_it_is_so_fast(const mt_growth_point *first, const mt_growth_point *last)
{
    const mt_growth_point *from = last - 1;
    double faster;

    while (from > first && 2 * pace(from - 1, from) >= pace(from, last))
        from--;
    if (last->step - from->step < MT_GROWTH_SETTLED) return first;
    faster = last - from > 1 ? 1.25 : 2.0;
    return pace(from, last) >= faster * pace(first, last) ? from : first;
}

bool
mt_growth_judge(const mt_growth *g, uint32_t watch, bool may_fill, mt_growth_gain *out)
{
    const mt_growth_watch *w = &g->watches[watch];
    const mt_growth_point *first = w->points, *last, *middle;
    bool slows;

    assert(watch < g->watches_n && w->look > 0);
    last = w->points + w->points_n - 1;
    if (w->points_n < 3 || w->rises < (w->single ? 3U : 2U)) return false;
    if ((double)last->length <= 1.25 * (double)w->peak) return false;
    while (first + 1 < last && first[1].length == first->length)
        first++;
    middle = first;
    while (middle + 1 < last && 2 * middle[1].step <= first->step + last->step)
        middle++;
    slows = pace(middle, last) < 0.5 * pace(first, last);
    if (slows && (!may_fill || middle->length == last->length)) return false;
    first = slows ? middle : since_it_is_so_fast(first, last);
    *out = (mt_growth_gain){
        .since = first->step,
        .until = last->step,
        .length = last->length - first->length,
        .now = last->length,
        .bytes = last->bytes > first->bytes ? last->bytes - first->bytes : 0,
        .rises = w->rises,
        .fell = w->peak > 0,
        .slows = slows,
    };
    return true;
}
