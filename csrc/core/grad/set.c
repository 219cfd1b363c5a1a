/* set.c -- how this file works.
 *
 * mt_gradset_set cuts the gradients into chunks and gathers them into shares. A pass hands the
 * shares to the caller's pool of threads: each thread takes the next one by an atomic counter,
 * runs the pass's function over its chunks and leaves one part per chunk. The calling thread adds
 * the parts up in the order of the chunks, so that the result does not depend on the threads. */
#include "grad/set.h"

#include <assert.h>
#include <fenv.h>
#include <stdatomic.h>
#include <string.h>

#include "base/size.h"

/* Elements. A chunk is a few blocks, so that its sum hides the cost of noting it; a share is some
 * 100 us of memory traffic, next to which taking it is nothing. */
enum { CHUNK = 1 << 15, SHARE = 4 * CHUNK };

/* Bytes. */
enum { PAGE = 4096, FETCHED = 4 * PAGE };

typedef struct chunk {
    size_t span;
    size_t begin; /* in the span */
    size_t n;
} chunk;

/* The arrays of one list. */
typedef struct list {
    mt_grad_span *spans;
    size_t span_count, span_room;
    chunk *chunks;
    mt_grad_sum *parts; /* one for each chunk */
    size_t chunk_count, chunk_room;
    size_t *shares; /* the chunk at which each begins, and chunk_count at the end */
    size_t share_count, share_room;
} list;

struct mt_gradset {
    const mt_alloc *mem;
    list list;
    uint64_t rebuilt;
};

/* --- the list -------------------------------------------------------------------------------- */

static void
list_free(const mt_alloc *mem, list *l)
{
    mem->put(mem->ctx, l->spans, l->span_room * sizeof *l->spans);
    mem->put(mem->ctx, l->chunks, l->chunk_room * sizeof *l->chunks);
    mem->put(mem->ctx, l->parts, l->chunk_room * sizeof *l->parts);
    mem->put(mem->ctx, l->shares, l->share_room * sizeof *l->shares);
}

mt_status
mt_gradset_new(const mt_alloc *mem, mt_gradset **out, mt_error *err)
{
    mt_gradset *set = mem->get(mem->ctx, sizeof *set);

    if (set == NULL) return mt_fail(err, MT_ENOMEM, "mt_gradset_new", 0);
    *set = (mt_gradset){.mem = mem};
    *out = set;
    return MT_OK;
}

void
mt_gradset_free(mt_gradset *set)
{
    if (set == NULL) return;
    list_free(set->mem, &set->list);
    set->mem->put(set->mem->ctx, set, sizeof *set);
}

static bool
same_spans(const list *l, const mt_grad_span *spans, size_t n)
{
    if (l->span_count != n) return false;
    for (size_t i = 0; i < n; i++) {
        const mt_grad_span *a = &l->spans[i], *b = &spans[i];
        if (a->data != b->data || a->n != b->n || a->dtype != b->dtype) return false;
    }
    return true;
}

static size_t
count_chunks(const mt_grad_span *spans, size_t n)
{
    size_t chunks = 0;

    for (size_t i = 0; i < n; i++)
        chunks += spans[i].n / CHUNK + (spans[i].n % CHUNK != 0);
    return chunks;
}

static void *
array(const mt_alloc *mem, size_t count, size_t size)
{
    size_t bytes;

    if (!mt_size_mul(count, size, &bytes)) return NULL;
    return mem->get(mem->ctx, bytes == 0 ? 1 : bytes);
}

/* Room for so many, and some more: the next list is often a little longer. False without memory;
 * what was taken is in *l then. pre: *l is zeros. */
static bool
gradset_make_room(const mt_alloc *mem, list *l, size_t spans, size_t chunks)
{
    l->span_room = spans + 1;
    l->chunk_room = chunks + 1;
    l->share_room = chunks + 2;
    l->spans = array(mem, l->span_room, sizeof *l->spans);
    l->chunks = array(mem, l->chunk_room, sizeof *l->chunks);
    l->parts = array(mem, l->chunk_room, sizeof *l->parts);
    l->shares = array(mem, l->share_room, sizeof *l->shares);
    return l->spans != NULL && l->chunks != NULL && l->parts != NULL && l->shares != NULL;
}

static void
cut_span(list *l, size_t span)
{
    size_t left = l->spans[span].n;

    for (size_t begin = 0; left > 0; begin += CHUNK) {
        size_t n = mt_size_min(left, CHUNK);
        l->chunks[l->chunk_count++] = (chunk){span, begin, n};
        left -= n;
    }
}

static void
cut_shares(list *l)
{
    size_t elements = SHARE;

    l->share_count = 0;
    for (size_t c = 0; c < l->chunk_count; c++) {
        if (elements >= SHARE) {
            l->shares[l->share_count++] = c;
            elements = 0;
        }
        elements += l->chunks[c].n;
    }
    l->shares[l->share_count] = l->chunk_count;
}

static void
gradset_fill(list *l, const mt_grad_span *spans, size_t n)
{
    if (n > 0) memcpy(l->spans, spans, n * sizeof *spans);
    l->span_count = n;
    l->chunk_count = 0;
    for (size_t i = 0; i < n; i++)
        cut_span(l, i);
    cut_shares(l);
}

