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

#define AS_SYMBOL(name) {"dlsym " #name, offsetof(driver_points, name)},

typedef struct driver_points {
    DRIVER_POINTS(AS_MEMBER)
} driver_points;

static const struct symbol {
    const char *call; /* for mt_error; the name begins after "dlsym " */
    size_t offset;
} symbols[] = {DRIVER_POINTS(AS_SYMBOL)};

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

/* The two interfaces number their errors alike. */
static mt_status
done(mt_cudrv *drv, scope *at, CUresult rc, const char *call, mt_error *err)
{
    return leave(drv->rt, at, (cudaError_t)rc, call, err);
}

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

static mt_status
take_entries(mt_cudrv *drv, mt_error *err)
{
    static const char finder[] = "dlsym cudaGetDriverEntryPointByVersion";
    void *entry = dlsym(drv->rt->lib, finder + strlen("dlsym "));
    find_entry *find;

    if (entry == NULL) return mt_fail(err, MT_EDEVICE, finder, 0);
    memcpy((void *)&find, (const void *)&entry, sizeof entry);
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        cudaError_t rc;

        entry = NULL;
        rc = find(symbols[i].call + strlen("dlsym "), &entry, VERSION, cudaEnableDefault, NULL);
        if (rc != cudaSuccess) return report(drv->rt, rc, "cudaGetDriverEntryPointByVersion", err);
        if (entry == NULL) return mt_fail(err, MT_EDEVICE, symbols[i].call, 0);
        memcpy((char *)&drv->fn + symbols[i].offset, (const void *)&entry, sizeof entry);
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
    if ((st = take_entries(drv, err)) == MT_OK)
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
    scope at;
    mt_status st = enter_context(drv, &at, err);
    CUresult rc;

    if (st != MT_OK) return st;
    rc = drv->fn.cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    st = done(drv, &at, rc, "cuMemGetAllocationGranularity", err);
    if (st == MT_OK) *out = bytes;
    return st;
}

mt_status
mt_cudrv_reserve(mt_cudrv *drv, size_t bytes, size_t align, void **out, mt_error *err)
{
    CUdeviceptr base = 0;
    scope at;
    mt_status st = enter_context(drv, &at, err);
    CUresult rc;

    if (st != MT_OK) return st;
    rc = drv->fn.cuMemAddressReserve(&base, bytes, align, 0, 0);
    st = note_asked(done(drv, &at, rc, "cuMemAddressReserve", err), bytes, err);
    if (st == MT_OK) *out = (void *)(uintptr_t)base;
    return st;
}

mt_status
mt_cudrv_create(mt_cudrv *drv, size_t bytes, mt_cupage *out, mt_error *err)
{
    CUmemAllocationProp prop = on_device(drv);
    CUmemGenericAllocationHandle page = 0;
    scope at;
    mt_status st = enter_context(drv, &at, err);
    CUresult rc;

    if (st != MT_OK) return st;
    rc = drv->fn.cuMemCreate(&page, bytes, &prop, 0);
    st = note_asked(done(drv, &at, rc, "cuMemCreate", err), bytes, err);
    if (st == MT_OK) *out = page;
    return st;
}

mt_status
mt_cudrv_map(mt_cudrv *drv, void *where, size_t bytes, mt_cupage page, mt_error *err)
{
    scope at;
    mt_status st = enter_context(drv, &at, err);

    if (st != MT_OK) return st;
    return done(drv, &at, drv->fn.cuMemMap((CUdeviceptr)(uintptr_t)where, bytes, 0, page, 0),
                "cuMemMap", err);
}

mt_status
mt_cudrv_allow(mt_cudrv *drv, void *where, size_t bytes, mt_error *err)
{
    CUmemAccessDesc desc = {.location = on_device(drv).location,
                            .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    scope at;
    mt_status st = enter_context(drv, &at, err);

    if (st != MT_OK) return st;
    return done(drv, &at, drv->fn.cuMemSetAccess((CUdeviceptr)(uintptr_t)where, bytes, &desc, 1),
                "cuMemSetAccess", err);
}

mt_status
mt_cudrv_unmap(mt_cudrv *drv, void *where, size_t bytes, mt_error *err)
{
    scope at;
    mt_status st = enter_context(drv, &at, err);

    if (st != MT_OK) return st;
    return done(drv, &at, drv->fn.cuMemUnmap((CUdeviceptr)(uintptr_t)where, bytes), "cuMemUnmap",
                err);
}

mt_status
mt_cudrv_release(mt_cudrv *drv, mt_cupage page, mt_error *err)
{
    scope at;
    mt_status st = enter_context(drv, &at, err);

    if (st != MT_OK) return st;
    return done(drv, &at, drv->fn.cuMemRelease(page), "cuMemRelease", err);
}

mt_status
mt_cudrv_unreserve(mt_cudrv *drv, void *base, size_t bytes, mt_error *err)
{
    scope at;
    mt_status st = enter_context(drv, &at, err);

    if (st != MT_OK) return st;
    return done(drv, &at, drv->fn.cuMemAddressFree((CUdeviceptr)(uintptr_t)base, bytes),
                "cuMemAddressFree", err);
}
