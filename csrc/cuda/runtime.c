/* runtime.c -- how this file works.
 *
 * The library is found and its entry points are taken at run time. Each function of the device
 * table enters a scope (scope.h), calls the runtime and leaves the scope, which puts the thread's
 * device and capture mode back and turns the result into an mt_error. */
#define _GNU_SOURCE /* RTLD_NOLOAD */

#include "cuda/runtime.h"

#include <dlfcn.h>
#include <string.h>

#include "cuda/scope.h"

#define TABLE entry_points
static const symbol symbols[] = {ENTRY_POINTS(AS_SYMBOL)};

/* leave, where the code `answer` is one of the call's answers, not a failure. */
static mt_status
leave_unless(mt_cudart *rt, scope *at, cudaError_t rc, cudaError_t answer, const char *call,
             mt_error *err)
{
    mt_status st = leave(rt, at, rc, call, rc == answer ? NULL : err);

    return rc == answer ? MT_OK : st;
}

static mt_status
host_alloc(void *ctx, int device, size_t bytes, void **out, mt_error *err)
{
    void *block = NULL;
    mt_status st =
        CALL_RELAXED(ctx, device, err, cudaHostAlloc, &block, bytes, cudaHostAllocPortable);

    if (st == MT_OK) *out = block;
    return st;
}

static void
host_free(void *ctx, int device, void *block)
{
    if (block != NULL) (void)CALL_RELAXED(ctx, device, NULL, cudaFreeHost, block);
}

static mt_status
dev_alloc(void *ctx, int device, size_t bytes, void **out, mt_error *err)
{
    void *block = NULL;
    mt_status st = CALL_RELAXED(ctx, device, err, cudaMalloc, &block, bytes);

    if (st == MT_OK) *out = block;
    return st;
}

static void
dev_free(void *ctx, int device, void *block)
{
    if (block != NULL) (void)CALL_RELAXED(ctx, device, NULL, cudaFree, block);
}

static mt_status
stream_new(void *ctx, int device, void **out, mt_error *err)
{
    cudaStream_t stream = NULL;
    mt_status st =
        CALL_RELAXED(ctx, device, err, cudaStreamCreateWithFlags, &stream, cudaStreamNonBlocking);

    if (st == MT_OK) *out = stream;
    return st;
}

static void
stream_free(void *ctx, int device, void *stream)
{
    if (stream != NULL) (void)CALL_RELAXED(ctx, device, NULL, cudaStreamDestroy, stream);
}

static mt_status
stream_wait(void *ctx, int device, void *stream, void *event, mt_error *err)
{
    return CALL(ctx, device, err, cudaStreamWaitEvent, stream, event, 0);
}

static mt_status
stream_capturing(void *ctx, int device, void *stream, bool *out, mt_error *err)
{
    mt_cudart *rt = ctx;
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    scope at;
    mt_status st = enter(rt, device, &at, err);
    cudaError_t rc;

    if (st != MT_OK) return st;
    rc = rt->fn.cudaStreamIsCapturing(stream, &status);
    /* The default stream, while a stream that synchronises with it is being captured: work on it
     * would spoil that capture. */
    st = leave_unless(rt, &at, rc, cudaErrorStreamCaptureImplicit, "cudaStreamIsCapturing", err);
    if (st == MT_OK) *out = rc != cudaSuccess || status != cudaStreamCaptureStatusNone;
    return st;
}

static mt_status
event_new(void *ctx, int device, void **out, mt_error *err)
{
    cudaEvent_t event = NULL;
    mt_status st =
        CALL_RELAXED(ctx, device, err, cudaEventCreateWithFlags, &event, cudaEventDisableTiming);

    if (st == MT_OK) *out = event;
    return st;
}

static void
event_free(void *ctx, int device, void *event)
{
    if (event != NULL) (void)CALL_RELAXED(ctx, device, NULL, cudaEventDestroy, event);
}

static mt_status
event_record(void *ctx, int device, void *event, void *stream, mt_error *err)
{
    return CALL(ctx, device, err, cudaEventRecord, event, stream);
}

static mt_status
event_done(void *ctx, int device, void *event, bool *out, mt_error *err)
{
    mt_cudart *rt = ctx;
    scope at;
    mt_status st = enter_relaxed(rt, device, &at, err);
    cudaError_t rc;

    if (st != MT_OK) return st;
    rc = rt->fn.cudaEventQuery(event);
    st = leave_unless(rt, &at, rc, cudaErrorNotReady, "cudaEventQuery", err);
    if (st == MT_OK) *out = rc == cudaSuccess;
    return st;
}

