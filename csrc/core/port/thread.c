#define _POSIX_C_SOURCE 200809L /* clocks, signal masks */
#include "port/thread.h"

#include <signal.h>
#include <time.h>

#include "base/lock.h"

enum { STACK = 512 * 1024, SECOND = 1000000000 };

typedef struct ticker {
    mt_alloc mem;
    const mt_thread_sys *sys;
    void (*prepare)(void);
    mt_lock lock;
    pthread_cond_t wake;
    bool stopping;
    bool runs; /* the owner's */
    pthread_t thread;
    void (*run)(void *arg);
    void *arg;
} ticker;

/* --- the system ------------------------------------------------------------------------------- */

static int
posix_cond_new(pthread_cond_t *out)
{
    pthread_condattr_t attr;
    int fault = pthread_condattr_init(&attr);

    if (fault != 0) return fault;
    fault = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (fault == 0) fault = pthread_cond_init(out, &attr);
    pthread_condattr_destroy(&attr);
    return fault;
}

/* A thread begins with its maker's mask. The four that a fault of the thread itself raises stay
 * open, so that a handler which prints where it happened still does. */
static int
create_with_signals_blocked(pthread_t *out, const pthread_attr_t *attr, void *(*run)(void *),
                            void *arg)
{
    sigset_t all, before;
    int fault;

    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    if ((fault = pthread_sigmask(SIG_SETMASK, &all, &before)) != 0) return fault;
    fault = pthread_create(out, attr, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return fault;
}

static int
posix_thread_new(pthread_t *out, void *(*run)(void *), void *arg)
{
    pthread_attr_t attr;
    int fault = pthread_attr_init(&attr);

    if (fault != 0) return fault;
    fault = pthread_attr_setstacksize(&attr, STACK);
    if (fault == 0) fault = create_with_signals_blocked(out, &attr, run, arg);
    pthread_attr_destroy(&attr);
    return fault;
}

const mt_thread_sys mt_thread_sys_posix = {posix_cond_new, posix_thread_new};

static uint64_t
clock_ns(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static uint64_t
now_ns(void *ctx)
{
    (void)ctx;
    return clock_ns(CLOCK_MONOTONIC);
}

static uint64_t
cpu_ns(void *ctx)
{
    (void)ctx;
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

/* --- the thread ------------------------------------------------------------------------------- */

static void *
body(void *arg)
{
    ticker *t = arg;

    if (t->prepare != NULL) t->prepare();
    t->run(t->arg);
    return NULL;
}

static mt_status
start(void *ctx, void (*run)(void *), void *arg, mt_error *err)
{
    ticker *t = ctx;
    int fault;

    t->stopping = false;
    t->run = run;
    t->arg = arg;
    if ((fault = t->sys->thread_new(&t->thread, body, t)) != 0)
        return mt_fail(err, MT_EAGAIN, "pthread_create", fault);
    t->runs = true;
    return MT_OK;
}

static bool
wait(void *ctx, uint64_t at_ns)
{
    struct timespec at = {(time_t)(at_ns / SECOND), (long)(at_ns % SECOND)};
    ticker *t = ctx;
    int fault = 0;
    bool go_on;

    mt_lock_take(&t->lock);
    while (!t->stopping && fault == 0)
        fault = pthread_cond_timedwait(&t->wake, &t->lock, &at);
    go_on = !t->stopping;
    mt_lock_give(&t->lock);
    return go_on;
}

static void
stop(void *ctx)
{
    ticker *t = ctx;

    if (!t->runs) return;
    mt_lock_take(&t->lock);
    t->stopping = true;
    pthread_cond_signal(&t->wake);
    mt_lock_give(&t->lock);
    pthread_join(t->thread, NULL);
    t->runs = false;
}

static void
close(void *ctx)
{
    ticker *t = ctx;
    mt_alloc mem;

    if (t == NULL) return;
    pthread_cond_destroy(&t->wake);
    mt_lock_fini(&t->lock);
    mem = t->mem;
    mem.put(mem.ctx, t, sizeof *t);
}

mt_status
mt_ticker_new(const mt_alloc *mem, const mt_thread_sys *sys, void (*prepare)(void),
              mt_ticker_ops *out, mt_error *err)
{
    ticker *t = mt_alloc_zeroed(mem, 1, sizeof *t);
    int fault;

    if (t == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    if ((fault = sys->cond_new(&t->wake)) != 0) {
        mem->put(mem->ctx, t, sizeof *t);
        return mt_fail(err, MT_ENOMEM, "pthread_cond_init", fault);
    }
    t->mem = *mem;
    t->sys = sys;
    t->prepare = prepare;
    mt_lock_init(&t->lock);
    *out = (mt_ticker_ops){start, wait, stop, now_ns, cpu_ns, close, t};
    return MT_OK;
}
