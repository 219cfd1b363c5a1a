/* cgroup.c -- how this file works.
 *
 * mt_cgroup_refresh asks /proc/self/cgroup which group this process is in, and where its text has
 * changed looks in /proc/self/mountinfo for the place where that hierarchy is mounted (see_mounts).
 * From there it walks the folders from the group up to the mount's top and takes the lowest limit
 * (find_limit). The readings at the end use the paths that were found, by kept descriptors. */
#define _GNU_SOURCE /* O_CLOEXEC */
#include "os/monitor/cgroup.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "core/port/probe.h"

enum { TEXT_ROOM = 8192, STAT_ROOM = 4096, NUMBER_ROOM = 64, MOST_LEVELS = 64 };

static void
cgroup_forget(mt_cgroup *cg)
{
    cg->seen = 0;
    cg->version = 0;
    cg->why = NULL;
    cg->limit = MT_UNKNOWN;
    cg->top = cg->stated_by = 0;
    cg->above = cg->pressure_of_host = false;
    cg->dir[0] = cg->usage_path[0] = cg->stat_path[0] = cg->pressure_path[0] = 0;
}

void
mt_cgroup_init(mt_cgroup *cg, const mt_proc_sys *sys, const char *root)
{
    cg->sys = sys;
    cg->root = root;
    cg->kept_usage = cg->kept_stat = cg->kept_pressure = MT_NO_DESCRIPTOR;
    cgroup_forget(cg);
}

void
mt_cgroup_fini(mt_cgroup *cg)
{
    mt_proc_close(cg->sys, &cg->kept_usage);
    mt_proc_close(cg->sys, &cg->kept_stat);
    mt_proc_close(cg->sys, &cg->kept_pressure);
    cgroup_forget(cg);
}

/* --- where the hierarchies are mounted -------------------------------------------------------- */

typedef struct place {
    mt_text path;  /* of the group, as the kernel names it */
    size_t levels; /* names from the mount's top down to it */
    size_t top;    /* bytes of `dir` that are the mount point */
    bool mounted, found;
    char dir[MT_PATH_ROOM];
} place;

/* The next part of a path, without its slashes. */
static bool
next_part(mt_text *path, mt_text *part)
{
    while (mt_text_word(path, '/', part)) {
        if (part->len > 0) return true;
    }
    return false;
}

/* What is left of `path` below `top`; both may begin with "..", which stands for names that are
 * hidden. */
static bool
below(const char *top, mt_text path, mt_text *rest, size_t *levels)
{
    mt_text above = {top, strlen(top)}, a, b;

    while (next_part(&above, &a)) {
        if (!next_part(&path, &b) || a.len != b.len || memcmp(a.at, b.at, a.len) != 0) return false;
    }
    *rest = path;
    for (*levels = 0; next_part(&path, &b); ++*levels) {
        if (mt_text_is(b, "..")) return false;
    }
    return true;
}

/* Of several mounts the one that shows most ancestors counts, of two equal ones the later. A later
 * mount at the same point hides the earlier one. */
static void
consider(place *p, const char *root, const mt_cgroup_mount *mount)
{
    char top[MT_PATH_ROOM], point[MT_PATH_ROOM], mounted_at[MT_PATH_ROOM];
    mt_text rest, part;
    size_t levels, at;

    p->mounted = true;
    if (!mt_text_unescape(mount->top, top, sizeof top)) return;
    if (!mt_text_unescape(mount->point, point, sizeof point)) return;
    if (!mt_path_join(mounted_at, root, point)) return;
    for (at = strlen(mounted_at); at > 0 && mounted_at[at - 1] == '/';)
        at--;
    if (p->found && at == p->top && memcmp(mounted_at, p->dir, at) == 0) p->found = false;
    if (!below(top, p->path, &rest, &levels) || levels > MOST_LEVELS) return;
    if (p->found && levels < p->levels) return;
    if (strlen(root) + strlen(point) + rest.len + levels + 2 > sizeof p->dir) return;
    memcpy(p->dir, mounted_at, at);
    p->top = at;
    while (next_part(&rest, &part)) {
        p->dir[at++] = '/';
        memcpy(p->dir + at, part.at, part.len);
        at += part.len;
    }
    p->dir[at] = 0;
    p->levels = levels;
    p->found = true;
}

typedef struct places {
    const char *root;
    place v1, v2;
    bool in_v1, in_v2;
} places;

static void
see_mount(places *ps, mt_text line)
{
    mt_cgroup_mount mount;

    if (!mt_cgroup_mount_parse(line, &mount)) return;
    if (mount.v2 && ps->in_v2) consider(&ps->v2, ps->root, &mount);
    if (mount.memory && ps->in_v1) consider(&ps->v1, ps->root, &mount);
}

