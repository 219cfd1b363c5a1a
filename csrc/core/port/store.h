/* store.h -- physical pages with offsets, and address space into which ranges of them are mapped.
 *
 *   store (pages)      [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ] ...        offset = page number x page_bytes
 *                        |    \      /   |
 *                        |     \    /    |    map(at, bytes, offset, kind)
 *   addresses   |...home..|..alias..|zero|...               one range replaces what was there
 *
 * What the KV-cache pool needs of an operating system or a driver, as a table. csrc/os fills it
 * with one sparse memfd and mmap, csrc/cuda with the driver's virtual-memory calls; tests with
 * faults.
 *
 * A store grows by arenas: extend(n) appends n bytes of store (no page is physical yet) and n bytes
 * of address space. Where `lazy` is true, the new addresses are mapped to the new offsets one to
 * one (kind SHARED) from the start, a page becomes physical when it is touched, and take() only
 * announces. Where it is false, nothing is mapped, an unmapped address must not be touched, and a
 * page must be taken before it is mapped.
 *
 * All offsets, addresses and sizes are multiples of page_bytes. A page that becomes physical reads
 * as zeros. Every call is all-or-nothing, unless it says otherwise. Functions return MT_OK,
 * MT_ENOMEM (with the call, errno or driver's code, and bytes in `asked`) or MT_EDEVICE. Not
 * thread-safe: the pool serialises. */
#ifndef MT_PORT_STORE_H
#define MT_PORT_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* What extend() names as the failed call where the system has no addresses left: freeing pages would
 * not help. */
#define MT_STORE_ADDRESSES "mmap of addresses"
/* The same where the process has `limit` arenas, the most that are closed in children of fork(). */
#define MT_STORE_ARENAS "arenas that children close"
/* The same where the process may not map more ranges, each of them apart. */
#define MT_STORE_MAPS "vm.max_map_count"

typedef enum mt_map_kind {
    MT_MAP_SHARED,  /* writes reach the page, and all addresses that map it */
    MT_MAP_PRIVATE, /* where private_writes is true, a write through it is kept for this address
                     * alone, in memory that the store does not count; else as SHARED */
} mt_map_kind;

typedef struct mt_store_ops {
    size_t page_bytes;   /* a power of two */
    size_t max_maps;     /* ranges that one process may map; SIZE_MAX: any number */
    bool lazy;           /* see above */
    bool private_writes; /* what MT_MAP_PRIVATE promises */

    /* Ranges that this process may map beside those that are there now, with a tenth of max_maps
     * left over for the program. It reads what the system says, which takes time. NULL: only
     * max_maps counts. */
    size_t (*maps_left)(void *ctx);
    /* Appends an arena of `bytes`; *base is its first address, and stays. */
    mt_status (*extend)(void *ctx, size_t bytes, void **base, mt_error *err);
    /* Makes the pages of [offset, offset + bytes) physical; those that are stay as they are. */
    mt_status (*take)(void *ctx, size_t offset, size_t bytes, mt_error *err);
    /* Gives the pages back to the system; they may be physical or not. pre, unless lazy: nothing
     * maps them. Where lazy, addresses that map them read zeros from now on, but for what was
     * written privately there: settle first. Cannot fail. */
    void (*drop)(void *ctx, size_t offset, size_t bytes);
    /* Maps [offset, offset + bytes) at `at`, within arenas. Waits for device work that was enqueued
     * on addresses it replaces. On failure a part of the range may be mapped already: its content
     * is then undefined and the caller maps it again before it is used. */
    mt_status (*map)(void *ctx, void *at, size_t bytes, size_t offset, mt_map_kind kind,
                     mt_error *err);
    /* Maps zeros: reads cost no page of the store. On failure as map. What is written there is lost
     * at the next map. */
    mt_status (*map_zero)(void *ctx, void *at, size_t bytes, mt_error *err);
    /* Leaves the addresses unmapped, when that work is done. Only where !lazy. Cannot fail. */
    void (*unmap)(void *ctx, void *at, size_t bytes);
    /* Forgets what was written through MT_MAP_PRIVATE mappings and those of zeros in
     * [at, at + bytes), if anything: they read the page again, and zeros. Where lazy, the system
     * does not count the pages there as the process's until they are touched again; what is mapped
     * stays mapped. On failure a part of it may be forgotten already. */
    mt_status (*settle)(void *ctx, void *at, size_t bytes, mt_error *err);
    /* Bytes from `at` to the first page of [at, at + bytes) that was written to on its own account:
     * through MT_MAP_PRIVATE or map_zero; `bytes` where there is none. May name a page that was
     * not, where the system cannot tell. Only where private_writes. Cannot fail. */
    size_t (*written)(void *ctx, void *at, size_t bytes);
    /* An address at which taken pages [offset, offset + bytes) can be read and written until they
     * are dropped, whatever maps they have elsewhere. pre: within one arena. */
    mt_status (*window)(void *ctx, size_t offset, size_t bytes, void **out, mt_error *err);
    /* memcpy and memset(0) between mapped addresses, in the order of the stream in use. */
    mt_status (*copy)(void *ctx, void *dst, const void *src, size_t bytes, mt_error *err);
    mt_status (*zero)(void *ctx, void *dst, size_t bytes, mt_error *err);
    /* The stream on which the caller works from now on; host: ignored. NULL is the default stream.
     * Work enqueued before on another stream is ordered before what comes after on this one. */
    mt_status (*use_stream)(void *ctx, void *stream, mt_error *err);
    /* Bytes that are physical now, by the system's own account (fstat; handles made). */
    size_t (*physical)(void *ctx);
    /* Gives everything back. Waits for enqueued work. NULL ctx is ignored. */
    void (*close)(void *ctx);
    void *ctx;
} mt_store_ops;

#endif
