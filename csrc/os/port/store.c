/* store.c -- how this file works.
 *
 * All pages lie in one memfd. An arena is two ranges of addresses over a part of that file: its
 * home, whose pages map() puts elsewhere as the pool asks, and its window, which always shows the
 * part as it is. To drop a page is to punch a hole into the file. written() finds out which pages
 * of a private mapping hold a copy of their own: by PAGEMAP_SCAN, else by the entries of
 * /proc/self/pagemap, else it says all; settle() drops the copies. Both ranges of each arena
 * stand in a table that a handler closes in every child of fork(). */
#define _GNU_SOURCE /* memfd_create, fallocate, MAP_FIXED_NOREPLACE */
#include "os/port/store.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/size.h"
#include "os/base/descriptor.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

/* linux/fs.h from 6.7 on, under our own names: the headers may be older than the kernel. */
typedef struct scan_arg {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
} scan_arg;

typedef struct scan_region {
    uint64_t start, end, categories;
} scan_region;

#define SCAN_REQUEST _IOWR('f', 16, scan_arg)
enum {
    SCAN_FILE = 1 << 2,
    SCAN_PRESENT = 1 << 3,
    SCAN_SWAPPED = 1 << 4,
    SCAN_ZEROS = 1 << 5 /* the kernel's page of zeros, which reading brings */
};

/* Of an entry of /proc/self/pagemap, in any version: present or swapped; a page of a file, or one
 * that is shared. */
#define ENTRY_THERE (3ULL << 62)
#define ENTRY_FILE  (1ULL << 61)

enum { READ_WRITE = PROT_READ | PROT_WRITE, USUAL_MAX_MAPS = 65530 };

typedef struct arena {
    size_t offset, bytes;
    unsigned char *home, *window;
} arena;

typedef struct store {
    mt_alloc mem;
    const mt_linux_sys *sys;
    mt_descriptor file;
    size_t end; /* bytes of all arenas */
    arena *arenas;
    size_t len, room; /* arenas, and places in the array */
} store;

/* ---- the calls as a table ---- */

static int
linux_store_libc_open(const char *path, int flags)
{
    return open(path, flags);
}

/* By the system call: the request is an int in some C libraries and a long in others. */
static int
libc_scan(int pagemap, void *pm_scan_arg)
{
    return (int)syscall(SYS_ioctl, pagemap, SCAN_REQUEST, pm_scan_arg);
}

const mt_linux_sys mt_linux_sys_libc = {.memfd_create = memfd_create,
                                        .ftruncate = ftruncate,
                                        .fallocate = fallocate,
                                        .open = linux_store_libc_open,
                                        .read = read,
                                        .pread = pread,
                                        .close = close,
                                        .mmap = mmap,
                                        .munmap = munmap,
                                        .madvise = madvise,
                                        .scan = libc_scan};

static mt_status
fail(mt_error *err, const char *call, size_t bytes)
{
    mt_fail(err, MT_ENOMEM, call, errno);
    if (err != NULL) err->asked = bytes;
    return MT_ENOMEM;
}

/* ---- children ---- */

/* A child of fork() would share these pages with its parent: what one writes the other would read.
 * So in a child the addresses of all arenas are closed, from its first instruction on: a child that
 * touches an inherited view there ends with SIGSEGV. They stay reserved, so that nothing else of
 * the child comes to lie under such a view. A child of vfork() or posix_spawn() runs none of this.
 */
enum { CLOSED_IN_CHILDREN = 4096 }; /* two of each arena */

/* `at` is written first and taken back last, so what has bytes is closed where it lies. */
static struct range {
    _Atomic uintptr_t at; /* 0: free */
    _Atomic size_t bytes; /* 0: not in use yet */
} ranges[CLOSED_IN_CHILDREN];

static pthread_once_t handler_was_asked_for = PTHREAD_ONCE_INIT;
static bool handler_is_there; /* constant after that */
static mt_gauge mapped_again;

mt_gauge *
mt_store_linux_mapped_again(void)
{
    return &mapped_again;
}

