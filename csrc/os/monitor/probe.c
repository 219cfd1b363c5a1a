/* probe.c -- how this file works.
 *
 * mt_probe_linux_read goes through the bits of the mask, one function for each file. What costs
 * more than a system call is kept with the time of its reading and read again only when it is older
 * than `ages` allows. After a fork probe_notice_fork() closes and forgets all that was kept,
 * because it means the parent. */
#define _GNU_SOURCE /* mallinfo2 */
#include "os/monitor/probe.h"

#include <malloc.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/base/clock.h"
#include "os/base/forks.h"
#include "os/monitor/shm.h"

enum {
    STATUS_ROOM = 4096,
    MEMINFO_ROOM = 1024,
    MS = 1000000,
    JOB_SHARE = 20, /* of the time, for the job of mt_probe_linux_host: one part in so many */
};

const mt_probe_ages mt_probe_ages_usual = {
    .slow_ns = 10ull * MS, .limit_ns = 1000ull * MS, .children_ns = 100ull * MS};

typedef struct machine {
    uint64_t available, total, swap_total, swap_free;
} machine;

struct mt_probe_linux {
    mt_alloc mem;
    const mt_proc_sys *sys;
    mt_probe_ages ages;
    mt_birth birth; /* of what is kept open */
    mt_descriptor kept_statm, kept_status, kept_meminfo;
    uint64_t inactive, inactive_at; /* each with the time of the reading, 0 for never */
    machine machine;
    uint64_t machine_at, limit_at, children_at;
    mt_cgroup cgroup;
    mt_children *children;
    mt_shm *shm;
    mt_sample job;     /* the last one of mt_probe_linux_host */
    uint64_t job_due;  /* when it is too old; 0: there is none */
    uint64_t began_ns; /* when this process did, by the clock of the machine; 0: not known yet */
    char root[MT_PATH_ROOM];
    char statm[MT_PATH_ROOM], status[MT_PATH_ROOM], meminfo[MT_PATH_ROOM];
};

/* --- life ------------------------------------------------------------------------------------- */

static void
probe_close_all(mt_probe_linux *p)
{
    mt_proc_close(p->sys, &p->kept_statm);
    mt_proc_close(p->sys, &p->kept_status);
    mt_proc_close(p->sys, &p->kept_meminfo);
    mt_cgroup_fini(&p->cgroup);
    if (p->children != NULL) mt_children_clear(p->children);
    if (p->shm != NULL) mt_shm_clear(p->shm);
    p->began_ns = 0;
    p->inactive_at = p->machine_at = p->limit_at = p->children_at = p->job_due = 0;
}

static void
probe_notice_fork(mt_probe_linux *p)
{
    if (mt_birth_is_here(&p->birth)) return;
    probe_close_all(p);
    p->birth = mt_birth_now();
}

void
mt_probe_linux_free(mt_probe_linux *p)
{
    mt_alloc mem;

    if (p == NULL) return;
    probe_close_all(p);
    mt_children_free(p->children);
    mt_shm_free(p->shm);
    mem = p->mem;
    mem.put(mem.ctx, p, sizeof *p);
}

static bool
set_paths(mt_probe_linux *p, const char *root)
{
    return mt_path_join(p->root, root, "") && mt_path_join(p->statm, root, "/proc/self/statm") &&
           mt_path_join(p->status, root, "/proc/self/status") &&
           mt_path_join(p->meminfo, root, "/proc/meminfo");
}

