/* The Linux store: the suite that every store passes, on this kernel and as on one that has no
 * PAGEMAP_SCAN; and what only Linux has. The strict store of the tests stands on it: the suite on
 * that one too. */
#define _GNU_SOURCE /* mkstemp, pread */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit/faulty_sys.h"
#include "kit/memstore.h"
#include "kit/store_suite.h"

static const mt_linux_sys *sys = &faulty_sys;
static size_t strict_page_bytes;

static mt_status
make(void *ctx, mt_store_ops *out)
{
    mt_alloc mem = faulty_alloc(ctx);

    return mt_store_linux_new_with(&mem, sys, out, NULL);
}

static mt_status
make_strict(void *ctx, mt_store_ops *out)
{
    mt_alloc mem = faulty_alloc(ctx);

    return memstore_new(&mem, &faulty_sys, strict_page_bytes, out, NULL);
}

static void
peek(void *ctx, void *to, const void *at, size_t bytes)
{
    (void)ctx;
    memcpy(to, at, bytes);
}

static void
poke(void *ctx, void *at, const void *from, size_t bytes)
{
    (void)ctx;
    memcpy(at, from, bytes);
}

/* The allocator and the system count together: ctx is sys_faults. */
static long
fired_now(const faulty *f)
{
    return f->fail_at >= 0 && f->calls > f->fail_at;
}

static long fired_before; /* under what was armed before */

static void
fail_at(void *ctx, long n)
{
    faulty *f = ctx;

    fired_before += fired_now(f);
    f->fail_at = n < 0 ? -1 : f->calls + n;
}

static long
fired(void *ctx)
{
    return fired_before + fired_now(ctx);
}

static long
live(void *ctx)
{
    return ((faulty *)ctx)->live;
}

/* ---- kernels without PAGEMAP_SCAN, and processes without /proc ---- */

static int
no_scan(int pagemap, void *arg)
{
    (void)pagemap;
    (void)arg;
    errno = ENOTTY;
    return -1;
}

static int
no_open(const char *path, int flags)
{
    (void)path;
    (void)flags;
    errno = ENOENT;
    return -1;
}

static const mt_linux_sys *
without(bool proc)
{
    static mt_linux_sys older;

    older = faulty_sys;
    older.scan = no_scan;
    if (!proc) older.open = no_open;
    return &older;
}

/* ---- Linux alone ---- */

/* Whether all of it is mapped, by whatever. */
static bool
is_reserved(const sim *m, size_t at, size_t n)
{
    return msync(sim_at(m, at), n * m->ops.page_bytes, MS_ASYNC) == 0;
}

static void
an_untouched_arena_of_64_gib_costs_nothing(void)
{
    sim m = sim_new(bench);
    void *base;

    CHECK(m.ops.extend(m.ops.ctx, (size_t)64 << 30, &base, NULL) == MT_OK);
    CHECK(m.ops.physical(m.ops.ctx) == 0);
    ((volatile char *)base)[(size_t)63 << 30] = 1;
    CHECK(m.ops.physical(m.ops.ctx) == m.ops.page_bytes);
    sim_close(&m);
}

static void
a_size_that_no_file_has_is_refused(void)
{
    sim m = sim_new(bench);
    mt_error err = {0};
    void *base;

    CHECK(m.ops.extend(m.ops.ctx, (size_t)1 << 63, &base, &err) == MT_ENOMEM);
    CHECK(err.asked == (size_t)1 << 63 && err.native == ENOMEM);
    CHECK(sim_extend(&m, 2) == MT_OK);
    sim_check(&m);
    sim_close(&m);
}

static void
addresses_stay_ours_when_mmap_fails_over_them(void)
{
    sim m = sim_mapped_store(8);
    mt_error err = {0};

    fail_at(bench->ctx, 0);
    CHECK(m.ops.map(m.ops.ctx, sim_at(&m, 2), 3 * m.ops.page_bytes, 0, MT_MAP_SHARED, &err) ==
          MT_ENOMEM);
    CHECK(err.native == ENOMEM && err.asked == 3 * m.ops.page_bytes);
    CHECK(is_reserved(&m, 0, 8));
    fail_at(bench->ctx, 0);
    CHECK(m.ops.map_zero(m.ops.ctx, sim_at(&m, 1), m.ops.page_bytes, NULL) == MT_ENOMEM);
    fail_at(bench->ctx, -1);
    CHECK(is_reserved(&m, 0, 8));
    CHECK(sim_map(&m, 1, 1, 4, MT_MAP_SHARED) == MT_OK);
    sim_check(&m);
    sim_close(&m);
}

