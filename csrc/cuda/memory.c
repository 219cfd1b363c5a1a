#include "cuda/memory.h"

#include <cuda.h>

#include "cuda/scope.h"

#define CONTEXT_POINTS(X)                                                                          \
    X(cuDeviceGet)                                                                                 \
    X(cuDevicePrimaryCtxGetState)                                                                  \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuDevicePrimaryCtxRelease)                                                                   \
    X(cuCtxPushCurrent)                                                                            \
    X(cuCtxPopCurrent)                                                                             \
    X(cuThreadExchangeStreamCaptureMode)                                                           \
    X(cuMemGetInfo)

typedef struct context_points {
    CONTEXT_POINTS(AS_MEMBER)
} context_points;

#define TABLE context_points
static const symbol symbols[] = {CONTEXT_POINTS(AS_SYMBOL)};

struct mt_devmem {
    mt_alloc mem;
    mt_cudart *rt;
    bool looked, complete;
    context_points fn;
};

mt_status
mt_devmem_new(const mt_alloc *mem, mt_cudart *rt, mt_devmem **out, mt_error *err)
{
    mt_devmem *dm = mt_alloc_zeroed(mem, 1, sizeof *dm);

    if (dm == NULL) return mt_fail(err, MT_ENOMEM, "mt_devmem_new", 0);
    dm->mem = *mem;
    dm->rt = rt;
    *out = dm;
    return MT_OK;
}

void
mt_devmem_free(mt_devmem *dm)
{
    if (dm != NULL) dm->mem.put(dm->mem.ctx, dm, sizeof *dm);
}

/* Once: what is not there now will not come. */
static bool
has_entries(mt_devmem *dm)
{
    size_t n = sizeof symbols / sizeof *symbols;

    if (!dm->looked)
        dm->complete = mt_cuda_driver_entries(dm->rt, symbols, n, &dm->fn, NULL) == MT_OK;
    dm->looked = true;
    return dm->complete;
}

static bool
is_used(const mt_devmem *dm, int device, CUdevice *out)
{
    unsigned flags;
    int active = 0;

    return dm->fn.cuDeviceGet(out, device) == CUDA_SUCCESS &&
           dm->fn.cuDevicePrimaryCtxGetState(*out, &flags, &active) == CUDA_SUCCESS && active;
}

/* Relaxed, because a graph that another thread captures forbids whatever might wait for the device,
 * and is spoilt by it. */
static bool
memory_ask(const mt_devmem *dm, size_t *free, size_t *total)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool ok;

    if (dm->fn.cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS) return false;
    ok = dm->fn.cuMemGetInfo(free, total) == CUDA_SUCCESS;
    (void)dm->fn.cuThreadExchangeStreamCaptureMode(&mode);
    return ok;
}

bool
mt_devmem_read(mt_devmem *dm, int device, uint64_t *free, uint64_t *total)
{
    size_t left = 0, all = 0;
    CUcontext context;
    CUdevice dev;
    bool ok = false;

    if (!has_entries(dm) || !is_used(dm, device, &dev)) return false;
    if (dm->fn.cuDevicePrimaryCtxRetain(&context, dev) != CUDA_SUCCESS) return false;
    if (dm->fn.cuCtxPushCurrent(context) == CUDA_SUCCESS) {
        ok = memory_ask(dm, &left, &all);
        (void)dm->fn.cuCtxPopCurrent(&context);
    }
    (void)dm->fn.cuDevicePrimaryCtxRelease(dev);
    if (!ok) return false;
    *free = left;
    *total = all;
    return true;
}