/* Line by line, however long the file is; a line that does not fit the buffer is skipped. */
static bool
see_mounts(const mt_cgroup *cg, places *ps)
{
    char path[MT_PATH_ROOM], buf[TEXT_ROOM];
    bool inside = false; /* of a line that does not fit */
    off_t at = 0;
    ssize_t n;
    int fd;

    if (!mt_path_join(path, cg->root, "/proc/self/mountinfo")) return false;
    if ((fd = cg->sys->open(path, O_RDONLY | O_CLOEXEC)) < 0) return false;
    while ((n = cg->sys->pread(fd, buf, sizeof buf, at)) > 0) {
        mt_text text = {buf, (size_t)n}, line;
        if (inside && memchr(buf, '\n', text.len) != NULL) {
            mt_text_line(&text, &line); /* the rest of it */
            inside = false;
        } else if (inside) {
            text.len = 0;
        }
        while (memchr(text.at, '\n', text.len) != NULL && mt_text_line(&text, &line))
            see_mount(ps, line);
        if (text.len == (size_t)n) { /* no line ended in it */
            if (n < (ssize_t)sizeof buf) see_mount(ps, text);
            inside = n == (ssize_t)sizeof buf;
            text.len = 0;
        }
        at += n - (ssize_t)text.len;
    }
    cg->sys->close(fd);
    return n == 0;
}

/* --- limits ----------------------------------------------------------------------------------- */

/* dir[:len] + "/" + name. */
static const char *
file_in(const mt_cgroup *cg, size_t len, const char *name, char out[MT_PATH_ROOM + 32])
{
    assert(len >= cg->top && len <= strlen(cg->dir) && strlen(name) < 31);
    snprintf(out, MT_PATH_ROOM + 32, "%.*s/%s", (int)len, cg->dir, name);
    return out;
}

/* Reads that file; -1 and errno. */
static ssize_t
read_in(const mt_cgroup *cg, size_t len, const char *name, char *to, size_t room)
{
    char path[MT_PATH_ROOM + 32];

    return mt_proc_slurp(cg->sys, file_in(cg, len, name, path), to, room);
}

static const char *
usage_name(const mt_cgroup *cg)
{
    return cg->version == 1 ? "memory.usage_in_bytes" : "memory.current";
}

size_t
mt_cgroup_above(const mt_cgroup *cg, size_t len)
{
    if (len-- <= cg->top) return 0;
    while (len > cg->top && cg->dir[len] != '/')
        len--;
    return len;
}

/* Sets limit, stated_by and above; false where a level cannot be read. Of equal limits the
 * outermost counts: more is counted against it. v2 has no file of a limit in the root group and
 * where the controller is off. v1 states the minimum over all ancestors as well, those above the
 * mount included. */
static bool
find_limit(mt_cgroup *cg)
{
    const char *name = cg->version == 1 ? "memory.limit_in_bytes" : "memory.max";
    char buf[STAT_ROOM];
    uint64_t limit;
    ssize_t n;

    cg->limit = MT_UNLIMITED;
    cg->stated_by = 0;
    for (size_t len = strlen(cg->dir);;) {
        limit = MT_UNLIMITED;
        n = read_in(cg, len, name, buf, NUMBER_ROOM);
        if (n < 0 ? errno != ENOENT || cg->version != 2
                  : !mt_limit_parse((mt_text){buf, (size_t)n}, &limit))
            return false;
        if (limit != MT_UNLIMITED && limit <= cg->limit) {
            cg->limit = limit;
            cg->stated_by = len;
        }
        if (len == cg->top) break;
        len = mt_cgroup_above(cg, len);
    }
    cg->above = false;
    if (cg->version != 1) return true;
    n = read_in(cg, strlen(cg->dir), "memory.stat", buf, sizeof buf);
    if (n < 0) return errno == ENOENT;
    if (mt_text_field((mt_text){buf, (size_t)n}, "hierarchical_memory_limit ", &limit) &&
        limit < (uint64_t)1 << 62 && limit < cg->limit) {
        cg->above = true;
        cg->limit = limit;
        cg->stated_by = cg->top;
    }
    return true;
}

static void
look_at_limits(mt_cgroup *cg)
{
    size_t before = cg->stated_by, len = strlen(cg->dir);
    char byte[NUMBER_ROOM];

    if (cg->version == 0) return;
    cg->why = NULL;
    if (!find_limit(cg)) {
        cg->limit = MT_UNKNOWN;
        cg->why = "a control group states a limit that cannot be read";
    }
    /* Without a limit: the nearest group that counts at all, so that usage still says something. */
    for (; cg->stated_by == 0 && len != 0; len = mt_cgroup_above(cg, len))
        if (read_in(cg, len, usage_name(cg), byte, sizeof byte) >= 0) cg->stated_by = len;
    if (cg->stated_by == before && cg->usage_path[0] != 0) return;
    mt_proc_close(cg->sys, &cg->kept_usage);
    mt_proc_close(cg->sys, &cg->kept_stat);
    cg->usage_path[0] = cg->stat_path[0] = 0;
    if (cg->stated_by == 0) return;
    file_in(cg, cg->stated_by, usage_name(cg), cg->usage_path);
    file_in(cg, cg->stated_by, "memory.stat", cg->stat_path);
}