/* Takes no lock and no memory: a thread of the parent may have held any of them. */
static void
close_in_child(void)
{
    int kept = errno, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;

    for (struct range *s = ranges; s < ranges + CLOSED_IN_CHILDREN; s++)
        if (s->bytes > 0 && mmap((void *)s->at, s->bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
            munmap((void *)s->at, s->bytes); /* at least nothing of the parent's is left there */
    mapped_again.bytes = mapped_again.most = mapped_again.once = 0;
    errno = kept;
}

static void
linux_store_install_handler(void)
{
    handler_is_there = pthread_atfork(NULL, NULL, close_in_child) == 0;
}

/* Whether the range will be closed in children; false: there are too many, or no handler. */
static bool
close_in_children(void *at, size_t bytes)
{
    pthread_once(&handler_was_asked_for, linux_store_install_handler);
    if (!handler_is_there) return false;
    for (struct range *s = ranges; s < ranges + CLOSED_IN_CHILDREN; s++) {
        uintptr_t none = 0;

        if (!atomic_compare_exchange_strong(&s->at, &none, (uintptr_t)at)) continue;
        s->bytes = bytes;
        return true;
    }
    return false;
}

static void
forget_range(const void *at)
{
    for (struct range *s = ranges; s < ranges + CLOSED_IN_CHILDREN; s++) {
        if (s->at != (uintptr_t)at) continue;
        s->bytes = 0;
        s->at = 0;
        return;
    }
}

/* ---- growing ---- */

/* False, with errno, once the program closed the descriptor: another file may have its number. What
 * is mapped stays mapped. */
static bool
has_file(const store *s)
{
    if (mt_descriptor_is_ours(&s->file)) return true;
    errno = EBADF;
    return false;
}

/* The file's bytes from `offset` on, wherever there is room for them. */
static mt_status
map_file(const store *s, size_t offset, size_t bytes, unsigned char **out, mt_error *err)
{
    void *at = s->sys->mmap(NULL, bytes, READ_WRITE, MAP_SHARED | MAP_NORESERVE, s->file.fd,
                            (off_t)offset);

    if (at == MAP_FAILED) return fail(err, MT_STORE_ADDRESSES, bytes);
    *out = at;
    if (close_in_children(at, bytes)) return MT_OK;
    s->sys->munmap(at, bytes);
    errno = ENOMEM;
    (void)fail(err, handler_is_there ? MT_STORE_ARENAS : "pthread_atfork", bytes);
    if (err != NULL) err->limit = CLOSED_IN_CHILDREN / 2;
    return MT_ENOMEM;
}

static void
unmap_file(const store *s, void *at, size_t bytes)
{
    forget_range(at); /* first: a child is not to close what comes to lie there */
    s->sys->munmap(at, bytes);
}

static mt_status
linux_extend(void *ctx, size_t bytes, void **base, mt_error *err)
{
    store *s = ctx;
    arena next = {.offset = s->end, .bytes = bytes};
    arena *grown = mt_alloc_grown(&s->mem, s->arenas, &s->room, s->len + 1, sizeof *grown);
    mt_status st;

    if (grown != NULL) s->arenas = grown;
    if (grown == NULL || bytes > (size_t)INT64_MAX - s->end) {
        errno = ENOMEM;
        return fail(err, MT_STORE_ADDRESSES, bytes);
    }
    if (!has_file(s) || s->sys->ftruncate(s->file.fd, (off_t)(s->end + bytes)) != 0)
        return fail(err, "ftruncate", bytes);
    /* A file that stays longer after a failure costs nothing: its pages are not there, and the next
     * extend sets its length again. */
    if ((st = map_file(s, next.offset, bytes, &next.home, err)) != MT_OK) return st;
    if ((st = map_file(s, next.offset, bytes, &next.window, err)) != MT_OK) {
        unmap_file(s, next.home, bytes);
        return st;
    }
    s->arenas[s->len++] = next;
    s->end += bytes;
    *base = next.home;
    return MT_OK;
}

static const arena *
arena_of(const store *s, size_t offset)
{
    size_t i = 0;

    while (i < s->len && offset - s->arenas[i].offset >= s->arenas[i].bytes)
        i++;
    assert(i < s->len);
    return &s->arenas[i];
}

/* ---- pages ---- */

static mt_status
linux_take(void *ctx, size_t offset, size_t bytes, mt_error *err)
{
    (void)ctx; /* a page comes when it is touched */
    (void)offset;
    (void)bytes;
    (void)err;
    return MT_OK;
}

static mt_status
linux_window(void *ctx, size_t offset, size_t bytes, void **out, mt_error *err)
{
    const arena *a = arena_of(ctx, offset);

    (void)err;
    (void)bytes;
    assert(bytes <= a->bytes - (offset - a->offset));
    *out = a->window + (offset - a->offset);
    return MT_OK;
}

/* What drop promises, where the file cannot be asked: the pages go by their mapping, or at least
 * read zeros. */
static void
wipe(store *s, size_t offset, size_t bytes)
{
    while (bytes > 0) {
        const arena *a = arena_of(s, offset);
        size_t from = offset - a->offset, n = mt_size_min(bytes, a->bytes - from);

        if (s->sys->madvise(a->window + from, n, MADV_REMOVE) != 0) memset(a->window + from, 0, n);
        offset += n;
        bytes -= n;
    }
}

static void
linux_drop(void *ctx, size_t offset, size_t bytes)
{
    store *s = ctx;
    int failed;

    assert(offset <= s->end && bytes <= s->end - offset);
    do
        failed = !has_file(s) ||
                 s->sys->fallocate(s->file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                   (off_t)offset, (off_t)bytes);
    while (failed && errno == EINTR);
    if (failed) wipe(s, offset, bytes);
}

static size_t
linux_physical(void *ctx)
{
    const store *s = ctx;
    struct stat is;

    if (!has_file(s) || fstat(s->file.fd, &is) != 0) return 0; /* it cannot be found out */
    return (size_t)is.st_blocks * 512;
}

/* ---- how many mappings ---- */

/* Lines of the file; 0 where it cannot be read. */
static size_t
count_lines(const mt_linux_sys *sys, const char *path)
{
    char text[4096];
    size_t lines = 0;
    ssize_t n;
    int fd = sys->open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0) return 0;
    while ((n = sys->read(fd, text, sizeof text)) > 0)
        for (ssize_t i = 0; i < n; i++)
            lines += text[i] == '\n';
    sys->close(fd);
    return lines;
}

static size_t
most_maps(const mt_linux_sys *sys)
{
    char text[32];
    ssize_t n = -1;
    int fd = sys->open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);

    if (fd >= 0) {
        n = sys->read(fd, text, sizeof text - 1);
        sys->close(fd);
    }
    if (n <= 0) return USUAL_MAX_MAPS;
    text[n] = 0;
    return (size_t)strtoull(text, NULL, 10);
}