static mt_status
event_wait(void *ctx, int device, void *event, mt_error *err)
{
    return CALL_RELAXED(ctx, device, err, cudaEventSynchronize, event);
}

static mt_status
copy_d2d(void *ctx, int device, void *dst, const void *src, size_t bytes, void *stream,
         mt_error *err)
{
    return CALL(ctx, device, err, cudaMemcpyAsync, dst, src, bytes, cudaMemcpyDeviceToDevice,
                stream);
}

static mt_status
copy_d2h(void *ctx, int device, void *dst, const void *src, size_t bytes, void *stream,
         mt_error *err)
{
    return CALL(ctx, device, err, cudaMemcpyAsync, dst, src, bytes, cudaMemcpyDeviceToHost, stream);
}

static mt_status
runtime_zero(void *ctx, int device, void *dst, size_t bytes, void *stream, mt_error *err)
{
    return CALL(ctx, device, err, cudaMemsetAsync, dst, 0, bytes, stream);
}

static mt_dev_ops
dev_ops(mt_cudart *rt)
{
    return (mt_dev_ops){
        .host_alloc = host_alloc,
        .host_free = host_free,
        .dev_alloc = dev_alloc,
        .dev_free = dev_free,
        .stream_new = stream_new,
        .stream_free = stream_free,
        .stream_wait = stream_wait,
        .stream_capturing = stream_capturing,
        .event_new = event_new,
        .event_free = event_free,
        .event_record = event_record,
        .event_done = event_done,
        .event_wait = event_wait,
        .copy_d2d = copy_d2d,
        .copy_d2h = copy_d2h,
        .zero = runtime_zero,
        .ctx = rt,
    };
}

static void *
find_library(const char *path)
{
    static const char *const names[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
    static const int flags[] = {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL};
    void *lib = NULL;

    if (path != NULL) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (size_t how = 0; how < sizeof flags / sizeof *flags; how++)
        for (size_t i = 0; lib == NULL && i < sizeof names / sizeof *names; i++)
            lib = dlopen(names[i], flags[how]);
    return lib;
}

static mt_status
take_symbols(mt_cudart *rt, mt_error *err)
{
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *entry = dlsym(rt->lib, symbols[i].call + strlen("dlsym "));

        if (entry == NULL) return mt_fail(err, MT_EDEVICE, symbols[i].call, 0);
        memcpy((char *)&rt->fn + symbols[i].offset, (const void *)&entry, sizeof entry);
    }
    return MT_OK;
}

mt_status
mt_cudart_open(const mt_alloc *mem, const char *path, mt_cudart **out, mt_error *err)
{
    mt_cudart *rt = mt_alloc_zeroed(mem, 1, sizeof *rt);
    mt_status st;

    if (rt == NULL) return mt_fail(err, MT_ENOMEM, "mt_cudart_open", 0);
    rt->mem = *mem;
    rt->ops = dev_ops(rt);
    rt->lib = find_library(path);
    st = rt->lib != NULL ? take_symbols(rt, err) : mt_fail(err, MT_EDEVICE, "dlopen libcudart", 0);
    if (st != MT_OK) {
        mt_cudart_close(rt);
        return st;
    }
    *out = rt;
    return MT_OK;
}

void
mt_cudart_close(mt_cudart *rt)
{
    mt_alloc mem;

    if (rt == NULL) return;
    if (rt->lib != NULL) dlclose(rt->lib);
    mem = rt->mem;
    mem.put(mem.ctx, rt, sizeof *rt);
}

const mt_dev_ops *
mt_cudart_dev_ops(mt_cudart *rt)
{
    return &rt->ops;
}

mt_status
mt_cudart_info(mt_cudart *rt, int *runtime_version, int *driver_version, int *devices,
               mt_error *err)
{
    int runtime = 0, driver = 0, count = 0;
    cudaError_t rc;
    mt_status st;
    bool none;

    st = report(rt, rt->fn.cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion", err);
    if (st != MT_OK) return st;
    st = report(rt, rt->fn.cudaDriverGetVersion(&driver), "cudaDriverGetVersion", err);
    if (st != MT_OK) return st;
    rc = rt->fn.cudaGetDeviceCount(&count);
    none = rc == cudaErrorNoDevice || rc == cudaErrorInsufficientDriver;
    st = report(rt, rc, "cudaGetDeviceCount", none ? NULL : err);
    if (st != MT_OK && !none) return st;
    *runtime_version = runtime;
    *driver_version = driver;
    *devices = none ? 0 : count;
    return MT_OK;
}

const char *
mt_cudart_strerror(mt_cudart *rt, int native)
{
    return rt->fn.cudaGetErrorString((cudaError_t)native);
}
