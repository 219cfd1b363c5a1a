#include "gate/scan_wide.h"

#include <stdbool.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define WIDE   __attribute__((target("avx512f,avx512dq")))
#define INLINE static inline WIDE __attribute__((always_inline))

/* The maxima of four rows, each in all 16 lanes of top[row]. Halves, then quarters of two rows are
 * folded by one shuffle:  aaaa bbbb -> aabb,  aabb ccdd -> abcd  (a letter is four lanes). */
INLINE void
four_maxima(const float *x, size_t vectors, __m512 top[4])
{
    for (size_t r = 0; r < 4; r++) {
        top[r] = _mm512_loadu_ps(x + r * 16 * vectors);
        for (size_t v = 1; v < vectors; v++)
            top[r] = _mm512_max_ps(top[r], _mm512_loadu_ps(x + (r * vectors + v) * 16));
    }
    __m512 ab = _mm512_max_ps(_mm512_shuffle_f32x4(top[0], top[1], 0x44),
                              _mm512_shuffle_f32x4(top[0], top[1], 0xEE));
    __m512 cd = _mm512_max_ps(_mm512_shuffle_f32x4(top[2], top[3], 0x44),
                              _mm512_shuffle_f32x4(top[2], top[3], 0xEE));
    __m512 all =
        _mm512_max_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    all = _mm512_max_ps(all, _mm512_permute_ps(all, 0x4E));
    all = _mm512_max_ps(all, _mm512_permute_ps(all, 0xB1));
    top[0] = _mm512_shuffle_f32x4(all, all, 0x00);
    top[1] = _mm512_shuffle_f32x4(all, all, 0x55);
    top[2] = _mm512_shuffle_f32x4(all, all, 0xAA);
    top[3] = _mm512_shuffle_f32x4(all, all, 0xFF);
}

/* Adds 16 gates of a row to their sums, and counts those that are the row's maximum. */
INLINE void
add_vector(const float *x, __m512 top, __m512d *low, __m512d *high, __m512i *count)
{
    __m512 gates = _mm512_loadu_ps(x);
    __mmask16 hit = _mm512_cmp_ps_mask(gates, top, _CMP_EQ_OQ);

    *count = _mm512_mask_add_epi32(*count, hit, *count, _mm512_set1_epi32(1));
    *low = _mm512_add_pd(*low, _mm512_cvtps_pd(_mm256_loadu_ps(x)));
    *high = _mm512_add_pd(*high, _mm512_cvtps_pd(_mm256_loadu_ps(x + 8)));
}

/* All sums stay in registers: with `vectors` a constant, the arrays below never reach memory. */
INLINE size_t
add_fours(const float *x, size_t rows, size_t vectors, double *sum, uint32_t *count)
{
    __m512d part[8];
    __m512i hits[4];
    __m512 top[4];
    size_t r = 0;

    for (size_t v = 0; v < vectors; v++) {
        part[2 * v] = part[2 * v + 1] = _mm512_setzero_pd();
        hits[v] = _mm512_setzero_si512();
    }
    for (; r + 4 <= rows; r += 4, x += 64 * vectors) {
        four_maxima(x, vectors, top);
        for (size_t i = 0; i < 4 * vectors; i++) {
            size_t v = i % vectors;
            add_vector(x + i * 16, top[i / vectors], &part[2 * v], &part[2 * v + 1], &hits[v]);
        }
    }
    for (size_t v = 0; v < 2 * vectors; v++)
        _mm512_storeu_pd(sum + 8 * v, _mm512_add_pd(_mm512_loadu_pd(sum + 8 * v), part[v]));
    for (size_t v = 0; v < vectors; v++)
        _mm512_storeu_si512(count + 16 * v,
                            _mm512_add_epi32(_mm512_loadu_si512(count + 16 * v), hits[v]));
    return r;
}

/* A bit for each expert whose gate is the row's maximum. */
INLINE uint64_t
row_mask(const float *x, size_t vectors, __m512 top)
{
    uint64_t mask = 0;

    for (size_t v = 0; v < vectors; v++) {
        uint64_t hit = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + v * 16), top, _CMP_EQ_OQ);
        mask |= hit << (16 * v);
    }
    return mask;
}

INLINE size_t
first_fours(const float *x, size_t rows, size_t vectors, uint32_t *count)
{
    __m512 top[4];
    size_t r = 0;

    for (; r + 4 <= rows; r += 4, x += 64 * vectors) {
        four_maxima(x, vectors, top);
        for (size_t i = 0; i < 4; i++)
            count[__builtin_ctzll(row_mask(x + i * vectors * 16, vectors, top[i]))]++;
    }
    return r;
}

/* The numbers of experts that fill one to four vectors: each has loops of its own. */
#define WIDTHS(CASE) CASE(16) CASE(32) CASE(48) CASE(64)

#define FIRST(n)                                                                                   \
    case n:                                                                                        \
        return first_fours(x, rows, (n) / 16, count);

WIDE static size_t
first_width(const float *x, size_t rows, size_t experts, uint32_t *count)
{
    switch (experts) {
        WIDTHS(FIRST)
    default:
        return 0;
    }
}

#define ADD(n)                                                                                     \
    case n:                                                                                        \
        return add_fours(x, rows, (n) / 16, sum, count);

WIDE static size_t
add_width(const float *x, size_t rows, size_t experts, double *sum, uint32_t *count)
{
    switch (experts) {
        WIDTHS(ADD)
    default:
        return 0;
    }
}

static bool
have_wide(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
}

size_t
mt_gatewide_rows(const float *x, size_t rows, size_t experts, double *sum, uint32_t *count)
{
    return have_wide() ? add_width(x, rows, experts, sum, count) : 0;
}

size_t
mt_gatewide_first(const float *x, size_t rows, size_t experts, uint32_t *count)
{
    return have_wide() ? first_width(x, rows, experts, count) : 0;
}

#else

size_t
mt_gatewide_rows(const float *x, size_t rows, size_t experts, double *sum, uint32_t *count)
{
    (void)x, (void)rows, (void)experts, (void)sum, (void)count;
    return 0;
}

size_t
mt_gatewide_first(const float *x, size_t rows, size_t experts, uint32_t *count)
{
    (void)x, (void)rows, (void)experts, (void)count;
    return 0;
}

#endif
