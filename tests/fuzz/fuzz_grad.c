/* Bytes to a list of gradients and a few passes over it, against one element after the other. */
#include "grad/model.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static size_t
roll(void *ctx, size_t n)
{
    return input_below(ctx, n);
}

/* An 8-byte number of any bits: NaN, subnormal, far beyond float. */
static double
number(input *in)
{
    uint8_t bytes[8];
    double x;

    for (size_t i = 0; i < 8; i++)
        bytes[i] = input_byte(in);
    memcpy(&x, bytes, sizeof x);
    return x;
}

/* Half precision and a limit that only a double can hold: as the model has it as well. */
static void
check_scale(gradrig *r, mt_gradset *set, double factor, double limit)
{
    for (size_t i = 0; i < r->n; i++) {
        mt_grad_span one = r->span[i];
        double want[64];
        size_t looked = one.n < 64 ? one.n : 64;
        for (size_t k = 0; k < looked; k++)
            want[k] = grad_scaled(&one, one.n - 1 - k, factor, limit);
        CHECK(mt_gradset_set(set, &one, 1, NULL) == MT_OK);
        mt_gradset_scale(set, factor, limit, NULL, 1);
        for (size_t k = 0; k < looked; k++)
            CHECK(grad_same(grad_get(&one, one.n - 1 - k), want[k]));
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    double factor = number(&in), limit = fabs(number(&in));
    mt_grad_total got, want;
    mt_gradset *set;
    gradrig r;

    grad_make(&r, roll, &in);
    CHECK(mt_gradset_new(&mt_alloc_libc, &set, NULL) == MT_OK);
    CHECK(mt_gradset_set(set, r.span, r.n, NULL) == MT_OK);
    mt_gradset_measure(set, NULL, 1, &got);
    want = grad_expect(r.span, r.n);
    grad_check_total(&got, &want);
    mt_gradset_accumulate(set, r.into, true, NULL, 1, &got);
    for (size_t i = 0; i < r.n; i++)
        for (size_t k = 0; k < r.span[i].n; k += 1 + k / 8)
            CHECK(grad_same((double)r.into[i][k], (double)(float)grad_get(&r.span[i], k)));
    check_scale(&r, set, factor, isnan(limit) ? 1 : limit);
    mt_gradset_free(set);
    grad_drop(&r);
    check_cases++;
    return 0;
}
