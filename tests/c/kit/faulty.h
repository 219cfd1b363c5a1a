/* faulty.h -- an allocator and an address-space backend whose n-th call fails.
 *
 *     for (fail_at = 0;; fail_at++) { arm; run the operation; if it succeeded, stop;
 *                                     otherwise nothing may be live and the object unchanged }
 *
 * Both count live blocks, so that a test can say `live == 0`. */
#ifndef MT_TESTS_KIT_FAULTY_H
#define MT_TESTS_KIT_FAULTY_H

#include <stdlib.h>
#include <string.h>

#include "core/base/alloc.h"
#include "core/port/vmem.h"

typedef struct faulty {
    long calls;       /* made so far */
    long fail_at;     /* the call that fails; -1 for none */
    long live;        /* blocks not given back */
    size_t forgotten; /* bytes, ever */
} faulty;

static inline int
faulty_fails(faulty *f)
{
    return f->calls++ == f->fail_at;
}

/* Defines a system call that answers `failed`, with errno set, where `fails()` says so. */
#define FAULTY_CALL(type, name, params, fails, failed, real)                                       \
    static inline type name params                                                                 \
    {                                                                                              \
        return fails() ? (failed) : real;                                                          \
    }

static inline void *
faulty_get(void *ctx, size_t bytes)
{
    faulty *f = ctx;
    void *block = faulty_fails(f) ? NULL : malloc(bytes);

    if (block != NULL) {
        memset(block, 0xA5, bytes); /* nobody may rely on zeros */
        f->live++;
    }
    return block;
}

static inline void
faulty_put(void *ctx, void *block, size_t bytes)
{
    faulty *f = ctx;

    if (block == NULL) return;
    memset(block, 0x5A, bytes);
    f->live--;
    free(block);
}

static inline mt_status
faulty_reserve(void *ctx, size_t bytes, void **out, mt_error *err)
{
    faulty *f = ctx;
    void *block = faulty_fails(f) ? NULL : calloc(1, bytes);

    if (block == NULL) return mt_fail(err, MT_ENOMEM, "reserve", 12);
    f->live++;
    *out = block;
    return MT_OK;
}

static inline void
faulty_release(void *ctx, void *base, size_t bytes)
{
    (void)bytes;
    if (base == NULL) return;
    ((faulty *)ctx)->live--;
    free(base);
}

static inline void
faulty_forget(void *ctx, void *at, size_t bytes)
{
    ((faulty *)ctx)->forgotten += bytes;
    memset(at, 0x5A, bytes);
}

static inline mt_alloc
faulty_alloc(faulty *f)
{
    return (mt_alloc){.get = faulty_get, .put = faulty_put, .ctx = f};
}

static inline mt_vmem_ops
faulty_vmem(faulty *f)
{
    return (mt_vmem_ops){
        .reserve = faulty_reserve, .release = faulty_release, .forget = faulty_forget, .ctx = f};
}

#endif
