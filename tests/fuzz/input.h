/* input.h -- the bytes of one fuzz input, taken from the front; zeros when they run out. */
#ifndef MT_TESTS_INPUT_H
#define MT_TESTS_INPUT_H

#include <stddef.h>
#include <stdint.h>

typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static inline uint8_t
input_byte(input *in)
{
    if (in->left == 0) return 0;
    in->left--;
    return *in->at++;
}

static inline size_t
input_pair(input *in)
{
    size_t high = input_byte(in);

    return high << 8 | input_byte(in);
}

/* 0 to n - 1. pre: 0 < n <= 256. */
static inline size_t
input_below(input *in, size_t n)
{
    return input_byte(in) % n;
}

#endif