static void
what_the_system_does_not_take_back_reads_zeros_all_the_same(void)
{
    sim m = sim_new(bench);

    CHECK(sim_extend(&m, 3) == MT_OK);
    CHECK(sim_extend(&m, 3) == MT_OK);
    for (size_t i = 0; i < 6; i++)
        sim_poke(&m, i, 81 + i);
    fail_at(bench->ctx, 0);
    m.ops.drop(m.ops.ctx, m.ops.page_bytes, 4 * m.ops.page_bytes); /* over two arenas */
    fail_at(bench->ctx, -1);
    for (size_t i = 1; i < 5; i++) {
        whole_page_reads_zeros(&m, sim_at(&m, i));
        m.value[i] = 0;
    }
    sim_check(&m);
    sim_close(&m);
}

static void
an_interrupted_drop_goes_on(void)
{
    sim m = sim_mapped_store(4);

    sim_poke(&m, 1, 91);
    sys_errno = EINTR;
    fail_at(bench->ctx, 0);
    sim_drop(&m, 1, 1);
    fail_at(bench->ctx, -1);
    sys_errno = ENOMEM;
    sim_check_physical(&m);
    sim_check(&m);
    sim_close(&m);
}

static void
a_kernel_that_does_not_know_noexec_gets_a_memfd(void)
{
    mt_store_ops ops;

    sys_errno = EINVAL;
    fail_at(bench->ctx, 1); /* 0 is the allocation */
    CHECK(make(bench->ctx, &ops) == MT_OK);
    ops.close(ops.ctx);
    sys_errno = EPERM;
    fail_at(bench->ctx, 1);
    CHECK(make(bench->ctx, &ops) == MT_ENOMEM);
    fail_at(bench->ctx, -1);
    sys_errno = ENOMEM;
}

/* The program closes what it did not open, and its own file gets the number: that file is neither
 * cut, mapped, punched nor closed. What was mapped before can be read and written. */
static void
a_descriptor_that_means_another_file_is_left_alone(void)
{
    char name[] = "/tmp/memtools-test-XXXXXX", text[5];
    int user = mkstemp(name), memfd = dup(user); /* the next number that is free */
    struct stat is;
    mt_store_ops ops;
    int other;
    void *at, *more;
    size_t unit;

    CHECK(unlink(name) == 0 && write(user, "user's", 6) == 6 && close(memfd) == 0);
    CHECK(make(bench->ctx, &ops) == MT_OK);
    unit = ops.page_bytes;
    CHECK(ops.extend(ops.ctx, 4 * unit, &at, NULL) == MT_OK);
    CHECK(ops.map(ops.ctx, at, 4 * unit, 0, MT_MAP_SHARED, NULL) == MT_OK);
    memset(at, 7, 4 * unit);
    CHECK((other = dup(memfd)) >= 0);
    CHECK(lseek(memfd, 0, SEEK_END) == (off_t)(4 * unit) && dup2(user, memfd) == memfd);

    CHECK(ops.extend(ops.ctx, unit, &more, NULL) == MT_ENOMEM);
    CHECK(ops.map(ops.ctx, at, unit, unit, MT_MAP_SHARED, NULL) == MT_ENOMEM);
    CHECK(ops.physical(ops.ctx) == 0);
    ops.drop(ops.ctx, 0, unit);
    CHECK(fstat(other, &is) == 0 && (size_t)is.st_blocks * 512 == 3 * unit && close(other) == 0);
    CHECK(((unsigned char *)at)[0] == 0 && ((unsigned char *)at)[unit] == 7);
    ops.close(ops.ctx);
    sys_faults.live--; /* the memfd, which dup2 closed */
    CHECK(lseek(memfd, 0, SEEK_END) == 6 && pread(memfd, text, 5, 0) == 5);
    CHECK(memcmp(text, "user'", 5) == 0 && close(memfd) == 0 && close(user) == 0);
}

/* Pages of the file that were only read are none, so a fork copies only what was written. */
static void
the_first_page_that_was_written_privately_is_found(void)
{
    enum { PAGES = 1300, WRITTEN = 1201 };
    sim m = sim_new(bench);
    size_t unit = m.ops.page_bytes;
    volatile unsigned char *base;
    void *at;

    CHECK(m.ops.extend(m.ops.ctx, PAGES * unit, &at, NULL) == MT_OK);
    base = at;
    for (size_t i = 0; i < PAGES; i++)
        base[i * unit] = 1;
    CHECK(m.ops.map(m.ops.ctx, at, PAGES * unit, 0, MT_MAP_PRIVATE, NULL) == MT_OK);
    for (size_t i = 0; i < PAGES; i++)
        CHECK(base[i * unit] == 1);
    CHECK(m.ops.written(m.ops.ctx, at, PAGES * unit) == PAGES * unit);
    base[WRITTEN * unit] = 7;
    CHECK(m.ops.written(m.ops.ctx, at, PAGES * unit) == WRITTEN * unit);
    CHECK(m.ops.written(m.ops.ctx, (char *)at + unit, PAGES * unit - unit) == (WRITTEN - 1) * unit);
    sim_close(&m);
}

