/* rows.h -- a borrowed view of a 2-D tensor.
 *
 *   data -> [ row 0 ]  element (r, c) lies at data + (r * row_stride + c * col_stride) elements
 *           [ row 1 ]
 *             ...
 *
 * Nothing is owned; the view is good for the call it is passed to. */
#ifndef MT_BASE_ROWS_H
#define MT_BASE_ROWS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/dtype.h"

typedef struct mt_rows {
    const void *data; /* NULL only when there are no elements */
    mt_dtype dtype;
    size_t rows;
    size_t cols;
    ptrdiff_t row_stride; /* in elements; 0 in an expanded tensor */
    ptrdiff_t col_stride;
} mt_rows;

/* A view of packed memory. */
mt_rows mt_rows_packed(const void *data, mt_dtype dtype, size_t rows, size_t cols);

/* True when the elements lie one after another without gaps. */
bool mt_rows_is_packed(const mt_rows *t);

/* Copies rows [first, first + count) to packed memory of the same dtype. */
void mt_rows_pack(const mt_rows *t, size_t first, size_t count, void *dst);

#endif
