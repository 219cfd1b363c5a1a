/* size.h -- size arithmetic that cannot wrap unnoticed, and the lesser and greater of two numbers.
 *
 * Each mt_size_... with an `out` returns false when the true result does not fit a size_t, and
 * leaves *out alone. */
#ifndef MT_BASE_SIZE_H
#define MT_BASE_SIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool
mt_size_add(size_t a, size_t b, size_t *out)
{
    if (a > SIZE_MAX - b) return false;
    *out = a + b;
    return true;
}

static inline bool
mt_size_mul(size_t a, size_t b, size_t *out)
{
    if (b != 0 && a > SIZE_MAX / b) return false;
    *out = a * b;
    return true;
}

/* pre: unit is a power of two. */
static inline bool
mt_size_align_up(size_t a, size_t unit, size_t *out)
{
    size_t padded;

    if (!mt_size_add(a, unit - 1, &padded)) return false;
    *out = padded & ~(unit - 1);
    return true;
}

static inline size_t
mt_size_min(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t
mt_size_max(size_t a, size_t b)
{
    return a > b ? a : b;
}

static inline uint64_t
mt_u64_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t
mt_u64_max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

#endif
