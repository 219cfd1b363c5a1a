/* store.h -- mt_store_ops by one sparse memfd and mmap.
 *
 *   memfd      [ arena 0          | arena 1                   |      pages appear on touch
 *                  |       \           |
 *   home       [ arena 0 ]  \     [ arena 1 ]                        mapped again by map, map_zero
 *   window     [ arena 0 ]   `--> [ arena 1 ]                        stays shared, one to one
 *
 * lazy: addresses read zeros before anything is mapped, and take() has nothing to do. A private map
 * is MAP_PRIVATE: the kernel copies a page when it is written to there. written() asks the page
 * table which pages were copied, by PAGEMAP_SCAN (Linux 6.7) or else entry by entry. settle() drops
 * the page-table entries of the whole range and the copies with them, which costs page faults.
 *
 * In a child made by fork() all of this store's addresses are closed: touching one ends the child.
 * A handler of pthread_atfork does that, from a table of the homes and windows of all stores of the
 * process: a fork knows no store, and the child closes them before any other code of its own runs.
 * The handler takes no lock, so it does not matter what other threads of the parent were doing. A
 * store that finds no room in the table (2,048 arenas in all, MT_STORE_ARENAS) is not extended. A
 * child of vfork() or posix_spawn() runs no handler, and calls exec at once.
 *
 * Reading a page that was dropped, other than through map_zero, makes it physical again. */
#ifndef MT_OS_PORT_STORE_H
#define MT_OS_PORT_STORE_H

#include <sys/types.h>

#include "core/base/alloc.h"
#include "core/base/gauge.h"
#include "core/port/store.h"

/* The system calls that can fail, as libc has them: -1 or MAP_FAILED, and errno. A table, so that
 * tests make them fail. */
typedef struct mt_linux_sys {
    int (*memfd_create)(const char *name, unsigned flags);
    int (*ftruncate)(int fd, off_t bytes);
    int (*fallocate)(int fd, int mode, off_t offset, off_t bytes);
    int (*open)(const char *path, int flags);
    ssize_t (*read)(int fd, void *to, size_t bytes);
    ssize_t (*pread)(int fd, void *to, size_t bytes, off_t offset);
    int (*close)(int fd);
    void *(*mmap)(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);
    int (*munmap)(void *at, size_t bytes);
    int (*madvise)(void *at, size_t bytes, int advice);
    int (*scan)(int pagemap, void *pm_scan_arg); /* ioctl(PAGEMAP_SCAN) */
} mt_linux_sys;

extern const mt_linux_sys mt_linux_sys_libc;

/* For pages of stores that this process maps more than once. 0 in a child, where the pools of its
 * parent are closed. */
mt_gauge *mt_store_linux_mapped_again(void);

/* A store of no bytes yet; out->close gives everything back. max_maps is vm.max_map_count;
 * maps_left counts the lines of /proc/self/maps. *out is written on MT_OK only. MT_ENOMEM. */
mt_status mt_store_linux_new(const mt_alloc *mem, mt_store_ops *out, mt_error *err);

/* The same over other system calls; `sys` stays valid until close. */
mt_status mt_store_linux_new_with(const mt_alloc *mem, const mt_linux_sys *sys, mt_store_ops *out,
                                  mt_error *err);

#endif
