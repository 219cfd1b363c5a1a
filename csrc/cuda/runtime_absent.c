#include "cuda/runtime.h"

#include <stddef.h>

/* Compiled in place of runtime.c where the build found no CUDA Toolkit headers. open() never gives
 * out an mt_cudart, so the other functions see NULL at most. */
static const char not_built[] = "cudart: this memtools was built without the CUDA Toolkit headers";

mt_status
mt_cudart_open(const mt_alloc *mem, const char *path, mt_cudart **out, mt_error *err)
{
    (void)mem;
    (void)path;
    (void)out;
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
    (void)rt;
    (void)runtime_version;
    (void)driver_version;
    (void)devices;
    return mt_fail(err, MT_EDEVICE, not_built, 0);
}

const char *
mt_cudart_strerror(mt_cudart *rt, int native)
{
    (void)rt;
    (void)native;
    return not_built;
}
