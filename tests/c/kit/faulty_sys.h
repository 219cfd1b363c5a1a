/* faulty_sys.h -- the Linux store's system calls, of which the n-th fails, with a count of what was
 * mapped and opened and not given back. mmap over a mapping fails the hard way: what was there is
 * gone. One at a time: the table has no context. */
#ifndef MT_TESTS_KIT_FAULTY_SYS_H
#define MT_TESTS_KIT_FAULTY_SYS_H

#include <errno.h>
#include <sys/mman.h>

#include "kit/check.h"
#include "kit/faulty.h"
#include "os/port/store.h"

static faulty sys_faults = {.fail_at = -1};
static int sys_errno = ENOMEM; /* of the call that fails */

static inline int
sys_fails(void)
{
    if (!faulty_fails(&sys_faults)) return 0;
    errno = sys_errno;
    return 1;
}

static inline int
sys_kept(int fd)
{
    sys_faults.live += fd >= 0;
    return fd;
}

FAULTY_CALL(int, sys_memfd_create, (const char *name, unsigned flags), sys_fails, -1,
            sys_kept(mt_linux_sys_libc.memfd_create(name, flags)))
FAULTY_CALL(int, sys_ftruncate, (int fd, off_t bytes), sys_fails, -1,
            mt_linux_sys_libc.ftruncate(fd, bytes))
FAULTY_CALL(int, sys_fallocate, (int fd, int mode, off_t offset, off_t bytes), sys_fails, -1,
            mt_linux_sys_libc.fallocate(fd, mode, offset, bytes))
FAULTY_CALL(int, sys_open, (const char *path, int flags), sys_fails, -1,
            sys_kept(mt_linux_sys_libc.open(path, flags)))
FAULTY_CALL(ssize_t, sys_read, (int fd, void *to, size_t bytes), sys_fails, -1,
            mt_linux_sys_libc.read(fd, to, bytes))
FAULTY_CALL(ssize_t, sys_pread, (int fd, void *to, size_t bytes, off_t offset), sys_fails, -1,
            mt_linux_sys_libc.pread(fd, to, bytes, offset))

static inline int
sys_close(int fd)
{
    sys_faults.live--;
    return mt_linux_sys_libc.close(fd);
}

static inline void *
sys_mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    void *got;

    if (sys_fails()) {
        if (at != NULL) CHECK(munmap(at, bytes) == 0);
        errno = sys_errno;
        return MAP_FAILED;
    }
    got = mt_linux_sys_libc.mmap(at, bytes, prot, flags, fd, offset);
    sys_faults.live += at == NULL && got != MAP_FAILED;
    return got;
}

static inline int
sys_munmap(void *at, size_t bytes)
{
    sys_faults.live--;
    return mt_linux_sys_libc.munmap(at, bytes);
}

FAULTY_CALL(int, sys_madvise, (void *at, size_t bytes, int advice), sys_fails, -1,
            mt_linux_sys_libc.madvise(at, bytes, advice))

static int sys_scanned; /* the last scan succeeded */

static inline int
sys_scan(int pagemap, void *arg)
{
    int n = sys_fails() ? -1 : mt_linux_sys_libc.scan(pagemap, arg);

    sys_scanned = n >= 0;
    return n;
}

static const mt_linux_sys faulty_sys = {.memfd_create = sys_memfd_create,
                                        .ftruncate = sys_ftruncate,
                                        .fallocate = sys_fallocate,
                                        .open = sys_open,
                                        .read = sys_read,
                                        .pread = sys_pread,
                                        .close = sys_close,
                                        .mmap = sys_mmap,
                                        .munmap = sys_munmap,
                                        .madvise = sys_madvise,
                                        .scan = sys_scan};

#endif
