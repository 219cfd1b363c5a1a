#define _GNU_SOURCE /* MAP_ANONYMOUS, mkdtemp */
/* The Linux probe over made-up trees: control groups of both versions, missing, garbled and failing
 * files; fork; and this process's own peak on the machine's own /proc. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/monitor/peaks.h"
#include "os/monitor/peak.h"
#include "os/monitor/probe.h"
#include "kit/proctree.h"

enum { ALL = MT_READ_ALL, HOST = MT_READ_HOST, GIB = 1 << 30 };
static const mt_probe_ages FRESH = {0, 0, 0};

static mt_probe_linux *
probe_by(const mt_proc_sys *sys, const char *root)
{
    mt_probe_linux *p;

    CHECK(mt_probe_linux_new(&mt_alloc_libc, sys, root, &FRESH, &p, NULL) == MT_OK);
    return p;
}

static mt_probe_linux *
probe_on(const char *root)
{
    return probe_by(&faulty_proc, root);
}

static mt_sample
sample(mt_probe_linux *p, unsigned mask)
{
    mt_sample s;

    mt_probe_linux_read(p, mask, &s);
    return s;
}

/* A hybrid host: memory on v1, two levels deep, pressure on v2. */
static void
plant_v1(const proctree *t)
{
    plant(t, "proc/self/statm", "1000 600 200 1 0 3 0\n");
    plant(t, "proc/self/status", "Name:\tx\nVmHWM:\t  9000 kB\nVmSwap:\t  12 kB\n");
    plant(t, "proc/meminfo",
          "MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable: 4000 kB\n"
          "SwapTotal: 100 kB\nSwapFree: 60 kB\n");
    plant(t, "proc/self/cgroup", "4:memory:/a/b\n0::/u\n");
    plant(t, "proc/self/mountinfo",
          "1 2 0:1 / /cg/memory rw - cgroup cgroup rw,memory\n"
          "3 2 0:2 / /cg/unified rw - cgroup2 cgroup2 rw\n");
    plant(t, "cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
    plant(t, "cg/memory/memory.usage_in_bytes", "9000\n");
    plant(t, "cg/memory/memory.stat", "total_inactive_file 100\n");
    plant(t, "cg/memory/a/memory.limit_in_bytes", "5000\n");
    plant(t, "cg/memory/a/memory.usage_in_bytes", "3000\n");
    plant(t, "cg/memory/a/memory.stat", "inactive_file 7\ntotal_inactive_file 1000\n");
    plant(t, "cg/memory/a/b/memory.limit_in_bytes", "6000\n");
    plant(t, "cg/memory/a/b/memory.usage_in_bytes", "2000\n");
    plant(t, "cg/memory/a/b/memory.stat", "hierarchical_memory_limit 5000\n");
    plant(t, "cg/unified/u/memory.pressure", "some avg10=1.50 avg60=0.00 avg300=0.00 total=42\n");
    plant(t, "cg/unified/u/cgroup.type", "domain\n");
}

static void
plant_v2(const proctree *t)
{
    plant_v1(t);
    plant(t, "proc/self/cgroup", "0::/a/b\n");
    plant(t, "proc/self/mountinfo", "3 2 0:2 / /cg2 rw - cgroup2 cgroup2 rw"); /* no newline */
    plant(t, "cg2/a/memory.max", "8000\n");
    plant(t, "cg2/a/memory.current", "7000");
    plant(t, "cg2/a/memory.stat", "anon 1\ninactive_file 500\n");
    plant(t, "cg2/a/b/memory.max", "max\n");
    plant(t, "cg2/a/b/memory.current", "100");
    plant(t, "cg2/a/b/memory.stat", "inactive_file 10");
    plant(t, "cg2/a/b/memory.pressure", "some avg10=0.25 total=9");
}

static void
every_field_of_a_hybrid_host_is_read(void)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    mt_probe_linux *p;
    mt_sample s;
    proctree t;

    tree_begin(&t);
    plant_v1(&t);
    p = probe_on(t.root);
    s = sample(p, HOST);
    CHECK(s.rss == 600 * page && s.priv == 400 * page && mt_probe_linux_rss(p) == 600 * page);
    CHECK(s.cgroup_limit == 5000 && s.cgroup_used == 2000 && s.swap == 12 * 1024);
    CHECK(s.pressure == 150 && s.swap_free == 60 * 1024);
    CHECK(s.available == 4000 * 1024 && s.total == 8000 * 1024 && s.heap_used == MT_UNKNOWN);
    CHECK(!mt_probe_linux_cgroup(p)->pressure_of_host && s.devices == 0);
    s = sample(p, MT_READ_RSS);
    CHECK(s.rss == 600 * page && s.cgroup_limit == MT_UNKNOWN && s.available == MT_UNKNOWN);
    s = sample(p, MT_READ_HEAP);
    CHECK(s.heap_used != MT_UNKNOWN && s.rss == MT_UNKNOWN && s.time_ns != MT_UNKNOWN);
    mt_probe_linux_free(p);
    CHECK(proc_faults.live == 0);
    tree_end(&t);
}

