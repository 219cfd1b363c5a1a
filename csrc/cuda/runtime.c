#define _GNU_SOURCE /* RTLD_NOLOAD */

#include "cuda/runtime.h"

#include <dlfcn.h>
#include <string.h>

#include "cuda/scope.h"

#define AS_SYMBOL(name) {"dlsym " #name, offsetof(entry_points, name)},

static const struct symbol {
    const char *call; /* for mt_error; the name begins after "dlsym " */
    size_t offset;
} symbols[] = {ENTRY_POINTS(AS_SYMBOL)};

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
    mt_cudart *rt = ctx;
    void *block = NULL;
    scope at;
    mt_status st = enter_relaxed(rt, device, &at, err);

    if (st != MT_OK) return st;
    st = leave(rt, &at, rt->fn.cudaHostAlloc(&block, bytes, cudaHostAllocPortable), "cudaHostAlloc",
               err);
    if (st == MT_OK) *out = block;
    return st;
}

static void
host_free(void *ctx, int device, void *block)
{
    mt_cudart *rt = ctx;
    scope at;

    if (block == NULL || enter_relaxed(rt, device, &at, NULL) != MT_OK) return;
    leave(rt, &at, rt->fn.cudaFreeHost(block), "cudaFreeHost", NULL);
}

static mt_status
dev_alloc(void *ctx, int device, size_t bytes, void **out, mt_error *err)
{
    mt_cudart *rt = ctx;
    void *block = NULL;
    scope at;
    mt_status st = enter_relaxed(rt, device, &at, err);

    if (st != MT_OK) return st;
    st = leave(rt, &at, rt->fn.cudaMalloc(&block, bytes), "cudaMalloc", err);
    if (st == MT_OK) *out = block;
    return st;
}

static void
dev_free(void *ctx, int device, void *block)
{
    mt_cudart *rt = ctx;
    scope at;

    if (block == NULL || enter_relaxed(rt, device, &at, NULL) != MT_OK) return;
    leave(rt, &at, rt->fn.cudaFree(block), "cudaFree", NULL);
}

static mt_status
stream_new(void *ctx, int device, void **out, mt_error *err)
{
    mt_cudart *rt = ctx;
    cudaStream_t stream = NULL;
    scope at;
    mt_status st = enter_relaxed(rt, device, &at, err);

    if (st != MT_OK) return st;
    st = leave(rt, &at, rt->fn.cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags", err);
    if (st == MT_OK) *out = stream;
    return st;
}

static void
stream_free(void *ctx, int device, void *stream)
{
    mt_cudart *rt = ctx;
    scope at;

    if (stream == NULL || enter_relaxed(rt, device, &at, NULL) != MT_OK) return;
    leave(rt, &at, rt->fn.cudaStreamDestroy(stream), "cudaStreamDestroy", NULL);
}

static mt_status
stream_wait(void *ctx, int device, void *stream, void *event, mt_error *err)
{
    mt_cudart *rt = ctx;
    scope at;
    mt_status st = enter(rt, device, &at, err);

    if (st != MT_OK) return st;
    return leave(rt, &at, rt->fn.cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent", err);
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
    mt_cudart *rt = ctx;
    cudaEvent_t event = NULL;
    scope at;
    mt_status st = enter_relaxed(rt, device, &at, err);

    if (st != MT_OK) return st;
    st = leave(rt, &at, rt->fn.cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
               "cudaEventCreateWithFlags", err);
    if (st == MT_OK) *out = event;
    return st;
}

static void
event_free(void *ctx, int device, void *event)
{
    mt_cudart *rt = ctx;
    scope at;

    if (event == NULL || enter_relaxed(rt, device, &at, NULL) != MT_OK) return;
    leave(rt, &at, rt->fn.cudaEventDestroy(event), "cudaEventDestroy", NULL);
}

static mt_status
event_record(void *ctx, int device, void *event, void *stream, mt_error *err)
{
    mt_cudart *rt = ctx;
    scope at;
    mt_status st = enter(rt, device, &at, err);

    if (st != MT_OK) return st;
    return leave(rt, &at, rt->fn.cudaEventRecord(event, stream), "cudaEventRecord", err);
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
    mt_cudart *rt = ctx;
    scope at;
    mt_status st = enter_relaxed(rt, device, &at, err);

    if (st != MT_OK) return st;
    return leave(rt, &at, rt->fn.cudaEventSynchronize(event), "cudaEventSynchronize", err);
}

static mt_status
copy(mt_cudart *rt, int device, void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
     void *stream, mt_error *err)
{
    scope at;
    mt_status st = enter(rt, device, &at, err);

    if (st != MT_OK) return st;
    return leave(rt, &at, rt->fn.cudaMemcpyAsync(dst, src, bytes, kind, stream), "cudaMemcpyAsync",
                 err);
}

static mt_status
copy_d2d(void *ctx, int device, void *dst, const void *src, size_t bytes, void *stream,
         mt_error *err)
{
    return copy(ctx, device, dst, src, bytes, cudaMemcpyDeviceToDevice, stream, err);
}

static mt_status
copy_d2h(void *ctx, int device, void *dst, const void *src, size_t bytes, void *stream,
         mt_error *err)
{
    return copy(ctx, device, dst, src, bytes, cudaMemcpyDeviceToHost, stream, err);
}

static mt_status
zero(void *ctx, int device, void *dst, size_t bytes, void *stream, mt_error *err)
{
    mt_cudart *rt = ctx;
    scope at;
    mt_status st = enter(rt, device, &at, err);

    if (st != MT_OK) return st;
    return leave(rt, &at, rt->fn.cudaMemsetAsync(dst, 0, bytes, stream), "cudaMemsetAsync", err);
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
        .zero = zero,
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
