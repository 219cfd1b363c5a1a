/* children.c -- how this file works.
 *
 * A scan marks all children of the table as not listed, walks the kernel's lists of children from
 * this process down, and drops those that it did not come by. Between scans only the memory of the
 * children in the table is read. */
#define _POSIX_C_SOURCE 200809L /* O_CLOEXEC */
#include "os/monitor/children.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "core/port/probe.h"

enum { LIST_ROOM = 4096, TEXT_ROOM = 1024 };

typedef struct child {
    uint64_t pid;
    uint64_t priv;       /* bytes; MT_UNKNOWN when it could not be read */
    mt_descriptor statm; /* where it is kept */
    bool listed;         /* by the scan that runs */
} child;

struct mt_children {
    mt_alloc mem;
    const mt_proc_sys *sys;
    const char *root;
    size_t len, kept;
    uint64_t beyond; /* listed, but no room */
    bool known;
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
    ch->len = ch->kept = 0;
    ch->beyond = 0;
    ch->known = false;
    *out = ch;
    return MT_OK;
}

/* Drops child i; the last child of the table takes its place. */
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
    mem.put(mem.ctx, ch, sizeof *ch);
}

/* True where the last call failed because the process has ended meanwhile, which is no fault. */
static bool
has_gone(void)
{
    return errno == ENOENT || errno == ESRCH;
}

/* --- one child's memory ----------------------------------------------------------------------- */

/* Reads the memory of a child by its kept descriptor, and keeps one that it opens while there is
 * room. False where the child has ended or is a zombie. */
static bool
look_at(mt_children *ch, child *c)
{
    char path[MT_PATH_ROOM], name[64], buf[TEXT_ROOM];
    bool had = c->statm.fd >= 0, zombie = false;
    uint64_t resident, shared;
    ssize_t n;

    snprintf(name, sizeof name, "/proc/%" PRIu64 "/statm", c->pid);
    c->priv = MT_UNKNOWN;
    if (!mt_path_join(path, ch->root, name)) return true;
    n = mt_proc_read(ch->sys, &c->statm, path, buf, sizeof buf);
    ch->kept += (size_t)(c->statm.fd >= 0) - (size_t)had;
    if (n < 0) return !has_gone();
    if (mt_statm_parse((mt_text){buf, (size_t)n}, &resident, &shared)) {
        c->priv = resident - shared;
        zombie = resident == 0;
    }
    if (c->statm.fd >= 0 && ch->kept > MT_CHILDREN_KEPT) {
        mt_proc_close(ch->sys, &c->statm);
        ch->kept--;
    }
    assert(ch->kept <= MT_CHILDREN_KEPT);
    return !zombie;
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

/* Lists the children of all threads of one process, and counts the threads that have a list. False
 * when something hid a part of them. */
static bool
list_children_of(mt_children *ch, const char *pid, size_t *lists)
{
    char name[64], folder[MT_PATH_ROOM], path[MT_PATH_ROOM + 64];
    const char *thread;
    bool ok = true;
    mt_folder dir;

    *lists = 0;
    snprintf(name, sizeof name, "/proc/%s/task", pid);
    if (!mt_path_join(folder, ch->root, name)) return false;
    if (!ch->sys->opendir(folder, &dir)) return has_gone();
    while ((thread = ch->sys->readdir(&dir)) != NULL) {
        if (!is_number(thread)) continue;
        snprintf(path, sizeof path, "%s/%s/children", folder, thread);
        if (take_list(ch, path))
            ++*lists;
        else
            ok = ok && has_gone();
    }
    ok = ok && (errno == 0 || has_gone());
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

    for (size_t i = 0; ok && i < ch->len; i++) {
        if (!ch->table[i].listed) continue;
        snprintf(pid, sizeof pid, "%" PRIu64, ch->table[i].pid);
        ok = list_children_of(ch, pid, &lists);
    }
    return ok;
}

/* --- scan and read ---------------------------------------------------------------------------- */

bool
mt_children_scan(mt_children *ch)
{
    for (size_t i = 0; i < ch->len; i++)
        ch->table[i].listed = false;
    ch->beyond = 0;
    ch->known = scan_tree(ch);
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
