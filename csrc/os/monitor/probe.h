/* probe.h -- mt_probe_ops by /proc, the control groups and the C library.
 *
 *   statm           rss, priv             every reading
 *   memory.current  cgroup_used           every reading
 *   memory.pressure pressure              every reading
 *   memory.stat     less inactive_file    at most ages.slow_ns old
 *   meminfo         available, total      at most ages.slow_ns old
 *   memory.max ...  cgroup_limit          at most ages.limit_ns old
 *   children        children, ...         at most ages.children_ns old
 *   fd, maps        shm                   every reading, see shm.h
 *
 * Opening takes nothing of the system but memory: each file is opened when it is first read, and
 * again after it failed, so a process that is out of descriptors gets its readings back when it has
 * some. In a forked child everything is opened again. Not thread-safe. */
#ifndef MT_OS_MONITOR_PROBE_H
#define MT_OS_MONITOR_PROBE_H

#include "core/base/alloc.h"
#include "core/port/probe.h"
#include "core/base/status.h"
#include "os/monitor/cgroup.h"
#include "os/monitor/children.h"
#include "os/monitor/procfile.h"

/* How old the readings that cost microseconds, or change rarely, may be; 0: never old. */
typedef struct mt_probe_ages {
    uint64_t slow_ns, limit_ns, children_ns;
} mt_probe_ages;

extern const mt_probe_ages mt_probe_ages_usual; /* 10 ms, 1 s, 100 ms */

typedef struct mt_probe_linux mt_probe_linux;

/* root "" is this machine; else a folder that holds `proc` and whatever its mountinfo names. sys
 * stays valid until free. *out is written on MT_OK only. MT_ENOMEM, MT_EOVERFLOW for a root longer
 * than a path can be. */
mt_status mt_probe_linux_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root,
                             const mt_probe_ages *ages, mt_probe_linux **out, mt_error *err);
void mt_probe_linux_free(mt_probe_linux *probe); /* NULL is ignored */

/* The table over it; its close() is mt_probe_linux_free. */
mt_probe_ops mt_probe_linux_ops(mt_probe_linux *probe);

/* See mt_probe_ops. Device columns and what is not asked for stay MT_UNKNOWN. */
void mt_probe_linux_read(mt_probe_linux *probe, unsigned mask, mt_sample *out);

/* The host with the whole job: what MT_READ_HOST means, read now, and the descendants and shared
 * memory by a reading that is at most 20 times as old as it took. */
void mt_probe_linux_host(mt_probe_linux *probe, mt_sample *out);

/* Resident bytes alone: the cheapest reading. */
uint64_t mt_probe_linux_rss(mt_probe_linux *probe);

/* The descendants one by one, listed now. Borrowed, until the next call. */
const mt_children *mt_probe_linux_children(mt_probe_linux *probe);

/* Where limit and pressure come from, looked up now. Borrowed, until the next call. */
const mt_cgroup *mt_probe_linux_cgroup(mt_probe_linux *probe);

#endif
