/* shm.c -- how this file works.
 *
 * A look (mt_shm_look, at the end) goes through the open files and the mappings of each process of
 * the job and notes in the table, by inode, which files are held; then it lists /dev/shm, decides
 * which named files are the job's, and adds up the bytes. Entries of the table carry the number of
 * the look in which something was found out about them, so nothing needs to be cleared in between.
 * The table is sorted by inode: new files have higher ones, and are put at its end.
 *
 * mt_shm_note writes the inode of a new file into a ring that forked children share, and
 * mt_shm_note_path the hash of a path whose file comes next. Each look begins with what was noted
 * since the look before the last one. So each entry is read twice: the file of a path may be made
 * after the first look, and a writer that has counted its entry may not have written it yet. */
#define _GNU_SOURCE /* memfd_create's number, mincore */
#include "os/monitor/shm.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/size.h"
#include "core/port/probe.h"

enum {
    TEXT_ROOM = 4096,
    WORDS = 256, /* of pagemap that are read at once */
    RING = 4096, /* files that can be noted between two looks */
    NAME = 64,
    DEEPEST = 3, /* folders below each other in /dev/shm */
};

#define FOLDER  "/dev/shm/"
#define A_PATH  ((uint64_t)1 << 63) /* in the ring: the hash of a path, and no inode */
#define UNNAMED ((uint64_t)1 << 63) /* in a key: the file is of the kernel's own file system */

typedef struct file {
    uint64_t key;    /* first, for shm_place_of(): its inode, and where that is unique */
    uint64_t bytes;  /* that it has of memory */
    uint64_t mapped; /* of this process's addresses, in this look */
    uint64_t end;    /* up to there the file was counted by mappings, in this look */
    uint32_t held, exact, counted; /* the look in which it was found so */
    bool made;                     /* by the job: it counts as long as it has its name */
} file;

struct mt_shm {
    mt_alloc mem;
    const mt_proc_sys *sys;
    const char *root;
    const mt_children *children;
    uint64_t since;
    uint64_t folder, unnamed;   /* numbers of the two file systems; 0: not known, or not there */
    uint64_t read, read_before; /* entries of the ring, at the last look and the one before it */
    uint32_t look;
    bool complete; /* nothing was hidden from this look */
    size_t len;
    file *table; /* sorted by key; grows as files come */
    size_t room;
    uint64_t *paths; /* hashes of those that this look has read in the ring, sorted */
    size_t paths_len, paths_room;
};

/* --- files that the program reports ---------------------------------------------------------- */

typedef struct ring {
    _Atomic(uint64_t) count;
    _Atomic(uint64_t) notes[RING]; /* an inode, or A_PATH and a hash; 0: its writer is not done */
} ring;

static ring *_Atomic ring_of_job;
static _Atomic(uint64_t) file_of_ring; /* its inode: what memtools maps is nobody's shared memory */
static atomic_bool saw_strays;

static int
open_unnamed(void)
{
    return (int)syscall(SYS_memfd_create, "memtools", 1u /* MFD_CLOEXEC */);
}

bool
mt_shm_share_notes(void)
{
    ring *none = NULL, *made = MAP_FAILED;
    struct stat is;
    int fd;

    if (atomic_load(&ring_of_job) != NULL) return true;
    if ((fd = open_unnamed()) < 0) return false;
    if (ftruncate(fd, sizeof *made) == 0 && fstat(fd, &is) == 0)
        made = mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (made == MAP_FAILED) return false;
    if (atomic_compare_exchange_strong(&ring_of_job, &none, made))
        atomic_store(&file_of_ring, is.st_ino);
    else
        munmap(made, sizeof *made);
    return true;
}

void
mt_shm_note(const char *name)
{
    ring *r = atomic_load(&ring_of_job);
    char path[MT_PATH_ROOM];
    mt_file is;

    if (r == NULL || strlen(name) >= NAME || !mt_path_join(path, "/dev/shm/", name)) return;
    if (!mt_proc_sys_libc.stat(path, &is) || is.bytes > 0) return;
    atomic_store(&r->notes[atomic_fetch_add(&r->count, 1) % RING], is.inode);
}

