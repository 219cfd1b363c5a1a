/* The file behind a record: each system call failing in turn, disks that are full, names that are
 * taken, children. */
#define _GNU_SOURCE
#include "record/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit/faulty.h"
#include "os/record/file.h"

/* --- a folder of its own, and what is in it --- */

enum { CONTESTS = 60 };

static char folder[] = "/tmp/mt_recordfile_XXXXXX", path[64], previous[64];

static int
names_in_folder(void)
{
    char command[128];
    FILE *list;
    int n;

    snprintf(command, sizeof command, "ls -A %s | wc -l", folder);
    list = popen(command, "r");
    CHECK(list != NULL && fscanf(list, "%d", &n) == 1);
    pclose(list);
    return n;
}

static char kept[PATH_MAX]; /* of the last creation */

static const mt_record_size size = {.series = {RIG_COLUMNS, 5, 4}, .events = 3, .phases = 4};

static void
format(void *region, const mt_birth *birth, void *ctx)
{
    mt_record *r = ctx;

    rig_init(r, region, &size);
    r->birth = *birth;
}

static mt_status
create(const mt_recordfile_sys *sys, mt_record *r, mt_recordfile *file, mt_error *err)
{
    size_t bytes = mt_record_parts_of(&size).end;

    return mt_recordfile_create(sys, path, bytes, format, r, file, kept, err);
}

/* How many samples the record has, and whether a process writes it. */
static uint64_t
rows_at_path(bool *written)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t bytes = mt_record_parts_of(&size).end;
    void *copy = malloc(bytes);
    uint64_t rows;

    CHECK(fd >= 0 && pread(fd, copy, bytes, 0) == (ssize_t)bytes);
    *written = flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    CHECK(flock(fd, LOCK_UN) == 0 && close(fd) == 0);
    CHECK(memcmp(copy, MT_RECORD_MAGIC, 8) == 0);
    rows = view_samples(copy);
    free(copy);
    return rows;
}

static void
finish(mt_record *r, mt_recordfile *file)
{
    mt_record_close(r, 1);
    mt_recordfile_unmap(file);
    mt_recordfile_unmap(file); /* again: ignored */
    mt_record_fini(r);
}

/* --- system calls of which the n-th fails --- */

static faulty faults = {.fail_at = -1};
static int fault_errno = EIO;

static int
fails(void)
{
    if (!faulty_fails(&faults)) return 0;
    errno = fault_errno;
    return 1;
}

static int
sys_open(const char *name, int flags, mode_t mode)
{
    int fd = fails() ? -1 : open(name, flags, mode);

    faults.live += fd >= 0;
    return fd;
}

static int
sys_close(int fd)
{
    faults.live--;
    return close(fd);
}

FAULTY_CALL(int, sys_fstat, (int fd, struct stat *out), fails, -1, fstat(fd, out))
FAULTY_CALL(ssize_t, sys_pread, (int fd, void *to, size_t bytes, off_t at), fails, -1,
            pread(fd, to, bytes, at))
FAULTY_CALL(int, sys_getrlimit, (struct rlimit * out), fails, -1, getrlimit(RLIMIT_FSIZE, out))
FAULTY_CALL(int, sys_fchmod, (int fd, mode_t mode), fails, -1, fchmod(fd, mode))
FAULTY_CALL(int, sys_fallocate, (int fd, off_t at, off_t bytes), fails, fault_errno,
            posix_fallocate(fd, at, bytes))
FAULTY_CALL(int, sys_flock, (int fd, int how), fails, -1, flock(fd, how))

static void *
sys_mmap(size_t bytes, int fd)
{
    void *at = fails() ? MAP_FAILED : mt_recordfile_sys_libc.mmap(bytes, fd);

    faults.live += at != MAP_FAILED;
    return at;
}

FAULTY_CALL(int, sys_madvise, (void *at, size_t bytes, int advice), fails, -1,
            madvise(at, bytes, advice))

