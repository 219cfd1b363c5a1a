#define _GNU_SOURCE /* MADV_DONTFORK */
#include "os/record/file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "os/record/busguard.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

enum { TRIES = 16, KEPT_MOST = 9999, ONLY_THE_USER = 0600 };

/* --- the system's calls --- */

static int
libc_open(const char *path, int flags, mode_t mode)
{
    return open(path, flags, mode);
}

static int
libc_getrlimit(struct rlimit *out)
{
    return getrlimit(RLIMIT_FSIZE, out);
}

static void *
libc_mmap(size_t bytes, int fd)
{
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
}

const mt_recordfile_sys mt_recordfile_sys_libc = {.open = libc_open,
                                                  .fstat = fstat,
                                                  .pread = pread,
                                                  .getrlimit = libc_getrlimit,
                                                  .fchmod = fchmod,
                                                  .fallocate = posix_fallocate,
                                                  .flock = flock,
                                                  .mmap = libc_mmap,
                                                  .madvise = madvise,
                                                  .munmap = munmap,
                                                  .rename = rename,
                                                  .link = link,
                                                  .unlink = unlink,
                                                  .close = close};

static mt_status
refuse(mt_error *err, const char *call, int native, const char *detail)
{
    mt_fail(err, MT_EFILE, call, native);
    if (err != NULL) err->detail = detail;
    return MT_EFILE;
}

/* --- making one --- */

/* A file under a name of its own in the same folder, to `name` of PATH_MAX bytes. What an earlier
 * process of this number left behind is passed over. */
static mt_status
make_new(const mt_recordfile_sys *sys, const char *path, char *name, int *fd, mt_error *err)
{
    const char *slash = strrchr(path, '/'), *base = slash == NULL ? path : slash + 1;
    int folder = (int)(base - path);

    *fd = -1;
    for (int n = 0; *fd < 0 && n < TRIES; n++) {
        int len =
            snprintf(name, PATH_MAX, "%.*s.%s.%ld.%d.new", folder, path, base, (long)getpid(), n);
        if (len < 0 || len >= PATH_MAX) return refuse(err, "open", ENAMETOOLONG, NULL);
        *fd = sys->open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, ONLY_THE_USER);
        if (*fd < 0 && errno != EEXIST) return refuse(err, "open", errno, NULL);
    }
    /* A umask may have taken the user's own bits. Some file systems have none to set. */
    if (*fd >= 0) (void)sys->fchmod(*fd, ONLY_THE_USER);
    return *fd >= 0 ? MT_OK : refuse(err, "open", EEXIST, NULL);
}

/* Beyond the limit the system would send SIGXFSZ, which ends a program that does not ignore it. */
static mt_status
take_space(const mt_recordfile_sys *sys, int fd, size_t bytes, mt_error *err)
{
    struct rlimit limit;
    int fault;

    if (sys->getrlimit(&limit) != 0) return refuse(err, "getrlimit", errno, NULL);
    if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes)
        return refuse(err, "posix_fallocate", EFBIG, NULL);
    do
        fault = sys->fallocate(fd, 0, (off_t)bytes);
    while (fault == EINTR);
    return fault == 0 ? MT_OK : refuse(err, "posix_fallocate", fault, NULL);
}

/* Without MADV_DONTFORK a child would hold the lock, and could write. MADV_POPULATE_WRITE brings the
 * pages before the first store; old kernels lack it. */
static mt_status
map(const mt_recordfile_sys *sys, int fd, size_t bytes, void **at, mt_error *err)
{
    *at = sys->mmap(bytes, fd);
    if (*at == MAP_FAILED) {
        *at = NULL;
        return errno == ENOMEM ? mt_fail(err, MT_ENOMEM, "mmap", errno)
                               : refuse(err, "mmap", errno, NULL);
    }
    if (sys->madvise(*at, bytes, MADV_DONTFORK) != 0)
        return mt_fail(err, MT_ENOMEM, "madvise(MADV_DONTFORK)", errno);
    (void)sys->madvise(*at, bytes, MADV_POPULATE_WRITE);
    (void)mt_busguard_add(*at, bytes); /* what has none is as it would be without */
    return MT_OK;
}

/* --- its name --- */

static bool
is_record(const mt_recordfile_sys *sys, int fd)
{
    char magic[8];

    return sys->pread(fd, magic, sizeof magic, 0) == (ssize_t)sizeof magic &&
           memcmp(magic, MT_RECORD_MAGIC, sizeof magic) == 0;
}

