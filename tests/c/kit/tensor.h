/* tensor.h -- small random tensors of gates in every dtype and memory layout.
 *
 * The block is allocated to the byte, so that a sanitiser sees a read beside the tensor. */
#ifndef MT_TESTS_KIT_TENSOR_H
#define MT_TESTS_KIT_TENSOR_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/rows.h"
#include "kit/rng.h"

typedef enum layout {
    LAYOUT_PACKED,
    LAYOUT_GAPS,       /* columns of a wider tensor */
    LAYOUT_SECOND,     /* every second column */
    LAYOUT_TRANSPOSED, /* columns first */
    LAYOUT_EXPANDED,   /* one row, seen as many */
    LAYOUT_BACKWARDS,  /* flipped in both dimensions */
    LAYOUTS
} layout;

typedef struct tensor {
    void *block;
    mt_rows rows;
} tensor;

/* Probabilities, logits, many ties, and now and then something that is not finite. */
static inline double
tensor_gate(rng *r)
{
    static const double special[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0};

    switch (rng_below(r, 16)) {
    case 0:
        return special[rng_below(r, rng_below(r, 4) ? 5 : 3)];
    case 1:
    case 2:
    case 3:
        return (double)rng_below(r, 4) / 4;
    case 4:
    case 5:
        return rng_unit(r) * 20 - 10;
    default:
        return rng_unit(r);
    }
}

static inline void
tensor_store(rng *r, mt_dtype dtype, void *at)
{
    double wide = tensor_gate(r);
    float x = (float)wide;
    unsigned char byte = (unsigned char)rng_next(r);

    if (dtype == MT_F64)
        memcpy(at, &wide, sizeof wide);
    else if (mt_dtype_writable(dtype))
        mt_narrow_f32(dtype, &x, at, 1);
    else
        memcpy(at, &byte, 1); /* any code is a value */
}

/* The strides of a layout, and where in the block element (0, 0) lies. */
static inline mt_rows
tensor_view(layout how, size_t rows, size_t cols, size_t *elements, size_t *origin)
{
    ptrdiff_t r = (ptrdiff_t)rows, c = (ptrdiff_t)cols;
    mt_rows t = {.rows = rows, .cols = cols, .row_stride = c, .col_stride = 1};

    *elements = rows * cols;
    *origin = 0;
    switch (how) {
    case LAYOUT_GAPS:
        t.row_stride = c + 3;
        *elements = (rows - 1) * (cols + 3) + cols;
        break;
    case LAYOUT_SECOND:
        t.row_stride = 2 * c;
        t.col_stride = 2;
        *elements = 2 * rows * cols - 1;
        break;
    case LAYOUT_TRANSPOSED:
        t.row_stride = 1;
        t.col_stride = r;
        break;
    case LAYOUT_EXPANDED:
        t.row_stride = 0;
        *elements = cols;
        break;
    case LAYOUT_BACKWARDS:
        t.row_stride = -c;
        t.col_stride = -1;
        *origin = rows * cols - 1;
        break;
    default:
        break;
    }
    return t;
}

static inline tensor
tensor_new(rng *r, mt_dtype dtype, size_t rows, size_t cols, layout how)
{
    size_t elements, origin, size = mt_dtype_size(dtype);
    tensor t = {.rows = mt_rows_packed(NULL, dtype, rows, cols)};

    if (rows == 0 || cols == 0) return t;
    t.rows = tensor_view(how, rows, cols, &elements, &origin);
    t.rows.dtype = dtype;
    t.block = malloc(elements * size);
    if (t.block == NULL) abort();
    for (size_t i = 0; i < elements; i++)
        tensor_store(r, dtype, (unsigned char *)t.block + i * size);
    t.rows.data = (unsigned char *)t.block + origin * size;
    return t;
}

static inline void
tensor_free(tensor *t)
{
    free(t->block);
    *t = (tensor){.block = NULL};
}

#endif