static int
sys_munmap(void *at, size_t bytes)
{
    faults.live--;
    return munmap(at, bytes);
}

FAULTY_CALL(int, sys_rename, (const char *from, const char *to), fails, -1, rename(from, to))
FAULTY_CALL(int, sys_link, (const char *from, const char *to), fails, -1, link(from, to))

static const mt_recordfile_sys faulty_sys = {.open = sys_open,
                                             .fstat = sys_fstat,
                                             .pread = sys_pread,
                                             .getrlimit = sys_getrlimit,
                                             .fchmod = sys_fchmod,
                                             .fallocate = sys_fallocate,
                                             .flock = sys_flock,
                                             .mmap = sys_mmap,
                                             .madvise = sys_madvise,
                                             .munmap = sys_munmap,
                                             .rename = sys_rename,
                                             .link = sys_link,
                                             .unlink = unlink,
                                             .close = sys_close};

/* With each errno a call can have here: a failure is said and leaves nothing, or does not matter.
 * `old` tells whether a record was there before, which then is there still. */
static void
each_call_fails(bool old, int native)
{
    int failed = 0;

    fault_errno = native;
    for (long at = 0;; at++) {
        mt_error err = {.status = MT_OK};
        mt_recordfile file = {.at = NULL};
        mt_record r;
        mt_status st;
        bool written;
        faults = (faulty){.fail_at = at};
        st = create(&faulty_sys, &r, &file, &err);
        if (st == MT_OK) {
            bool none = faults.calls <= at;
            finish(&r, &file);
            CHECK(faults.live == 0 && rows_at_path(&written) == 0);
            CHECK(unlink(old ? kept : path) == 0);
            if (none) break;
            continue;
        }
        failed++;
        CHECK(st == MT_EFILE ? err.native > 0 && err.call != NULL : st == MT_ENOMEM);
        CHECK(faults.live == 0 && file.at == NULL);
        CHECK(names_in_folder() == old);
        CHECK(!old || rows_at_path(&written) == 0);
    }
    CHECK(failed >= 4);
    faults.fail_at = -1;
}

static void
every_call_of_a_creation_can_fail(void)
{
    mt_recordfile file;
    mt_record r;

    each_call_fails(false, EIO);
    each_call_fails(false, ENOMEM);
    each_call_fails(false, EMFILE);
    each_call_fails(false, EPERM); /* of link(): a file system that has none */
    CHECK(create(&mt_recordfile_sys_libc, &r, &file, NULL) == MT_OK);
    finish(&r, &file);
    each_call_fails(true, EIO);
    each_call_fails(true, ENOSPC);
    CHECK(unlink(path) == 0);
}

/* --- names --- */

static void
a_living_record_is_not_replaced_and_a_dead_one_is(void)
{
    mt_recordfile one, two;
    mt_record r, s;
    mt_error err;
    bool written;

    CHECK(create(&mt_recordfile_sys_libc, &r, &one, NULL) == MT_OK);
    rig_append(&r, 0);
    CHECK(rows_at_path(&written) == 1 && written);
    CHECK(create(&mt_recordfile_sys_libc, &s, &two, &err) == MT_EFILE);
    CHECK(err.native == EBUSY && err.detail != NULL && names_in_folder() == 1);
    mt_recordfile_unmap(&one); /* as the kernel does when a process ends */
    CHECK(rows_at_path(&written) == 1 && !written);
    CHECK(create(&mt_recordfile_sys_libc, &s, &two, NULL) == MT_OK && names_in_folder() == 2);
    CHECK(rows_at_path(&written) == 0 && written && unlink(kept) == 0);
    finish(&s, &two);
    mt_recordfile_unmap(&one);
    mt_record_fini(&r);
    CHECK(unlink(path) == 0);
}

static ino_t
inode_of(const char *name)
{
    struct stat st;

    CHECK(stat(name, &st) == 0);
    return st.st_ino;
}

