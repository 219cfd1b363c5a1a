#define _GNU_SOURCE /* O_CLOEXEC, getrusage */
#include "procfile_linux.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static int
libc_open(const char *path, int flags)
{
    return open(path, flags);
}

static int
libc_getrusage(int who, struct rusage *out)
{
    return getrusage(who, out);
}

static void *
libc_opendir(const char *path)
{
    return opendir(path);
}

static const char *
libc_readdir(void *folder)
{
    const struct dirent *entry;

    errno = 0;
    entry = readdir(folder);
    return entry == NULL ? NULL : entry->d_name;
}

static void
libc_closedir(void *folder)
{
    closedir(folder);
}

const mt_proc_sys mt_proc_sys_libc = {.open = libc_open,
                                      .pread = pread,
                                      .pwrite = pwrite,
                                      .close = close,
                                      .getrusage = libc_getrusage,
                                      .opendir = libc_opendir,
                                      .readdir = libc_readdir,
                                      .closedir = libc_closedir};

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

void
mt_proc_close(const mt_proc_sys *sys, int *fd)
{
    int saved = errno;

    if (*fd >= 0) sys->close(*fd);
    *fd = -1;
    errno = saved;
}

ssize_t
mt_proc_read(const mt_proc_sys *sys, int *fd, const char *path, char *to, size_t room)
{
    ssize_t n;

    if (*fd < 0 && (*fd = sys->open(path, O_RDONLY | O_CLOEXEC)) < 0) return -1;
    do
        n = sys->pread(*fd, to, room, 0);
    while (n < 0 && errno == EINTR);
    if (n < 0) mt_proc_close(sys, fd);
    return n;
}

ssize_t
mt_proc_slurp(const mt_proc_sys *sys, const char *path, char *to, size_t room)
{
    int fd = -1;
    ssize_t n = mt_proc_read(sys, &fd, path, to, room);

    mt_proc_close(sys, &fd);
    return n;
}
