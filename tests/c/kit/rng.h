/* rng.h -- random numbers that are the same in every run: xorshift64*. */
#ifndef MT_TESTS_KIT_RNG_H
#define MT_TESTS_KIT_RNG_H

#include <stddef.h>
#include <stdint.h>

typedef struct rng {
    uint64_t state;
} rng;

/* Any seed, 0 included. */
static inline rng
rng_seeded(uint64_t seed)
{
    return (rng){seed * 0x9E3779B97F4A7C15u + 0x1234567u};
}

static inline uint64_t
rng_next(rng *r)
{
    r->state ^= r->state >> 12;
    r->state ^= r->state << 25;
    r->state ^= r->state >> 27;
    return r->state * 0x2545F4914F6CDD1Du;
}

/* 0 to n - 1. pre: n > 0. */
static inline size_t
rng_below(rng *r, size_t n)
{
    return (size_t)((rng_next(r) >> 16) % n);
}

/* [0, 1) */
static inline double
rng_unit(rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

#endif
