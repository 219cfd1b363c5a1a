#include "cuda/memory.h"

#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

#include "cuda/scope.h"

enum { VERSION = 12000 }; /* of the entry points: these signatures are those of 11.0 still */

#define CONTEXT_POINTS(X)                                                                          \
    X(cuDeviceGet)                                                                                 \
    X(cuDevicePrimaryCtxGetState)                                                                  \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuDevicePrimaryCtxRelease)                                                                   \
    X(cuCtxPushCurrent)                                                                            \
    X(cuCtxPopCurrent)                                                                             \
    X(cuThreadExchangeStreamCaptureMode)                                                           \
    X(cuMemGetInfo)

#define AS_SYMBOL(name) {#name, offsetof(context_points, name)},

typedef struct context_points {
    CONTEXT_POINTS(AS_MEMBER)
} context_points;

static const struct symbol {
    const char *name;
    size_t offset;
} symbols[] = {CONTEXT_POINTS(AS_SYMBOL)};

/* As in driver.c. */
typedef cudaError_t find_entry(const char *, void **, unsigned, unsigned long long, void *);

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

static bool
take_entries(mt_devmem *dm)
{
    void *entry = dlsym(dm->rt->lib, "cudaGetDriverEntryPointByVersion");
    find_entry *find;

    if (entry == NULL) return false;
    memcpy((void *)&find, (const void *)&entry, sizeof entry);
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        cudaError_t rc;

        entry = NULL;
        rc = find(symbols[i].name, &entry, VERSION, cudaEnableDefault, NULL);
        if (report(dm->rt, rc, "", NULL) != MT_OK || entry == NULL) return false;
        memcpy((char *)&dm->fn + symbols[i].offset, (const void *)&entry, sizeof entry);
    }
    return true;
}

/* Once: what is not there now will not come. */
static bool
has_entries(mt_devmem *dm)
{
    if (!dm->looked) dm->complete = take_entries(dm);
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
ask(const mt_devmem *dm, size_t *free, size_t *total)
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
        ok = ask(dm, &left, &all);
        (void)dm->fn.cuCtxPopCurrent(&context);
    }
    (void)dm->fn.cuDevicePrimaryCtxRelease(dev);
    if (!ok) return false;
    *free = left;
    *total = all;
    return true;
}
