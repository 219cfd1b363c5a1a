/* scope.h -- the runtime's entry points, and a scope around each use of them; for csrc/cuda
 * alone.
 *
 *   enter ──► the thread's device is ours, its capture mode relaxed ──► calls
 *   leave ──► both are as they were before
 */
#ifndef MT_CUDA_SCOPE_H
#define MT_CUDA_SCOPE_H

/* Entry points without a suffix: to them NULL is the legacy default stream, as it is to torch. */
#undef CUDA_API_PER_THREAD_DEFAULT_STREAM

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#include "cuda/runtime.h"

/* All of these exist, with these signatures, in CUDA 11 to 13 and are not versioned by macros. */
#define ENTRY_POINTS(X)                                                                            \
    X(cudaRuntimeGetVersion)                                                                       \
    X(cudaDriverGetVersion)                                                                        \
    X(cudaGetDeviceCount)                                                                          \
    X(cudaGetDevice)                                                                               \
    X(cudaSetDevice)                                                                               \
    X(cudaGetErrorString)                                                                          \
    X(cudaGetLastError)                                                                            \
    X(cudaThreadExchangeStreamCaptureMode)                                                         \
    X(cudaHostAlloc)                                                                               \
    X(cudaFreeHost)                                                                                \
    X(cudaMalloc)                                                                                  \
    X(cudaFree)                                                                                    \
    X(cudaStreamCreateWithFlags)                                                                   \
    X(cudaStreamDestroy)                                                                           \
    X(cudaStreamWaitEvent)                                                                         \
    X(cudaStreamIsCapturing)                                                                       \
    X(cudaEventCreateWithFlags)                                                                    \
    X(cudaEventDestroy)                                                                            \
    X(cudaEventRecord)                                                                             \
    X(cudaEventQuery)                                                                              \
    X(cudaEventSynchronize)                                                                        \
    X(cudaMemcpyAsync)                                                                             \
    X(cudaMemsetAsync)

#define AS_MEMBER(name) __typeof__(name) *name; /* NOLINT(bugprone-macro-parentheses) */
#define AS_SYMBOL(name) {"dlsym " #name, offsetof(TABLE, name)},

/* Where in a table of entry points the one of this name belongs. A file that lists them by AS_SYMBOL
 * defines TABLE as the table's type. */
typedef struct symbol {
    const char *call; /* for mt_error; the name begins after "dlsym " */
    size_t offset;
} symbol;

typedef struct entry_points {
    ENTRY_POINTS(AS_MEMBER)
} entry_points;

struct mt_cudart {
    mt_alloc mem;
    void *lib;
    entry_points fn;
    mt_dev_ops ops;
};

/* What a call changed in its thread and puts back. */
typedef struct scope {
    int device;
    bool moved;
    enum cudaStreamCaptureMode mode;
    bool relaxed;
} scope;

static inline mt_status
report(mt_cudart *rt, cudaError_t rc, const char *call, mt_error *err)
{
    if (rc == cudaSuccess) return MT_OK;
    (void)rt->fn.cudaGetLastError(); /* or torch would blame its next kernel launch for it */
    return mt_fail(err, rc == cudaErrorMemoryAllocation ? MT_ENOMEM : MT_EDEVICE, call, (int)rc);
}

static inline mt_status
enter(mt_cudart *rt, int device, scope *at, mt_error *err)
{
    mt_status st;

    *at = (scope){.device = device};
    st = report(rt, rt->fn.cudaGetDevice(&at->device), "cudaGetDevice", err);
    if (st != MT_OK || at->device == device) return st;
    st = report(rt, rt->fn.cudaSetDevice(device), "cudaSetDevice", err);
    at->moved = st == MT_OK;
    return st;
}

/* Puts the thread back as it was, which was valid a moment ago: what fails here is not reported. */
static inline mt_status
leave(mt_cudart *rt, scope *at, cudaError_t rc, const char *call, mt_error *err)
{
    mt_status st = report(rt, rc, call, err);

    if (at->relaxed) report(rt, rt->fn.cudaThreadExchangeStreamCaptureMode(&at->mode), "", NULL);
    if (at->moved) report(rt, rt->fn.cudaSetDevice(at->device), "", NULL);
    return st;
}

/* For calls that CUDA forbids while any thread captures a graph in the global mode (torch's), on
 * pain of spoiling that capture: allocations and looking at events. They concern our memory and
 * events alone, which is what the relaxed mode is for. */
static inline mt_status
enter_relaxed(mt_cudart *rt, int device, scope *at, mt_error *err)
{
    mt_status st = enter(rt, device, at, err);
    cudaError_t rc;

    if (st != MT_OK) return st;
    at->mode = cudaStreamCaptureModeRelaxed;
    rc = rt->fn.cudaThreadExchangeStreamCaptureMode(&at->mode);
    at->relaxed = rc == cudaSuccess;
    return at->relaxed ? MT_OK : leave(rt, at, rc, "cudaThreadExchangeStreamCaptureMode", err);
}

/* Enters a scope, calls one of the runtime's entry points and leaves the scope: the mt_status of all
 * three. `how` is enter or enter_relaxed. A statement expression, which gcc and clang know. */
#define CALL_IN(how, runtime, device, err, name, ...)                                              \
    __extension__({                                                                                \
        mt_cudart *call_rt = (runtime);                                                            \
        scope call_at;                                                                             \
        mt_status call_st = how(call_rt, (device), &call_at, (err));                               \
        if (call_st == MT_OK)                                                                      \
            call_st = leave(call_rt, &call_at, call_rt->fn.name(__VA_ARGS__), #name, (err));       \
        call_st;                                                                                   \
    })
#define CALL(ctx, device, err, ...)         CALL_IN(enter, ctx, device, err, __VA_ARGS__)
#define CALL_RELAXED(ctx, device, err, ...) CALL_IN(enter_relaxed, ctx, device, err, __VA_ARGS__)

/* Fills a table with n of the driver's entry points, as the runtime knows them
 * (cudaGetDriverEntryPointByVersion); in driver.c. MT_EDEVICE: one of them, or that, is missing. */
mt_status mt_cuda_driver_entries(mt_cudart *rt, const symbol *from, size_t n, void *table,
                                 mt_error *err);

#endif
