/* children.c -- how this file works.
 *
 * The table is in the order in which a scan comes by the children: a scan walks the kernel's lists
 * from this process down, puts each child that it meets behind those that it has met (in most scans
 * it is there already), and drops what is left behind them. Then it reads their memory, and weighs
 * some of them (at "what a child has alone"). */
#define _POSIX_C_SOURCE 200809L /* O_CLOEXEC */
#include "os/monitor/children.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/base/clock.h"
#include "core/base/size.h"
#include "core/port/probe.h"

enum {
    LIST_ROOM = 4096,
    TEXT_ROOM = 2048,
    MS = 1000000,
    CREDIT_NS = 50 * MS, /* of a core, for weighing: at the start and at most */
    SHARE = 300,         /* of a core: one part in so many */
    AGE_NS = 1000 * MS,  /* a child is not weighed again sooner */
};

typedef struct child {
    uint64_t pid;
    uint64_t anon;       /* bytes of no file and no shared memory; MT_UNKNOWN: could not be read */
    uint64_t common;     /* of them, those that count in another process of its family */
    uint64_t first;      /* the same when that was found out for the first time */
    uint64_t stack;      /* where its stack begins: the same in the whole family; 0: not known */
    uint64_t weighed_at; /* when that was found out; 0: not yet */
} child;

struct mt_children {
    mt_alloc mem;
    const mt_proc_sys *sys;
    const char *root;
    size_t len;
    size_t listed;   /* of len, the first ones: by the scan that runs */
    uint64_t beyond; /* listed, but no room */
    bool known;
    uint64_t credit_ns, credit_at; /* for weighing, and when it was counted */
    uint64_t weighing_ns;          /* of the last scan */
    bool all_are_due;              /* to be weighed, at the next scan */
    child weighed;                 /* the last one: an example for those that were not */
    uint64_t stack;                /* of this process */
    child *table;                  /* grows as children come: most programs have few */
    size_t room;
};

