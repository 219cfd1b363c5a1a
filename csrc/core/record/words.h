/* words.h -- 8-byte words of a region that a reader may see at any instant.
 *
 * Every store is seen after the ones before it: by another process that reads the same memory, and
 * by a reader after the writer was killed. Then all stores before some instruction have been made,
 * and none after it. On x86 a plain store does that. */
#ifndef MT_RECORD_WORDS_H
#define MT_RECORD_WORDS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

static inline void
mt_word_put(uint64_t *at, uint64_t value)
{
    atomic_store_explicit((_Atomic uint64_t *)at, value, memory_order_release);
}

/* The factor of word i in a check: odd, so that no change of one word goes unseen. */
static inline uint64_t
mt_check_factor(size_t i)
{
    return ((uint64_t)(i + 1) * 0x9E3779B97F4A7C15u) | 1;
}

/* The check of n words: it distinguishes words that were written together from a mixture of two
 * times. It does not protect against deliberate changes. */
static inline uint64_t
mt_words_check(const uint64_t *words, size_t n)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += words[i] * mt_check_factor(i);
    return sum;
}

/* Replaces words[0, n) by others so that a reader finds the old ones, the new ones, or ones without
 * a valid stamp and check: word 0 is the stamp, which is 0 meanwhile; behind the n words goes their
 * check. pre: from[0] != 0. */
static inline void
mt_words_replace(uint64_t *words, const uint64_t *from, size_t n)
{
    mt_word_put(words, 0);
    for (size_t i = 1; i < n; i++)
        mt_word_put(words + i, from[i]);
    mt_word_put(words + n, mt_words_check(from, n));
    mt_word_put(words, from[0]);
}

#endif