/* Of what comes after FOLDER. */
static uint64_t
shm_hash_of(const char *name)
{
    uint64_t h = UINT64_C(0xCBF29CE484222325);

    for (; *name != 0; name++)
        h = (h ^ (unsigned char)*name) * UINT64_C(0x100000001B3);
    return h | A_PATH;
}

void
mt_shm_note_path(const char *path)
{
    ring *r = atomic_load(&ring_of_job);
    size_t len = strlen(FOLDER);

    if (r == NULL || strncmp(path, FOLDER, len) != 0) return;
    atomic_store(&r->notes[atomic_fetch_add(&r->count, 1) % RING], shm_hash_of(path + len));
}

bool
mt_shm_saw_strays(void)
{
    return atomic_load(&saw_strays);
}

/* --- life ------------------------------------------------------------------------------------- */

mt_status
mt_shm_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root, mt_shm **out,
           mt_error *err)
{
    mt_shm *s = mem->get(mem->ctx, sizeof *s);

    if (s == NULL) return mt_fail(err, MT_ENOMEM, "malloc", 0);
    *s = (mt_shm){.mem = *mem, .sys = sys, .root = root};
    *out = s;
    return MT_OK;
}

void
mt_shm_free(mt_shm *s)
{
    mt_alloc mem;

    if (s == NULL) return;
    mem = s->mem;
    if (s->table != NULL) mem.put(mem.ctx, s->table, s->room * sizeof *s->table);
    if (s->paths != NULL) mem.put(mem.ctx, s->paths, s->paths_room * sizeof *s->paths);
    mem.put(mem.ctx, s, sizeof *s);
}

/* What was noted so far was noted for the parent. */
void
mt_shm_clear(mt_shm *s)
{
    ring *r = atomic_load(&ring_of_job);

    s->len = s->paths_len = 0;
    s->read = s->read_before = r == NULL ? 0 : atomic_load(&r->count);
}

/* --- the table -------------------------------------------------------------------------------- */

/* Where a key is, or belongs, among entries of `size` bytes that are sorted by the key that each
 * begins with. */