/* --- where this process is -------------------------------------------------------------------- */

static void
find_pressure(mt_cgroup *cg, const place *v2)
{
    char path[MT_PATH_ROOM + 32];
    char byte[NUMBER_ROOM];

    if (!v2->found) return;
    snprintf(cg->pressure_path, sizeof cg->pressure_path, "%s/memory.pressure", v2->dir);
    /* Every group but the root has a type. */
    snprintf(path, sizeof path, "%s/cgroup.type", v2->dir);
    cg->pressure_of_host = mt_proc_slurp(cg->sys, path, byte, sizeof byte) < 0 && errno == ENOENT;
}

/* Sets version, dir and top, or why not. */
static void
find_memory_group(mt_cgroup *cg, const places *ps)
{
    const place *at = ps->in_v1 ? &ps->v1 : &ps->v2;
    char byte[NUMBER_ROOM];

    if (!ps->in_v1 && !(ps->in_v2 && ps->v2.mounted)) {
        if (ps->in_v2)
            cg->why = "no control-group file system is mounted";
        else
            cg->limit = MT_UNLIMITED; /* the controller is off */
        return;
    }
    if (!at->found) {
        cg->why = at->mounted ? "the control group lies outside what is mounted"
                              : "no control-group file system is mounted";
        return;
    }
    if (mt_proc_slurp(cg->sys, at->dir, byte, sizeof byte) < 0 && errno != EISDIR) {
        cg->why = "the control group's folder is not there";
        return;
    }
    memcpy(cg->dir, at->dir, sizeof cg->dir);
    cg->top = at->top;
    cg->version = ps->in_v1 ? 1 : 2;
}

static void
find_groups(mt_cgroup *cg, mt_text membership)
{
    places ps = {.root = cg->root};

    ps.in_v1 = mt_cgroup_path(membership, "memory", &ps.v1.path);
    ps.in_v2 = mt_cgroup_path(membership, "", &ps.v2.path);
    if (!see_mounts(cg, &ps)) {
        cg->why = "/proc/self/mountinfo cannot be read";
        return;
    }
    find_memory_group(cg, &ps);
    find_pressure(cg, &ps.v2);
}

static uint64_t
cgroup_hash_of(mt_text text)
{
    uint64_t hash = 14695981039346656037u;

    for (size_t i = 0; i < text.len; i++)
        hash = (hash ^ (unsigned char)text.at[i]) * 1099511628211u;
    return hash | 1;
}

void
mt_cgroup_refresh(mt_cgroup *cg)
{
    char path[MT_PATH_ROOM], buf[TEXT_ROOM];
    mt_text text = {buf, 0};
    ssize_t n = -1;

    if (mt_path_join(path, cg->root, "/proc/self/cgroup"))
        n = mt_proc_slurp(cg->sys, path, buf, sizeof buf);
    if (n < 0) {
        mt_cgroup_fini(cg);
        cg->why = "no /proc/self/cgroup that can be read";
        return;
    }
    text.len = (size_t)n;
    if (cg->version == 0 || cgroup_hash_of(text) != cg->seen) {
        mt_cgroup_fini(cg);
        find_groups(cg, text);
        cg->seen = cgroup_hash_of(text);
    }
    look_at_limits(cg);
}

/* --- readings --------------------------------------------------------------------------------- */

/* Reads a file of the group by a kept descriptor. No text where there is none. */
static mt_text
read_kept(const mt_cgroup *cg, mt_descriptor *kept, const char *path, char buf[STAT_ROOM])
{
    ssize_t n = path[0] == 0 ? -1 : mt_proc_read(cg->sys, kept, path, buf, STAT_ROOM);

    return (mt_text){buf, n < 0 ? 0 : (size_t)n};
}

uint64_t
mt_cgroup_usage(mt_cgroup *cg)
{
    char buf[STAT_ROOM];
    mt_text text = read_kept(cg, &cg->kept_usage, cg->usage_path, buf);
    uint64_t bytes;

    return mt_text_number(&text, &bytes) ? bytes : MT_UNKNOWN;
}

uint64_t
mt_cgroup_inactive(mt_cgroup *cg)
{
    const char *key = cg->version == 1 ? "total_inactive_file " : "inactive_file ";
    char buf[STAT_ROOM];
    mt_text text = read_kept(cg, &cg->kept_stat, cg->stat_path, buf);
    uint64_t bytes;

    return mt_text_field(text, key, &bytes) ? bytes : MT_UNKNOWN;
}

uint64_t
mt_cgroup_pressure(mt_cgroup *cg)
{
    char buf[STAT_ROOM];
    mt_text text = read_kept(cg, &cg->kept_pressure, cg->pressure_path, buf);
    uint64_t pressure;

    return mt_pressure_parse(text, &pressure) ? pressure : MT_UNKNOWN;
}
