#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "os/record/busguard.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "os/record/endmark.h"
#include "os/base/ownplace.h"

enum { DONE = -1 };

typedef struct region {
    _Atomic long owner; /* see os/base/ownplace.h */
    _Atomic uintptr_t from;
    _Atomic size_t bytes;
    _Atomic bool hit;
} region;

static region regions[MT_BUSGUARD_REGIONS];
static struct sigaction before; /* written before the handler is there, constant afterwards */
static uintptr_t page_bytes;    /* as well */
static _Atomic long installer;  /* 0: none yet; the process whose thread is installing it; DONE */

static region *
region_of(uintptr_t at)
{
    for (int i = 0; i < MT_BUSGUARD_REGIONS; i++)
        if (regions[i].from <= at && at - regions[i].from < regions[i].bytes &&
            mt_ownplace_is_used(&regions[i].owner))
            return &regions[i];
    return NULL;
}

/* --- in the handler: only what is safe there --- */

static bool
replace_page(uintptr_t at)
{
    region *r = region_of(at);
    void *page = (void *)(at & ~(page_bytes - 1));

    if (r == NULL) return false;
    if (mmap(page, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
             0) == MAP_FAILED)
        return false;
    r->hit = true;
    return true;
}

/* Under the default handler a fault comes again when it is returned from; what was sent does not.
 * That handler is there before the mark is made, so that a fault in the marking ends the
 * process and does not recurse. */
static void
pass_on(int number, siginfo_t *info, void *context)
{
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else if (info->si_code > 0 || before.sa_handler == SIG_DFL) {
        sigaction(number, &before, NULL);
        mt_endmark_now(number); /* the process ends by it */
        if (info->si_code <= 0) raise(number);
    }
}

static void
on_bus(int number, siginfo_t *info, void *context)
{
    int kept = errno;

    if (info->si_code <= 0 || !replace_page((uintptr_t)info->si_addr))
        pass_on(number, info, context);
    errno = kept;
}

/* --- outside of it --- */

/* Whether this thread is to install the handler. Another one that is at it is waited for, unless
 * the process was forked meanwhile: then it is the parent's, and its place is taken. */
static bool
is_mine_to_install(void)
{
    long self = (long)getpid(), seen = 0;

    while (!atomic_compare_exchange_strong(&installer, &seen, self)) {
        if (seen == DONE) return false;
        if (seen != self) continue;
        sched_yield();
        seen = 0;
    }
    return true;
}

/* A process that is forked while its parent installs the handler may have it already: then the
 * handler before is known as well. */
static bool
put_handler(void)
{
    struct sigaction mine = {.sa_sigaction = on_bus,
                             .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART};
    struct sigaction now;

    sigemptyset(&mine.sa_mask);
    if (sigaction(SIGBUS, NULL, &now) != 0) return false;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_bus) return true;
    before = now;
    return sigaction(SIGBUS, &mine, NULL) == 0;
}

static bool
busguard_install(void)
{
    bool done;

    if (!is_mine_to_install()) return true;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    done = put_handler();
    installer = done ? DONE : 0;
    return done;
}

bool
mt_busguard_add(void *at, size_t bytes)
{
    if (!busguard_install()) return false;
    for (int i = 0; i < MT_BUSGUARD_REGIONS; i++) {
        region *r = &regions[i];
        if (!mt_ownplace_take(&r->owner)) continue;
        r->from = (uintptr_t)at;
        r->bytes = bytes;
        r->hit = false;
        mt_ownplace_use(&r->owner);
        return true;
    }
    return false;
}

static region *
region_from(const void *at)
{
    region *r = region_of((uintptr_t)at);

    return r != NULL && r->from == (uintptr_t)at ? r : NULL;
}

void
mt_busguard_remove(const void *at)
{
    region *r = region_from(at);

    if (r == NULL) return;
    r->bytes = 0;
    r->owner = 0;
}

bool
mt_busguard_hit(const void *at)
{
    region *r = region_from(at);

    return r != NULL && r->hit;
}
