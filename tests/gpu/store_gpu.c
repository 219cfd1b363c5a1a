/* The CUDA store on a real device: the suite of every store. test_store_gpu.py builds and runs it.
 *
 * What fails here, call by call, is the allocator: a driver cannot be told to. */
#include "cuda/store.h"

#include <dlfcn.h>

#include "kit/faulty.h"
#include "kit/store_suite.h"

enum { HOST_TO_DEVICE = 1 }; /* as cudaMemcpyKind has it */

typedef int copy_call(void *dst, const void *src, size_t bytes, int kind, void *stream);

typedef struct device {
    mt_cudart *rt;
    const mt_dev_ops *ops;
    void *event;
    copy_call *copy; /* the runtime's own, since a store has no use for copies from the host */
    faulty heap;
    long fired;
} device;

static mt_status
make(void *ctx, mt_store_ops *out)
{
    device *d = ctx;
    mt_alloc mem = faulty_alloc(&d->heap);

    return mt_store_cuda_new(&mem, d->rt, 0, 0, out, NULL);
}

static void
finish(device *d)
{
    CHECK(d->ops->event_record(d->ops->ctx, 0, d->event, NULL, NULL) == MT_OK);
    CHECK(d->ops->event_wait(d->ops->ctx, 0, d->event, NULL) == MT_OK);
}

static void
peek(void *ctx, void *to, const void *at, size_t bytes)
{
    device *d = ctx;

    CHECK(d->ops->copy_d2h(d->ops->ctx, 0, to, at, bytes, NULL, NULL) == MT_OK);
    finish(d);
}

static void
poke(void *ctx, void *at, const void *from, size_t bytes)
{
    device *d = ctx;

    CHECK(d->copy(at, from, bytes, HOST_TO_DEVICE, NULL) == 0);
    finish(d);
}

static void
fail_at(void *ctx, long n)
{
    device *d = ctx;

    if (d->heap.fail_at >= 0 && d->heap.calls > d->heap.fail_at) d->fired++;
    d->heap.fail_at = n < 0 ? -1 : d->heap.calls + n;
}

static long
fired(void *ctx)
{
    const device *d = ctx;

    return d->fired + (d->heap.fail_at >= 0 && d->heap.calls > d->heap.fail_at);
}

static long
live(void *ctx)
{
    return ((device *)ctx)->heap.live;
}

static void
open_device(device *d)
{
    int runtime, driver, devices;
    void *lib, *copy;

    CHECK(mt_cudart_open(&mt_alloc_libc, NULL, &d->rt, NULL) == MT_OK);
    CHECK(mt_cudart_info(d->rt, &runtime, &driver, &devices, NULL) == MT_OK && devices > 0);
    d->ops = mt_cudart_dev_ops(d->rt);
    CHECK(d->ops->event_new(d->ops->ctx, 0, &d->event, NULL) == MT_OK);
    lib = dlopen(runtime >= 13000 ? "libcudart.so.13" : "libcudart.so.12", RTLD_NOW);
    CHECK(lib != NULL && (copy = dlsym(lib, "cudaMemcpyAsync")) != NULL);
    memcpy((void *)&d->copy, (const void *)&copy, sizeof copy);
}

int
main(void)
{
    device d = {.heap = {.fail_at = -1}};
    const store_bench on = {.make = make,
                            .peek = peek,
                            .poke = poke,
                            .fail_at = fail_at,
                            .fired = fired,
                            .live = live,
                            .exact = true,
                            .ctx = &d};

    open_device(&d);
    store_suite(&on);
    d.ops->event_free(d.ops->ctx, 0, d.event);
    mt_cudart_close(d.rt);
    CHECK_DONE();
}