/* Makes a record with a row, which is closed, or not, as after a kill. */
static ino_t
left_behind(const mt_recordfile_sys *sys, bool closed)
{
    mt_recordfile file;
    mt_record r;

    CHECK(create(sys, &r, &file, NULL) == MT_OK);
    rig_append(&r, 0);
    if (closed) {
        finish(&r, &file);
    } else {
        mt_recordfile_unmap(&file);
        mt_record_fini(&r);
    }
    return inode_of(path);
}

static int
link_that_is_none(const char *from, const char *to)
{
    (void)from;
    (void)to;
    errno = EPERM;
    return -1;
}

static void
what_was_not_closed_is_kept_under_the_next_free_number(void)
{
    mt_recordfile_sys without = mt_recordfile_sys_libc;
    mt_recordfile file;
    mt_record r;
    ino_t before[4];
    char name[80];

    without.link = link_that_is_none;
    for (int n = 0; n < 4; n++) { /* the last two on a file system that has no links */
        before[n] = left_behind(n < 3 ? &mt_recordfile_sys_libc : &without, false);
        CHECK(names_in_folder() == n + 1 && (kept[0] == 0) == (n == 0));
    }
    CHECK(create(&without, &r, &file, NULL) == MT_OK && names_in_folder() == 5);
    finish(&r, &file);
    for (int n = 0; n < 4; n++) {
        snprintf(name, sizeof name, "%s/run.%d.mem", folder, n + 1);
        CHECK(inode_of(name) == before[n] && (n < 3 || strcmp(kept, name) == 0));
        CHECK(unlink(name) == 0);
    }
    CHECK(unlink(path) == 0);
}

/* Exactly one is kept, the newest, whatever fails; only the one before may be gone then. */
static void
of_what_was_closed_the_last_is_kept(void)
{
    static const int natives[] = {EIO, EPERM};
    mt_recordfile_sys without = mt_recordfile_sys_libc;

    without.link = link_that_is_none;
    for (size_t i = 0; i < 2; i++)
        for (long at = 0;; at++) {
            ino_t first = left_behind(&mt_recordfile_sys_libc, true),
                  second = left_behind(&without, true);
            mt_recordfile file;
            mt_record r;
            mt_status st;
            CHECK(names_in_folder() == 2 && inode_of(previous) == first);
            fault_errno = natives[i];
            faults = (faulty){.fail_at = at};
            st = create(&faulty_sys, &r, &file, NULL);
            CHECK(inode_of(st == MT_OK ? previous : path) == second);
            if (st == MT_OK) {
                CHECK(names_in_folder() == 2 && strcmp(kept, previous) == 0);
                finish(&r, &file);
                CHECK(faults.live == 0);
            }
            (void)unlink(previous);
            CHECK(unlink(path) == 0 && names_in_folder() == 0);
            if (faults.calls <= at) break;
        }
    faults.fail_at = -1;
}

/* A file of that name which is not a record, or which a process writes, is left alone. */
static void
a_previous_record_that_is_none_is_not_replaced(void)
{
    ino_t closed = left_behind(&mt_recordfile_sys_libc, true);
    mt_recordfile file;
    mt_record r;
    mt_error err;
    int fd;

    for (int is_record = 0; is_record < 2; is_record++) {
        fd = open(previous, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0);
        if (is_record) CHECK(write(fd, MT_RECORD_MAGIC, 8) == 8);
        CHECK(create(&mt_recordfile_sys_libc, &r, &file, &err) == MT_EFILE);
        CHECK(err.native == EEXIST && err.detail != NULL && kept[0] == 0);
        CHECK(inode_of(path) == closed && names_in_folder() == 2);
        CHECK(close(fd) == 0 && (is_record || unlink(previous) == 0));
    }
    CHECK(unlink(path) == 0 && unlink(previous) == 0);
}

