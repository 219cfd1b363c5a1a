/* runtime_absent.c -- compiled in place of all other files of this folder if the build found no
 * headers of the CUDA Toolkit. Every function that opens or makes an object fails. So there never is
 * an mt_cudart or an mt_devmem, and the other functions get NULL at most. */
#include <stddef.h>

#include "cuda/memory.h"
#include "cuda/runtime.h"
#include "cuda/store.h"

static const char not_built[] = "cudart: this memtools was built without the CUDA Toolkit headers";

mt_status
mt_cudart_open(const mt_alloc *mem, const char *path, mt_cudart **out, mt_error *err)
{
    (void)mem, (void)path, (void)out;
    return mt_fail(err, MT_EDEVICE, not_built, 0);
}

void
mt_cudart_close(mt_cudart *rt)
{
    (void)rt;
}

const mt_dev_ops *
mt_cudart_dev_ops(mt_cudart *rt)
{
    (void)rt;
    return NULL;
}

mt_status
mt_cudart_info(mt_cudart *rt, int *runtime_version, int *driver_version, int *devices,
               mt_error *err)
{
    (void)rt, (void)runtime_version, (void)driver_version, (void)devices;
    return mt_fail(err, MT_EDEVICE, not_built, 0);
}

const char *
mt_cudart_strerror(mt_cudart *rt, int native)
{
    (void)rt, (void)native;
    return not_built;
}

mt_status
mt_devmem_new(const mt_alloc *mem, mt_cudart *rt, mt_devmem **out, mt_error *err)
{
    (void)mem, (void)rt, (void)out;
    return mt_fail(err, MT_EDEVICE, not_built, 0);
}

void
mt_devmem_free(mt_devmem *dm)
{
    (void)dm;
}

bool
mt_devmem_read(mt_devmem *dm, int device, uint64_t *free, uint64_t *total)
{
    (void)dm, (void)device, (void)free, (void)total;
    return false;
}

mt_status
mt_store_cuda_new(const mt_alloc *mem, mt_cudart *rt, int device, size_t page_bytes,
                  const mt_birth *birth, mt_store_ops *out, mt_error *err)
{
    (void)mem, (void)rt, (void)device, (void)page_bytes, (void)birth, (void)out;
    return mt_fail(err, MT_EDEVICE, not_built, 0);
}