mt_status
mt_probe_linux_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root,
                   const mt_probe_ages *ages, mt_probe_linux **out, mt_error *err)
{
    mt_probe_linux *p = mt_alloc_zeroed(mem, 1, sizeof *p);
    mt_status st;

    if (p == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    p->mem = *mem;
    p->sys = sys;
    p->ages = *ages;
    p->birth = mt_birth_now();
    p->kept_statm = p->kept_status = p->kept_meminfo = MT_NO_DESCRIPTOR;
    mt_cgroup_init(&p->cgroup, sys, p->root);
    st = set_paths(p, root) ? mt_children_new(mem, sys, p->root, &p->children, err)
                            : mt_fail(err, MT_EOVERFLOW, "mt_probe_linux_new", 0);
    if (st == MT_OK) st = mt_shm_new(mem, sys, p->root, &p->shm, err);
    if (st != MT_OK) {
        mt_probe_linux_free(p);
        return st;
    }
    *out = p;
    return MT_OK;
}

/* --- readings --------------------------------------------------------------------------------- */

static bool
has_aged(uint64_t *read_at, uint64_t most, uint64_t now)
{
    if (*read_at != 0 && most != 0 && now - *read_at < most) return false;
    *read_at = now;
    return true;
}

static void
read_rss(mt_probe_linux *p, mt_sample *out)
{
    uint64_t resident, shared;

    if (!mt_proc_statm(p->sys, &p->kept_statm, p->statm, &resident, &shared)) return;
    out->rss = resident;
    out->priv = resident - shared;
}

static void
read_cgroup(mt_probe_linux *p, uint64_t now, mt_sample *out)
{
    uint64_t usage;

    /* Without the limit it is not known whose usage counts. */
    if (p->cgroup.limit != MT_UNKNOWN && (usage = mt_cgroup_usage(&p->cgroup)) != MT_UNKNOWN) {
        if (has_aged(&p->inactive_at, p->ages.slow_ns, now))
            p->inactive = mt_cgroup_inactive(&p->cgroup);
        if (p->inactive != MT_UNKNOWN) out->cgroup_used = mt_cgroup_used(usage, p->inactive);
    }
    out->cgroup_limit = p->cgroup.limit;
}

static void
look_at_machine(mt_probe_linux *p, uint64_t now)
{
    char buf[MEMINFO_ROOM];
    mt_text text = {buf, 0};
    ssize_t n;

    if (!has_aged(&p->machine_at, p->ages.slow_ns, now)) return;
    n = mt_proc_read(p->sys, &p->kept_meminfo, p->meminfo, buf, sizeof buf);
    text.len = n < 0 ? 0 : (size_t)n;
    p->machine.available = mt_text_kib(text, "MemAvailable:");
    p->machine.total = mt_text_kib(text, "MemTotal:");
    p->machine.swap_total = mt_text_kib(text, "SwapTotal:");
    p->machine.swap_free = mt_text_kib(text, "SwapFree:");
}

/* Where the machine has no swap, nothing needs to be read. */
static bool
has_swap(mt_probe_linux *p, uint64_t now)
{
    look_at_machine(p, now);
    return p->machine.swap_total != 0;
}

static uint64_t
probe_swap_of(mt_probe_linux *p, uint64_t now)
{
    char buf[STATUS_ROOM];
    ssize_t n;

    if (!has_swap(p, now)) return 0;
    n = mt_proc_read(p->sys, &p->kept_status, p->status, buf, sizeof buf);
    return n < 0 ? MT_UNKNOWN : mt_text_kib((mt_text){buf, (size_t)n}, "VmSwap:");
}

/* Other C libraries and older ones do not say. The two conditions stand apart, because a macro with
 * arguments that is not known is an error also behind &&. */
static void
probe_read_heap(mt_sample *out)
{
#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 33)
    struct mallinfo2 heap = mallinfo2();

    out->heap_used = heap.uordblks + heap.hblkhd;
    out->heap_free = heap.fordblks;
#endif
#endif
    (void)out;
}

static uint64_t
clock_ns(clockid_t which)
{
    struct timespec now = {0, 0};

    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000 * MS + (uint64_t)now.tv_nsec;
}

/* When this process began, by the clock of the machine, a little early: the kernel counts ticks. In
 * a made-up tree everything is newer. */
static uint64_t
began_ns(const mt_proc_sys *sys)
{
    enum { START_TIME = 22 };
    uint64_t ticks, tick = 1000ull * MS / (uint64_t)sysconf(_SC_CLK_TCK);
    char buf[STATUS_ROOM];
    ssize_t n = mt_proc_slurp(sys, "/proc/self/stat", buf, sizeof buf);

    if (n < 0 || !mt_stat_field((mt_text){buf, (size_t)n}, START_TIME, &ticks)) return 0;
    return clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_BOOTTIME) + (ticks - 2) * tick;
}