/* Another one's status says whether it has memory at all: a zombie has no line of it. */
static void
plant_child(const proctree *t, unsigned pid, const char *status)
{
    char path[64];

    snprintf(path, sizeof path, "proc/%u/statm", pid);
    plant(t, path, "40 30 10 1 0 9 0\n");
    snprintf(path, sizeof path, "proc/%u/status", pid);
    plant(t, path, status);
}

static void
what_children_have_swapped_out_is_summed(void)
{
    mt_probe_linux *p;
    mt_sample s;
    proctree t;

    tree_begin(&t);
    plant_v1(&t);
    plant(&t, "proc/self/task/1/children", "10 11 12");
    plant_child(&t, 10, "Name:\ta\nVmSize:\t 90 kB\nVmSwap:\t 30 kB\n");
    plant_child(&t, 11, "Name:\tb\nVmSize:\t 90 kB\nVmSwap:\t  7 kB\n");
    plant_child(&t, 12, "Name:\tc\nState:\tZ (zombie)\n");
    p = probe_on(t.root);
    s = sample(p, MT_READ_CHILDREN | MT_READ_SWAP);
    CHECK(s.children_swap == 37 * 1024 && mt_sample_job_swap(&s) == 49 * 1024);
    plant_child(&t, 11, "Name:\tb\nVmSize:\t 90 kB\n");
    s = sample(p, MT_READ_CHILDREN | MT_READ_SWAP);
    CHECK(s.children_swap == MT_UNKNOWN && mt_sample_job_swap(&s) == MT_UNKNOWN);
    plant(&t, "proc/11/status", NULL); /* it has ended */
    CHECK(sample(p, MT_READ_CHILDREN).children_swap == 30 * 1024);
    plant(&t, "proc/self/task/1/children", "what?");
    CHECK(sample(p, MT_READ_CHILDREN).children_swap == MT_UNKNOWN);
    plant(&t, "proc/meminfo", "MemTotal: 8000 kB\nSwapTotal: 0 kB\n");
    CHECK(sample(p, MT_READ_CHILDREN).children_swap == 0); /* where there is no swap */
    mt_probe_linux_free(p);
    tree_end(&t);
}

static int
slow_open(const char *path, int flags)
{
    usleep(10000);
    return faulty_proc.open(path, flags);
}

/* What is asked for often is read anew but for the job, whose reading may take long: here so long
 * that 20 times as much does not pass by chance between two calls. */
static void
the_host_is_read_with_a_job_that_is_a_little_older(void)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    mt_proc_sys slow = faulty_proc;
    mt_probe_linux *p;
    mt_sample s;
    proctree t;

    tree_begin(&t);
    plant_v1(&t);
    plant(&t, "proc/self/task/1/children", "10");
    plant_child(&t, 10, "VmSize: 1 kB\nVmSwap: 1 kB\n");
    slow.open = slow_open;
    p = probe_by(&slow, t.root);
    mt_probe_linux_host(p, &s);
    slow.open = faulty_proc.open;
    CHECK(s.rss == 600 * page && s.children == 1 && s.children_priv == 20 * page);
    CHECK(s.children_swap == 1024 && s.swap == 12 * 1024);
    plant(&t, "proc/self/statm", "1000 700 200 1 0 3 0\n");
    plant(&t, "proc/10/statm", "40 35 10 1 0 9 0\n");
    mt_probe_linux_host(p, &s); /* 20 times what the first one took have not passed */
    CHECK(s.rss == 700 * page && s.children_priv == 20 * page);
    for (uint64_t until = s.time_ns + 5000000000; s.children_priv != 25 * page;) {
        mt_probe_linux_host(p, &s);
        CHECK(s.time_ns < until);
    }
    mt_probe_linux_free(p);
    tree_end(&t);
}