static size_t
shm_place_of(const void *entries, size_t len, size_t size, uint64_t key)
{
    size_t low = 0, high = len;

    while (low < high) {
        size_t mid = (low + high) / 2;
        uint64_t there;
        memcpy(&there, (const char *)entries + mid * size, sizeof there);
        if (there < key)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static size_t
place_of_file(const mt_shm *s, uint64_t key)
{
    return shm_place_of(s->table, s->len, sizeof *s->table, key);
}

/* The file's entry, made where there is none; NULL where the table is full. */
static file *
entry_of(mt_shm *s, uint64_t key)
{
    size_t i = place_of_file(s, key);
    file *table = NULL;

    if (i < s->len && s->table[i].key == key) return &s->table[i];
    if (s->len < MT_SHM_MOST)
        table = mt_alloc_grown(&s->mem, s->table, &s->room, s->len + 1, sizeof *table);
    if (table == NULL) { /* too many, or no memory for more */
        s->complete = false;
        return NULL;
    }
    s->table = table;
    memmove(s->table + i + 1, s->table + i, (s->len - i) * sizeof *s->table);
    s->len++;
    s->table[i] = (file){.key = key};
    return &s->table[i];
}

/* The entry of a file that is held, which may be for the first time in this look. */
static file *
hold(mt_shm *s, uint64_t key)
{
    file *f = entry_of(s, key);

    if (f == NULL || f->held == s->look) return f;
    f->held = s->look;
    f->mapped = f->end = 0;
    return f;
}

static void
shm_count(mt_shm *s, file *f, uint64_t bytes, bool exact)
{
    if (f->counted != s->look) f->bytes = 0;
    f->bytes = exact ? bytes : f->bytes + bytes;
    f->counted = s->look;
    if (exact) f->exact = s->look;
}

/* Notes that the file is not the job's. */
static void
exclude(mt_shm *s, file *f, uint64_t bytes)
{
    f->bytes = bytes;
    f->exact = s->look;
}

static size_t
place_of_path(const mt_shm *s, uint64_t hash)
{
    return shm_place_of(s->paths, s->paths_len, sizeof *s->paths, hash);
}

/* Without memory the path is not known. */
static void
keep_path(mt_shm *s, uint64_t hash)
{
    size_t i = place_of_path(s, hash);
    uint64_t *paths;

    if (i < s->paths_len && s->paths[i] == hash) return;
    paths = mt_alloc_grown(&s->mem, s->paths, &s->paths_room, s->paths_len + 1, sizeof *paths);
    if (paths == NULL) return;
    s->paths = paths;
    memmove(paths + i + 1, paths + i, (s->paths_len - i) * sizeof *paths);
    paths[i] = hash;
    s->paths_len++;
}

static void
read_notes(mt_shm *s)
{
    ring *r = s->root[0] == 0 ? atomic_load(&ring_of_job) : NULL;
    uint64_t count = r == NULL ? 0 : atomic_load(&r->count), note;
    uint64_t at = mt_u64_max(s->read_before, count > RING ? count - RING : 0);

    s->paths_len = 0;
    s->read_before = s->read;
    s->read = count;
    for (; at < count; at++) {
        note = atomic_load(&r->notes[at % RING]);
        if (note & A_PATH) {
            keep_path(s, note);
            continue;
        }
        file *f = note == 0 ? NULL : entry_of(s, note);
        if (f != NULL) f->made = true;
    }
}

/* --- what a process holds --------------------------------------------------------------------- */

static void
shm_see(mt_shm *s, const mt_file *is)
{
    bool unnamed = s->unnamed != 0 && is->device == s->unnamed;
    file *f;

    if (!is->regular || (!unnamed && is->device != s->folder)) return;
    f = hold(s, is->inode | (unnamed ? UNNAMED : 0));
    if (f == NULL || (!unnamed && is->links > 0)) return; /* its name decides */
    if (unnamed || is->born_ns >= s->since)
        shm_count(s, f, is->bytes, true);
    else
        exclude(s, f, is->bytes);
}

/* Puts a name behind the first `len` characters, which are a folder. False where it is too long. */
static bool
name_in(char path[MT_PATH_ROOM], size_t len, const char *name)
{
    size_t own = strlen(name) + 1;

    if (len + 1 + own > MT_PATH_ROOM) return false;
    path[len] = '/';
    memcpy(path + len + 1, name, own);
    return true;
}

/* False where the folder may not be read. */
static bool
look_at_files(mt_shm *s, const char *pid, bool self)
{
    char path[MT_PATH_ROOM];
    const char *number;
    mt_folder dir;
    mt_file is;
    size_t len;
    bool ok = true;

    if (!mt_proc_path(path, s->root, pid, "fd")) return false;
    if (!s->sys->opendir(path, &dir)) return !self && mt_proc_has_gone();
    len = strlen(path);
    while ((number = s->sys->readdir(&dir)) != NULL) {
        if (*number == '.') continue;
        if (!name_in(path, len, number)) continue;
        if (s->sys->stat(path, &is))
            shm_see(s, &is);
        else
            ok = ok && mt_proc_has_gone();
    }
    ok = ok && (errno == 0 || (!self && mt_proc_has_gone()));
    s->sys->closedir(&dir);
    return ok;
}

/* How many bytes of a mapping of this process its file has in memory, no matter which process put
 * them there. */
static uint64_t
resident_here(mt_shm *s, const mt_mapping *m)
{
    unsigned char pages[TEXT_ROOM];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), most = sizeof pages * page, found = 0;

    for (uint64_t at = m->start; at < m->end; at += most) {
        uint64_t bytes = mt_u64_min(most, m->end - at);
        if (s->sys->mincore((uintptr_t)at, (size_t)bytes, pages) != 0) break; /* unmapped */
        for (uint64_t i = 0; i < bytes / page; i++)
            found += (pages[i] & 1) * page;
    }
    return found;
}

/* How many bytes of a mapping of another process that process has used. */
static uint64_t
resident_there(mt_shm *s, const char *pid, const mt_mapping *m)
{
    const uint64_t used = (uint64_t)3 << 62; /* in memory, or swapped out */
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), words[WORDS], found = 0;
    char path[MT_PATH_ROOM];
    uint64_t at = m->start;
    ssize_t n = 1;
    int fd;
    mt_descriptor brief;

    if (!mt_proc_path(path, s->root, pid, "pagemap")) return 0;
    if ((fd = s->sys->open(path, O_RDONLY | O_CLOEXEC)) < 0) {
        s->complete = s->complete && mt_proc_has_gone();
        return 0;
    }
    brief = mt_descriptor_keep(fd);
    while (at < m->end && n > 0) {
        size_t most = (size_t)mt_u64_min(WORDS, (m->end - at) / page) * sizeof *words;
        n = s->sys->pread(fd, words, most, (off_t)(at / page * sizeof *words));
        for (ssize_t i = 0; i < n / (ssize_t)sizeof *words; i++)
            found += (words[i] & used) != 0 ? page : 0;
        at += n > 0 ? (uint64_t)n / sizeof *words * page : 0;
        if (n > 0 && n < (ssize_t)sizeof *words) break;
    }
    mt_proc_close(s->sys, &brief);
    return found;
}