/* Where zeros were read, no more than that. Older kernels cannot tell. */
static void
pages_of_zeros_that_were_read_are_not_written(void)
{
    enum { PAGES = 8, WRITTEN = 5 };
    sim m = sim_new(bench);
    size_t unit = m.ops.page_bytes, found;
    volatile unsigned char *base;
    void *at;

    CHECK(m.ops.extend(m.ops.ctx, PAGES * unit, &at, NULL) == MT_OK);
    CHECK(m.ops.map_zero(m.ops.ctx, at, PAGES * unit, NULL) == MT_OK);
    base = at;
    for (size_t i = 0; i < PAGES; i++)
        CHECK(base[i * unit] == 0);
    found = m.ops.written(m.ops.ctx, at, PAGES * unit);
    CHECK(found == (sys_scanned ? PAGES * unit : 0));
    base[WRITTEN * unit] = 7;
    CHECK(m.ops.written(m.ops.ctx, at, PAGES * unit) == (sys_scanned ? WRITTEN * unit : 0));
    CHECK(m.ops.settle(m.ops.ctx, at, PAGES * unit, NULL) == MT_OK);
    for (size_t i = 0; i < PAGES; i++)
        CHECK(base[i * unit] == 0);
    sim_close(&m);
}

/* Each arena has two stretches in the table of what is closed in children. */
static void
a_process_has_so_many_arenas(void)
{
    enum { MOST = 2048 };
    mt_error err = {0};
    mt_store_ops ops;
    size_t arenas = 0;
    void *at;

    CHECK(make(bench->ctx, &ops) == MT_OK);
    while (ops.extend(ops.ctx, ops.page_bytes, &at, &err) == MT_OK)
        arenas++;
    CHECK(arenas == MOST && err.limit == MOST && strcmp(err.call, MT_STORE_ARENAS) == 0);
    ops.close(ops.ctx);
    CHECK(make(bench->ctx, &ops) == MT_OK);
    CHECK(ops.extend(ops.ctx, ops.page_bytes, &at, NULL) == MT_OK);
    ops.close(ops.ctx);
}

/* Pages of [at, at + pages) that the system counts as the process's. */
static size_t
resident_pages(const volatile unsigned char *at, size_t pages, size_t unit)
{
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    size_t resident = 0;

    CHECK(pagemap >= 0);
    for (size_t i = 0; i < pages; i++) {
        off_t entry = (off_t)((uintptr_t)(at + i * unit) / unit * sizeof(uint64_t));
        uint64_t is;

        CHECK(pread(pagemap, &is, sizeof is, entry) == (ssize_t)sizeof is);
        resident += is >> 63;
    }
    CHECK(close(pagemap) == 0);
    return resident;
}

/* Pages of the file too: what maps them stays, and shows them when it is touched. */
static void
settling_takes_pages_out_of_the_resident_set(void)
{
    enum { PAGES = 1000 };
    sim m = sim_new(bench);
    size_t unit = m.ops.page_bytes;
    volatile unsigned char *base;
    void *at;

    CHECK(m.ops.extend(m.ops.ctx, PAGES * unit, &at, NULL) == MT_OK);
    base = at;
    for (size_t i = 0; i < PAGES; i++)
        base[i * unit] = 7;
    CHECK(resident_pages(base, PAGES, unit) == PAGES);
    CHECK(m.ops.settle(m.ops.ctx, at, PAGES * unit, NULL) == MT_OK);
    CHECK(resident_pages(base, PAGES, unit) == 0);
    for (size_t i = 0; i < PAGES; i++)
        CHECK(base[i * unit] == 7);
    sim_close(&m);
}

/* What a child wrote the parent would read, and the other way round: so it has nothing of it, and
 * nothing else comes to lie there. */
static void
a_child_of_fork_cannot_touch_the_pages(void)
{
    sim m = sim_mapped_store(4);
    volatile unsigned char *shared = sim_at(&m, 0), *copied = sim_at(&m, 1);
    int status = 0;

    sim_poke(&m, 0, 5);
    CHECK(sim_map(&m, 1, 0, 1, MT_MAP_PRIVATE) == MT_OK);
    for (int i = 0; i < 2; i++) {
        pid_t child = fork();

        if (child == 0) {
            signal(SIGSEGV, SIG_DFL);
            *(i == 0 ? shared : copied) = 6;
            _exit(0);
        }
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    }
    CHECK(sim_reads(&m, sim_at(&m, 0), 5) && sim_reads(&m, sim_at(&m, 1), 5));
    sim_close(&m);
}