static void
a_limit_that_changes_is_seen(void)
{
    mt_probe_linux *p;
    mt_sample s;
    proctree t;

    tree_begin(&t);
    plant_v2(&t);
    p = probe_on(t.root);
    s = sample(p, HOST);
    CHECK(s.cgroup_limit == 8000 && s.cgroup_used == 6500 && s.pressure == 25);
    CHECK(mt_probe_linux_cgroup(p)->pressure_of_host); /* no cgroup.type */
    plant(&t, "cg2/a/b/memory.max", "300\n");
    s = sample(p, HOST);
    CHECK(s.cgroup_limit == 300 && s.cgroup_used == 90);
    plant(&t, "cg2/a/b/memory.max", "max\n");
    plant(&t, "cg2/a/memory.max", "max\n");
    s = sample(p, HOST);
    CHECK(s.cgroup_limit == MT_UNLIMITED && s.cgroup_used == 90);
    plant(&t, "cg2/a/memory.max", "lots\n");
    CHECK(sample(p, HOST).cgroup_limit == MT_UNKNOWN && mt_probe_linux_cgroup(p)->why != NULL);
    plant(&t, "cg2/a/memory.max", "-1\n");
    CHECK(sample(p, HOST).cgroup_limit == MT_UNKNOWN);
    plant(&t, "cg2/a/memory.max", "99999999999999999999999\n");
    CHECK(sample(p, HOST).cgroup_limit == MT_UNKNOWN);
    plant(&t, "cg2/a/memory.max", NULL); /* the controller was switched off */
    CHECK(sample(p, HOST).cgroup_limit == MT_UNLIMITED && mt_probe_linux_cgroup(p)->why == NULL);
    plant(&t, "proc/self/cgroup", "0::/a\n"); /* and we were moved */
    plant(&t, "cg2/a/memory.max", "700\n");
    s = sample(p, HOST);
    CHECK(s.cgroup_limit == 700 && s.cgroup_used == 6500 && s.pressure == MT_UNKNOWN);
    mt_probe_linux_free(p);
    tree_end(&t);
}

static void
of_equal_limits_the_outer_counts_and_hidden_ones_are_heard_of(void)
{
    mt_probe_linux *p;
    mt_sample s;
    proctree t;

    tree_begin(&t);
    plant_v1(&t);
    plant(&t, "cg/memory/a/b/memory.limit_in_bytes", "5000\n");
    p = probe_on(t.root);
    s = sample(p, HOST);
    CHECK(s.cgroup_limit == 5000 && s.cgroup_used == 2000);
    plant(&t, "cg/memory/a/b/memory.stat", "hierarchical_memory_limit 4000\n");
    s = sample(p, HOST);
    CHECK(s.cgroup_limit == 4000 && s.cgroup_used == 8900 && mt_probe_linux_cgroup(p)->above);
    mt_probe_linux_free(p);
    tree_end(&t);
}

typedef struct hidden {
    const char *cgroup, *mountinfo;
    uint64_t limit;
} hidden;