static size_t
linux_maps_left(void *ctx)
{
    const store *s = ctx;
    size_t most = most_maps(s->sys), used = count_lines(s->sys, "/proc/self/maps") + most / 10;

    return used < most ? most - used : 0;
}

/* ---- addresses ---- */

/* mmap over addresses that are ours. The kernel may have taken the old mapping away before it
 * fails; then something else could be mapped there, and a later map of ours would tear it down. So
 * the hole is filled at once, if there is one. */
static mt_status
map_over(const store *s, void *at, size_t bytes, int flags, int fd, size_t offset, mt_error *err)
{
    mt_status st;
    bool full;

    flags |= MAP_FIXED | MAP_NORESERVE;
    if (s->sys->mmap(at, bytes, READ_WRITE, flags, fd, (off_t)offset) != MAP_FAILED) return MT_OK;
    st = fail(err, "mmap", bytes);
    full = errno == ENOMEM;
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    s->sys->mmap(at, bytes, PROT_NONE, flags, -1, 0);
    if (full && err != NULL && linux_maps_left((void *)s) == 0) {
        err->call = MT_STORE_MAPS;
        err->limit = most_maps(s->sys);
    }
    return st;
}

static mt_status
linux_map(void *ctx, void *at, size_t bytes, size_t offset, mt_map_kind kind, mt_error *err)
{
    const store *s = ctx;
    int flags = kind == MT_MAP_PRIVATE ? MAP_PRIVATE : MAP_SHARED;

    assert(offset <= s->end && bytes <= s->end - offset);
    return has_file(s) ? map_over(s, at, bytes, flags, s->file.fd, offset, err)
                       : fail(err, "mmap", bytes);
}

static mt_status
linux_map_zero(void *ctx, void *at, size_t bytes, mt_error *err)
{
    return map_over(ctx, at, bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, err);
}

static mt_status
linux_settle(void *ctx, void *at, size_t bytes, mt_error *err)
{
    const store *s = ctx;

    return s->sys->madvise(at, bytes, MADV_DONTNEED) == 0 ? MT_OK : fail(err, "madvise", bytes);
}

/* Finds the first pages of [*start, end) that were written: no page of a file nor the kernel's one
 * of zeros; and moves *start to where it looked to. Returns how many regions, at most 1; -1: the
 * page table cannot be asked. */
static int
find_copy(const store *s, int pagemap, uint64_t *start, uint64_t end, scan_region *found)
{
    scan_arg arg = {.size = sizeof arg,
                    .start = *start,
                    .end = end,
                    .vec = (uintptr_t)found,
                    .vec_len = 1,
                    .category_inverted = SCAN_FILE | SCAN_ZEROS, /* these must be 0 */
                    .category_mask = SCAN_FILE | SCAN_ZEROS,
                    .category_anyof_mask = SCAN_PRESENT | SCAN_SWAPPED,
                    .return_mask = SCAN_PRESENT | SCAN_SWAPPED};
    int n = s->sys->scan(pagemap, &arg);

    if (n < 0 || arg.walk_end <= *start) return -1;
    *start = arg.walk_end;
    return n;
}

/* The same for one region, by the entries of the page table one by one, for kernels before 6.7: the
 * first page in [*start, end) that is there and no page of a file. */
