#include "cuda/store.h"

/* Compiled in place of driver.c and store.c where the build found no CUDA Toolkit headers. */
mt_status
mt_store_cuda_new(const mt_alloc *mem, mt_cudart *rt, int device, size_t page_bytes,
                  mt_store_ops *out, mt_error *err)
{
    (void)mem;
    (void)rt;
    (void)device;
    (void)page_bytes;
    (void)out;
    return mt_fail(err, MT_EDEVICE,
                   "store: this memtools was built without the CUDA Toolkit headers", 0);
}
