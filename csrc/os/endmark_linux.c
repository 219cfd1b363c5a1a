#define _GNU_SOURCE /* syscall */
#include "endmark_linux.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../core/record.h"

typedef struct record {
    _Atomic uintptr_t at; /* 0: free */
    _Atomic long pid;     /* a child has something else at this address */
} record;

/* Those that end a process by default and that something may send or cause, but SIGBUS, which
 * busguard_linux.h has, and SIGPIPE and SIGXFSZ, which Python ignores. */
static const int signals[] = {SIGTERM, SIGHUP, SIGINT,  SIGQUIT, SIGABRT, SIGSEGV,
                              SIGFPE,  SIGILL, SIGXCPU, SIGALRM, SIGUSR1, SIGUSR2};
enum { SIGNALS = sizeof signals / sizeof *signals };
enum { NOBODY = 0, WAITING = -1 }; /* of `came`, beside the number of a signal */
enum { WAIT_MS = 200, SAY_MS = 2000 };

static record records[MT_ENDMARK_RECORDS];
static _Atomic int inside; /* handlers that are at the records */
static _Atomic int came;
static _Atomic long waiter; /* the process of whoever waits */
static timer_t timers[2];   /* of SIGTERM and SIGHUP; constant while somebody waits */
static void (*tell)(void);  /* as well */

/* --- in the handler: only what is safe there --- */

static void
set_default(int number)
{
    struct sigaction by_default = {.sa_handler = SIG_DFL};

    sigaction(number, &by_default, NULL);
}

static bool
is_fault(int number)
{
    return number == SIGSEGV || number == SIGFPE || number == SIGILL;
}

static void
futex(int what, int value)
{
    syscall(SYS_futex, &came, what | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static bool
arm(int number, long ms)
{
    struct itimerspec at = {.it_value = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}};

    return timer_settime(timers[number == SIGHUP], 0, &at, NULL) == 0;
}

/* Whether somebody who waits ends the process, or else the timer. */
static bool
hand_over(int number)
{
    int waiting = WAITING;

    if ((number != SIGTERM && number != SIGHUP) || waiter != (long)getpid()) return false;
    if (!atomic_compare_exchange_strong(&came, &waiting, number)) return false;
    set_default(number);
    if (!arm(number, WAIT_MS)) return false;
    tell();
    futex(FUTEX_WAKE, 1);
    return true;
}

void
mt_endmark_now(int number)
{
    struct timespec now;
    long pid = (long)getpid();

    clock_gettime(CLOCK_MONOTONIC, &now);
    inside++;
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++) {
        uintptr_t at = records[i].at;
        if (at != 0 && records[i].pid == pid)
            mt_record_mark_signal((void *)at, (uint64_t)number,
                                  (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
    }
    inside--;
}

/* A fault comes again when it is returned from; what was sent does not. */
static void
on_end(int number, siginfo_t *info, void *context)
{
    int kept = errno;

    (void)context;
    mt_endmark_now(number);
    if (!hand_over(number)) {
        set_default(number);
        if (!is_fault(number) || info->si_code <= 0) kill(getpid(), number);
    }
    errno = kept;
}

/* --- outside of it --- */

/* A page of a record that is gone must reach busguard_linux.h from within the handler too. */
static void
install(void)
{
    struct sigaction mine = {.sa_sigaction = on_end,
                             .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    struct sigaction now;

    sigfillset(&mine.sa_mask);
    sigdelset(&mine.sa_mask, SIGBUS);
    for (int i = 0; i < SIGNALS; i++)
        if (sigaction(signals[i], NULL, &now) == 0 && !(now.sa_flags & SA_SIGINFO) &&
            now.sa_handler == SIG_DFL)
            sigaction(signals[i], &mine, NULL);
}

static void
uninstall(void)
{
    struct sigaction now;

    for (int i = 0; i < SIGNALS; i++)
        if (sigaction(signals[i], NULL, &now) == 0 && now.sa_flags & SA_SIGINFO &&
            now.sa_sigaction == on_end)
            set_default(signals[i]);
}

static bool
any_of(long pid)
{
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++)
        if (records[i].at != 0 && records[i].pid == pid) return true;
    return false;
}

bool
mt_endmark_add(void *region)
{
    long pid = (long)getpid();

    if (pid == 1) return true;
    if (!any_of(pid)) inside = 0; /* a parent's handler may have been in it at the fork */
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++) {
        uintptr_t at = records[i].at;
        if (at != 0 && records[i].pid == pid) continue;
        if (!atomic_compare_exchange_strong(&records[i].at, &at, (uintptr_t)region)) continue;
        records[i].pid = pid;
        install();
        return true;
    }
    return false;
}

void
mt_endmark_remove(const void *region)
{
    long pid = (long)getpid();

    if (region == NULL) return;
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++)
        if (records[i].at == (uintptr_t)region && records[i].pid == pid) {
            records[i].at = 0;
            while (inside > 0)
                sched_yield();
            if (!any_of(pid)) uninstall();
            return;
        }
}

static bool
make_timers(void)
{
    for (int i = 0; i < 2; i++) {
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL,
                                 .sigev_signo = i == 0 ? SIGTERM : SIGHUP};
        if (timer_create(CLOCK_MONOTONIC, &event, &timers[i]) != 0) {
            if (i == 1) timer_delete(timers[0]);
            return false;
        }
    }
    return true;
}

bool
mt_endmark_expect(void (*when_it_came)(void))
{
    if (waiter == (long)getpid() || !make_timers()) return false;
    tell = when_it_came;
    came = WAITING;
    waiter = (long)getpid();
    return true;
}

int
mt_endmark_wait(void)
{
    int number;

    while ((number = came) == WAITING)
        futex(FUTEX_WAIT, WAITING);
    return number;
}

void
mt_endmark_extend(int number)
{
    (void)arm(number, SAY_MS);
}

void
mt_endmark_stop(void)
{
    int waiting = WAITING;

    if (waiter != (long)getpid()) return;
    if (!atomic_compare_exchange_strong(&came, &waiting, NOBODY)) return;
    timer_delete(timers[0]);
    timer_delete(timers[1]);
    waiter = 0;
    futex(FUTEX_WAKE, 1);
}