static int
find_copy_by_entries(const store *s, int pagemap, uint64_t *start, uint64_t end, scan_region *found)
{
    uint64_t entries[512], page = (uint64_t)sysconf(_SC_PAGESIZE);

    for (; *start < end; *start += page * (sizeof entries / sizeof *entries)) {
        uint64_t pages = (end - *start + page - 1) / page;
        size_t want = sizeof *entries * (size_t)(pages < 512 ? pages : 512);
        ssize_t got = s->sys->pread(pagemap, entries, want, (off_t)(*start / page * 8));

        if (got != (ssize_t)want) return -1;
        for (size_t i = 0; i < want / sizeof *entries; i++) {
            if ((entries[i] & ENTRY_THERE) == 0 || (entries[i] & ENTRY_FILE) != 0) continue;
            found->start = *start + i * page;
            return 1;
        }
    }
    return 0;
}

/* Where the page table cannot be asked at all, every page may have been written to. */
static size_t
linux_written(void *ctx, void *at, size_t bytes)
{
    const store *s = ctx;
    uint64_t start = (uintptr_t)at, end = start + bytes;
    scan_region found;
    /* Opened again each time: in the child of a fork an older one would show the parent's pages. */
    int pagemap = s->sys->open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), n = 0;

    if (pagemap < 0) return 0;
    while (n == 0 && start < end)
        n = find_copy(s, pagemap, &start, end, &found);
    if (n < 0) n = find_copy_by_entries(s, pagemap, &start, end, &found);
    s->sys->close(pagemap);
    if (n < 0) return 0;
    return n == 0 ? bytes : (size_t)(found.start - (uintptr_t)at);
}

/* ---- copies: the host has no streams ---- */

static mt_status
linux_copy(void *ctx, void *dst, const void *src, size_t bytes, mt_error *err)
{
    (void)ctx;
    (void)err;
    memcpy(dst, src, bytes);
    return MT_OK;
}

static mt_status
linux_zero(void *ctx, void *dst, size_t bytes, mt_error *err)
{
    (void)ctx;
    (void)err;
    memset(dst, 0, bytes);
    return MT_OK;
}

static mt_status
linux_use_stream(void *ctx, void *stream, mt_error *err)
{
    (void)ctx;
    (void)stream;
    (void)err;
    return MT_OK;
}

/* ---- from new to close ---- */

static void
linux_close(void *ctx)
{
    store *s = ctx;
    mt_alloc mem;

    if (s == NULL) return;
    mem = s->mem;
    for (size_t i = 0; i < s->len; i++) {
        unmap_file(s, s->arenas[i].home, s->arenas[i].bytes);
        unmap_file(s, s->arenas[i].window, s->arenas[i].bytes);
    }
    if (has_file(s)) s->sys->close(s->file.fd);
    mem.put(mem.ctx, s->arenas, s->room * sizeof *s->arenas);
    mem.put(mem.ctx, s, sizeof *s);
}

/* Not executable, as hosts with vm.memfd_noexec=2 demand; kernels before 6.3 do not know the flag.
 */
static int
open_memfd(const mt_linux_sys *sys)
{
    int fd = sys->memfd_create("memtools", MFD_CLOEXEC | MFD_NOEXEC_SEAL);

    return fd >= 0 || errno != EINVAL ? fd : sys->memfd_create("memtools", MFD_CLOEXEC);
}

mt_status
mt_store_linux_new_with(const mt_alloc *mem, const mt_linux_sys *sys, mt_store_ops *out,
                        mt_error *err)
{
    store *s = mt_alloc_zeroed(mem, 1, sizeof *s);

    if (s == NULL) return mt_fail(err, MT_ENOMEM, "mt_store_linux_new", 0);
    s->mem = *mem;
    s->sys = sys;
    s->file = mt_descriptor_keep(open_memfd(sys));
    if (s->file.fd < 0) {
        mt_status st = fail(err, "memfd_create", 0);

        mem->put(mem->ctx, s, sizeof *s);
        return st;
    }
    *out = (mt_store_ops){.page_bytes = (size_t)sysconf(_SC_PAGESIZE),
                          .max_maps = most_maps(sys),
                          .maps_left = linux_maps_left,
                          .lazy = true,
                          .private_writes = true,
                          .extend = linux_extend,
                          .take = linux_take,
                          .drop = linux_drop,
                          .map = linux_map,
                          .map_zero = linux_map_zero,
                          .settle = linux_settle,
                          .written = linux_written,
                          .window = linux_window,
                          .copy = linux_copy,
                          .zero = linux_zero,
                          .use_stream = linux_use_stream,
                          .physical = linux_physical,
                          .close = linux_close,
                          .ctx = s};
    return MT_OK;
}

mt_status
mt_store_linux_new(const mt_alloc *mem, mt_store_ops *out, mt_error *err)
{
    return mt_store_linux_new_with(mem, &mt_linux_sys_libc, out, err);
}
