/* file.h -- the file behind a record: made, mapped and let go.
 *
 *   create   ".run.mem.<pid>.<n>.new" ──► all its blocks allocated ──► mapped ──► written by
 *            `format` ──► takes the name run.mem in one step
 *
 * All space is taken when the file is made, so that a full disk is an error here and never a SIGBUS
 * in the middle of a run. The name appears with a whole record behind it, or not at all. An older
 * record of that name is kept as run.previous.mem if it was closed, in place of the one that was
 * kept so before. One that was not is what a killed run left as evidence: it is kept as run.1.mem,
 * or the next number that is free. What is not a record is never touched, nor is a record that a
 * living process still writes, as its lock (flock) shows. Only the user can read and write the
 * file, whatever the umask is: it has the command line and the texts of errors in it. The lock
 * belongs to the mapping, of which forked children get nothing, so it ends with the process that
 * made it, however that ends.
 *
 * A process that truncates the file while it is mapped, and a disk that copies on write and is
 * full, take the pages away: see busguard.h. What is stored from then on is lost, which
 * mt_recordfile_check reports. */
#ifndef MT_OS_RECORD_FILE_H
#define MT_OS_RECORD_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "core/record/layout.h"
#include "core/base/status.h"
#include "os/base/forks.h"

/* The system calls, so that tests can make the n-th fail. */
typedef struct mt_recordfile_sys {
    int (*open)(const char *path, int flags, mode_t mode);
    int (*fstat)(int fd, struct stat *out);
    ssize_t (*pread)(int fd, void *to, size_t bytes, off_t at);
    int (*getrlimit)(struct rlimit *out); /* of RLIMIT_FSIZE */
    int (*fchmod)(int fd, mode_t mode);
    int (*fallocate)(int fd, off_t at, off_t bytes); /* posix_fallocate: returns the errno */
    int (*flock)(int fd, int how);
    void *(*mmap)(size_t bytes, int fd);
    int (*madvise)(void *at, size_t bytes, int advice);
    int (*munmap)(void *at, size_t bytes);
    int (*rename)(const char *from, const char *to);
    int (*link)(const char *from, const char *to);
    int (*unlink)(const char *path);
    int (*close)(int fd);
} mt_recordfile_sys;

extern const mt_recordfile_sys mt_recordfile_sys_libc;

typedef struct mt_recordfile {
    const mt_recordfile_sys *sys;
    void *at; /* the mapping; NULL: none */
    size_t bytes;
    mt_birth birth;
} mt_recordfile;

/* Makes a file of `bytes` at `path` and maps it; `format` writes all of it; its `birth`
 * is of this process. `kept`, of PATH_MAX bytes, gets the name under which an older record is kept;
 * "" if there was none. On failure the record that was there before is there, under its name or,
 * if it could not get that back, under another one, as `detail` says; *out is untouched. Only
 * run.previous.mem may be gone.
 * MT_EFILE: ENOSPC; EFBIG beyond ulimit -f (no SIGXFSZ is raised); EROFS, EACCES, ENOENT,
 *   EMFILE... of the call; with `detail` set: EEXIST, the file there is not a record, or its
 *   run.previous.mem is none or is being written; EISDIR, it is a directory; ENOENT, it is a
 *   symbolic link to nothing; EBUSY, another process writes the record there.
 * MT_ENOMEM when there is no memory for the mapping. */
mt_status mt_recordfile_create(const mt_recordfile_sys *sys, const char *path, size_t bytes,
                               void (*format)(void *region, const mt_birth *birth, void *ctx),
                               void *ctx, mt_recordfile *out, char *kept, mt_error *err);

/* MT_EFILE with EIO once a page of the file was gone when it was written. A look at memory. */
mt_status mt_recordfile_check(const mt_recordfile *file, mt_error *err);

/* Unmaps, in the process that made it; in a forked child, which has no mapping, it only forgets.
 * It may be called twice. */
void mt_recordfile_unmap(mt_recordfile *file);

#endif
