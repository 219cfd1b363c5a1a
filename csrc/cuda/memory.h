/* memory.h -- how much memory a device has left, by the driver, without making a context.
 *
 *   the program uses the device   ─► its context is borrowed: retain, push, ask, pop, release
 *   it does not                   ─► no answer: a context would take hundreds of MB of the device
 *
 * The first reading looks the driver's calls up through the runtime, which starts the driver if it
 * is not started. The caller must know that it is: a process that forks after that cannot use CUDA
 * in its children. The thread's context and capture mode are put back. One thread at a time. */
#ifndef MT_CUDA_MEMORY_H
#define MT_CUDA_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda/runtime.h"

typedef struct mt_devmem mt_devmem;

/* Borrows rt. Calls nothing of it. *out is written on MT_OK only. MT_ENOMEM; MT_EDEVICE where not
 * built. */
mt_status mt_devmem_new(const mt_alloc *mem, mt_cudart *rt, mt_devmem **out, mt_error *err);
void mt_devmem_free(mt_devmem *dm); /* NULL is ignored */

/* Bytes that the driver has left for all processes, and all bytes of the device. False, and nothing
 * is written, if this process has no context on it or a call failed. */
bool mt_devmem_read(mt_devmem *dm, int device, uint64_t *free, uint64_t *total);

#endif