/* Whatever fails: the record of the killed run is there, with its row. */
static void
no_failure_loses_what_was_not_closed(void)
{
    static const int natives[] = {EIO, EPERM};

    for (size_t i = 0; i < 2; i++)
        for (long at = 0;; at++) {
            ino_t before = left_behind(&mt_recordfile_sys_libc, false);
            mt_recordfile file;
            mt_record r;
            mt_status st;
            fault_errno = natives[i];
            faults = (faulty){.fail_at = at};
            st = create(&faulty_sys, &r, &file, NULL);
            CHECK(inode_of(st == MT_OK ? kept : path) == before);
            CHECK(names_in_folder() == 1 + (st == MT_OK));
            if (st == MT_OK) {
                finish(&r, &file);
                CHECK(faults.live == 0 && unlink(kept) == 0);
            }
            CHECK(unlink(path) == 0);
            if (faults.calls <= at) break;
        }
    faults.fail_at = -1;
}

static int
rename_that_gives_nothing_the_name(const char *from, const char *to)
{
    if (strcmp(to, path) != 0) return rename(from, to);
    errno = EIO;
    return -1;
}

/* Neither the new record nor the old one gets the name: the old one stays under the other name. */
static void
what_cannot_be_given_back_stays_where_it_is_kept(void)
{
    ino_t before = left_behind(&mt_recordfile_sys_libc, false);
    mt_recordfile_sys broken = mt_recordfile_sys_libc;
    mt_recordfile file;
    mt_record r;
    mt_error err;
    char name[80];

    snprintf(name, sizeof name, "%s/run.1.mem", folder);
    broken.rename = rename_that_gives_nothing_the_name;
    CHECK(create(&broken, &r, &file, &err) == MT_EFILE && err.native == EIO);
    CHECK(err.detail == NULL && names_in_folder() == 1 && inode_of(path) == before);
    broken.link = link_that_is_none;
    CHECK(create(&broken, &r, &file, &err) == MT_EFILE && err.native == EIO);
    CHECK(err.detail != NULL && names_in_folder() == 1 && inode_of(name) == before);
    CHECK(unlink(name) == 0);
}

static void
only_the_user_may_read_it(void)
{
    mode_t before = umask(0777);

    for (int n = 0; n < 2; n++) { /* made, and in place of another */
        mt_recordfile file;
        mt_record r;
        struct stat st;
        CHECK(create(&mt_recordfile_sys_libc, &r, &file, NULL) == MT_OK);
        CHECK(stat(path, &st) == 0 && (st.st_mode & 07777) == 0600 && chmod(path, 0644) == 0);
        finish(&r, &file);
        umask(0);
    }
    umask(before);
    CHECK(unlink(path) == 0 && unlink(kept) == 0);
}

static void
what_is_no_record_is_left_alone(void)
{
    static const char *const contents[] = {"", "MTRECOR", "my thesis, the only copy"};
    char before[64];
    mt_recordfile file;
    mt_record r;
    mt_error err;

    for (size_t i = 0; i < 3; i++) {
        FILE *other = fopen(path, "w");
        CHECK(other != NULL && fputs(contents[i], other) >= 0 && fclose(other) == 0);
        CHECK(create(&mt_recordfile_sys_libc, &r, &file, &err) == MT_EFILE);
        CHECK(err.native == EEXIST && err.detail != NULL && names_in_folder() == 1);
        other = fopen(path, "r");
        before[fread(before, 1, 63, other)] = 0;
        CHECK(strcmp(before, contents[i]) == 0 && fclose(other) == 0);
    }
    CHECK(unlink(path) == 0 && mkdir(path, 0700) == 0);
    CHECK(create(&mt_recordfile_sys_libc, &r, &file, &err) == MT_EFILE && err.native == EISDIR);
    CHECK(rmdir(path) == 0 && mkfifo(path, 0600) == 0);
    CHECK(create(&mt_recordfile_sys_libc, &r, &file, &err) == MT_EFILE);
    CHECK(unlink(path) == 0 && symlink("nothing", path) == 0);
    CHECK(create(&mt_recordfile_sys_libc, &r, &file, &err) == MT_EFILE && err.native == ENOENT);
    CHECK(err.detail != NULL && unlink(path) == 0 && names_in_folder() == 0);
}

