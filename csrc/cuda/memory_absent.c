#include "cuda/memory.h"

#include <stddef.h>

/* Compiled in place of memory.c where the build found no CUDA Toolkit headers. */
mt_status
mt_devmem_new(const mt_alloc *mem, mt_cudart *rt, mt_devmem **out, mt_error *err)
{
    (void)mem;
    (void)rt;
    (void)out;
    return mt_fail(err, MT_EDEVICE,
                   "devmem: this memtools was built without the CUDA Toolkit headers", 0);
}

void
mt_devmem_free(mt_devmem *dm)
{
    (void)dm;
}

bool
mt_devmem_read(mt_devmem *dm, int device, uint64_t *free, uint64_t *total)
{
    (void)dm;
    (void)device;
    (void)free;
    (void)total;
    return false;
}