static void
what_cannot_be_seen_is_unknown_and_what_is_not_there_unlimited(void)
{
    static const hidden cases[] = {
        {NULL, "", MT_UNKNOWN},
        {"0::/a\n", NULL, MT_UNKNOWN},
        {"0::/a\n", "", MT_UNKNOWN},
        {"", "1 2 0:1 / /cg2 rw - cgroup2 x rw\n", MT_UNLIMITED},
        {"0::/gone\n", "1 2 0:1 / /cg2 rw - cgroup2 x rw\n", MT_UNKNOWN},
        {"0::/x\n", "1 2 0:1 /y /cg2 rw - cgroup2 x rw\n", MT_UNKNOWN},
        {"0::/../x\n", "1 2 0:1 / /cg2 rw - cgroup2 x rw\n", MT_UNKNOWN},
        {"4:memory:/a\n", "1 2 0:1 / /cg2 rw - cgroup2 x rw\n", MT_UNKNOWN},
        {"0::/y/a\n", "1 2 0:1 /y /cg2 rw - cgroup2 x rw\n", 8000},
        {"0::/a\n", "1 2 0:1 / /c\\0402 rw - cgroup2 x rw\n1 2 0:1 / /cg2 rw - cgroup2 x rw", 8000},
        {"\x01\x02::::\n:::", "\n\n - - -\n- cgroup", MT_UNKNOWN},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_probe_linux *p;
        proctree t;
        tree_begin(&t);
        plant_v2(&t);
        plant(&t, "proc/self/cgroup", cases[i].cgroup);
        plant(&t, "proc/self/mountinfo", cases[i].mountinfo);
        p = probe_on(t.root);
        CHECK(sample(p, HOST).cgroup_limit == cases[i].limit);
        CHECK((mt_probe_linux_cgroup(p)->why != NULL) == (cases[i].limit == MT_UNKNOWN));
        mt_probe_linux_free(p);
        tree_end(&t);
    }
}

/* overlayfs names all its layers in one line; the rest of one that is too long says nothing. */
static void
the_rest_of_a_line_that_is_too_long_is_no_line(void)
{
    static char lines[40000];
    mt_probe_linux *p;
    proctree t;

    tree_begin(&t);
    plant_v2(&t);
    for (size_t length = 8180; length < 8200; length++) { /* where the buffer of the reader ends */
        size_t at = (size_t)snprintf(lines, sizeof lines, "1 2 0:3 / /o rw - overlay o lower=");
        memset(lines + at, 'x', length - at);
        snprintf(lines + length, sizeof lines - length, "%s",
                 "9 2 0:2 / /wrong rw - cgroup2 cgroup2 rw\n"
                 "3 2 0:2 / /cg2 rw - cgroup2 cgroup2 rw\n");
        plant(&t, "proc/self/mountinfo", lines);
        p = probe_on(t.root);
        CHECK(sample(p, HOST).cgroup_limit == 8000);
        CHECK(strstr(mt_probe_linux_cgroup(p)->dir, "/cg2/") != NULL);
        mt_probe_linux_free(p);
    }
    memset(lines, 'x', sizeof lines - 1); /* several buffers long, and the file ends in it */
    plant(&t, "proc/self/mountinfo", lines);
    p = probe_on(t.root);
    CHECK(sample(p, HOST).cgroup_limit == MT_UNKNOWN);
    mt_probe_linux_free(p);
    tree_end(&t);
}

static void
an_empty_root_is_unknown_in_every_field(void)
{
    mt_probe_linux *p;
    proctree t;
    mt_sample s;

    tree_begin(&t);
    p = probe_on(t.root);
    s = sample(p, ALL & ~(unsigned)MT_READ_HEAP);
    for (uint64_t *field = &s.rss; field != &s.devices; field++)
        CHECK(*field == MT_UNKNOWN);
    plant(&t, "proc/self/statm", "1 1 0 0 0 0 0\n"); /* what comes later is seen */
    CHECK(sample(p, MT_READ_RSS).rss != MT_UNKNOWN);
    plant(&t, "proc/self/statm", "1 18446744073709551610 0 0 0 0 0\n");
    CHECK(sample(p, MT_READ_RSS).rss == MT_UNKNOWN);
    mt_probe_linux_free(p);
    tree_end(&t);
}

/* Each call fails in turn, with each error: a field is right or unknown, and right the next time.
 */