/* Many want the name at once: one gets it, and no file is left of the others. */
static void
of_many_that_want_a_name_one_gets_it(void)
{
    for (int round = 0; round < CONTESTS; round++) { /* the first makes it, the others replace it */
        int got = 0, go[2], hold[2];
        CHECK(pipe(go) == 0 && pipe(hold) == 0);
        for (int i = 0; i < 8; i++)
            if (fork() == 0) {
                mt_recordfile file;
                mt_record r;
                mt_error err;
                char c;
                mt_status st;
                close(go[1]);
                close(hold[1]);
                (void)!read(go[0], &c, 1);
                st = create(&mt_recordfile_sys_libc, &r, &file, &err);
                if (st != MT_OK) _exit(err.native == EBUSY ? 1 : 2);
                (void)!read(hold[0], &c, 1); /* until all have tried */
                mt_record_close(&r, 1);
                _exit(0);
            }
        close(go[1]); /* the barrier opens */
        for (int i = 0; i < 7; i++) {
            int status;
            CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 1);
        }
        close(hold[1]);
        for (int status; wait(&status) > 0;)
            got += WIFEXITED(status) && WEXITSTATUS(status) == 0;
        CHECK(got == 1 && names_in_folder() == 1 + (round > 0)); /* and the one before */
        close(go[0]);
        close(hold[0]);
    }
    CHECK(unlink(path) == 0 && unlink(previous) == 0);
}

/* The worst moment: another one replaces the old record between its opening and its lock. */
static mt_record other_record;
static mt_recordfile other_file;
static int locks;

static int
flock_too_late(int fd, int how)
{
    if (locks++ == 1) /* the first is that of the new file */
        CHECK(create(&mt_recordfile_sys_libc, &other_record, &other_file, NULL) == MT_OK);
    return flock(fd, how);
}

static void
who_locks_too_late_sees_it(void)
{
    mt_recordfile_sys late = mt_recordfile_sys_libc;
    mt_recordfile file;
    mt_record r;
    mt_error err;
    bool written;

    CHECK(create(&mt_recordfile_sys_libc, &r, &file, NULL) == MT_OK);
    finish(&r, &file);
    late.flock = flock_too_late;
    CHECK(create(&late, &r, &file, &err) == MT_EFILE && err.native == EBUSY);
    CHECK(other_file.at != NULL && names_in_folder() == 2 && unlink(previous) == 0);
    rig_append(&other_record, 0);
    CHECK(rows_at_path(&written) == 1 && written);
    finish(&other_record, &other_file);
    mt_record_fini(&r);
    CHECK(unlink(path) == 0);
}

static void
leftovers_of_a_killed_creation_are_passed_over(void)
{
    char left[160];
    mt_recordfile file;
    mt_record r;

    snprintf(left, sizeof left, "%s/.run.mem.%ld.0.new", folder, (long)getpid());
    CHECK(close(open(left, O_CREAT | O_WRONLY, 0600)) == 0);
    CHECK(create(&mt_recordfile_sys_libc, &r, &file, NULL) == MT_OK && names_in_folder() == 2);
    finish(&r, &file);
    CHECK(unlink(left) == 0 && unlink(path) == 0);
}

/* --- disks and limits --- */

