#define _DEFAULT_SOURCE /* sysconf */
#include "os/monitor/children.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/port/probe.h"

enum { LIST_ROOM = 4096, TEXT_ROOM = 1024, MOST_PROCESSES = 32768 };

typedef struct child {
    uint64_t pid;
    uint64_t priv;       /* bytes; MT_UNKNOWN when it could not be read */
    mt_descriptor statm; /* where it is kept */
    bool listed;         /* by the scan that runs */
} child;

/* The slower way's list of all processes. */
typedef struct process {
    uint32_t pid, parent;
} process;

struct mt_children {
    mt_alloc mem;
    const mt_proc_sys *sys;
    const char *root;
    uint64_t page;
    size_t len, kept;
    uint64_t beyond; /* listed, but no room */
    bool known, slow;
    process *all; /* made when the slower way is first taken */
    child table[MT_CHILDREN_MOST];
};

mt_status
mt_children_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root, mt_children **out,
                mt_error *err)
{
    mt_children *ch = mem->get(mem->ctx, sizeof *ch);

    if (ch == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    ch->mem = *mem;
    ch->sys = sys;
    ch->root = root;
    ch->page = (uint64_t)sysconf(_SC_PAGESIZE);
    ch->len = ch->kept = 0;
    ch->beyond = 0;
    ch->known = ch->slow = false;
    ch->all = NULL;
    *out = ch;
    return MT_OK;
}

/* The last one takes its place. */
static void
drop_child(mt_children *ch, size_t i)
{
    ch->kept -= ch->table[i].statm.fd >= 0;
    mt_proc_close(ch->sys, &ch->table[i].statm);
    ch->table[i] = ch->table[--ch->len];
}

void
mt_children_clear(mt_children *ch)
{
    while (ch->len > 0)
        drop_child(ch, ch->len - 1);
    ch->beyond = 0;
    ch->known = false;
}

void
mt_children_free(mt_children *ch)
{
    mt_alloc mem;

    if (ch == NULL) return;
    mt_children_clear(ch);
    mem = ch->mem;
    if (ch->all != NULL) mem.put(mem.ctx, ch->all, MOST_PROCESSES * sizeof *ch->all);
    mem.put(mem.ctx, ch, sizeof *ch);
}

/* What ended between two looks is no fault. */
static bool
has_gone(void)
{
    return errno == ENOENT || errno == ESRCH;
}

/* --- one child's memory ----------------------------------------------------------------------- */

static uint64_t
private_bytes(const mt_children *ch, const char *text, size_t len, bool *gone)
{
    uint64_t resident, shared;

    *gone = false;
    if (!mt_statm_parse((mt_text){text, len}, &resident, &shared)) return MT_UNKNOWN;
    *gone = resident == 0; /* a zombie */
    if (resident > (MT_UNLIMITED - 1) / ch->page) return MT_UNKNOWN;
    return (resident - shared) * ch->page;
}

/* Reads by the kept descriptor, or opens one while there is room. False: it has ended. */
static bool
look_at(mt_children *ch, child *c)
{
    char path[MT_PATH_ROOM], name[64], buf[TEXT_ROOM];
    bool had = c->statm.fd >= 0, gone;
    ssize_t n;

    snprintf(name, sizeof name, "/proc/%" PRIu64 "/statm", c->pid);
    c->priv = MT_UNKNOWN;
    if (!mt_path_join(path, ch->root, name)) return true;
    n = mt_proc_read(ch->sys, &c->statm, path, buf, sizeof buf);
    ch->kept += (size_t)(c->statm.fd >= 0) - (size_t)had;
    if (n < 0) return !has_gone();
    c->priv = private_bytes(ch, buf, (size_t)n, &gone);
    if (c->statm.fd >= 0 && ch->kept > MT_CHILDREN_KEPT) {
        mt_proc_close(ch->sys, &c->statm);
        ch->kept--;
    }
    return !gone;
}

/* --- the tree --------------------------------------------------------------------------------- */

static void
list_child(mt_children *ch, uint64_t pid)
{
    for (size_t i = 0; i < ch->len; i++) {
        if (ch->table[i].pid != pid) continue;
        ch->table[i].listed = true;
        return;
    }
    if (ch->len == MT_CHILDREN_MOST)
        ch->beyond++;
    else
        ch->table[ch->len++] = (child){pid, MT_UNKNOWN, MT_NO_DESCRIPTOR, true};
}

/* Takes the numbers of a part of the list, and returns how many bytes of it: a number that the end
 * of a full buffer cuts is read with the next part. 0 for what is no list. */
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
    int fd = ch->sys->open(path, O_RDONLY | O_CLOEXEC), saved;

    if (fd < 0) return false;
    while ((n = ch->sys->pread(fd, buf, sizeof buf, at)) > 0) {
        if ((taken = take_part(ch, buf, (size_t)n)) == 0) {
            errno = ENODATA;
            break;
        }
        at += (off_t)taken;
    }
    saved = errno;
    ch->sys->close(fd);
    errno = saved;
    return n == 0;
}

static bool
is_number(const char *name)
{
    return *name != 0 && strspn(name, "0123456789") == strlen(name) && strlen(name) < 11;
}

typedef struct seen_threads {
    size_t all, missing; /* of them, those whose list is not there */
} seen_threads;

