#define _GNU_SOURCE /* O_CLOEXEC, getrusage, syscall, statx, mincore */
#include "os/monitor/procfile.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static int
procfile_libc_open(const char *path, int flags)
{
    return open(path, flags);
}

static int
libc_getrusage(int who, struct rusage *out)
{
    return getrusage(who, out);
}

static bool
linux_opendir(const char *path, mt_folder *out)
{
    out->at = out->len = 0;
    out->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    out->kept = mt_descriptor_keep(out->fd);
    return out->fd >= 0;
}

/* What the system call writes: the C library has a type for it since 2.30 only. */
typedef struct entry {
    uint64_t inode, next;
    unsigned short bytes;
    unsigned char kind;
    char name[];
} entry;

static const char *
linux_readdir(mt_folder *folder)
{
    const entry *e;
    long n;

    errno = 0;
    if (folder->at == folder->len) {
        n = syscall(SYS_getdents64, folder->fd, folder->entries, sizeof folder->entries);
        folder->at = 0;
        folder->len = n > 0 ? (size_t)n : 0;
        if (n <= 0) return NULL;
    }
    e = (const void *)(folder->entries + folder->at);
    folder->at += e->bytes;
    return e->name;
}

static void
linux_closedir(mt_folder *folder)
{
    if (mt_descriptor_is_ours(&folder->kept)) close(folder->fd);
}

static uint64_t
in_ns(int64_t seconds, uint32_t ns)
{
    return seconds < 0 ? 0 : (uint64_t)seconds * 1000000000u + ns;
}

/* Only statx() has the time of birth; older headers have stat() alone. */
static bool
linux_stat(const char *path, mt_file *out)
{
    uint64_t modified, changed;
    struct stat is;

#ifdef STATX_BTIME
    struct statx x;

    if (statx(AT_FDCWD, path, 0, STATX_BASIC_STATS | STATX_BTIME, &x) == 0) {
        const struct statx_timestamp *born = x.stx_mask & STATX_BTIME ? &x.stx_btime
                                             : x.stx_mtime.tv_sec < x.stx_ctime.tv_sec
                                                 ? &x.stx_mtime
                                                 : &x.stx_ctime;
        *out = (mt_file){.device = makedev(x.stx_dev_major, x.stx_dev_minor),
                         .inode = x.stx_ino,
                         .links = x.stx_nlink,
                         .user = x.stx_uid,
                         .bytes = x.stx_blocks * 512,
                         .born_ns = in_ns(born->tv_sec, born->tv_nsec),
                         .regular = S_ISREG(x.stx_mode),
                         .folder = S_ISDIR(x.stx_mode)};
        return true;
    }
    if (errno != ENOSYS && errno != EPERM) return false;
#endif
    if (stat(path, &is) != 0) return false;
    modified = in_ns(is.st_mtim.tv_sec, (uint32_t)is.st_mtim.tv_nsec);
    changed = in_ns(is.st_ctim.tv_sec, (uint32_t)is.st_ctim.tv_nsec);
    *out = (mt_file){.device = is.st_dev,
                     .inode = is.st_ino,
                     .links = is.st_nlink,
                     .user = is.st_uid,
                     .bytes = (uint64_t)is.st_blocks * 512,
                     .born_ns = modified < changed ? modified : changed,
                     .regular = S_ISREG(is.st_mode),
                     .folder = S_ISDIR(is.st_mode)};
    return true;
}

static int
linux_mincore(uintptr_t address, size_t bytes, unsigned char *pages)
{
    return mincore((void *)address, bytes, pages);
}

const mt_proc_sys mt_proc_sys_libc = {.open = procfile_libc_open,
                                      .pread = pread,
                                      .pwrite = pwrite,
                                      .close = close,
                                      .getrusage = libc_getrusage,
                                      .opendir = linux_opendir,
                                      .readdir = linux_readdir,
                                      .closedir = linux_closedir,
                                      .stat = linux_stat,
                                      .mincore = linux_mincore};

bool
mt_path_join(char *out, const char *root, const char *path)
{
    size_t a = strlen(root), b = strlen(path);

    if (a + b + 1 > MT_PATH_ROOM) return false;
    memcpy(out, root, a);
    memcpy(out + a, path, b);
    out[a + b] = 0;
    return true;
}

bool
mt_proc_path(char *out, const char *root, const char *pid, const char *file)
{
    int len = snprintf(out, MT_PATH_ROOM, "%s/proc/%s/%s", root, pid, file);

    return len > 0 && len < MT_PATH_ROOM;
}

bool
mt_proc_has_gone(void)
{
    return errno == ENOENT || errno == ESRCH;
}

void
mt_proc_close(const mt_proc_sys *sys, mt_descriptor *kept)
{
    int saved = errno;

    if (mt_descriptor_is_ours(kept)) sys->close(kept->fd);
    *kept = MT_NO_DESCRIPTOR;
    errno = saved;
}

static ssize_t
read_start(const mt_proc_sys *sys, int fd, char *to, size_t room)
{
    ssize_t n;

    do
        n = sys->pread(fd, to, room, 0);
    while (n < 0 && errno == EINTR);
    return n;
}

ssize_t
mt_proc_read(const mt_proc_sys *sys, mt_descriptor *kept, const char *path, char *to, size_t room)
{
    ssize_t n;

    if (!mt_descriptor_is_ours(kept))
        *kept = mt_descriptor_keep(sys->open(path, O_RDONLY | O_CLOEXEC));
    if (kept->fd < 0) return -1;
    n = read_start(sys, kept->fd, to, room);
    if (n < 0) mt_proc_close(sys, kept);
    return n;
}

ssize_t
mt_proc_slurp(const mt_proc_sys *sys, const char *path, char *to, size_t room)
{
    mt_descriptor brief = mt_descriptor_keep(sys->open(path, O_RDONLY | O_CLOEXEC));
    ssize_t n;

    if (brief.fd < 0) return -1;
    n = read_start(sys, brief.fd, to, room);
    mt_proc_close(sys, &brief);
    return n;
}

bool
mt_proc_statm(const mt_proc_sys *sys, mt_descriptor *kept, const char *path, uint64_t *resident,
              uint64_t *shared)
{
    char buf[128];
    ssize_t n = mt_proc_read(sys, kept, path, buf, sizeof buf);

    return n >= 0 && mt_statm_parse((mt_text){buf, (size_t)n}, resident, shared);
}