static void
any_call_may_fail(void)
{
    static const int errors[] = {EMFILE, EIO, EACCES, ESRCH};
    mt_sample whole;
    proctree t;
    mt_probe_linux *p;

    tree_begin(&t);
    plant_v1(&t);
    plant(&t, "proc/self/task/1/children", "");
    plant(&t, "cg/memory/a/b/memory.stat", "hierarchical_memory_limit 4000\n");
    p = probe_on(t.root);
    whole = sample(p, ALL & ~(unsigned)MT_READ_HEAP);
    CHECK(whole.children == 0 && whole.children_priv == 0 && whole.children_swap == 0);
    mt_probe_linux_free(p);
    for (size_t e = 0; e < sizeof errors / sizeof *errors; e++) {
        proc_errno = errors[e];
        for (long at = 0;; at++) {
            mt_sample s;
            proc_faults = (faulty){.fail_at = at};
            p = probe_on(t.root);
            for (int again = 0; again < 2; again++) {
                long before = proc_faults.calls;
                bool spoilt;
                s = sample(p, ALL & ~(unsigned)MT_READ_HEAP);
                spoilt = before <= at && at < proc_faults.calls;
                for (size_t i = 1; i < offsetof(mt_sample, devices) / 8; i++) {
                    uint64_t got = (&s.time_ns)[i], right = (&whole.time_ns)[i];
                    CHECK(got == right || (spoilt && got == MT_UNKNOWN));
                }
            }
            mt_probe_linux_free(p);
            CHECK(proc_faults.live == 0);
            if (proc_faults.calls <= at) break;
        }
    }
    proc_faults.fail_at = -1;
    tree_end(&t);
}

/* --- numbers that the program closed and used again ------------------------------------------- */

enum { NUMBERS = 64 };

static bool
is_open(int fd)
{
    struct stat is;

    return fstat(fd, &is) == 0;
}

static void
see_open(bool open_ones[NUMBERS])
{
    for (int fd = 0; fd < NUMBERS; fd++)
        open_ones[fd] = is_open(fd);
}

/* Puts the user's file under every number that was opened since. */
static int
take_over(const bool before[NUMBERS], bool taken[NUMBERS], int user)
{
    int count = 0;

    for (int fd = 0; fd < NUMBERS; fd++) {
        taken[fd] = fd != user && !before[fd] && is_open(fd);
        if (taken[fd]) CHECK(dup2(user, fd) == fd);
        count += taken[fd];
    }
    return count;
}

static void
see_untouched(const bool taken[NUMBERS], const char *text)
{
    char buf[256];

    for (int fd = 0; fd < NUMBERS; fd++) {
        if (!taken[fd]) continue;
        CHECK(pread(fd, buf, sizeof buf, 0) == (ssize_t)strlen(text));
        CHECK(memcmp(buf, text, strlen(text)) == 0 && close(fd) == 0);
        proc_faults.live--;
    }
}

/* A field is right or unknown, and right the next time. */
static void
see_right(mt_probe_linux *p, const mt_sample *whole)
{
    for (int again = 0; again < 2; again++) {
        mt_sample s = sample(p, ALL & ~(unsigned)MT_READ_HEAP);
        for (size_t i = 1; i < offsetof(mt_sample, devices) / 8; i++) {
            uint64_t got = (&s.time_ns)[i];
            CHECK(got == (&whole->time_ns)[i] || (again == 0 && got == MT_UNKNOWN));
        }
    }
}

static void
see_another_file(const proctree *t, const char *text)
{
    bool before[NUMBERS], taken[NUMBERS];
    mt_probe_linux *p;
    mt_mark_ops mark;
    mt_sample whole;
    uint64_t now, shared;
    char path[128];
    int user;

    plant(t, "user", text);
    snprintf(path, sizeof path, "%s/user", t->root);
    CHECK((user = open(path, O_RDWR)) >= 0);
    see_open(before);
    p = probe_on(t->root);
    CHECK(mt_mark_linux_new(&mt_alloc_libc, &faulty_proc, t->root, &mark, NULL) == MT_OK);
    whole = sample(p, ALL & ~(unsigned)MT_READ_HEAP);
    now = mark.now(mark.ctx, &shared);
    CHECK(mark.reset(mark.ctx) && mark.high(mark.ctx, 0) == 9000 << 10);
    CHECK(take_over(before, taken, user) == 9); /* 6 of the probe, 3 of the mark */
    see_right(p, &whole);
    CHECK(mark.reset(mark.ctx) && mark.high(mark.ctx, 0) == 9000 << 10);
    CHECK(mark.now(mark.ctx, &shared) == now);
    mark.close(mark.ctx);
    mt_probe_linux_free(p);
    see_untouched(taken, text);
    CHECK(proc_faults.live == 0 && close(user) == 0);
}

