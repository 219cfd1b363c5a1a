/* procfile.h -- small files of the kernel, read again and again.
 *
 *   root "/"            root "/tmp/fake"
 *     proc/self/statm     proc/self/statm      tests build a tree of plain files
 *
 * pread at 0 makes the kernel write the file's text again. So what each sample reads is kept open:
 * in a program with threads opening and closing takes 15 us where reading takes 1, and a sampler
 * that may take 0.5 % of a core would get half of its samples. Before each reading fstat says
 * whether the descriptor is still ours (os/base/descriptor.h). A descriptor under /proc/self goes
 * on meaning the process that opened it: after fork() the owner closes what it kept. */
#ifndef MT_OS_MONITOR_PROCFILE_H
#define MT_OS_MONITOR_PROCFILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "os/base/descriptor.h"
#include "os/monitor/proctext.h"

enum { MT_PATH_ROOM = 4096 };

/* A folder that is being listed. The C library's opendir() would allocate, on a thread that must
 * not: the caller has the room. */
typedef struct mt_folder {
    int fd;
    mt_descriptor kept; /* the same: a program may close what it did not open */
    size_t at, len;
    _Alignas(8) char entries[4096];
} mt_folder;

/* What is known of a file. */
typedef struct mt_file {
    uint64_t device, inode, links, user;
    uint64_t bytes; /* that it takes, holes left out */
    uint64_t
        born_ns; /* by the clock of the machine; where that is not kept, when it last changed */
    bool regular, folder;
} mt_file;

/* The system calls used, as libc has them: -1 and errno. A table, so that tests make them fail. */
typedef struct mt_proc_sys {
    int (*open)(const char *path, int flags);
    ssize_t (*pread)(int fd, void *to, size_t bytes, off_t at);
    ssize_t (*pwrite)(int fd, const void *from, size_t bytes, off_t at);
    int (*close)(int fd);
    int (*getrusage)(int who, struct rusage *out);
    /* A folder's names from its start; NULL ends it, with errno 0 unless it failed. */
    bool (*opendir)(const char *path, mt_folder *out);
    const char *(*readdir)(mt_folder *folder);
    void (*closedir)(mt_folder *folder);
    /* False and errno. */
    bool (*stat)(const char *path, mt_file *out);
    int (*mincore)(uintptr_t address, size_t bytes, unsigned char *pages);
} mt_proc_sys;

extern const mt_proc_sys mt_proc_sys_libc;

/* root + path into out[MT_PATH_ROOM]; false when it does not fit. */
bool mt_path_join(char *out, const char *root, const char *path);
/* The same for a file in the folder of a process, "self" for this one. */
bool mt_proc_path(char *out, const char *root, const char *pid, const char *file);

/* True where errno says that the process, or its file, has gone meanwhile. */
bool mt_proc_has_gone(void);

/* Opens, reads at most `room` bytes, closes. -1 and errno; what is longer is cut. */
ssize_t mt_proc_slurp(const mt_proc_sys *sys, const char *path, char *to, size_t room);

/* As mt_proc_slurp, over a descriptor that is kept: MT_NO_DESCRIPTOR at first. One that the program
 * closed, or whose number means another file by now, is opened again. When reading fails the
 * descriptor is closed, so that the next call opens it again. */
ssize_t mt_proc_read(const mt_proc_sys *sys, mt_descriptor *kept, const char *path, char *to,
                     size_t room);

/* The bytes that a statm states, over a kept descriptor. False where it cannot be read, or its text
 * is not one of statm's. */
bool mt_proc_statm(const mt_proc_sys *sys, mt_descriptor *kept, const char *path,
                   uint64_t *resident, uint64_t *shared);

/* Closes it if it is open and still ours, and sets it to MT_NO_DESCRIPTOR. */
void mt_proc_close(const mt_proc_sys *sys, mt_descriptor *kept);

#endif