/* True when `path` still means the open file. */
static bool
file_is_same(const mt_recordfile_sys *sys, const char *path, const struct stat *open_one)
{
    struct stat now;
    int fd = sys->open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    bool same;

    if (fd < 0) return false;
    same = sys->fstat(fd, &now) == 0 && now.st_dev == open_one->st_dev &&
           now.st_ino == open_one->st_ino;
    sys->close(fd);
    return same;
}

/* "folder/run.mem" and "3" are "folder/run.3.mem". False: it is too long. */
static bool
kept_name(const char *path, const char *word, char *kept)
{
    const char *slash = strrchr(path, '/'), *base = slash == NULL ? path : slash + 1;
    const char *dot = strrchr(base, '.');
    int stem = (int)(dot == NULL || dot == base ? strlen(path) : (size_t)(dot - path));
    int len = snprintf(kept, PATH_MAX, "%.*s.%s%s", stem, path, word, path + stem);

    return len > 0 && len < PATH_MAX;
}

/* Gives the old record a second name. Where the file system has only one name for a file, an empty
 * file takes the name first, which then is replaced: what is there is never lost. */
static mt_status
take_kept_name(const mt_recordfile_sys *sys, const char *path, const char *kept, mt_error *err)
{
    int fd;

    if (sys->link(path, kept) == 0) return MT_OK;
    if (errno == EEXIST) return MT_EAGAIN;
    if (errno != EPERM && errno != EOPNOTSUPP && errno != EMLINK)
        return refuse(err, "link", errno, NULL);
    fd = sys->open(kept, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, ONLY_THE_USER);
    if (fd < 0) return errno == EEXIST ? MT_EAGAIN : refuse(err, "open", errno, NULL);
    sys->close(fd);
    if (sys->rename(path, kept) == 0) return MT_OK;
    refuse(err, "rename", errno, NULL);
    sys->unlink(kept);
    return MT_EFILE;
}

/* A record that was not closed: under the next number that is free. */
static mt_status
keep_unclosed(const mt_recordfile_sys *sys, const char *path, char *kept, mt_error *err)
{
    mt_status st = MT_EAGAIN;
    char word[12];

    for (int n = 1; st == MT_EAGAIN && n <= KEPT_MOST; n++) {
        snprintf(word, sizeof word, "%d", n);
        if (!kept_name(path, word, kept)) return refuse(err, "link", ENAMETOOLONG, NULL);
        st = take_kept_name(sys, path, kept, err);
    }
    if (st == MT_EAGAIN)
        st = refuse(err, "link", EEXIST, "9,999 records of killed runs are kept there already");
    return st;
}

/* A record that was closed: in place of the one that was kept so before. */
static mt_status
keep_closed(const mt_recordfile_sys *sys, const char *path, char *kept, mt_error *err)
{
    bool is_old_record;
    int fd;

    if (!kept_name(path, "previous", kept)) return refuse(err, "link", ENAMETOOLONG, NULL);
    fd = sys->open(kept, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0 && errno != ENOENT) return refuse(err, "open", errno, NULL);
    if (fd >= 0) {
        is_old_record =
            is_record(sys, fd) && (sys->flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK);
        sys->close(fd);
        if (!is_old_record)
            return refuse(err, "open", EEXIST,
                          "the record there cannot be kept as run.previous.mem, a name that is "
                          "taken; choose another name");
        if (sys->unlink(kept) != 0) return refuse(err, "unlink", errno, NULL);
    }
    return take_kept_name(sys, path, kept, err);
}

/* Of two names of one file rename() keeps both, and unlink() takes the second; of one name, the
 * first call gives it back and the second finds nothing. Where the old record may have no other
 * name, it keeps that one; false then. */
static bool
take_back(const mt_recordfile_sys *sys, const struct stat *old, const char *path, const char *kept)
{
    if (sys->rename(kept, path) != 0 && !file_is_same(sys, path, old)) return false;
    (void)sys->unlink(kept);
    return true;
}

static mt_status
move_over(const mt_recordfile_sys *sys, int old, const struct stat *old_one, const char *name,
          const char *path, char *kept, mt_error *err)
{
    uint64_t closed = 0; /* a file that is too short for the mark was cut off */
    mt_status st;

    if (sys->pread(old, &closed, sizeof closed, (off_t)8 * MT_RECORD_AT_CLOSED) < 0)
        return refuse(err, "pread", errno, NULL);
    st = closed == 0 ? keep_unclosed(sys, path, kept, err) : keep_closed(sys, path, kept, err);
    if (st == MT_OK && sys->rename(name, path) == 0) return MT_OK;
    if (st == MT_OK) {
        st = refuse(err, "rename", errno, NULL);
        if (!take_back(sys, old_one, path, kept) && err != NULL)
            err->detail = "the record that was there is kept under another name";
    }
    kept[0] = 0;
    return st;
}