static void
another_file_under_a_kept_number_is_neither_believed_nor_touched(void)
{
    static const char *const texts[] = {"4096 4096 4096 4096 4096 4096 4096 4096\n",
                                        "1 2 1 4 5 6 7\n",
                                        "77\n",
                                        "some 1\nMemTotal: 5 kB\n77 77 77 77 77 77 77\n",
                                        "VmHWM: 5 kB\nVmSwap: 5 kB\ninactive_file 5\n",
                                        ""};
    proctree t;

    tree_begin(&t);
    plant_v1(&t);
    plant(&t, "proc/self/clear_refs", "");
    plant(&t, "proc/self/task/1/children", "10");
    plant(&t, "proc/10/statm", "40 30 10 1 0 9 0\n");
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        see_another_file(&t, texts[i]);
    tree_end(&t);
}

static void
making_one_may_fail(void)
{
    static char long_root[MT_PATH_ROOM + 10];
    mt_probe_linux *p = NULL;
    mt_mark_ops mark;

    memset(long_root, 'x', sizeof long_root - 1);
    for (long at = 0; at < 2; at++) {
        faulty fault = {.fail_at = at};
        mt_alloc mem = faulty_alloc(&fault);
        CHECK(mt_probe_linux_new(&mem, &faulty_proc, "", &FRESH, &p, NULL) == MT_ENOMEM);
        CHECK(at == 1 || mt_mark_linux_new(&mem, &faulty_proc, "", &mark, NULL) == MT_OK);
        if (at == 0) mark.close(mark.ctx);
        CHECK(fault.live == 0);
    }
    CHECK(mt_probe_linux_new(&mt_alloc_libc, &faulty_proc, long_root, &FRESH, &p, NULL) ==
          MT_EOVERFLOW);
    CHECK(mt_mark_linux_new(&mt_alloc_libc, &faulty_proc, long_root, &mark, NULL) == MT_EOVERFLOW);
    CHECK(p == NULL && proc_faults.live == 0);
    mt_probe_linux_free(NULL);
}

/* --- this machine ----------------------------------------------------------------------------- */

static void
touch(size_t bytes)
{
    char *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(block != MAP_FAILED);
    memset(block, 1, bytes);
    munmap(block, bytes);
}

static bool
is_near(uint64_t bytes, uint64_t wanted)
{
    return bytes < wanted + (8 << 20) && bytes + (8 << 20) > wanted;
}

static mt_mark_ops
own_mark(void)
{
    mt_mark_ops mark;

    CHECK(mt_mark_linux_new(&mt_alloc_libc, &faulty_proc, "", &mark, NULL) == MT_OK);
    return mark;
}

static void
a_peak_forgets_what_was_before_the_reset(void)
{
    mt_mark_ops mark = own_mark();
    uint64_t base, shared;

    touch(300 << 20);
    CHECK(mark.high(mark.ctx, 0) > 300u << 20);
    CHECK(mark.reset(mark.ctx));
    base = mark.now(mark.ctx, &shared);
    CHECK(is_near(mark.high(mark.ctx, 0), base));
    touch(120 << 20);
    CHECK(is_near(mark.high(mark.ctx, 0), base + (120 << 20)));
    CHECK(mark.reset(mark.ctx) && is_near(mark.high(mark.ctx, 0), base));
    mark.close(mark.ctx);
    CHECK(proc_faults.live == 0);
}

/* What exec() carries over: run again after a 300 MiB peak, see the floor, and see through it. */
static int
behind_a_floor(void)
{
    mt_mark_ops mark = own_mark();
    struct rusage usage;
    uint64_t shared;
    long before;
    bool ok = mark.reset(mark.ctx) && getrusage(RUSAGE_SELF, &usage) == 0;

    ok = ok && usage.ru_maxrss > 300 << 10; /* or there is nothing to see through */
    ok = ok && mark.high(mark.ctx, 0) < 100 << 20;
    before = proc_faults.calls; /* what is known already is not read for */
    ok = ok && mark.high(mark.ctx, 1 << 30) == 0 && proc_faults.calls == before + 1;
    touch(120 << 20);
    ok = ok && is_near(mark.high(mark.ctx, 0), mark.now(mark.ctx, &shared) + (120 << 20));
    ok = ok && mark.reset(mark.ctx) && mark.high(mark.ctx, 0) < 100 << 20;
    touch(400 << 20);
    ok = ok && is_near(mark.high(mark.ctx, 0), mark.now(mark.ctx, &shared) + (400 << 20));
    mark.close(mark.ctx);
    return ok ? 0 : 1;
}