/* A file without a name that is open somewhere was counted as a whole. Of one that is not, a part
 * that is mapped twice counts once. */
static void
see_mapping(mt_shm *s, const char *pid, bool self, mt_mapping m)
{
    bool unnamed = s->unnamed != 0 && m.device == s->unnamed;
    uint64_t bytes = m.end - m.start;
    file *f;

    if (m.inode == 0 || (!unnamed && (s->folder == 0 || m.device != s->folder))) return;
    if (unnamed && m.inode == atomic_load(&file_of_ring)) return;
    if ((f = hold(s, m.inode | (unnamed ? UNNAMED : 0))) == NULL) return;
    if (self) f->mapped += bytes;
    if ((!unnamed && !m.deleted) || f->exact == s->look) return;
    if (m.offset < f->end) {
        uint64_t again = mt_u64_min(f->end - m.offset, bytes);
        m.start += again;
        m.offset += again;
    }
    f->end = mt_u64_max(f->end, m.offset + (m.end - m.start));
    shm_count(s, f, self ? resident_here(s, &m) : resident_there(s, pid, &m), false);
}

/* Reads the lines of a list that may change meanwhile. False where it cannot be read. */
static bool
look_at_mappings(mt_shm *s, const char *pid, bool self)
{
    char path[MT_PATH_ROOM], buf[TEXT_ROOM];
    int fd;
    mt_descriptor brief;
    off_t at = 0;
    ssize_t n;
    bool ok;

    if (!mt_proc_path(path, s->root, pid, "maps")) return false;
    if ((fd = s->sys->open(path, O_RDONLY | O_CLOEXEC)) < 0) return !self && mt_proc_has_gone();
    brief = mt_descriptor_keep(fd);
    while ((n = s->sys->pread(fd, buf, sizeof buf, at)) > 0) {
        mt_text text = {buf, (size_t)n}, line;
        mt_mapping m;
        while (text.len > 0 && text.at[text.len - 1] != '\n') /* cut: it comes with the next part */
            text.len--;
        if (text.len == 0)
            text.len = (size_t)n; /* a line longer than the buffer does not map shared memory */
        at += (off_t)text.len;
        while (mt_text_line(&text, &line)) {
            if (mt_mapping_parse(line, &m)) see_mapping(s, pid, self, m);
        }
    }
    ok = n == 0 || (!self && mt_proc_has_gone());
    mt_proc_close(s->sys, &brief);
    return ok;
}

