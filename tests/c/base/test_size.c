/* Size arithmetic against 128-bit arithmetic, and what stands right on it: zeroed blocks. */
#include <string.h>

#include "kit/check.h"
#include "core/base/alloc.h"
#include "core/base/size.h"
#include "core/base/status.h"
#include "kit/faulty.h"

typedef unsigned __int128 wide;

static const size_t corners[] = {
    0,
    1,
    2,
    3,
    7,
    63,
    64,
    65,
    4095,
    4096,
    0xFFFFFFFF,
    1ull << 32,
    0x100000001u,
    SIZE_MAX / 3,
    1ull << 62,
    1ull << 63,
    SIZE_MAX / 2,
    SIZE_MAX - 64,
    SIZE_MAX - 63,
    SIZE_MAX - 1,
    SIZE_MAX,
};
enum { CORNERS = sizeof corners / sizeof *corners };

static void
holds(bool fits, size_t got, wide truth)
{
    CHECK(fits == (truth <= SIZE_MAX));
    CHECK(got == (fits ? (size_t)truth : 0xDEAD)); /* left alone when it does not fit */
}

static void
sums_are_exact_or_refused(void)
{
    for (size_t i = 0; i < CORNERS; i++)
        for (size_t j = 0; j < CORNERS; j++) {
            size_t got = 0xDEAD;
            bool fits = mt_size_add(corners[i], corners[j], &got);
            holds(fits, got, (wide)corners[i] + corners[j]);
        }
}

static void
products_are_exact_or_refused(void)
{
    for (size_t i = 0; i < CORNERS; i++)
        for (size_t j = 0; j < CORNERS; j++) {
            size_t got = 0xDEAD;
            bool fits = mt_size_mul(corners[i], corners[j], &got);
            holds(fits, got, (wide)corners[i] * corners[j]);
        }
}

static void
aligning_up_is_exact_or_refused(void)
{
    for (size_t i = 0; i < CORNERS; i++)
        for (unsigned bit = 0; bit < 64; bit++) {
            size_t unit = (size_t)1 << bit, got = 0xDEAD;
            bool fits = mt_size_align_up(corners[i], unit, &got);
            holds(fits, got, ((wide)corners[i] + unit - 1) / unit * unit);
        }
}

static void
min_and_max_order_two_sizes(void)
{
    CHECK(mt_size_min(1, 2) == 1 && mt_size_min(2, 1) == 1 && mt_size_min(5, 5) == 5);
    CHECK(mt_size_max(1, 2) == 2 && mt_size_max(2, 1) == 2 && mt_size_max(0, SIZE_MAX) == SIZE_MAX);
}

static void
a_zeroed_block_is_zero(void)
{
    faulty f = {.fail_at = -1};
    mt_alloc mem = faulty_alloc(&f);
    static const unsigned char zeros[7 * 13];
    void *block = mt_alloc_zeroed(&mem, 7, 13);

    CHECK(block != NULL && memcmp(block, zeros, sizeof zeros) == 0);
    mem.put(mem.ctx, block, 7 * 13);
    CHECK(f.live == 0);
}

static void
a_zeroed_block_that_cannot_be_is_null(void)
{
    faulty f = {.fail_at = 0};
    mt_alloc mem = faulty_alloc(&f);

    CHECK(mt_alloc_zeroed(&mem, SIZE_MAX / 2, 3) == NULL);
    CHECK(mt_alloc_zeroed(&mem, 0, 8) == NULL && mt_alloc_zeroed(&mem, 8, 0) == NULL);
    CHECK(f.calls == 0); /* none of these asks the allocator */
    CHECK(mt_alloc_zeroed(&mem, 1, 1) == NULL && f.calls == 1 && f.live == 0);
}

static void
libc_blocks_come_and_go(void)
{
    void *block = mt_alloc_libc.get(mt_alloc_libc.ctx, 100);

    CHECK(block != NULL);
    memset(block, 1, 100);
    mt_alloc_libc.put(mt_alloc_libc.ctx, block, 100);
    mt_alloc_libc.put(mt_alloc_libc.ctx, NULL, 100);
}

static void
a_failure_fills_the_error_and_may_have_none_to_fill(void)
{
    mt_error err;

    CHECK(mt_fail(&err, MT_ENOMEM, "mmap", 12) == MT_ENOMEM);
    CHECK(err.status == MT_ENOMEM && err.native == 12 && strcmp(err.call, "mmap") == 0);
    CHECK(mt_fail_limit(&err, 3, 2, 4) == MT_ELIMIT);
    CHECK(err.status == MT_ELIMIT && err.asked == 3 && err.used == 2 && err.limit == 4);
    CHECK(err.native == 0 && err.call == NULL && err.detail == NULL); /* nothing of before */
    CHECK(mt_fail_shape(&err, MT_SHAPE_ROWS, 9, 8) == MT_ESHAPE);
    CHECK(err.status == MT_ESHAPE && err.asked == 9 && err.limit == 8 && err.used == 0);
    CHECK(mt_fail_format(&err, "short") == MT_EFORMAT);
    CHECK(err.status == MT_EFORMAT && strcmp(err.detail, "short") == 0 && err.asked == 0);
    CHECK(mt_fail(NULL, MT_EAGAIN, "x", 0) == MT_EAGAIN);
    CHECK(mt_fail_limit(NULL, 1, 1, 1) == MT_ELIMIT &&
          mt_fail_shape(NULL, MT_SHAPE_ROWS, 1, 1) == MT_ESHAPE);
    CHECK(mt_fail_format(NULL, "x") == MT_EFORMAT);
}

static void
every_status_has_its_own_name(void)
{
    for (int a = MT_OK; a <= MT_EAGAIN; a++) {
        CHECK(strncmp(mt_status_name((mt_status)a), "MT_", 3) == 0);
        for (int b = MT_OK; b < a; b++)
            CHECK(strcmp(mt_status_name((mt_status)a), mt_status_name((mt_status)b)) != 0);
    }
}

int
main(void)
{
    RUN(sums_are_exact_or_refused);
    RUN(products_are_exact_or_refused);
    RUN(aligning_up_is_exact_or_refused);
    RUN(min_and_max_order_two_sizes);
    RUN(a_zeroed_block_is_zero);
    RUN(a_zeroed_block_that_cannot_be_is_null);
    RUN(libc_blocks_come_and_go);
    RUN(a_failure_fills_the_error_and_may_have_none_to_fill);
    RUN(every_status_has_its_own_name);
    CHECK_DONE();
}