static int
status_of(pid_t child)
{
    int status;

    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void
a_peak_of_the_program_before_exec_is_none_of_ours(void)
{
    pid_t child = fork();

    if (child == 0) {
        touch(350 << 20);
        execl("/proc/self/exe", "test_probe", "behind-a-floor", (char *)NULL);
        _exit(99);
    }
    CHECK(status_of(child) == 0);
}

static void
a_forked_child_reads_itself(void)
{
    mt_probe_linux *p = probe_on("");
    mt_mark_ops mark = own_mark();
    size_t bytes = 64 << 20;
    char *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint64_t before = mt_probe_linux_rss(p), shared;
    pid_t child;

    CHECK(mark.reset(mark.ctx) && block != MAP_FAILED && before != MT_UNKNOWN);
    if ((child = fork()) == 0) {
        memset(block, 1, bytes);
        int bad = mt_probe_linux_rss(p) < bytes + (mt_probe_linux_rss(p) > before ? 0 : before);
        bad |= 2 * (mark.now(mark.ctx, &shared) < bytes) + 4 * (mark.high(mark.ctx, 0) < bytes);
        munmap(block, bytes);
        bad |= 8 * (!mark.reset(mark.ctx) || mark.high(mark.ctx, 0) > bytes);
        _exit(bad);
    }
    CHECK(status_of(child) == 0);
    CHECK(is_near(mt_probe_linux_rss(p), before) && mark.high(mark.ctx, 0) < bytes);
    munmap(block, bytes);
    mark.close(mark.ctx);
    mt_probe_linux_free(p);
    CHECK(proc_faults.live == 0);
}

static void
a_mark_that_cannot_be_reset_says_so(void)
{
    mt_mark_ops mark;
    proctree t;

    tree_begin(&t);
    CHECK(mt_mark_linux_new(&mt_alloc_libc, &faulty_proc, t.root, &mark, NULL) == MT_OK);
    CHECK(!mark.reset(mark.ctx) && mark.high(mark.ctx, 0) == MT_UNKNOWN);
    plant_v1(&t);
    CHECK(!mark.reset(mark.ctx) && mark.high(mark.ctx, 0) == 9000 * 1024);
    plant(&t, "proc/self/clear_refs", "");
    CHECK(mark.reset(mark.ctx));
    for (long at = 0; at < 1; at++) {
        proc_faults = (faulty){.fail_at = at, .live = proc_faults.live};
        CHECK(!mark.reset(mark.ctx)); /* the write */
        CHECK(mark.reset(mark.ctx));
        proc_faults.fail_at = -1;
    }
    mark.close(mark.ctx);
    CHECK(proc_faults.live == 0);
    tree_end(&t);
}

int
main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "behind-a-floor") == 0) return behind_a_floor();
    RUN(every_field_of_a_hybrid_host_is_read);
    RUN(what_children_have_swapped_out_is_summed);
    RUN(the_host_is_read_with_a_job_that_is_a_little_older);
    RUN(a_limit_that_changes_is_seen);
    RUN(of_equal_limits_the_outer_counts_and_hidden_ones_are_heard_of);
    RUN(what_cannot_be_seen_is_unknown_and_what_is_not_there_unlimited);
    RUN(the_rest_of_a_line_that_is_too_long_is_no_line);
    RUN(an_empty_root_is_unknown_in_every_field);
    RUN(any_call_may_fail);
    RUN(another_file_under_a_kept_number_is_neither_believed_nor_touched);
    RUN(making_one_may_fail);
    RUN(a_peak_forgets_what_was_before_the_reset);
    RUN(a_peak_of_the_program_before_exec_is_none_of_ours);
    RUN(a_forked_child_reads_itself);
    RUN(a_mark_that_cannot_be_reset_says_so);
    CHECK_DONE();
}