static void
read_children(mt_probe_linux *p, uint64_t now, mt_sample *out)
{
    mt_children_read(p->children, &out->children, &out->children_priv);
    out->children_swap = has_swap(p, now) ? mt_children_swap(p->children) : 0;
}

static void
read_shm(mt_probe_linux *p, mt_sample *out)
{
    mt_shm_bytes bytes;

    if (p->began_ns == 0 && p->root[0] == 0) p->began_ns = began_ns(p->sys);
    mt_shm_look(p->shm, p->children, p->began_ns, &bytes);
    if (p->root[0] == 0 && p->began_ns == 0) return;
    out->shm = bytes.all;
    out->shm_mapped = bytes.mapped;
}

static void
refresh_limits(mt_probe_linux *p, uint64_t now)
{
    if (!has_aged(&p->limit_at, p->ages.limit_ns, now)) return;
    mt_cgroup_refresh(&p->cgroup);
    p->inactive_at = 0; /* perhaps of another group */
}

void
mt_probe_linux_read(mt_probe_linux *p, unsigned mask, mt_sample *out)
{
    uint64_t now = mt_now_ns();

    probe_notice_fork(p);
    mt_sample_clear(out);
    out->time_ns = now;
    if (mask & (MT_READ_CGROUP | MT_READ_PRESSURE)) refresh_limits(p, now);
    if (mask & MT_READ_RSS) read_rss(p, out);
    if (mask & MT_READ_CGROUP) read_cgroup(p, now, out);
    if (mask & MT_READ_PRESSURE) out->pressure = mt_cgroup_pressure(&p->cgroup);
    if (mask & MT_READ_SYSTEM) {
        look_at_machine(p, now);
        out->available = p->machine.available;
        out->total = p->machine.total;
        out->swap_free = p->machine.swap_free;
    }
    if (mask & MT_READ_SWAP) out->swap = probe_swap_of(p, now);
    if (mask & MT_READ_HEAP) probe_read_heap(out);
    if (mask & (MT_READ_CHILDREN | MT_READ_SHM) &&
        has_aged(&p->children_at, p->ages.children_ns, now)) {
        if (mask & MT_READ_LAST) mt_children_weigh_all(p->children);
        mt_children_scan(p->children);
        out->weighing_ns = mt_children_weighing_ns(p->children);
    }
    if (mask & MT_READ_CHILDREN) read_children(p, now, out);
    if (mask & MT_READ_SHM) read_shm(p, out);
}

void
mt_probe_linux_host(mt_probe_linux *p, mt_sample *out)
{
    uint64_t began;

    mt_probe_linux_read(p, MT_READ_HOST, out);
    if (out->time_ns >= p->job_due) {
        began = mt_now_ns();
        mt_probe_linux_read(p, MT_READ_CHILDREN | MT_READ_SHM, &p->job);
        p->job_due = began + JOB_SHARE * (mt_now_ns() - began);
    }
    out->children = p->job.children;
    out->children_priv = p->job.children_priv;
    out->children_swap = p->job.children_swap;
    out->shm = p->job.shm;
    out->shm_mapped = p->job.shm_mapped;
}

uint64_t
mt_probe_linux_rss(mt_probe_linux *p)
{
    mt_sample sample = {.rss = MT_UNKNOWN};

    probe_notice_fork(p);
    read_rss(p, &sample);
    return sample.rss;
}

const mt_children *
mt_probe_linux_children(mt_probe_linux *p)
{
    probe_notice_fork(p);
    p->children_at = mt_now_ns();
    mt_children_scan(p->children);
    return p->children;
}

const mt_cgroup *
mt_probe_linux_cgroup(mt_probe_linux *p)
{
    probe_notice_fork(p);
    p->limit_at = 0;
    refresh_limits(p, mt_now_ns());
    return &p->cgroup;
}

/* --- the table -------------------------------------------------------------------------------- */

static void
ops_read(void *ctx, unsigned mask, mt_sample *out)
{
    mt_probe_linux_read(ctx, mask, out);
}

static void
ops_close(void *ctx)
{
    mt_probe_linux_free(ctx);
}

mt_probe_ops
mt_probe_linux_ops(mt_probe_linux *p)
{
    return (mt_probe_ops){.read = ops_read, .close = ops_close, .ctx = p};
}
