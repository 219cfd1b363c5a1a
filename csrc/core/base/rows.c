#include "base/rows.h"

#include <assert.h>
#include <string.h>

mt_rows
mt_rows_packed(const void *data, mt_dtype dtype, size_t rows, size_t cols)
{
    return (mt_rows){.data = data,
                     .dtype = dtype,
                     .rows = rows,
                     .cols = cols,
                     .row_stride = (ptrdiff_t)cols,
                     .col_stride = 1};
}

bool
mt_rows_is_packed(const mt_rows *t)
{
    bool cols = t->col_stride == 1 || t->cols <= 1;
    bool rows = t->row_stride == (ptrdiff_t)t->cols || t->rows <= 1;

    return cols && rows;
}

/* The compiler makes one loop per element size of this. */
static inline void
gather(const unsigned char *src, size_t n, ptrdiff_t stride, unsigned char *dst, size_t size)
{
    for (size_t i = 0; i < n; i++)
        memcpy(dst + i * size, src + (ptrdiff_t)i * stride * (ptrdiff_t)size, size);
}

static void
pack_row(const unsigned char *src, const mt_rows *t, unsigned char *dst, size_t size)
{
    if (t->col_stride == 1) {
        memcpy(dst, src, t->cols * size);
        return;
    }
    switch (size) {
    case 8:
        gather(src, t->cols, t->col_stride, dst, 8);
        break;
    case 4:
        gather(src, t->cols, t->col_stride, dst, 4);
        break;
    case 2:
        gather(src, t->cols, t->col_stride, dst, 2);
        break;
    default:
        gather(src, t->cols, t->col_stride, dst, 1);
        break;
    }
}

void
mt_rows_pack(const mt_rows *t, size_t first, size_t count, void *dst)
{
    size_t size = mt_dtype_size(t->dtype), row_bytes = t->cols * size;
    const unsigned char *src = t->data;
    unsigned char *out = dst;

    if (count == 0 || t->cols == 0) return;
    assert(t->data != NULL && first <= t->rows && count <= t->rows - first);
    src += (ptrdiff_t)first * t->row_stride * (ptrdiff_t)size;
    if (mt_rows_is_packed(t)) {
        memcpy(out, src, count * row_bytes);
        return;
    }
    for (size_t r = 0; r < count; r++)
        pack_row(src + (ptrdiff_t)r * t->row_stride * (ptrdiff_t)size, t, out + r * row_bytes,
                 size);
}
