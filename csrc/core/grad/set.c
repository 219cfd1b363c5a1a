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
    mt_grad_sum part; /* what the last pass found in it */
} chunk;

struct mt_gradset {
    const mt_alloc *mem;
    mt_grad_span *spans;
    chunk *chunks;
    size_t *shares; /* the chunk at which each begins, and chunk_count at the end */
    size_t span_room, chunk_count, chunk_room, share_count, share_room;
};

/* --- the list -------------------------------------------------------------------------------- */

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
    const mt_alloc *mem;

    if (set == NULL) return;
    mem = set->mem;
    mem->put(mem->ctx, set->spans, set->span_room * sizeof *set->spans);
    mem->put(mem->ctx, set->chunks, set->chunk_room * sizeof *set->chunks);
    mem->put(mem->ctx, set->shares, set->share_room * sizeof *set->shares);
    mem->put(mem->ctx, set, sizeof *set);
}

/* False without memory; the arrays are then as long as before, or longer. */
static bool
gradset_make_room(mt_gradset *set, size_t spans, size_t chunks)
{
    const mt_alloc *mem = set->mem;
    mt_grad_span *span = mt_alloc_grown(mem, set->spans, &set->span_room, spans, sizeof *span);
    chunk *cut;
    size_t *share;

    if (span == NULL) return false;
    set->spans = span;
    if ((cut = mt_alloc_grown(mem, set->chunks, &set->chunk_room, chunks, sizeof *cut)) == NULL)
        return false;
    set->chunks = cut;
    share = mt_alloc_grown(mem, set->shares, &set->share_room, chunks, sizeof *share);
    if (share == NULL) return false;
    set->shares = share;
    return true;
}

mt_status
mt_gradset_set(mt_gradset *set, const mt_grad_span *spans, size_t n, mt_error *err)
{
    size_t chunks = 0, elements = SHARE;

    for (size_t i = 0; i < n; i++)
        chunks += spans[i].n / CHUNK + (spans[i].n % CHUNK != 0);
    if (!gradset_make_room(set, n + 1, chunks + 1))
        return mt_fail(err, MT_ENOMEM, "mt_gradset_set", 0);
    if (n > 0) memcpy(set->spans, spans, n * sizeof *spans);
    set->chunk_count = set->share_count = 0;
    for (size_t i = 0; i < n; i++) {
        for (size_t begin = 0; begin < spans[i].n; begin += CHUNK) {
            size_t count = mt_size_min(spans[i].n - begin, CHUNK);
            if (elements >= SHARE) {
                set->shares[set->share_count++] = set->chunk_count;
                elements = 0;
            }
            set->chunks[set->chunk_count++] = (chunk){.span = i, .begin = begin, .n = count};
            elements += count;
        }
    }
    set->shares[set->share_count] = set->chunk_count;
    return MT_OK;
}

/* --- passes ---------------------------------------------------------------------------------- */

/* One pass, as all threads see it. */
typedef struct pass {
    mt_gradset *set;
    void (*visit)(const struct pass *p, chunk *c);
    atomic_size_t next; /* share */
    fenv_t caller;
    double factor;
} pass;

static void
work_through(pass *p)
{
    mt_gradset *set = p->set;
    size_t share;

    while ((share = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) <
           set->share_count) {
        for (size_t c = set->shares[share]; c < set->shares[share + 1]; c++) {
            /* Small gradients lie here and there, and the machine's prefetcher does not know the
             * next one: prefetching a line of each of its first pages gains a tenth. */
            const chunk *next = &set->chunks[c + 1];
            if (c + 1 < set->chunk_count) {
                const mt_grad_span *span = &set->spans[next->span];
                size_t size = mt_dtype_size(span->dtype);
                size_t bytes = mt_size_min(next->n * size, FETCHED);
                for (size_t i = 0; i < bytes; i += PAGE)
                    __builtin_prefetch((const char *)span->data + next->begin * size + i);
            }
            p->visit(p, &set->chunks[c]);
        }
    }
}

/* A program may have set its own thread, and not the others, to flush subnormal numbers. */
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
    size_t workers = mt_size_min((size_t)threads, p->set->share_count);

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
    const mt_grad_span *span = &p->set->spans[c->span];

    return (char *)span->data + c->begin * mt_dtype_size(span->dtype);
}

static mt_dtype
dtype_of(const pass *p, const chunk *c)
{
    return p->set->spans[c->span].dtype;
}

static void
visit_measure(const pass *p, chunk *c)
{
    c->part = mt_grad_square(dtype_of(p, c), data_of(p, c), c->n);
}

void
mt_gradset_measure(mt_gradset *set, const mt_parallel_ops *par, int threads, mt_grad_total *out)
{
    pass p = {.set = set, .visit = visit_measure};

    run(&p, par, threads);
    *out = (mt_grad_total){.first_bad = SIZE_MAX};
    for (size_t c = 0; c < set->chunk_count; c++) { /* in their order, by whichever threads */
        const mt_grad_sum *part = &set->chunks[c].part;
        out->sum.squares += part->squares;
        out->sum.infs += part->infs;
        out->sum.nans += part->nans;
        if (out->first_bad == SIZE_MAX && part->infs + part->nans > 0)
            out->first_bad = set->chunks[c].span;
    }
}

static void
visit_scale(const pass *p, chunk *c)
{
    mt_grad_scale(dtype_of(p, c), data_of(p, c), c->n, p->factor);
}

void
mt_gradset_scale(mt_gradset *set, double factor, const mt_parallel_ops *par, int threads)
{
    pass p = {.set = set, .visit = visit_scale, .factor = factor};

    run(&p, par, threads);
}
