/* The real thread: it waits by the clock, stops at once, has a name and no signals, and what the
 * system refuses is told; also run under the thread sanitiser. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "kit/check.h"
#include "kit/faulty.h"
#include "os/port/thread.h"

#define HOUR 3600000000000ull

typedef struct seen {
    mt_ticker_ops ops;
    _Atomic int prepared, rounds;
    uint64_t from, asked, woke, cpu;
    bool early, late;
    char name[16];
    sigset_t signals;
} seen;

static faulty heap = {.fail_at = -1};

static mt_ticker_ops
ticker(void (*prepare)(void))
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_ticker_ops ops;

    CHECK(mt_ticker_new(&mem, &mt_thread_sys_posix, prepare, &ops, NULL) == MT_OK);
    return ops;
}

static uint64_t
monotonic(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void
wait_twice(void *arg)
{
    seen *s = arg;
    const mt_ticker_ops *t = &s->ops;

    prctl(PR_GET_NAME, s->name);
    pthread_sigmask(SIG_BLOCK, NULL, &s->signals);
    s->from = monotonic();
    s->early = t->wait(t->ctx, 0); /* is over */
    s->asked = t->now_ns(t->ctx) + 3000000;
    s->early = s->early && t->wait(t->ctx, s->asked);
    s->woke = monotonic();
    while (t->cpu_ns(t->ctx) == 0)
        continue;
    s->cpu = t->cpu_ns(t->ctx);
    s->rounds = 1;
    s->late = t->wait(t->ctx, s->woke + HOUR);
    s->rounds = 2;
}

static void
a_thread_waits_by_the_clock_and_stops_at_once(void)
{
    seen s = {.ops = ticker(mt_thread_name)};
    const mt_ticker_ops *t = &s.ops;
    sigset_t before, after;
    uint64_t began = monotonic();

    sigemptyset(&before);
    sigaddset(&before, SIGUSR2);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    CHECK(t->start(t->ctx, wait_twice, &s, NULL) == MT_OK);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    CHECK(!sigismember(&after, SIGINT) && sigismember(&after, SIGUSR2));
    while (s.rounds == 0)
        continue;
    t->stop(t->ctx); /* while it waits, or just before: the same */
    CHECK(s.rounds == 2 && s.early && !s.late);
    CHECK(began <= s.from && s.asked <= s.woke && s.woke <= monotonic());
    CHECK(monotonic() - began < HOUR);
    CHECK(s.cpu > 0 && strcmp(s.name, "memtools") == 0);
    CHECK(sigismember(&s.signals, SIGINT) && sigismember(&s.signals, SIGTERM));
    CHECK(sigismember(&s.signals, SIGALRM) && sigismember(&s.signals, SIGPROF));
    CHECK(!sigismember(&s.signals, SIGSEGV) && !sigismember(&s.signals, SIGBUS));
    t->stop(t->ctx);
    s.rounds = 0; /* and once more: it is not stopped from the first time */
    CHECK(t->start(t->ctx, wait_twice, &s, NULL) == MT_OK);
    while (s.rounds == 0)
        continue;
    t->stop(t->ctx);
    CHECK(s.rounds == 2 && s.early && !s.late);
    t->close(t->ctx);
    CHECK(heap.live == 0);
}

static void
count(void *arg)
{
    seen *s = arg;
    uint64_t at = s->ops.now_ns(s->ops.ctx);

    do
        s->rounds++;
    while (s->ops.wait(s->ops.ctx, at + HOUR));
}

static void
it_can_be_started_many_times(void)
{
    seen s = {.ops = ticker(NULL)};

    s.ops.stop(s.ops.ctx);
    for (int i = 0; i < 500; i++) {
        CHECK(s.ops.start(s.ops.ctx, count, &s, NULL) == MT_OK);
        s.ops.stop(s.ops.ctx);
        CHECK(s.rounds == i + 1);
    }
    s.ops.close(s.ops.ctx);
    s.ops.close(NULL);
    CHECK(heap.live == 0);
}

static int
no_cond(pthread_cond_t *out)
{
    (void)out;
    return ENOMEM;
}

static int
no_thread(pthread_t *out, void *(*run)(void *), void *arg)
{
    (void)out;
    (void)run;
    (void)arg;
    return EAGAIN;
}

static void
what_the_system_refuses_is_told(void)
{
    static const mt_thread_sys bare = {no_cond, no_thread};
    mt_thread_sys sys = bare;
    mt_alloc mem = faulty_alloc(&heap);
    mt_ticker_ops ops;
    mt_error err;
    seen s = {.rounds = 0};

    heap.fail_at = heap.calls;
    CHECK(mt_ticker_new(&mem, &sys, NULL, &ops, &err) == MT_ENOMEM && heap.live == 0);
    CHECK(strcmp(err.call, "malloc") == 0);
    CHECK(mt_ticker_new(&mem, &sys, NULL, &ops, &err) == MT_ENOMEM && heap.live == 0);
    CHECK(strcmp(err.call, "pthread_cond_init") == 0 && err.native == ENOMEM);
    sys.condition_init = mt_thread_sys_posix.condition_init;
    CHECK(mt_ticker_new(&mem, &sys, NULL, &ops, &err) == MT_OK);
    CHECK(ops.start(ops.ctx, count, &s, &err) == MT_EAGAIN && err.native == EAGAIN);
    CHECK(strcmp(err.call, "pthread_create") == 0 && s.rounds == 0);
    ops.stop(ops.ctx);
    sys.thread_new = mt_thread_sys_posix.thread_new;
    s.ops = ops;
    CHECK(ops.start(ops.ctx, count, &s, &err) == MT_OK);
    ops.stop(ops.ctx);
    CHECK(s.rounds == 1);
    ops.close(ops.ctx);
    CHECK(heap.live == 0);
}

int
main(void)
{
    RUN(a_thread_waits_by_the_clock_and_stops_at_once);
    RUN(it_can_be_started_many_times);
    RUN(what_the_system_refuses_is_told);
    CHECK_DONE();
}
