/* math.h -- what is computed of gradients: the loops over flat memory.
 *
 *   4096 elements = one block                        32 lanes, 4 elements deep
 *   +------------------------------------+   ((a*a + b*b) + (c*c + d*d)) in float, then in double
 *   | sum of squares in float, then      |
 *   | double; odd ones again, in double  |   no block where squares overflow, vanish or are NaN
 *   +------------------------------------+   keeps what float made of it
 *
 * A float's own error enters four elements deep only: a norm is right to 1e-7 whatever the length.
 * The lanes are the same with every instruction set, and so are the bits. */
#ifndef MT_GRAD_MATH_H
#define MT_GRAD_MATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"

/* What was found in some elements. */
typedef struct mt_grad_sum {
    double squares; /* as IEEE has it where there are infinities or NaN */
    uint64_t infs;
    uint64_t nans;
} mt_grad_sum;

/* The sum of squares of n elements, and how many of them are not finite. Squares of float64 are
 * taken in double, where they can overflow and vanish. */
mt_grad_sum mt_grad_square(mt_dtype dtype, const void *data, size_t n);

/* x = x * factor, computed in float32 (in double for float64, and where the factor is not a normal
 * float32), rounded to nearest even. */
void mt_grad_scale(mt_dtype dtype, void *data, size_t n, double factor);

#endif
