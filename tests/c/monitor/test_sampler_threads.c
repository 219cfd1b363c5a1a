/* A sampler on its real thread over the real probe and a record, used by several others at once;
 * also run under the thread sanitiser. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "kit/check.h"
#include "core/record/writer.h"
#include "kit/recordview.h"
#include "core/monitor/sampler.h"
#include "os/monitor/probe.h"
#include "os/port/thread.h"

enum { ROUNDS = 2000, STARTS = 200 };

typedef struct shared {
    mt_sampler *s;
    mt_record r;
    uint64_t *region;
    size_t bytes;
    _Atomic int left;
} shared;

static void
open_record(shared *x)
{
    mt_record_column names[MT_SAMPLER_HOST];
    mt_record_start start = {.wall_ns = 5, .clock_ns = 6, .pid = 7, .page_bytes = 4096};
    mt_record_size size = {.series = {MT_SAMPLER_HOST, 64, 32}, .events = 8, .phases = 2};

    memset(names, 0, sizeof names);
    for (size_t c = 0; c < MT_SAMPLER_HOST; c++)
        names[c].name[0] = (char)('A' + c);
    x->bytes = mt_record_parts_of(&size).end;
    x->region = malloc(x->bytes);
    mt_record_init(&x->r, x->region, &size, names, &start, &(mt_birth){0});
}

static void
open_all(shared *x)
{
    mt_sampler_setup setup = {.interval_ns = 100000, .limit = 1 << 20, .record = &x->r};
    mt_probe_linux *probe;

    open_record(x);
    CHECK(mt_probe_linux_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &mt_probe_ages_usual, &probe,
                             NULL) == MT_OK);
    setup.probe = mt_probe_linux_ops(probe);
    CHECK(mt_ticker_new(&mt_alloc_libc, &mt_thread_sys_posix, mt_thread_name, &setup.ticker,
                        NULL) == MT_OK);
    CHECK(mt_sampler_new(&mt_alloc_libc, &setup, &x->s, NULL) == MT_OK);
}

/* A training loop. */
static void *
steps(void *arg)
{
    shared *x = arg;
    uint32_t passed = 0;

    for (int i = 0; i < ROUNDS; i++)
        passed |= mt_sampler_step(x->s, 1);
    x->left--;
    return passed == 0 ? NULL : x;
}

/* What a live view asks, and what a program sets. */
static void *
look(void *arg)
{
    shared *x = arg;
    mt_sample last;

    while (x->left > 0) {
        int mark = mt_sampler_watch(x->s, MT_MARK_HOST, 0.5);
        if (mt_sampler_latest(x->s, &last)) CHECK(last.time_ns > 0);
        CHECK(mt_sampler_read(x->s).limit.bytes == 1 << 20);
        CHECK(mt_sampler_read(x->s).peak > 0 && mt_sampler_read(x->s).interval_ns > 0);
        CHECK(mt_sampler_read(x->s).samples < UINT64_MAX &&
              mt_sampler_read(x->s).cpu_ns < UINT64_MAX);
        CHECK(mark >= 0 && mt_sampler_unwatch(x->s, (unsigned)mark));
    }
    return NULL;
}

/* From two threads at once: exactly one of two starts wins, and every stop leaves none running. */
static void *
start_and_stop(void *arg)
{
    shared *x = arg;

    for (int i = 0; i < STARTS; i++) {
        mt_status st = mt_sampler_start(x->s, NULL);
        CHECK(st == MT_OK || st == MT_EAGAIN);
        mt_sampler_stop(x->s);
    }
    x->left--;
    return NULL;
}

static void
all_at_once(void)
{
    static void *(*const what[])(void *) = {steps, steps, look, start_and_stop, start_and_stop};
    pthread_t threads[5];
    shared x = {.left = 4};

    open_all(&x);
    for (int i = 0; i < 5; i++)
        CHECK(pthread_create(&threads[i], NULL, what[i], &x) == 0);
    for (int i = 0; i < 5; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(!mt_sampler_read(x.s).runs && mt_sampler_read(x.s).steps == 2 * ROUNDS);
    CHECK(mt_sampler_read(x.s).samples >=
          2 * STARTS); /* each start that won: a first and a last one */
    CHECK(view_samples(x.region) == mt_sampler_read(x.s).samples);
    mt_sampler_free(x.s);
    mt_record_fini(&x.r);
    free(x.region);
}

/* The record is closed under it, and it is freed while it runs. */
static void
the_record_may_end_first(void)
{
    shared x = {.left = 0};
    uint64_t seen;

    open_all(&x);
    CHECK(mt_sampler_start(x.s, NULL) == MT_OK);
    while (mt_sampler_read(x.s).samples < 3)
        continue;
    CHECK(mt_record_close(&x.r, 9));
    memset(x.region, 0, x.bytes); /* it is not looked at any more */
    seen = mt_sampler_read(x.s).samples;
    while (mt_sampler_read(x.s).samples < seen + 3)
        continue;
    for (size_t i = 0; i < x.bytes / 8; i++)
        CHECK(x.region[i] == 0);
    mt_sampler_free(x.s);
    mt_record_fini(&x.r);
    free(x.region);
}

int
main(void)
{
    RUN(all_at_once);
    RUN(the_record_may_end_first);
    CHECK_DONE();
}
