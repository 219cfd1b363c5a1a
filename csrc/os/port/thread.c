#define _POSIX_C_SOURCE 200809L /* signal masks */
#include "os/port/thread.h"

#include <assert.h>
#include <signal.h>
#include <sys/prctl.h>

#include "core/base/clock.h"
#include "core/base/lock.h"

enum { STACK = 512 * 1024 };

typedef struct ticker {
    mt_alloc mem;
    const mt_thread_sys *sys;
    void (*prepare)(void);
    mt_lock lock;
    mt_condition wake;
    bool stopping;
    bool runs; /* the owner's */
    pthread_t thread;
    void (*run)(void *arg);
    void *arg;
} ticker;

/* --- the system ------------------------------------------------------------------------------- */

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

const mt_thread_sys mt_thread_sys_posix = {mt_condition_init, posix_thread_new};

void
mt_thread_name(void)
{
    prctl(PR_SET_NAME, (unsigned long)"memtools", 0ul, 0ul, 0ul);
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
thread_start(void *ctx, void (*run)(void *), void *arg, mt_error *err)
{
    ticker *t = ctx;
    int fault;

    assert(!t->runs);
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
    ticker *t = ctx;
    bool go_on, waiting = true;

    mt_lock_take(&t->lock);
    while (!t->stopping && waiting)
        waiting = mt_condition_wait(&t->wake, &t->lock, at_ns);
    go_on = !t->stopping;
    mt_lock_give(&t->lock);
    return go_on;
}

static void
thread_stop(void *ctx)
{
    ticker *t = ctx;

    if (!t->runs) return;
    mt_lock_take(&t->lock);
    t->stopping = true;
    mt_condition_wake_all(&t->wake);
    mt_lock_give(&t->lock);
    pthread_join(t->thread, NULL);
    t->runs = false;
}

static uint64_t
now_ns(void *ctx)
{
    (void)ctx;
    return mt_now_ns();
}

static uint64_t
cpu_ns(void *ctx)
{
    (void)ctx;
    return mt_thread_cpu_ns();
}

static void
close(void *ctx)
{
    ticker *t = ctx;
    mt_alloc mem;

    if (t == NULL) return;
    assert(!t->runs);
    mt_condition_fini(&t->wake);
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
    if ((fault = sys->condition_init(&t->wake)) != 0) {
        mem->put(mem->ctx, t, sizeof *t);
        return mt_fail(err, MT_ENOMEM, "pthread_cond_init", fault);
    }
    t->mem = *mem;
    t->sys = sys;
    t->prepare = prepare;
    mt_lock_init(&t->lock);
    *out = (mt_ticker_ops){thread_start, wait, thread_stop, now_ns, cpu_ns, close, t};
    return MT_OK;
}