/* What this process has mapped of the ring, all of whose notes it has read by now: for its sake
 * alone the list of mappings is not read, which takes longer than all the rest of a look. */
static uint64_t
ring_here(mt_shm *s)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), bytes = sizeof(ring) + page - 1;
    ring *r = s->root[0] == 0 ? atomic_load(&ring_of_job) : NULL;
    mt_mapping m = {.start = (uintptr_t)r, .end = (uintptr_t)r + bytes - bytes % page};

    return r == NULL ? 0 : resident_here(s, &m);
}

/* Returns what the process's resident set has of shared memory; MT_UNKNOWN where that is not
 * known. */
static uint64_t
look_at_process(mt_shm *s, const char *pid, bool self)
{
    char path[MT_PATH_ROOM], buf[TEXT_ROOM];
    uint64_t shared;
    mt_file is;
    ssize_t n;

    if (!mt_proc_path(path, s->root, pid, "status")) return MT_UNKNOWN;
    n = mt_proc_slurp(s->sys, path, buf, sizeof buf);
    if (n < 0) {
        s->complete = s->complete && !self && mt_proc_has_gone();
        return MT_UNKNOWN;
    }
    shared = mt_text_kib((mt_text){buf, (size_t)n}, "RssShmem:");
    if (!look_at_files(s, pid, self)) {
        /* Another user's process: what it has open and does not map is its own. */
        s->complete = s->complete && shared == 0 && mt_proc_path(path, s->root, pid, "") &&
                      s->sys->stat(path, &is) && is.user != geteuid();
        return shared;
    }
    if (shared > (self ? ring_here(s) : 0) && !look_at_mappings(s, pid, self)) s->complete = false;
    return shared;
}

/* --- names ------------------------------------------------------------------------------------ */

typedef enum owner { NO_PROCESS, THE_JOB, OTHERS } owner;

/* By the pid in the names that torch and multiprocessing give. NO_PROCESS if it has ended, or the
 * name has no pid. */
static owner
owner_of(const mt_shm *s, const char *name)
{
    static const char *const starts[] = {"torch_", "pym-"};
    char path[MT_PATH_ROOM], process[32];
    mt_text rest = {name, strlen(name)};
    uint64_t pid;
    mt_file is;

    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        size_t len = strlen(starts[i]);
        mt_text number = {rest.at + len, rest.len - len};
        if (!mt_text_starts(rest, starts[i]) || !mt_text_number(&number, &pid)) continue;
        if (pid == (uint64_t)getpid()) return THE_JOB;
        for (size_t c = 0; c < mt_children_len(s->children); c++)
            if (mt_children_pid(s->children, c) == pid) return THE_JOB;
        snprintf(process, sizeof process, "%" PRIu64, pid);
        return mt_proc_path(path, s->root, process, "") && s->sys->stat(path, &is) ? OTHERS
                                                                                   : NO_PROCESS;
    }
    return NO_PROCESS;
}

/* A file of /dev/shm, by its path there: counts it where it is the job's. */
static void
see_name(mt_shm *s, const char *name, const mt_file *is)
{
    size_t at = place_of_file(s, is->inode), at_path;
    file *f = at < s->len && s->table[at].key == is->inode ? &s->table[at] : NULL;
    bool held = f != NULL && f->held == s->look, ours = f != NULL && f->made;
    owner by_name = owner_of(s, name);
    uint64_t hash = shm_hash_of(name);

    if (is->born_ns >= s->since) {
        bool users = is->user == geteuid(), was_noted;
        at_path = place_of_path(s, hash);
        was_noted = at_path < s->paths_len && s->paths[at_path] == hash;
        ours = ours || (users && (by_name == THE_JOB || was_noted));
        if (users && !ours && by_name == NO_PROCESS && s->root[0] == 0)
            atomic_store(&saw_strays, true);
        if (ours && f == NULL) f = entry_of(s, is->inode);
        if (f != NULL) f->made = ours;
        ours = ours || (held && by_name != OTHERS);
    } else {
        ours = false;
    }
    if (f == NULL) return;
    if (ours)
        shm_count(s, f, is->bytes, true);
    else
        exclude(s, f, is->bytes);
}