/* How a child ends that reads there: its signal, or 0. */
static int
end_of_reader(const volatile unsigned char *at)
{
    pid_t child = fork();
    int status = -1;

    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        _exit(*at != 0 && *at == 0); /* reads, whatever is there */
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/* In a child: what it inherited is closed there and in a child of its own, and a store of its own
 * is open here and closed there. */
static bool
closed_in_two_generations(const volatile unsigned char *inherited)
{
    sim mine = sim_mapped_store(2);
    bool good;

    sim_poke(&mine, 0, 3);
    good = end_of_reader(inherited) == SIGSEGV && end_of_reader(sim_at(&mine, 0)) == SIGSEGV;
    good &= sim_reads(&mine, sim_at(&mine, 0), 3);
    sim_close(&mine);
    return good;
}

static void *
fork_here(void *inherited)
{
    pid_t child = fork();
    int status = -1;

    if (child == 0) {
        bool good = closed_in_two_generations(inherited);

        _exit(good ? 0 : 1);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return NULL;
}

static void
children_of_any_thread_find_all_stores_closed(void)
{
    enum { STORES = 5 };
    sim m[STORES];
    unsigned char own = 7; /* of a stack, which is no store's */
    pthread_t thread;

    for (size_t i = 0; i < STORES; i++)
        m[i] = sim_mapped_store(2);
    for (size_t i = 0; i < STORES; i += 2)
        sim_close(&m[i]);
    for (size_t i = 1; i < STORES; i += 2) {
        sim_poke(&m[i], 0, i);
        CHECK(end_of_reader(sim_at(&m[i], 0)) == SIGSEGV);
        CHECK(pthread_create(&thread, NULL, fork_here, sim_at(&m[i], 0)) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK(sim_reads(&m[i], sim_at(&m[i], 0), i));
    }
    CHECK(end_of_reader(&own) == 0);
    for (size_t i = 1; i < STORES; i += 2)
        sim_close(&m[i]);
}

static void
mappings_that_exist_leave_room_for_fewer(void)
{
    sim m = sim_mapped_store(SIM_PAGES);
    size_t before = m.ops.maps_left(m.ops.ctx);
    mt_store_ops more;

    for (size_t i = 0; i < SIM_PAGES; i += 2)
        CHECK(sim_map_zero(&m, i, 1) == MT_OK);
    CHECK(m.ops.maps_left(m.ops.ctx) + SIM_PAGES / 2 <= before);
    CHECK(m.ops.maps_left(m.ops.ctx) > before / 2 && before < m.ops.max_maps / 10 * 9);
    sys = without(false);
    CHECK(make(bench->ctx, &more) == MT_OK);
    CHECK(more.max_maps == 65530 && more.maps_left(more.ctx) == 65530 - 6553);
    more.close(more.ctx);
    sys = &faulty_sys;
    sim_close(&m);
}

/* Huge pages in shared memory would make more physical than was touched. */
static bool
shared_memory_comes_in_pages(void)
{
    char text[128] = "";
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "r");
    bool got = f != NULL && fgets(text, sizeof text, f) != NULL;

    if (f != NULL) fclose(f);
    return !got || strstr(text, "[never]") != NULL || strstr(text, "[advise]") != NULL;
}

int
main(void)
{
    store_bench host = {.make = make,
                        .peek = peek,
                        .poke = poke,
                        .fail_at = fail_at,
                        .fired = fired,
                        .live = live,
                        .exact = shared_memory_comes_in_pages(),
                        .ctx = &sys_faults};

    store_suite(&host);
    RUN(an_untouched_arena_of_64_gib_costs_nothing);
    RUN(a_size_that_no_file_has_is_refused);
    RUN(addresses_stay_ours_when_mmap_fails_over_them);
    RUN(what_the_system_does_not_take_back_reads_zeros_all_the_same);
    RUN(an_interrupted_drop_goes_on);
    RUN(a_kernel_that_does_not_know_noexec_gets_a_memfd);
    RUN(a_descriptor_that_means_another_file_is_left_alone);
    RUN(settling_takes_pages_out_of_the_resident_set);
    RUN(the_first_page_that_was_written_privately_is_found);
    RUN(pages_of_zeros_that_were_read_are_not_written);
    RUN(a_process_has_so_many_arenas);
    RUN(a_child_of_fork_cannot_touch_the_pages);
    RUN(children_of_any_thread_find_all_stores_closed);
    RUN(mappings_that_exist_leave_room_for_fewer);
    sys = without(true);
    store_suite(&host);
    RUN(the_first_page_that_was_written_privately_is_found);
    sys = without(false);
    store_suite(&host);
    host.make = make_strict;
    host.exact = true;
    for (strict_page_bytes = 4096; strict_page_bytes <= 1 << 16; strict_page_bytes <<= 4)
        store_suite(&host);
    CHECK(live(&sys_faults) == 0);
    CHECK_DONE();
}
