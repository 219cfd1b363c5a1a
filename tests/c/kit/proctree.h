/* proctree.h -- a folder of made-up /proc and /sys files, and system calls of which the n-th fails.
 */
#ifndef MT_TESTS_KIT_PROCTREE_H
#define MT_TESTS_KIT_PROCTREE_H

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kit/check.h"
#include "kit/faulty.h"
#include "os/monitor/procfile.h"

typedef struct proctree {
    char root[64];
} proctree;

static inline void
tree_begin(proctree *t)
{
    strcpy(t->root, "/tmp/mt_tree_XXXXXX");
    CHECK(mkdtemp(t->root) != NULL);
}

static inline void
tree_end(proctree *t)
{
    char command[128];

    snprintf(command, sizeof command, "rm -rf %s", t->root);
    CHECK(system(command) == 0);
}

/* Writes a file, making its folders; text NULL removes it. */
static inline void
plant(const proctree *t, const char *path, const char *text)
{
    char full[512];
    FILE *file;

    snprintf(full, sizeof full, "%s/%s", t->root, path);
    if (text == NULL) {
        unlink(full);
        return;
    }
    for (char *at = full + strlen(t->root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = 0;
        CHECK(mkdir(full, 0755) == 0 || errno == EEXIST);
        *at = '/';
    }
    CHECK((file = fopen(full, "w")) != NULL);
    CHECK(fwrite(text, 1, strlen(text), file) == strlen(text) && fclose(file) == 0);
}

/* --- faults ---------------------------------------------------------------------------------- */

static faulty proc_faults = {.fail_at = -1};
static int proc_errno = EMFILE;

static inline int
proc_fails(void)
{
    if (!faulty_fails(&proc_faults)) return 0;
    errno = proc_errno;
    return 1;
}

static inline int
proc_open(const char *path, int flags)
{
    int fd = proc_fails() ? -1 : mt_proc_sys_libc.open(path, flags);

    proc_faults.live += fd >= 0;
    return fd;
}

FAULTY_CALL(ssize_t, proc_pread, (int fd, void *to, size_t bytes, off_t at), proc_fails, -1,
            mt_proc_sys_libc.pread(fd, to, bytes, at))
FAULTY_CALL(ssize_t, proc_pwrite, (int fd, const void *from, size_t bytes, off_t at), proc_fails,
            -1, mt_proc_sys_libc.pwrite(fd, from, bytes, at))

static inline int
proc_close(int fd)
{
    proc_faults.live--;
    return mt_proc_sys_libc.close(fd);
}

FAULTY_CALL(int, proc_getrusage, (int who, struct rusage *out), proc_fails, -1,
            mt_proc_sys_libc.getrusage(who, out))

static inline bool
proc_opendir(const char *path, mt_folder *out)
{
    bool ok = !proc_fails() && mt_proc_sys_libc.opendir(path, out);

    proc_faults.live += ok;
    return ok;
}

static inline const char *
proc_readdir(mt_folder *dir)
{
    return proc_fails() ? NULL : mt_proc_sys_libc.readdir(dir);
}

static inline void
proc_closedir(mt_folder *dir)
{
    proc_faults.live--;
    mt_proc_sys_libc.closedir(dir);
}

FAULTY_CALL(bool, proc_stat, (const char *path, mt_file *out), proc_fails, false,
            mt_proc_sys_libc.stat(path, out))
FAULTY_CALL(int, proc_mincore, (uintptr_t address, size_t bytes, unsigned char *pages), proc_fails,
            -1, mt_proc_sys_libc.mincore(address, bytes, pages))

static const mt_proc_sys faulty_proc = {.open = proc_open,
                                        .pread = proc_pread,
                                        .pwrite = proc_pwrite,
                                        .close = proc_close,
                                        .getrusage = proc_getrusage,
                                        .opendir = proc_opendir,
                                        .readdir = proc_readdir,
                                        .closedir = proc_closedir,
                                        .stat = proc_stat,
                                        .mincore = proc_mincore};

#endif