/* `path` is a folder, of so many characters, and has room for names in it; `above`: of these, how
 * many lead to /dev/shm. False where a part of the folder could not be seen. */
static bool
look_at_names(mt_shm *s, char path[MT_PATH_ROOM], size_t above, int deep)
{
    size_t len = strlen(path);
    const char *name;
    mt_folder dir;
    mt_file is;
    bool ok = true;

    if (!s->sys->opendir(path, &dir)) return errno == ENOENT;
    while ((name = s->sys->readdir(&dir)) != NULL) {
        if (*name == '.' || !name_in(path, len, name)) continue;
        if (!s->sys->stat(path, &is))
            ok = ok && mt_proc_has_gone();
        else if (is.regular && is.device == s->folder)
            see_name(s, path + above + 1, &is);
        else if (deep < DEEPEST && is.folder && is.device == s->folder && is.user == geteuid() &&
                 is.born_ns >= s->since) /* it may have files of the job */
            ok = look_at_names(s, path, above, deep + 1) && ok;
    }
    ok = ok && errno == 0;
    s->sys->closedir(&dir);
    path[len] = 0;
    return ok;
}

/* --- a look ----------------------------------------------------------------------------------- */

/* The number of the file system that files without a name are of. */
static uint64_t
find_unnamed(void)
{
    struct stat is;
    uint64_t found = 0;
    int fd = open_unnamed();

    if (fd < 0) return 0;
    if (fstat(fd, &is) == 0) found = is.st_dev;
    close(fd);
    return found;
}

void
mt_shm_look(mt_shm *s, const mt_children *children, uint64_t since_ns, mt_shm_bytes *out)
{
    char folder[MT_PATH_ROOM], pid[32];
    uint64_t mapped, sum = 0, foreign = 0;
    size_t known = 0;
    mt_file is;

    *out = (mt_shm_bytes){MT_UNKNOWN, MT_UNKNOWN};
    s->children = children;
    s->since = since_ns;
    s->look++;
    s->folder = 0;
    s->complete = mt_path_join(folder, s->root, "/dev/shm");
    if (s->complete && s->sys->stat(folder, &is))
        s->folder = is.device;
    else
        s->complete = s->complete && errno == ENOENT; /* then there are no names */
    if (s->unnamed == 0) s->unnamed = find_unnamed();
    read_notes(s);
    mapped = look_at_process(s, "self", true);
    for (size_t i = 0; i < mt_children_len(children); i++) {
        snprintf(pid, sizeof pid, "%" PRIu64, mt_children_pid(children, i));
        look_at_process(s, pid, false);
    }
    if (s->folder != 0 && !look_at_names(s, folder, strlen(folder), 0)) s->complete = false;
    for (size_t i = 0; i < s->len; i++) {
        const file *f = &s->table[i];
        if (f->counted == s->look)
            sum += f->bytes;
        else if (f->held == s->look)
            foreign += mt_u64_min(f->mapped, f->bytes);
    }
    if (!s->complete || mapped == MT_UNKNOWN || !mt_children_known(children)) return;
    for (size_t i = 0; i < s->len; i++) /* the others are held by no process and have no name */
        if (s->table[i].counted == s->look) s->table[known++] = s->table[i];
    s->len = known;
    out->all = sum;
    out->mapped = mapped > foreign ? mapped - foreign : 0;
}
