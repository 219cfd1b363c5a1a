/* shm.h -- the shared memory of a job: this process and its descendants.
 *
 *   /proc/<pid>/fd    open files ──── of /dev/shm, or without a name ──┐
 *   /proc/<pid>/maps  mappings ─────── of the same, or anonymous ──────┼──► files, by inode ──► bytes
 *   /dev/shm          names ───────── that the job made ───────────────┘    each counted once
 *
 * A file counts with what it has of memory, no matter which process filled it and how often it is
 * mapped. The list of mappings is read only of processes that map shared memory at all (RssShmem),
 * and of this one where that is more than the ring of notes, which counts nowhere.
 *
 * Whose file is it? /dev/shm is the machine's, and what other programs put there never counts:
 *  - one without a name (memfd, an unlinked file, a shared anonymous mapping) belongs to those who
 *    hold it, that is, have it open or mapped;
 *  - one with a name counts while the job holds it, and whether or not it does when the job made
 *    it: the pid in the names that torch and multiprocessing give is of the job, or the program
 *    reported it (mt_shm_note: Python's SharedMemory, whose names say nothing; mt_shm_note_path: the
 *    files that Python opens to write, also in folders that were made since);
 *  - it never counts when it is older than this process, or when the pid in its name is that of a
 *    living process outside the job, also where the job maps it.
 * So a file that C code made under another name, closed and did not unlink is not found. Nor is one
 * that Python made before its open() was watched, which begins once mt_shm_saw_strays() is true.
 *
 * Not thread-safe, and it allocates when it is made only. Parts of its table that it has not used
 * take no memory. */
#ifndef MT_OS_MONITOR_SHM_H
#define MT_OS_MONITOR_SHM_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/alloc.h"
#include "core/base/status.h"
#include "os/monitor/children.h"
#include "os/monitor/procfile.h"

enum { MT_SHM_MOST = 65536 /* files; with more of them the bytes are unknown */ };

/* Each is MT_UNKNOWN where it could not be found out. */
typedef struct mt_shm_bytes {
    uint64_t all;    /* of the job's shared memory */
    uint64_t mapped; /* of it, what this process's resident set counts */
} mt_shm_bytes;

typedef struct mt_shm mt_shm;

/* root and sys stay valid. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_shm_new(const mt_alloc *mem, const mt_proc_sys *sys, const char *root, mt_shm **out,
                     mt_error *err);
void mt_shm_free(mt_shm *shm); /* NULL is ignored */
/* Forgets all, in a forked child for example. */
void mt_shm_clear(mt_shm *shm);

/* Looks at this process and at the descendants as they were last listed. A file is the job's only
 * if it was made at since_ns or later, by the clock of the machine (CLOCK_REALTIME). */
void mt_shm_look(mt_shm *shm, const mt_children *children, uint64_t since_ns, mt_shm_bytes *out);

/* Makes the page that forked children share, by which they report their files to this process. False
 * without memory; mt_shm_note then does nothing. */
bool mt_shm_share_notes(void);
/* The program has just made the file of this name in /dev/shm. Where it is not empty any more,
 * another program made it, and it is ignored. Thread-safe. */
void mt_shm_note(const char *name);
/* The program is about to make, or to overwrite, the file of this path, which begins with /dev/shm/;
 * others are ignored. Thread-safe. */
void mt_shm_note_path(const char *path);
/* Whether a look of this process has found files of this user that were made since it began, which
 * were not reported: they may be the job's. */
bool mt_shm_saw_strays(void);

#endif
