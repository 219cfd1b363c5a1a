/* gradset: random sets against one element after the other, the same bits by any number of threads,
 * and every allocation failing in turn. Also run under the thread sanitiser. */
#include "grad/model.h"

#include <fenv.h>
#include <pthread.h>

#include "kit/faulty.h"

enum { MOST_THREADS = 16 };

/* --- pools ----------------------------------------------------------------------------------- */

typedef struct call {
    void (*task)(void *arg, int64_t begin, int64_t end);
    void *arg;
    int64_t begin, end;
    bool kept; /* the thread's floating-point environment was its own again afterwards */
} call;

static void *
make_call(void *arg)
{
    call *c = arg;

    fesetround(FE_TOWARDZERO);
    c->task(c->arg, c->begin, c->end);
    c->kept = fegetround() == FE_TOWARDZERO;
    return NULL;
}

/* One thread for each number. */
static void
run_wide(void *ctx, int64_t n, void (*task)(void *arg, int64_t begin, int64_t end), void *arg)
{
    pthread_t thread[MOST_THREADS];
    call calls[MOST_THREADS];

    CHECK(n >= 1 && n <= MOST_THREADS);
    *(int64_t *)ctx += n;
    for (int64_t i = 0; i < n; i++) {
        calls[i] = (call){task, arg, i, i + 1, false};
        CHECK(pthread_create(&thread[i], NULL, make_call, &calls[i]) == 0);
    }
    for (int64_t i = 0; i < n; i++) {
        CHECK(pthread_join(thread[i], NULL) == 0);
        CHECK(calls[i].kept);
    }
}

/* All of it in one call, by another thread than the caller's. */
static void
run_elsewhere(void *ctx, int64_t n, void (*task)(void *arg, int64_t begin, int64_t end), void *arg)
{
    call all = {task, arg, 0, n, false};
    pthread_t thread;

    *(int64_t *)ctx += n;
    CHECK(pthread_create(&thread, NULL, make_call, &all) == 0);
    CHECK(pthread_join(thread, NULL) == 0 && all.kept);
}

/* --- sets ------------------------------------------------------------------------------------ */

static mt_gradset *
make_set(const mt_alloc *mem, const mt_grad_span *spans, size_t n)
{
    mt_gradset *set;

    CHECK(mt_gradset_new(mem, &set, NULL) == MT_OK);
    CHECK(mt_gradset_set(set, spans, n, NULL) == MT_OK);
    return set;
}

static void *
copy_of(const mt_grad_span *s)
{
    size_t bytes = s->n * mt_dtype_size(s->dtype);
    void *copy = malloc(bytes + 1);

    CHECK(copy != NULL);
    if (bytes > 0) memcpy(copy, s->data, bytes);
    return copy;
}

static void
check_measure(gradrig *r, mt_gradset *set)
{
    mt_grad_total got, want = grad_expect(r->span, r->n);

    mt_gradset_measure(set, NULL, 1, &got);
    grad_check_total(&got, &want);
}

static void
check_scale(gradrig *r, mt_gradset *set)
{
    static const double factors[] = {0.5, 0.3, 1e-50, 1};
    double factor = factors[rng_below(r->random, 4)];
    void *old[GRAD_SPANS];

    for (size_t i = 0; i < r->n; i++)
        old[i] = copy_of(&r->span[i]);
    mt_gradset_scale(set, factor, NULL, 1);
    for (size_t i = 0; i < r->n; i++) {
        mt_grad_span before = {old[i], r->span[i].n, r->span[i].dtype};
        for (size_t k = 0; k < before.n; k++)
            CHECK(grad_same(grad_get(&r->span[i], k), grad_scaled(&before, k, factor)));
        free(old[i]);
    }
}

static void
random_sets_do_what_one_element_after_the_other_does(void)
{
    rng random = rng_seeded(7);

    for (int round = 0; round < 150; round++) {
        gradrig r;
        grad_make(&r, &random);
        mt_gradset *set = make_set(&mt_alloc_libc, r.span, r.n);
        check_measure(&r, set);
        check_scale(&r, set);
        mt_gradset_free(set);
        grad_drop(&r);
    }
}

/* --- threads --------------------------------------------------------------------------------- */

enum { LONG = 700001 };

static float *
long_gradient(uint64_t seed)
{
    float *x = malloc(LONG * sizeof *x);
    rng r = rng_seeded(seed);

    CHECK(x != NULL);
    for (size_t i = 0; i < LONG; i++)
        x[i] = (float)(rng_unit(&r) - 0.5) * (i % 5000 == 0 ? 1e22f : 1);
    return x;
}

