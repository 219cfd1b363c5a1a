/* The thread never allocates: every malloc of this program is counted, by thread. With the real
 * probe, a record, watermarks and a child to look at. */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit/check.h"
#include "core/monitor/sampler.h"
#include "os/monitor/probe.h"
#include "os/port/thread.h"

#ifdef __SANITIZE_ADDRESS__ /* which has a malloc of its own */

int
main(void)
{
    CHECK_DONE();
}

#else

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);

static _Thread_local int on_the_thread;
static _Atomic long all, on_thread;

static void
count(void)
{
    all++;
    on_thread += on_the_thread;
}

void *
malloc(size_t bytes)
{
    count();
    return __libc_malloc(bytes);
}

void *
calloc(size_t n, size_t bytes)
{
    count();
    return __libc_calloc(n, bytes);
}

void *
realloc(void *block, size_t bytes)
{
    count();
    return __libc_realloc(block, bytes);
}

static void
mark_thread(void)
{
    on_the_thread = 1;
}

static void *
open_record(mt_record *r)
{
    static mt_record_column names[MT_SAMPLER_HOST];
    mt_record_start start = {.wall_ns = 5, .clock_ns = 6, .pid = 7, .page_bytes = 4096};
    mt_record_size size = {.series = {MT_SAMPLER_HOST, 64, 32}, .events = 8, .phases = 2};
    void *region = malloc(mt_record_parts_of(&size).end);

    for (size_t c = 0; c < MT_SAMPLER_HOST; c++)
        names[c].name[0] = (char)('A' + c);
    mt_record_init(r, region, &size, names, &start, &(mt_birth){0});
    return region;
}

static mt_sampler *
open_sampler(mt_record *r)
{
    static const mt_probe_ages never_old = {0, 0, 0};
    mt_sampler_setup setup = {.interval_ns = 100000, .limit = 1 << 20, .record = r};
    mt_probe_linux *probe;
    mt_sampler *s;

    CHECK(mt_probe_linux_new(&mt_alloc_libc, &mt_proc_sys_libc, "", &never_old, &probe, NULL) ==
          MT_OK);
    setup.probe = mt_probe_linux_ops(probe);
    CHECK(mt_ticker_new(&mt_alloc_libc, &mt_thread_sys_posix, mark_thread, &setup.ticker, NULL) ==
          MT_OK);
    CHECK(mt_sampler_new(&mt_alloc_libc, &setup, &s, NULL) == MT_OK);
    return s;
}

static void
the_thread_allocates_nothing(void)
{
    pid_t child = fork();
    mt_record r;
    void *region;
    mt_sampler *s;
    mt_sample last = {.children = 0};

    if (child == 0) {
        for (;;)
            pause();
    }
    region = open_record(&r);
    s = open_sampler(&r);
    mt_sampler_watch(s, MT_MARK_HOST, 0.5);
    CHECK(all > 3 && on_thread == 0);
    CHECK(mt_sampler_start(s, NULL) == MT_OK);
    while (mt_sampler_read(s).samples < 300)
        continue;
    CHECK(mt_sampler_latest(s, &last) && last.children == 1 && mt_sampler_step(s, 1) == 1);
    mt_sampler_stop(s);
    CHECK(on_thread == 0);
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child);
    mt_sampler_free(s);
    mt_record_fini(&r);
    free(region);
}

int
main(void)
{
    RUN(the_thread_allocates_nothing);
    CHECK_DONE();
}

#endif
