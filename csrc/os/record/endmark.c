#define _GNU_SOURCE /* syscall */
#include "os/record/endmark.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "core/record/writer.h"
#include "os/base/ownplace.h"

typedef struct record {
    _Atomic long owner; /* see os/base/ownplace.h */
    _Atomic uintptr_t at;
} record;

/* Those that end a process by default and that something may send or cause, but SIGBUS, which
 * busguard.h has, and SIGPIPE and SIGXFSZ, which Python ignores. */
static const int signals[] = {SIGTERM, SIGHUP, SIGINT,  SIGQUIT, SIGABRT, SIGSEGV,
                              SIGFPE,  SIGILL, SIGXCPU, SIGALRM, SIGUSR1, SIGUSR2};
enum { SIGNALS = sizeof signals / sizeof *signals };

static record records[MT_ENDMARK_RECORDS];
static _Atomic int inside; /* handlers that are at the records */
static _Atomic long ends;  /* the process that a signal is about to end */
static void (*_Atomic before_end)(void);

/* --- in the handler: only what is safe there --- */

static void
set_default(int number)
{
    struct sigaction by_default = {.sa_handler = SIG_DFL};

    sigaction(number, &by_default, NULL);
}

/* Whether a store to the place of the mark works, and does not raise SIGBUS because the page has
 * gone. To find out, the kernel is made to write the mask of signals into the word of the time,
 * which has no meaning as long as there is no mark. */
static bool
has_its_page(void *region)
{
    uint64_t *time_ns = (uint64_t *)region + MT_RECORD_AT_SIGNAL_NS;

    return syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, time_ns, sizeof *time_ns) == 0;
}

void
mt_endmark_now(int number)
{
    uint64_t now = mt_now_ns();

    inside++;
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++) {
        bool is_used = mt_ownplace_is_used(&records[i].owner);
        void *region = (void *)records[i].at;
        if (is_used && mt_ownplace_is_used(&records[i].owner) && has_its_page(region))
            mt_record_mark_signal(region, (uint64_t)number, now);
    }
    inside--;
}

/* A fault comes again when it is returned from; what was sent does not. */
static void
on_end(int number, siginfo_t *info, void *context)
{
    void (*call)(void) = before_end;
    int kept = errno;
    bool is_fault;

    (void)context;
    ends = (long)getpid();
    mt_endmark_now(number);
    if (call != NULL && (number == SIGTERM || number == SIGHUP)) call();
    set_default(number);
    is_fault = number == SIGSEGV || number == SIGFPE || number == SIGILL;
    if (!is_fault || info->si_code <= 0) kill(getpid(), number);
    errno = kept;
}

/* --- outside of it --- */

/* Both kinds of handlers lie in one union. */
static bool
endmark_is_same(const struct sigaction *one, const struct sigaction *other)
{
    return one->sa_sigaction == other->sa_sigaction;
}

/* If the handler that it replaces is not the one of a moment ago, another thread has installed it
 * meanwhile, and it is put back. So the newest handler of the program stays. */
static void
replace_default(int number, const struct sigaction *mine)
{
    struct sigaction last = {.sa_handler = SIG_DFL}, put = *mine, was;

    if (sigaction(number, NULL, &was) != 0 || !endmark_is_same(&was, &last)) return;
    while (sigaction(number, &put, &was) == 0 && !endmark_is_same(&was, &last)) {
        last = put;
        put = was;
    }
}

/* A page of a record that goes while it is marked must reach busguard.h from within the
 * handler too. */
static void
endmark_install(void)
{
    struct sigaction mine = {.sa_sigaction = on_end,
                             .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};

    sigfillset(&mine.sa_mask);
    sigdelset(&mine.sa_mask, SIGBUS);
    for (int i = 0; i < SIGNALS; i++)
        replace_default(signals[i], &mine);
}

static void
uninstall(void)
{
    struct sigaction now;

    for (int i = 0; i < SIGNALS; i++)
        if (sigaction(signals[i], NULL, &now) == 0 && now.sa_sigaction == on_end)
            set_default(signals[i]);
}

static bool
any(void)
{
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++)
        if (mt_ownplace_is_used(&records[i].owner)) return true;
    return false;
}

/* NULL where it is not in the table. */
static record *
place_of(const void *region)
{
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++)
        if (records[i].at == (uintptr_t)region && mt_ownplace_is_used(&records[i].owner))
            return &records[i];
    return NULL;
}

static bool
endmark_put(void *region)
{
    for (int i = 0; i < MT_ENDMARK_RECORDS; i++) {
        if (!mt_ownplace_take(&records[i].owner)) continue;
        records[i].at = (uintptr_t)region;
        mt_ownplace_use(&records[i].owner);
        return true;
    }
    return false;
}

bool
mt_endmark_add(void *region)
{
    if (getpid() == 1 || place_of(region) != NULL) return true;
    if (!any()) inside = 0; /* a parent's handler may have been in it at the fork */
    if (!endmark_put(region)) return false;
    endmark_install();
    return true;
}

void
mt_endmark_remove(const void *region)
{
    record *r = place_of(region);

    if (r == NULL) return;
    r->owner = 0;
    while (inside > 0)
        sched_yield();
    if (!any()) uninstall();
}

void
mt_endmark_renew(void)
{
    if (ends == (long)getpid() || !any()) return;
    endmark_install();
    if (!any()) uninstall(); /* the last record went meanwhile */
}

void
mt_endmark_before_end(void (*call)(void))
{
    before_end = call;
}