/* Moves the new file over an old record, whose lock is held meanwhile: of two processes that want
 * the name, one sees the other's new file, which is locked as well. MT_EAGAIN: look again. */
static mt_status
replace(const mt_recordfile_sys *sys, int old, const char *name, const char *path, char *kept,
        mt_error *err)
{
    struct stat st;

    if (sys->fstat(old, &st) != 0) return refuse(err, "fstat", errno, NULL);
    if (S_ISDIR(st.st_mode))
        return refuse(err, "open", EISDIR, "a directory is there; name a file in it");
    if (!S_ISREG(st.st_mode) || !is_record(sys, old))
        return refuse(err, "open", EEXIST, "the file there is not a record; choose another name");
    if (sys->flock(old, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        if (!file_is_same(sys, path, &st)) return MT_EAGAIN;
        return refuse(err, "flock", EBUSY,
                      "another process writes the record there; choose another name");
    }
    if (!file_is_same(sys, path, &st)) return MT_EAGAIN;
    return move_over(sys, old, &st, name, path, kept, err);
}

/* link() never replaces; file systems without it have rename() only. */
static mt_status
take_free_name(const mt_recordfile_sys *sys, const char *name, const char *path, mt_error *err)
{
    if (sys->link(name, path) == 0) {
        sys->unlink(name);
        return MT_OK;
    }
    if (errno == EEXIST) return MT_EAGAIN;
    if (errno != EPERM && errno != EOPNOTSUPP) return refuse(err, "link", errno, NULL);
    return sys->rename(name, path) == 0 ? MT_OK : refuse(err, "rename", errno, NULL);
}

static mt_status
take_name(const mt_recordfile_sys *sys, const char *name, const char *path, char *kept,
          mt_error *err)
{
    int nothing = 0; /* how often the name was taken, and yet there was no file behind it */

    for (int n = 0; n < TRIES; n++) {
        int old = sys->open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0);
        mt_status st;
        if (old < 0 && errno != ENOENT) return refuse(err, "open", errno, NULL);
        if (old < 0) {
            st = take_free_name(sys, name, path, err);
            nothing += st == MT_EAGAIN;
        } else {
            st = replace(sys, old, name, path, kept, err);
            sys->close(old);
        }
        if (st != MT_EAGAIN) return st;
    }
    if (nothing == TRIES)
        return refuse(err, "open", ENOENT, "a symbolic link there leads to nothing; remove it");
    return refuse(err, "rename", EBUSY, "other processes make a record there; choose another name");
}

/* --- all of it --- */

mt_status
mt_recordfile_create(const mt_recordfile_sys *sys, const char *path, size_t bytes,
                     void (*format)(void *region, const mt_birth *birth, void *ctx), void *ctx,
                     mt_recordfile *out, char *kept, mt_error *err)
{
    mt_recordfile f = {.sys = sys, .bytes = bytes};
    char name[PATH_MAX];
    mt_status st;
    int fd;

    kept[0] = 0;
    st = make_new(sys, path, name, &fd, err);
    if (st == MT_OK) {
        st = take_space(sys, fd, bytes, err);
        if (st == MT_OK) st = map(sys, fd, bytes, &f.at, err);
        if (st == MT_OK) {
            f.birth = mt_birth_now();
            format(f.at, &f.birth, ctx);
            /* Where the file system has no locks, a living writer cannot be recognised. */
            (void)sys->flock(fd, LOCK_EX | LOCK_NB);
            st = take_name(sys, name, path, kept, err);
        }
        if (st != MT_OK) sys->unlink(name);
        sys->close(fd);
    }
    if (st == MT_OK)
        *out = f;
    else
        mt_recordfile_unmap(&f);
    return st;
}

mt_status
mt_recordfile_check(const mt_recordfile *file, mt_error *err)
{
    if (!mt_busguard_hit(file->at)) return MT_OK;
    return refuse(err, "mmap", EIO,
                  "the file was cut off, or its disk is full or gone; what is recorded is lost");
}

void
mt_recordfile_unmap(mt_recordfile *f)
{
    /* A child's addresses may hold something else by now. */
    if (f->at != NULL && mt_birth_is_here(&f->birth)) {
        mt_busguard_remove(f->at);
        f->sys->munmap(f->at, f->bytes);
    }
    f->at = NULL;
}