mt_status
mt_gradset_set(mt_gradset *set, const mt_grad_span *spans, size_t n, mt_error *err)
{
    size_t chunks = count_chunks(spans, n);
    list *old = &set->list;

    if (old->spans != NULL && same_spans(old, spans, n)) return MT_OK;
    if (old->spans == NULL || n >= old->span_room || chunks >= old->chunk_room) {
        list larger = {0};
        if (!gradset_make_room(set->mem, &larger, n, chunks)) {
            list_free(set->mem, &larger);
            return mt_fail(err, MT_ENOMEM, "mt_gradset_set", 0);
        }
        list_free(set->mem, old);
        *old = larger;
    }
    gradset_fill(old, spans, n);
    set->rebuilt++;
    return MT_OK;
}

size_t
mt_gradset_chunks(const mt_gradset *set)
{
    return set->list.chunk_count;
}

uint64_t
mt_gradset_rebuilt(const mt_gradset *set)
{
    return set->rebuilt;
}

/* --- passes ---------------------------------------------------------------------------------- */

/* One pass, as all threads see it. */
typedef struct pass {
    list *list;
    void (*visit)(const struct pass *p, const chunk *c, mt_grad_sum *part);
    atomic_size_t next; /* share */
    fenv_t caller;
    double factor;
} pass;

/* A line of each page where the next chunk begins: many small gradients lie here and there, and the
 * machine's own prefetcher knows nothing of the next before it is there. It gains a tenth; within a
 * chunk the machine does better alone. */
static void
fetch_next(const list *l, size_t c)
{
    const chunk *next = &l->chunks[c + 1];
    const mt_grad_span *span = &l->spans[next->span];
    size_t size = mt_dtype_size(span->dtype);
    size_t bytes = mt_size_min(next->n * size, FETCHED);

    for (size_t i = 0; i < bytes; i += PAGE)
        __builtin_prefetch((const char *)span->data + next->begin * size + i);
}

static void
work_through(pass *p)
{
    const list *l = p->list;
    size_t share;

    while ((share = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < l->share_count)
        for (size_t c = l->shares[share]; c < l->shares[share + 1]; c++) {
            if (c + 1 < l->chunk_count) fetch_next(l, c);
            p->visit(p, &l->chunks[c], &l->parts[c]);
        }
}

/* A program may have told its own thread to flush subnormal numbers, and not the others. */
static void
worker(void *arg, int64_t begin, int64_t end)
{
    pass *p = arg;
    fenv_t mine;

    (void)begin;
    (void)end;
    fegetenv(&mine);
    fesetenv(&p->caller);
    work_through(p);
    fesetenv(&mine);
}

static void
run(pass *p, const mt_parallel_ops *par, int threads)
{
    size_t workers = mt_size_min((size_t)threads, p->list->share_count);

    assert(threads >= 1);
    atomic_init(&p->next, 0);
    if (par == NULL || workers <= 1) {
        work_through(p);
        return;
    }
    fegetenv(&p->caller);
    par->run(par->ctx, (int64_t)workers, worker, p);
}

static void *
data_of(const pass *p, const chunk *c)
{
    const mt_grad_span *span = &p->list->spans[c->span];

    return (char *)span->data + c->begin * mt_dtype_size(span->dtype);
}

static mt_dtype
dtype_of(const pass *p, const chunk *c)
{
    return p->list->spans[c->span].dtype;
}

static void
add_sum(mt_grad_sum *sum, mt_grad_sum more)
{
    sum->squares += more.squares;
    sum->infs += more.infs;
    sum->nans += more.nans;
}

/* In the order of the chunks, whoever made the parts. */
static void
add_parts(const list *l, mt_grad_total *out)
{
    *out = (mt_grad_total){.first_bad = SIZE_MAX};
    for (size_t c = 0; c < l->chunk_count; c++) {
        const mt_grad_sum *part = &l->parts[c];
        add_sum(&out->sum, *part);
        out->elements += l->chunks[c].n;
        if (out->first_bad == SIZE_MAX && part->infs + part->nans > 0)
            out->first_bad = l->chunks[c].span;
    }
}

static void
visit_measure(const pass *p, const chunk *c, mt_grad_sum *part)
{
    *part = mt_grad_square(dtype_of(p, c), data_of(p, c), c->n);
}

void
mt_gradset_measure(mt_gradset *set, const mt_parallel_ops *par, int threads, mt_grad_total *out)
{
    pass p = {.list = &set->list, .visit = visit_measure};

    run(&p, par, threads);
    add_parts(&set->list, out);
}

static void
visit_scale(const pass *p, const chunk *c, mt_grad_sum *part)
{
    (void)part;
    mt_grad_scale(dtype_of(p, c), data_of(p, c), c->n, p->factor);
}

void
mt_gradset_scale(mt_gradset *set, double factor, const mt_parallel_ops *par, int threads)
{
    pass p = {.list = &set->list, .visit = visit_scale, .factor = factor};

    run(&p, par, threads);
}