static void
every_number_of_threads_gives_the_same_bits(void)
{
    float *x = long_gradient(1), *y = long_gradient(2), *once = long_gradient(2);
    mt_grad_span spans[] = {{x, LONG, MT_F32}, {y, 1000, MT_F32}, {y + 1000, LONG - 1000, MT_F32}};
    mt_gradset *set = make_set(&mt_alloc_libc, spans, 3);
    mt_grad_total one, many;
    int64_t calls = 0;
    mt_parallel_ops par = {run_wide, &calls};

    mt_gradset_measure(set, NULL, 1, &one);
    for (int threads = 1; threads <= MOST_THREADS; threads++) {
        mt_gradset_measure(set, &par, threads, &many);
        CHECK(memcmp(&one, &many, sizeof one) == 0);
    }
    CHECK(calls > MOST_THREADS);
    mt_gradset_scale(set, 0.7, &par, 7);
    for (size_t i = 0; i < LONG; i++) {
        mt_grad_span before = {once, LONG, MT_F32};
        CHECK((double)y[i] == grad_scaled(&before, i, 0.7));
    }
    mt_gradset_free(set);
    free(x);
    free(y);
    free(once);
}

/* Another thread rounds, and flushes small numbers, as it likes; what it computes for us is rounded
 * as the caller's thread is told to. */
static void
workers_compute_as_the_caller_does(void)
{
    float *x = long_gradient(1), *y = long_gradient(1);
    mt_grad_span a = {x, LONG, MT_F32}, b = {y, LONG, MT_F32};
    mt_gradset *here = make_set(&mt_alloc_libc, &a, 1), *there = make_set(&mt_alloc_libc, &b, 1);
    int64_t calls = 0;
    mt_parallel_ops par = {run_elsewhere, &calls};

    CHECK(fesetround(FE_UPWARD) == 0);
    mt_gradset_scale(here, 0.7, NULL, 1);
    mt_gradset_scale(there, 0.7, &par, 4);
    CHECK(fesetround(FE_TONEAREST) == 0);
    CHECK(calls == 4 && memcmp(x, y, LONG * sizeof *x) == 0);
    mt_gradset_free(here);
    mt_gradset_free(there);
    free(x);
    free(y);
}

/* A second thread would cost more than it brings. */
static void
little_work_stays_on_the_callers_thread(void)
{
    float x[1000] = {1};
    mt_grad_span span = {x, 1000, MT_F32};
    mt_gradset *set = make_set(&mt_alloc_libc, &span, 1);
    int64_t calls = 0;
    mt_parallel_ops par = {run_wide, &calls};
    mt_grad_total total;

    mt_gradset_measure(set, &par, 16, &total);
    CHECK(calls == 0 && total.sum.squares == 1);
    mt_gradset_free(set);
}

/* --- the list -------------------------------------------------------------------------------- */

/* More gradients without more chunks, more chunks without more gradients, and fewer of both. */
static void
the_list_follows_the_gradients(void)
{
    float *x = long_gradient(4);
    mt_grad_span spans[40];
    mt_gradset *set;
    mt_grad_total total;

    for (size_t i = 0; i < 40; i++)
        spans[i] = (mt_grad_span){x, 0, MT_F32};
    spans[0].n = 1;
    set = make_set(&mt_alloc_libc, spans, 1);
    CHECK(mt_gradset_set(set, spans, 40, NULL) == MT_OK);
    spans[7].n = LONG;
    CHECK(mt_gradset_set(set, spans, 40, NULL) == MT_OK);
    mt_gradset_measure(set, NULL, 1, &total);
    CHECK(total.sum.squares > 1e40);
    CHECK(mt_gradset_set(set, spans, 1, NULL) == MT_OK);
    mt_gradset_measure(set, NULL, 1, &total);
    CHECK(total.sum.squares == (double)x[0] * (double)x[0]);
    CHECK(mt_gradset_set(set, spans, 0, NULL) == MT_OK);
    mt_gradset_measure(set, NULL, 1, &total);
    CHECK(total.sum.squares == 0 && total.first_bad == SIZE_MAX);
    mt_gradset_free(set);
    mt_gradset_free(NULL);
    free(x);
}

static void
a_failed_allocation_leaves_the_set_as_it_was(void)
{
    float *x = long_gradient(3), one = 3;
    mt_grad_span small = {&one, 1, MT_F32}, large[2] = {{x, LONG, MT_F32}, {&one, 1, MT_F32}};
    bool done = false;
    long at = 0;

    for (; !done; at++) {
        faulty f = {.fail_at = at};
        mt_alloc mem = faulty_alloc(&f);
        mt_gradset *set = NULL;
        mt_grad_total total;
        mt_error err = {0};
        if (mt_gradset_new(&mem, &set, &err) == MT_OK &&
            mt_gradset_set(set, &small, 1, &err) == MT_OK) {
            done = mt_gradset_set(set, large, 2, &err) == MT_OK;
            mt_gradset_measure(set, NULL, 1, &total);
            CHECK(done ? total.sum.squares > 1e40 : total.sum.squares == 9);
        }
        CHECK(done || err.status == MT_ENOMEM);
        mt_gradset_free(set);
        CHECK(f.live == 0);
    }
    CHECK(at > 5); /* one block for the set, four for its first list, and those that grow */
    free(x);
}

int
main(void)
{
    RUN(random_sets_do_what_one_element_after_the_other_does);
    RUN(every_number_of_threads_gives_the_same_bits);
    RUN(workers_compute_as_the_caller_does);
    RUN(little_work_stays_on_the_callers_thread);
    RUN(the_list_follows_the_gradients);
    RUN(a_failed_allocation_leaves_the_set_as_it_was);
    CHECK_DONE();
}
