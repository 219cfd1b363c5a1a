/* cudarig.h -- a CUDA store over the fake driver, on device 1, while the thread uses device 0.
 *
 * MT_FAKE_CUDART names libfakecudart.so. */
#ifndef MT_TESTS_KIT_CUDARIG_H
#define MT_TESTS_KIT_CUDARIG_H

#include "cuda/store.h"

#include "../../fake_cuda/fakecudart.h"
#include "kit/check.h"
#include "os/base/forks.h"
#include "kit/faulty.h"

enum { PAGE = 4096, OUT_OF_MEMORY = 2, LAUNCH_FAILURE = 719 }; /* codes as cudaError_t has them */

static fake_cuda fake;
static mt_cudart *rt;
static faulty heap = {.fail_at = -1};

typedef struct rig {
    mt_store_ops ops;
    char *base; /* of one arena */
} rig;

static inline mt_status
make(size_t page_bytes, mt_store_ops *out, mt_error *err)
{
    mt_alloc mem = faulty_alloc(&heap);
    mt_birth birth = mt_birth_now();

    return mt_store_cuda_new(&mem, rt, 1, page_bytes, &birth, out, err);
}

static inline rig
rig_of(size_t pages)
{
    void *base = NULL;
    rig r;

    fake.fake_cuda_reset();
    fake.fake_cuda_set_granularity(PAGE);
    CHECK(make(0, &r.ops, NULL) == MT_OK);
    CHECK(r.ops.extend(r.ops.ctx, pages * PAGE, &base, NULL) == MT_OK);
    r.base = base;
    return r;
}

/* Whatever happened, nothing was done that CUDA forbids; and the thread is as it was, unless the
 * call that failed is the one that puts it back. */
static inline void
check_manners(void)
{
    CHECK(fake.fake_cuda_misuses() == 0 && fake.fake_cuda_busy_frees() == 0);
    CHECK(fake.fake_cuda_spoiled_captures() == 0 && fake.fake_cuda_last_error() == 0);
    if (fake.fake_cuda_faults() > 0) return;
    CHECK(fake.fake_cuda_device() == 0 && !fake.fake_cuda_relaxed());
}

static inline void
rig_close(rig *r)
{
    r->ops.close(r->ops.ctx);
    check_manners();
    CHECK(fake.fake_cuda_live() == 0 && heap.live == 0);
}

static inline mt_status
take(const rig *r, size_t page, size_t n, mt_error *err)
{
    return r->ops.take(r->ops.ctx, page * PAGE, n * PAGE, err);
}

static inline mt_status
map(const rig *r, size_t at, size_t page, size_t n, mt_error *err)
{
    return r->ops.map(r->ops.ctx, r->base + at * PAGE, n * PAGE, page * PAGE, MT_MAP_SHARED, err);
}

static inline mt_status
map_zero(const rig *r, size_t at, size_t n, mt_error *err)
{
    return r->ops.map_zero(r->ops.ctx, r->base + at * PAGE, n * PAGE, err);
}

static inline void
unmap(const rig *r, size_t at, size_t n)
{
    r->ops.unmap(r->ops.ctx, r->base + at * PAGE, n * PAGE);
}

static inline void
drop(const rig *r, size_t page, size_t n)
{
    r->ops.drop(r->ops.ctx, page * PAGE, n * PAGE);
}

static inline void
take_and_map(const rig *r, size_t n)
{
    CHECK(take(r, 0, n, NULL) == MT_OK && map(r, 0, 0, n, NULL) == MT_OK);
}

static inline char *
window(const rig *r, size_t page)
{
    void *at = NULL;

    CHECK(r->ops.window(r->ops.ctx, page * PAGE, PAGE, &at, NULL) == MT_OK);
    return at;
}

/* A kernel that writes to the page at these addresses, some time. */
static inline void
write_later(const rig *r, size_t at, char value, void *stream)
{
    fake.fake_cuda_set_device(1); /* whose default stream NULL is */
    fake.fake_cuda_write(r->base + at * PAGE, &value, 1, stream);
    fake.fake_cuda_set_device(0);
}

static inline void *
new_stream(void)
{
    void *stream;

    fake.fake_cuda_set_device(1);
    stream = fake.fake_cuda_stream();
    fake.fake_cuda_set_device(0);
    return stream;
}

static inline char
read_byte(const char *at)
{
    fake.fake_cuda_run_all();
    return *at;
}

static inline mt_status
use(const rig *r, void *stream)
{
    return r->ops.use_stream(r->ops.ctx, stream, NULL);
}

static inline void
rig_open_fake(void)
{
    const char *path = getenv("MT_FAKE_CUDART");

    CHECK(path != NULL && fake_cuda_load(path, &fake));
    CHECK(mt_cudart_open(&mt_alloc_libc, path, &rt, NULL) == MT_OK);
}

#endif
