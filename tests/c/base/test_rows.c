/* Every way a 2-D tensor can lie in memory, against element-by-element addressing. */
#include <string.h>

#include "kit/check.h"
#include "core/base/rows.h"
#include "kit/rng.h"

enum { BACKING = 8192, GUARD = 0xEE };

static unsigned char backing[BACKING];

static void
fill_the_backing(void)
{
    rng r = rng_seeded(1);

    for (size_t i = 0; i < BACKING; i++)
        backing[i] = (unsigned char)rng_next(&r);
}

/* The bytes of element (r, c), by the definition in rows.h. */
static const unsigned char *
element(const mt_rows *t, size_t r, size_t c)
{
    ptrdiff_t at = (ptrdiff_t)r * t->row_stride + (ptrdiff_t)c * t->col_stride;

    return (const unsigned char *)t->data + at * (ptrdiff_t)mt_dtype_size(t->dtype);
}

static void
packs_like_its_elements(const mt_rows *t, size_t first, size_t count)
{
    static unsigned char got[BACKING];
    size_t size = mt_dtype_size(t->dtype), n = count * t->cols * size;

    memset(got, GUARD, sizeof got);
    mt_rows_pack(t, first, count, got + 8);
    for (size_t r = 0; r < count; r++)
        for (size_t c = 0; c < t->cols; c++)
            CHECK(memcmp(got + 8 + (r * t->cols + c) * size, element(t, first + r, c), size) == 0);
    CHECK(got[7] == GUARD && got[8 + n] == GUARD);
}

/* All sub-ranges of rows of a 5 x 7 tensor with these strides, for every element size. */
static void
packs_with_strides(ptrdiff_t row_stride, ptrdiff_t col_stride)
{
    static const mt_dtype dtypes[] = {MT_F64, MT_F32, MT_BF16, MT_F8_E5M2};

    for (size_t d = 0; d < 4; d++) {
        size_t middle = BACKING / 2;
        mt_rows t = {backing + middle, dtypes[d], 5, 7, row_stride, col_stride};
        for (size_t first = 0; first <= 5; first++)
            for (size_t count = 0; first + count <= 5; count++)
                packs_like_its_elements(&t, first, count);
    }
}

static void
rows_are_copied_however_they_lie(void)
{
    static const ptrdiff_t strides[][2] = {
        {7, 1},  {8, 1},   {50, 1}, {14, 2},  {15, 2}, /* packed, with gaps, every second column */
        {0, 1},  {0, 3},   {1, 0},  {0, 0},            /* an expanded row, an expanded column */
        {7, -1}, {14, -2}, {-7, 1}, {-7, -1},          /* backwards */
        {1, 5},  {1, 9},                               /* transposed */
    };

    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++)
        packs_with_strides(strides[i][0], strides[i][1]);
}

static void
one_column_ignores_its_column_stride(void)
{
    for (ptrdiff_t stride = -3; stride <= 3; stride++) {
        mt_rows t = {backing + BACKING / 2, MT_F32, 6, 1, stride, 99};
        packs_like_its_elements(&t, 0, 6);
        packs_like_its_elements(&t, 2, 3);
        CHECK(mt_rows_is_packed(&t) == (stride == 1));
    }
}

static void
one_row_ignores_its_row_stride(void)
{
    mt_rows t = {backing, MT_F16, 1, 6, 1 << 20, 1};

    CHECK(mt_rows_is_packed(&t));
    packs_like_its_elements(&t, 0, 1);
}

static void
nothing_is_copied_of_an_empty_tensor(void)
{
    unsigned char guard = GUARD;
    mt_rows no_rows = mt_rows_packed(NULL, MT_F32, 0, 4);
    mt_rows no_cols = mt_rows_packed(NULL, MT_F32, 4, 0);

    mt_rows_pack(&no_rows, 0, 0, &guard);
    mt_rows_pack(&no_cols, 0, 4, &guard);
    mt_rows_pack(&no_cols, 1, 2, &guard);
    CHECK(guard == GUARD);
}

static void
a_packed_view_says_so(void)
{
    mt_rows t = mt_rows_packed(backing, MT_BF16, 3, 4);

    CHECK(t.data == backing && t.dtype == MT_BF16 && t.rows == 3 && t.cols == 4);
    CHECK(t.row_stride == 4 && t.col_stride == 1 && mt_rows_is_packed(&t));
}

static void
a_view_with_gaps_or_repeats_is_not_packed(void)
{
    static const ptrdiff_t strides[][2] = {{5, 1}, {0, 1}, {-4, 1}, {4, -1},
                                           {4, 2}, {1, 3}, {4, 0}};

    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        mt_rows t = {backing + BACKING / 2, MT_F32, 3, 4, strides[i][0], strides[i][1]};
        CHECK(!mt_rows_is_packed(&t));
    }
}

int
main(void)
{
    fill_the_backing();
    RUN(rows_are_copied_however_they_lie);
    RUN(one_column_ignores_its_column_stride);
    RUN(one_row_ignores_its_row_stride);
    RUN(nothing_is_copied_of_an_empty_tensor);
    RUN(a_packed_view_says_so);
    RUN(a_view_with_gaps_or_repeats_is_not_packed);
    CHECK_DONE();
}
