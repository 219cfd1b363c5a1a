/* dtype.h -- the floating-point types a gate tensor may have, and how they turn into each other.
 *
 * The 8-bit types are here because a history records gates of any floating-point dtype; they can be
 * read, not narrowed to. Widening is exact. Narrowing rounds to nearest, ties to even, as torch
 * does; float64 to a half type goes through float32, as torch's own cast does. */
#ifndef MT_BASE_DTYPE_H
#define MT_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>

/* The values are written to files: append new ones, never renumber. */
typedef enum mt_dtype {
    MT_F32 = 0,
    MT_F64 = 1,
    MT_F16 = 2,
    MT_BF16 = 3,
    MT_F8_E4M3FN = 4,
    MT_F8_E5M2 = 5,
    MT_F8_E4M3FNUZ = 6,
    MT_F8_E5M2FNUZ = 7,
    MT_DTYPE_COUNT
} mt_dtype;

/* Bytes of one element: 8, 4, 2 or 1. */
size_t mt_dtype_size(mt_dtype dtype);

/* torch's name without the prefix: "float32", "float8_e4m3fn". */
const char *mt_dtype_name(mt_dtype dtype);

/* True for the types that values can be narrowed to: float64, float32, float16, bfloat16. */
bool mt_dtype_writable(mt_dtype dtype);

/* n packed elements at src to float32; src and dst do not overlap. */
void mt_widen_f32(mt_dtype dtype, const void *src, float *dst, size_t n);

/* n float32 elements to a writable dtype. pre: mt_dtype_writable(dtype). */
void mt_narrow_f32(mt_dtype dtype, const float *src, void *dst, size_t n);

#endif
