/* cgroup.h -- the memory limit of this process's control group, what counts against it, and
 * how long the group stalls for memory.
 *
 *   /proc/self/cgroup     4:memory:/a/b     which group, in which hierarchy
 *   /proc/self/mountinfo  ... /sys/fs/cgroup/memory ... memory     where that hierarchy is seen
 *
 *   /sys/fs/cgroup/memory          no limit       ┐
 *   /sys/fs/cgroup/memory/a        8 GiB  <── the lowest: `stated_by`; its usage is what counts
 *   /sys/fs/cgroup/memory/a/b      no limit       ┘
 *
 * Version 1 where the memory controller is there, else version 2. Pressure is accounted for by
 * version 2 only, on a hybrid host too. Limits change at run time and processes are moved:
 * mt_cgroup_refresh looks again.
 *
 * A limit is MT_UNKNOWN, with `why`, where there is a group whose files cannot be seen or read, and
 * MT_UNLIMITED where nothing accounts for memory. */
#ifndef MT_OS_MONITOR_CGROUP_H
#define MT_OS_MONITOR_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "os/monitor/procfile.h"

typedef struct mt_cgroup {
    const mt_proc_sys *sys;
    const char *root;
    uint64_t seen; /* a hash of /proc/self/cgroup: another one means that we were moved */
    mt_descriptor kept_usage, kept_stat, kept_pressure;
    int version;      /* 0: nothing accounts for memory, or it cannot be seen */
    const char *why;  /* static text: why the limit is unknown; NULL when it is known */
    uint64_t limit;   /* bytes, MT_UNLIMITED or MT_UNKNOWN */
    size_t top;       /* bytes of `dir` that are the mount point */
    size_t stated_by; /* bytes of `dir` that are the group that states the limit, else the nearest
                       * one that counts */
    bool above;       /* v1: the limit is stated by an ancestor that is not mounted here */
    bool pressure_of_host;              /* the group is the root: its pressure is the machine's */
    char dir[MT_PATH_ROOM];             /* this process's own group */
    char usage_path[MT_PATH_ROOM + 32]; /* "" when there is none */
    char stat_path[MT_PATH_ROOM + 32];
    char pressure_path[MT_PATH_ROOM + 32]; /* "" when there is none */
} mt_cgroup;

/* Nothing is read yet. root and sys stay valid. */
void mt_cgroup_init(mt_cgroup *cg, const mt_proc_sys *sys, const char *root);
/* Closes what is open; init's values again but for root and sys. */
void mt_cgroup_fini(mt_cgroup *cg);

/* Looks where this process belongs and what the limits are now. */
void mt_cgroup_refresh(mt_cgroup *cg);

/* The group above the one whose folder is dir[:len], as the length of its folder; 0 above the mount
 * point. pre: len is such a length, or that of dir. */
size_t mt_cgroup_above(const mt_cgroup *cg, size_t len);

/* usage: what counts against the limit now. inactive: file cache in it that is dropped without
 * effort. MT_UNKNOWN where it cannot be read. */
uint64_t mt_cgroup_usage(mt_cgroup *cg);
uint64_t mt_cgroup_inactive(mt_cgroup *cg);

/* The usage without that cache. Both must be known. */
static inline uint64_t
mt_cgroup_used(uint64_t usage, uint64_t inactive)
{
    return usage > inactive ? usage - inactive : 0;
}

/* MT_UNKNOWN where there is none. */
uint64_t mt_cgroup_pressure(mt_cgroup *cg);

#endif
