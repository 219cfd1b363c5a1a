/* driver.c -- how this file works.
 *
 * The entry points are looked up once, by name and version, through the runtime. Every call enters
 * a scope (scope.h), which makes the device current and so its context, calls the driver, and
 * leaves the scope with the result as an mt_error. */
#include "cuda/driver.h"

#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

#include "cuda/scope.h"

enum { VERSION = 12000 }; /* of the entry points: these signatures are those of 10.2 still */

#define DRIVER_POINTS(X)                                                                           \
    X(cuMemGetAllocationGranularity)                                                               \
    X(cuMemAddressReserve)                                                                         \
    X(cuMemAddressFree)                                                                            \
    X(cuMemCreate)                                                                                 \
    X(cuMemRelease)                                                                                \
    X(cuMemMap)                                                                                    \
    X(cuMemUnmap)                                                                                  \
    X(cuMemSetAccess)

typedef struct driver_points {
    DRIVER_POINTS(AS_MEMBER)
} driver_points;

#define TABLE driver_points
static const symbol symbols[] = {DRIVER_POINTS(AS_SYMBOL)};

/* cudaGetDriverEntryPointByVersion; its last parameter, of a type that older headers lack, is
 * optional. */
typedef cudaError_t find_entry(const char *, void **, unsigned, unsigned long long, void *);

struct mt_cudrv {
    mt_alloc mem;
    mt_cudart *rt;
    int device;
    driver_points fn;
};

/* Driver calls want the device's context to be the thread's; cudaSetDevice sees to that, also where
 * the device is the current one already. */
static mt_status
enter_context(mt_cudrv *drv, scope *at, mt_error *err)
{
    mt_cudart *rt = drv->rt;
    mt_status st = enter_relaxed(rt, drv->device, at, err);
    cudaError_t rc;

    if (st != MT_OK || at->moved) return st;
    rc = rt->fn.cudaSetDevice(drv->device);
    return rc == cudaSuccess ? MT_OK : leave(rt, at, rc, "cudaSetDevice", err);
}

/* Calls one of the driver's entry points in a scope: the mt_status of both. The two interfaces
 * number their errors alike. */
#define CALL_DRIVER(driver, err, name, ...)                                                        \
    __extension__({                                                                                \
        mt_cudrv *call_drv = (driver);                                                             \
        scope call_at;                                                                             \
        mt_status call_st = enter_context(call_drv, &call_at, (err));                              \
        if (call_st == MT_OK)                                                                      \
            call_st = leave(call_drv->rt, &call_at, (cudaError_t)call_drv->fn.name(__VA_ARGS__),   \
                            #name, (err));                                                         \
        call_st;                                                                                   \
    })

static mt_status
note_asked(mt_status st, size_t bytes, mt_error *err)
{
    if (st == MT_ENOMEM && err != NULL) err->asked = bytes;
    return st;
}

static CUmemAllocationProp
on_device(const mt_cudrv *drv)
{
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = drv->device},
    };
}

mt_status
mt_cuda_driver_entries(mt_cudart *rt, const symbol *from, size_t n, void *table, mt_error *err)
{
    static const char finder[] = "dlsym cudaGetDriverEntryPointByVersion";
    void *entry = dlsym(rt->lib, finder + strlen("dlsym "));
    find_entry *find;

    if (entry == NULL) return mt_fail(err, MT_EDEVICE, finder, 0);
    memcpy((void *)&find, (const void *)&entry, sizeof entry);
    for (; n > 0; n--, from++) {
        cudaError_t rc;

        entry = NULL;
        rc = find(from->call + strlen("dlsym "), &entry, VERSION, cudaEnableDefault, NULL);
        if (rc != cudaSuccess) return report(rt, rc, "cudaGetDriverEntryPointByVersion", err);
        if (entry == NULL) return mt_fail(err, MT_EDEVICE, from->call, 0);
        memcpy((char *)table + from->offset, (const void *)&entry, sizeof entry);
    }
    return MT_OK;
}

mt_status
mt_cudrv_open(const mt_alloc *mem, mt_cudart *rt, int device, mt_cudrv **out, mt_error *err)
{
    mt_cudrv *drv = mt_alloc_zeroed(mem, 1, sizeof *drv);
    mt_status st;

    if (drv == NULL) return mt_fail(err, MT_ENOMEM, "mt_cudrv_open", 0);
    drv->mem = *mem;
    drv->rt = rt;
    drv->device = device;
    st = mt_cuda_driver_entries(rt, symbols, sizeof symbols / sizeof *symbols, &drv->fn, err);
    if (st == MT_OK)
        *out = drv;
    else
        mt_cudrv_close(drv);
    return st;
}

void
mt_cudrv_close(mt_cudrv *drv)
{
    if (drv != NULL) drv->mem.put(drv->mem.ctx, drv, sizeof *drv);
}

mt_status
mt_cudrv_granularity(mt_cudrv *drv, size_t *out, mt_error *err)
{
    CUmemAllocationProp prop = on_device(drv);
    size_t bytes = 0;
    mt_status st = CALL_DRIVER(drv, err, cuMemGetAllocationGranularity, &bytes, &prop,
                               CU_MEM_ALLOC_GRANULARITY_MINIMUM);

    if (st == MT_OK) *out = bytes;
    return st;
}

mt_status
mt_cudrv_reserve(mt_cudrv *drv, size_t bytes, size_t align, void **out, mt_error *err)
{
    CUdeviceptr base = 0;
    mt_status st = CALL_DRIVER(drv, err, cuMemAddressReserve, &base, bytes, align, 0, 0);

    if (st == MT_OK) *out = (void *)(uintptr_t)base;
    return note_asked(st, bytes, err);
}

mt_status
mt_cudrv_create(mt_cudrv *drv, size_t bytes, mt_cupage *out, mt_error *err)
{
    CUmemAllocationProp prop = on_device(drv);
    CUmemGenericAllocationHandle page = 0;
    mt_status st = CALL_DRIVER(drv, err, cuMemCreate, &page, bytes, &prop, 0);

    if (st == MT_OK) *out = page;
    return note_asked(st, bytes, err);
}

mt_status
mt_cudrv_map(mt_cudrv *drv, void *where, size_t bytes, mt_cupage page, mt_error *err)
{
    return CALL_DRIVER(drv, err, cuMemMap, (CUdeviceptr)(uintptr_t)where, bytes, 0, page, 0);
}

mt_status
mt_cudrv_allow(mt_cudrv *drv, void *where, size_t bytes, mt_error *err)
{
    CUmemAccessDesc desc = {.location = on_device(drv).location,
                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

    return CALL_DRIVER(drv, err, cuMemSetAccess, (CUdeviceptr)(uintptr_t)where, bytes, &desc, 1);
}

mt_status
mt_cudrv_unmap(mt_cudrv *drv, void *where, size_t bytes, mt_error *err)
{
    return CALL_DRIVER(drv, err, cuMemUnmap, (CUdeviceptr)(uintptr_t)where, bytes);
}

mt_status
mt_cudrv_release(mt_cudrv *drv, mt_cupage page, mt_error *err)
{
    return CALL_DRIVER(drv, err, cuMemRelease, page);
}

mt_status
mt_cudrv_unreserve(mt_cudrv *drv, void *base, size_t bytes, mt_error *err)
{
    return CALL_DRIVER(drv, err, cuMemAddressFree, (CUdeviceptr)(uintptr_t)base, bytes);
}