/* Lists the children of all threads of one process. False when something hid a part of them. */
static bool
list_children_of(mt_children *ch, const char *pid, seen_threads *threads)
{
    char name[64], folder[MT_PATH_ROOM], path[MT_PATH_ROOM + 64];
    const char *thread;
    bool ok = true;
    mt_folder dir;

    *threads = (seen_threads){0, 0};
    snprintf(name, sizeof name, "/proc/%s/task", pid);
    if (!mt_path_join(folder, ch->root, name)) return false;
    if (!ch->sys->opendir(folder, &dir)) return has_gone();
    while ((thread = ch->sys->readdir(&dir)) != NULL) {
        if (!is_number(thread)) continue;
        snprintf(path, sizeof path, "%s/%s/children", folder, thread);
        threads->all++;
        if (take_list(ch, path)) continue;
        threads->missing += errno == ENOENT;
        ok = ok && has_gone();
    }
    ok = ok && (errno == 0 || has_gone());
    ch->sys->closedir(&dir);
    return ok;
}

/* Descendants are found in the same table, which grows while it is walked. *lists is false where
 * the kernel keeps no lists. */
static bool
scan_lists(mt_children *ch, bool *lists)
{
    seen_threads threads;
    char pid[32];
    bool ok = list_children_of(ch, "self", &threads) && threads.all > 0;

    *lists = !ok || threads.missing < threads.all;
    for (size_t i = 0; ok && *lists && i < ch->len; i++) {
        if (!ch->table[i].listed) continue;
        snprintf(pid, sizeof pid, "%" PRIu64, ch->table[i].pid);
        ok = list_children_of(ch, pid, &threads);
    }
    return ok;
}

/* --- the slower way --------------------------------------------------------------------------- */

typedef struct process_list {
    process *at;
    size_t len;
} process_list;

static bool
read_stat(const mt_children *ch, const char *path, uint64_t *pid, uint64_t *parent)
{
    char buf[TEXT_ROOM];
    ssize_t n = mt_proc_slurp(ch->sys, path, buf, sizeof buf);
    mt_text text = {buf, n < 0 ? 0 : (size_t)n};

    if (n < 0) return false;
    errno = ENODATA; /* for a caller that asks why */
    return mt_stat_parent(text, parent) && mt_text_number(&text, pid) && *pid <= UINT32_MAX &&
           *parent <= UINT32_MAX;
}

static bool
read_all(mt_children *ch, process_list *all)
{
    char folder[MT_PATH_ROOM], path[MT_PATH_ROOM + 64];
    uint64_t pid, parent;
    const char *name;
    bool ok = true;
    mt_folder dir;

    if (!mt_path_join(folder, ch->root, "/proc")) return false;
    if (!ch->sys->opendir(folder, &dir)) return false;
    while ((name = ch->sys->readdir(&dir)) != NULL) {
        if (!is_number(name)) continue;
        snprintf(path, sizeof path, "%s/%s/stat", folder, name);
        if (!read_stat(ch, path, &pid, &parent)) {
            ok = ok && has_gone();
            continue;
        }
        if (all->len == MOST_PROCESSES) ok = false;
        if (all->len < MOST_PROCESSES)
            all->at[all->len++] = (process){(uint32_t)pid, (uint32_t)parent};
    }
    ok = ok && errno == 0;
    ch->sys->closedir(&dir);
    return ok;
}

static void
list_children_among(mt_children *ch, const process_list *all, uint64_t parent)
{
    for (size_t i = 0; i < all->len; i++) {
        if (all->at[i].parent == parent) list_child(ch, all->at[i].pid);
    }
}

static bool
scan_all(mt_children *ch)
{
    char path[MT_PATH_ROOM];
    process_list all;
    uint64_t self, parent;

    if (ch->all == NULL) ch->all = ch->mem.get(ch->mem.ctx, MOST_PROCESSES * sizeof *ch->all);
    all = (process_list){ch->all, 0};
    if (ch->all == NULL || !mt_path_join(path, ch->root, "/proc/self/stat")) return false;
    if (!read_stat(ch, path, &self, &parent) || !read_all(ch, &all)) return false;
    list_children_among(ch, &all, self);
    for (size_t i = 0; i < ch->len; i++) {
        if (ch->table[i].listed) list_children_among(ch, &all, ch->table[i].pid);
    }
    return true;
}

/* --- scan and read ---------------------------------------------------------------------------- */

bool
mt_children_scan(mt_children *ch)
{
    bool lists = true;

    for (size_t i = 0; i < ch->len; i++)
        ch->table[i].listed = false;
    ch->beyond = 0;
    ch->known = ch->slow ? false : scan_lists(ch, &lists);
    if (ch->slow || !lists) ch->known = ch->slow = scan_all(ch);
    for (size_t i = ch->len; i-- > 0;) {
        if ((ch->known && !ch->table[i].listed) || !look_at(ch, &ch->table[i])) drop_child(ch, i);
    }
    return ch->known;
}

void
mt_children_read(mt_children *ch, uint64_t *count, uint64_t *priv)
{
    uint64_t sum = 0;

    for (size_t i = ch->len; i-- > 0;) {
        if (ch->table[i].statm.fd >= 0 && !look_at(ch, &ch->table[i])) drop_child(ch, i);
    }
    for (size_t i = 0; i < ch->len; i++) {
        if (ch->table[i].priv == MT_UNKNOWN || sum > MT_UNLIMITED - 1 - ch->table[i].priv) {
            sum = MT_UNKNOWN;
            break;
        }
        sum += ch->table[i].priv;
    }
    *count = ch->known ? ch->len + ch->beyond : MT_UNKNOWN;
    *priv = ch->known ? sum : MT_UNKNOWN;
}