/* Runs in a child what changes the process. */
static void
in_child(void (*what)(void))
{
    int status;
    pid_t pid = fork();

    if (pid == 0) {
        what();
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void
refuses_with(int native)
{
    mt_recordfile file;
    mt_record r;
    mt_error err;

    CHECK(create(&mt_recordfile_sys_libc, &r, &file, &err) == MT_EFILE);
    CHECK(err.native == native && err.detail == NULL);
}

static void
beyond_the_file_size_limit(void)
{
    struct rlimit limit = {4096, 4096};

    CHECK(signal(SIGXFSZ, SIG_DFL) != SIG_ERR && setrlimit(RLIMIT_FSIZE, &limit) == 0);
    refuses_with(EFBIG); /* and lives on */
    CHECK(names_in_folder() == 0);
}

static void
without_descriptors(void)
{
    struct rlimit limit = {3, 3};

    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    refuses_with(EMFILE);
}

static void
without_the_folder(void)
{
    path[strlen(path) - strlen("run.mem")] = 'x';
    path[5] = '_';
    refuses_with(ENOENT);
}

static void
without_permission(void)
{
    if (geteuid() == 0) CHECK(setegid(65534) == 0 && seteuid(65534) == 0);
    CHECK(access(folder, X_OK) == 0);
    refuses_with(EACCES);
}

static void
limits_of_the_process_are_errors(void)
{
    in_child(beyond_the_file_size_limit);
    in_child(without_descriptors);
    in_child(without_the_folder);
    CHECK(chmod(folder, 0555) == 0);
    in_child(without_permission);
    CHECK(chmod(folder, 0700) == 0 && names_in_folder() == 0);
}

/* A disk of 4 KiB for a record of 6: an error, and no SIGBUS later. Not everybody may mount one:
 * then /dev/full's errno comes out of posix_fallocate as in every_call_of_a_creation_can_fail. */
static void
on_a_full_disk(void)
{
    if (mount("none", folder, "tmpfs", 0, "size=4k") != 0) {
        CHECK(errno == EPERM || errno == EACCES);
        return;
    }
    refuses_with(ENOSPC);
    CHECK(names_in_folder() == 0);
    CHECK(mount("none", folder, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL) == 0);
    refuses_with(EROFS);
    CHECK(umount(folder) == 0);
}

/* --- children --- */

static void
a_child_has_nothing_of_it(void)
{
    mt_recordfile file;
    mt_record r;
    bool written;
    int ready[2], status;
    pid_t pid;
    char c;

    CHECK(create(&mt_recordfile_sys_libc, &r, &file, NULL) == MT_OK && pipe(ready) == 0);
    rig_append(&r, 0);
    if ((pid = fork()) == 0) {
        uint64_t values[RIG_COLUMNS] = {0};
        void *at = file.at, *other;
        CHECK(!mt_record_append(&r, 0, values) && !mt_record_close(&r, 1));
        /* Its addresses are free for others, which letting the file go must not unmap. */
        other = mmap(at, 4096, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        CHECK(other == at);
        mt_recordfile_unmap(&file);
        *(volatile char *)other = 1;
        CHECK(write(ready[1], "x", 1) == 1);
        pause();
    }
    close(ready[1]);
    CHECK(read(ready[0], &c, 1) == 1); /* the child came so far */
    rig_append(&r, 1);
    CHECK(rows_at_path(&written) == 2 && written);
    mt_recordfile_unmap(&file);
    CHECK(rows_at_path(&written) == 2 && !written); /* though the child lives */
    CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    close(ready[0]);
    mt_record_fini(&r);
    CHECK(unlink(path) == 0);
}

int
main(void)
{
    CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/run.mem", folder);
    snprintf(previous, sizeof previous, "%s/run.previous.mem", folder);
    RUN(every_call_of_a_creation_can_fail);
    RUN(a_living_record_is_not_replaced_and_a_dead_one_is);
    RUN(what_was_not_closed_is_kept_under_the_next_free_number);
    RUN(no_failure_loses_what_was_not_closed);
    RUN(of_what_was_closed_the_last_is_kept);
    RUN(a_previous_record_that_is_none_is_not_replaced);
    RUN(what_cannot_be_given_back_stays_where_it_is_kept);
    RUN(only_the_user_may_read_it);
    RUN(what_is_no_record_is_left_alone);
    RUN(of_many_that_want_a_name_one_gets_it);
    RUN(who_locks_too_late_sees_it);
    RUN(leftovers_of_a_killed_creation_are_passed_over);
    RUN(limits_of_the_process_are_errors);
    RUN(on_a_full_disk);
    RUN(a_child_has_nothing_of_it);
    CHECK(rmdir(folder) == 0);
    CHECK_DONE();
}