mt_status
mt_children_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root, mt_children **out,
                mt_error *err)
{
    mt_children *ch = mem->get(mem->ctx, sizeof *ch);

    if (ch == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    *ch = (mt_children){.mem = *mem, .sys = sys, .root = root, .credit_ns = CREDIT_NS};
    *out = ch;
    return MT_OK;
}

void
mt_children_clear(mt_children *ch)
{
    ch->len = ch->beyond = ch->stack = 0;
    ch->known = false;
}

void
mt_children_free(mt_children *ch)
{
    mt_alloc mem;

    if (ch == NULL) return;
    mt_children_clear(ch);
    mem = ch->mem;
    if (ch->table != NULL) mem.put(mem.ctx, ch->table, ch->room * sizeof *ch->table);
    mem.put(mem.ctx, ch, sizeof *ch);
}

/* --- one child's memory ----------------------------------------------------------------------- */

/* Reads the memory of a child. False where it has ended or is a zombie. */
static bool
children_look_at(mt_children *ch, child *c)
{
    char path[MT_PATH_ROOM], pid[32], buf[TEXT_ROOM];
    uint64_t resident, shared;
    ssize_t n;

    snprintf(pid, sizeof pid, "%" PRIu64, c->pid);
    c->anon = MT_UNKNOWN;
    if (!mt_proc_path(path, ch->root, pid, "statm")) return true;
    if ((n = mt_proc_slurp(ch->sys, path, buf, sizeof buf)) < 0) return !mt_proc_has_gone();
    if (!mt_statm_parse((mt_text){buf, (size_t)n}, &resident, &shared)) return true;
    c->anon = resident - shared;
    return resident != 0;
}

/* --- what a child has alone ---------------------------------------------------------------------
 * */

/* The text of a file of one process, which may be "self". */
static mt_text
children_text_of(const mt_children *ch, const char *pid, const char *file, char buf[TEXT_ROOM])
{
    char path[MT_PATH_ROOM];
    ssize_t n = -1;

    if (mt_proc_path(path, ch->root, pid, file)) n = mt_proc_slurp(ch->sys, path, buf, TEXT_ROOM);
    return (mt_text){buf, n < 0 ? 0 : (size_t)n};
}

/* A forked process has its parent's stack, and exec() draws another. 0: not known. */
static uint64_t
stack_of(const mt_children *ch, const char *pid)
{
    enum { START_STACK = 28 };
    char buf[TEXT_ROOM];
    uint64_t stack;

    return mt_stat_field(children_text_of(ch, pid, "stat", buf), START_STACK, &stack) ? stack : 0;
}

/* One that may not be read, another user's for example, keeps what is known of it. */
static void
weigh(mt_children *ch, child *c, uint64_t now)
{
    uint64_t began = mt_thread_cpu_ns(), own = c->anon, took;
    char pid[32], buf[TEXT_ROOM];
    bool is_first;

    snprintf(pid, sizeof pid, "%" PRIu64, c->pid);
    if (ch->stack == 0) ch->stack = stack_of(ch, "self");
    c->stack = stack_of(ch, pid);
    is_first = c->stack == 0 || c->stack != ch->stack;
    for (const child *other = ch->table; c->stack != 0 && other != c; other++)
        is_first = is_first && other->stack != c->stack;
    if (!is_first) {
        /* Anonymous pages that are mapped here alone are dirty; so are pages of shared memory, which
         * do not count here. What the process has alone is at most each of the three numbers. */
        mt_text rollup = children_text_of(ch, pid, "smaps_rollup", buf);
        uint64_t anon = mt_text_kib(rollup, "Anonymous:");
        uint64_t dirty = mt_text_kib(rollup, "Private_Dirty:");
        own = mt_u64_min(mt_u64_min(anon, dirty), mt_text_kib(rollup, "Pss_Anon:"));
        if (anon == MT_UNKNOWN || dirty == MT_UNKNOWN) own = MT_UNKNOWN;
    }
    if (own != MT_UNKNOWN) c->common = c->anon > own ? c->anon - own : 0;
    if (c->weighed_at == 0) c->first = c->common;
    c->weighed_at = now;
    ch->weighed = *c;
    took = mt_thread_cpu_ns() - began; /* a busy machine does not make children wait longer */
    ch->weighing_ns += took;
    ch->credit_ns = took < ch->credit_ns ? ch->credit_ns - took : 0;
}

/* New children first, then those that were weighed long ago, as long as there is time for it. */
static void
weigh_some(mt_children *ch, uint64_t now)
{
    if (ch->credit_at != 0)
        ch->credit_ns = mt_u64_min(CREDIT_NS, ch->credit_ns + (now - ch->credit_at) / SHARE);
    ch->credit_at = now;
    ch->weighing_ns = 0;
    for (int again = 0; again < 2; again++) {
        for (size_t i = 0; i < ch->len && ch->credit_ns > 0; i++) {
            child *c = &ch->table[i];
            bool old = ch->all_are_due || now - c->weighed_at >= AGE_NS;
            bool due = again ? old && c->weighed_at != now : c->weighed_at == 0;
            if (due && c->anon != MT_UNKNOWN) weigh(ch, c, now);
        }
    }
    ch->all_are_due = false;
}

static uint64_t
private_of(const mt_children *ch, const child *c)
{
    uint64_t common = c->common, example = ch->weighed.anon;

    if (c->anon == MT_UNKNOWN) return MT_UNKNOWN;
    if (c->weighed_at == 0 && c->anon / 4 * 3 <= example && example / 4 * 3 <= c->anon)
        common = ch->weighed.common;
    return c->anon > common ? c->anon - common : 0;
}

static uint64_t
made_by(const mt_children *ch, const child *c)
{
    if (c->anon == MT_UNKNOWN || c->weighed_at == 0) return private_of(ch, c);
    return c->anon > c->first ? c->anon - c->first : 0;
}

/* The sum of such bytes of all children, or MT_UNKNOWN. */
static uint64_t
sum_of(const mt_children *ch, uint64_t (*bytes_of)(const mt_children *, const child *))
{
    uint64_t sum = 0;

    if (!ch->known || ch->beyond > 0) return MT_UNKNOWN;
    for (size_t i = 0; i < ch->len; i++) {
        uint64_t own = bytes_of(ch, &ch->table[i]);
        if (own == MT_UNKNOWN || sum > MT_UNLIMITED - 1 - own) return MT_UNKNOWN;
        sum += own;
    }
    return sum;
}

/* --- the tree --------------------------------------------------------------------------------- */

/* Where in the table a child is; len: nowhere. */
static size_t
children_place_of(const mt_children *ch, uint64_t pid)
{
    for (size_t i = ch->listed; i < ch->len; i++) {
        if (ch->table[i].pid == pid) return i;
    }
    for (size_t i = 0; i < ch->listed; i++) {
        if (ch->table[i].pid == pid) return i;
    }
    return ch->len;
}

static void
list_child(mt_children *ch, uint64_t pid)
{
    size_t i = children_place_of(ch, pid);
    child c = {.pid = pid, .anon = MT_UNKNOWN};

    if (i < ch->listed) return; /* twice: its parent's thread has ended meanwhile */
    if (i == ch->room) {
        child *table = NULL;
        if (i < MT_CHILDREN_MOST)
            table = mt_alloc_grown(&ch->mem, ch->table, &ch->room, i + 1, sizeof *table);
        if (table == NULL) { /* too many, or no memory for more */
            ch->beyond++;
            return;
        }
        ch->table = table;
    }
    if (i < ch->len)
        c = ch->table[i];
    else
        ch->len++;
    ch->table[i] = ch->table[ch->listed];
    ch->table[ch->listed++] = c;
}

/* Takes the numbers of a part of the list, and returns how many bytes of it: a number that the end
 * of a full buffer cuts is read with the next part. 0 for what is not a list. */
static size_t
take_part(mt_children *ch, const char *buf, size_t len)
{
    mt_text text = {buf, len};
    uint64_t pid;

    if (len == LIST_ROOM) {
        while (text.len > 0 && buf[text.len - 1] != ' ')
            text.len--;
    }
    len = text.len;
    while (mt_text_number(&text, &pid))
        list_child(ch, pid);
    return text.len > 0 && text.at[0] != '\n' ? 0 : len;
}

static bool
take_list(mt_children *ch, const char *path)
{
    char buf[LIST_ROOM];
    size_t taken;
    off_t at = 0;
    ssize_t n;
    int fd = ch->sys->open(path, O_RDONLY | O_CLOEXEC);
    mt_descriptor brief = mt_descriptor_keep(fd);

    if (fd < 0) return false;
    while ((n = ch->sys->pread(fd, buf, sizeof buf, at)) > 0) {
        if ((taken = take_part(ch, buf, (size_t)n)) == 0) {
            errno = ENODATA;
            break;
        }
        at += (off_t)taken;
    }
    mt_proc_close(ch->sys, &brief);
    return n == 0;
}

/* Lists the children of all threads of one process, and counts the threads that have a list. False
 * when something hid a part of them. */
static bool
list_children_of(mt_children *ch, const char *pid, size_t *lists)
{
    char folder[MT_PATH_ROOM], path[MT_PATH_ROOM + 64];
    const char *thread;
    bool ok = true;
    mt_folder dir;

    *lists = 0;
    if (!mt_proc_path(folder, ch->root, pid, "task")) return false;
    if (!ch->sys->opendir(folder, &dir)) return mt_proc_has_gone();
    while ((thread = ch->sys->readdir(&dir)) != NULL) {
        if (*thread < '0' || *thread > '9') continue;
        snprintf(path, sizeof path, "%s/%.10s/children", folder, thread);
        if (take_list(ch, path))
            ++*lists;
        else
            ok = ok && mt_proc_has_gone();
    }
    ok = ok && (errno == 0 || mt_proc_has_gone());
    ch->sys->closedir(&dir);
    return ok;
}

/* Descendants are found in the same table, which grows while it is walked. This process lives:
 * where none of its own threads has a list, the kernel keeps none. */
static bool
scan_tree(mt_children *ch)
{
    char pid[32];
    size_t lists;
    bool ok = list_children_of(ch, "self", &lists) && lists > 0;

    for (size_t i = 0; ok && i < ch->listed; i++) {
        snprintf(pid, sizeof pid, "%" PRIu64, ch->table[i].pid);
        ok = list_children_of(ch, pid, &lists);
    }
    return ok;
}

/* --- scan and read ---------------------------------------------------------------------------- */

bool
mt_children_scan(mt_children *ch)
{
    size_t left = 0;

    ch->listed = 0;
    ch->beyond = 0;
    ch->known = scan_tree(ch);
    if (ch->known) ch->len = ch->listed;
    for (size_t i = 0; i < ch->len; i++)
        if (children_look_at(ch, &ch->table[i])) ch->table[left++] = ch->table[i];
    ch->len = left;
    weigh_some(ch, mt_now_ns());
    return ch->known;
}

void
mt_children_weigh_all(mt_children *ch)
{
    ch->credit_ns = CREDIT_NS;
    ch->all_are_due = true;
}

uint64_t
mt_children_weighing_ns(const mt_children *ch)
{
    return ch->weighing_ns;
}

void
mt_children_read(const mt_children *ch, uint64_t *count, uint64_t *priv)
{
    *count = ch->known ? ch->len + ch->beyond : MT_UNKNOWN;
    *priv = sum_of(ch, private_of);
}

uint64_t
mt_children_made_by_all(const mt_children *ch)
{
    return sum_of(ch, made_by);
}

uint64_t
mt_children_swap(const mt_children *ch)
{
    uint64_t sum = 0, swapped, size;
    char pid[32], buf[TEXT_ROOM];

    if (!mt_children_known(ch)) return MT_UNKNOWN;
    for (size_t i = 0; i < ch->len; i++) {
        mt_text text;
        snprintf(pid, sizeof pid, "%" PRIu64, ch->table[i].pid);
        errno = 0;
        text = children_text_of(ch, pid, "status", buf);
        if (text.len == 0)
            swapped = mt_proc_has_gone() ? 0 : MT_UNKNOWN;
        else if (mt_text_field(text, "VmSize:", &size))
            swapped = mt_text_kib(text, "VmSwap:");
        else
            swapped = 0; /* it ends, and has no memory any more */
        if (swapped >= MT_UNLIMITED || sum > MT_UNLIMITED - 1 - swapped) return MT_UNKNOWN;
        sum += swapped;
    }
    return sum;
}

bool
mt_children_known(const mt_children *ch)
{
    return ch->known && ch->beyond == 0;
}

size_t
mt_children_len(const mt_children *ch)
{
    return ch->known ? ch->len : 0;
}

uint64_t
mt_children_pid(const mt_children *ch, size_t i)
{
    assert(i < ch->len);
    return ch->table[i].pid;
}

uint64_t
mt_children_priv(const mt_children *ch, size_t i)
{
    assert(i < ch->len);
    return private_of(ch, &ch->table[i]);
}

uint64_t
mt_children_made(const mt_children *ch, size_t i)
{
    assert(i < ch->len);
    return made_by(ch, &ch->table[i]);
}

void
mt_children_name(const mt_children *ch, size_t i, char out[MT_CHILD_NAME])
{
    char pid[32], buf[TEXT_ROOM];
    mt_text name, line = {buf, 0};

    snprintf(pid, sizeof pid, "%" PRIu64, mt_children_pid(ch, i));
    name = children_text_of(ch, pid, "comm", buf);
    mt_text_line(&name, &line);
    snprintf(out, MT_CHILD_NAME, "%.*s", (int)line.len, line.at);
}
