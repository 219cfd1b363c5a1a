/* driver.h -- the driver's virtual-memory calls, for one device.
 *
 *   reserve ─► addresses    [ . . . . . . ]     nothing may touch them
 *   create  ─► pages          #     #           device memory without an address
 *   map     ─► addresses    [ # . . # . . ]     one page may be mapped at many places
 *   allow   ─► the device may read and write what is mapped
 *
 * The entry points come from the runtime (cudaGetDriverEntryPointByVersion, CUDA 12.5), so that they
 * are those of the driver that it uses itself. Each call makes the device current, which makes
 * its context, and puts the thread back as runtime.h says; it is legal while a graph is captured.
 * None waits for work of the device: unmap expects that there is none left on those addresses. */
#ifndef MT_CUDA_DRIVER_H
#define MT_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/runtime.h"

typedef struct mt_cudrv mt_cudrv;
typedef uint64_t mt_cupage; /* a handle of device memory */

/* Borrows rt. *out is written on MT_OK only. MT_ENOMEM; MT_EDEVICE, for an entry point that is
 * missing with native 0 and "dlsym " and its name as the call. */
mt_status mt_cudrv_open(const mt_alloc *mem, mt_cudart *rt, int device, mt_cudrv **out,
                        mt_error *err);
void mt_cudrv_close(mt_cudrv *drv); /* NULL is ignored */

/* The least size of a page; pages are multiples of it. */
mt_status mt_cudrv_granularity(mt_cudrv *drv, size_t *out, mt_error *err);

/* MT_ENOMEM, with bytes in asked, or MT_EDEVICE, both with the driver's code. */
mt_status mt_cudrv_reserve(mt_cudrv *drv, size_t bytes, size_t align, void **out, mt_error *err);
mt_status mt_cudrv_create(mt_cudrv *drv, size_t bytes, mt_cupage *out, mt_error *err);
/* Maps a whole page; pre: nothing is mapped at [at, at + bytes). */
mt_status mt_cudrv_map(mt_cudrv *drv, void *at, size_t bytes, mt_cupage page, mt_error *err);
/* pre: all of [at, at + bytes) is mapped. */
mt_status mt_cudrv_allow(mt_cudrv *drv, void *at, size_t bytes, mt_error *err);
/* pre: one whole page is mapped there. */
mt_status mt_cudrv_unmap(mt_cudrv *drv, void *at, size_t bytes, mt_error *err);
/* The memory goes when the last mapping of it has gone, too. */
mt_status mt_cudrv_release(mt_cudrv *drv, mt_cupage page, mt_error *err);
/* As reserved; pre: nothing is mapped there. */
mt_status mt_cudrv_unreserve(mt_cudrv *drv, void *base, size_t bytes, mt_error *err);

#endif
