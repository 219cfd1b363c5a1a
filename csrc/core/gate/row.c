#include "gate/row.h"

#include <assert.h>
#include <string.h>

static size_t
index_bytes(const mt_gaterow_format *f)
{
    return f->experts <= 0x100 ? 1 : f->experts <= 0x10000 ? 2 : 4;
}

size_t
mt_gaterow_bytes(const mt_gaterow_format *f)
{
    size_t size = mt_dtype_size(f->dtype);

    return f->keep == MT_KEEP_ALL ? f->experts * size : f->top_k * (index_bytes(f) + size);
}

static uint32_t
get_index(const unsigned char *src, size_t width)
{
    uint32_t expert = 0;

    memcpy(&expert, src, width);
    return expert;
}

static void
encode_row(const mt_gaterow_format *f, const unsigned char *values, const uint32_t *top,
           unsigned char *dst)
{
    size_t width = index_bytes(f), size = mt_dtype_size(f->dtype);

    for (unsigned k = 0; k < f->top_k; k++)
        memcpy(dst + k * width, &top[k], width); /* little-endian: setup.py refuses others */
    dst += f->top_k * width;
    for (unsigned k = 0; k < f->top_k; k++)
        memcpy(dst + k * size, values + top[k] * size, size);
}

void
mt_gaterow_encode(const mt_gaterow_format *f, const void *values, const void *order,
                  mt_gate_width width, size_t rows, void *dst)
{
    size_t row = f->experts * mt_dtype_size(f->dtype), coded = mt_gaterow_bytes(f);
    size_t wide = f->experts * (width == MT_GATE_F64 ? sizeof(double) : sizeof(float));
    uint32_t top[MT_TOP_K_MAX];

    for (size_t r = 0; r < rows; r++) {
        mt_gatescan_top((const unsigned char *)order + r * wide, width, f->experts, f->top_k, top);
        encode_row(f, (const unsigned char *)values + r * row, top,
                   (unsigned char *)dst + r * coded);
    }
}

static void
decode_row(const mt_gaterow_format *f, const unsigned char *record, unsigned char *dst)
{
    size_t width = index_bytes(f), size = mt_dtype_size(f->dtype);
    const unsigned char *gates = record + f->top_k * width;

    memset(dst, 0, f->experts * size);
    for (unsigned k = 0; k < f->top_k; k++) {
        uint32_t expert = get_index(record + k * width, width);

        assert(expert < f->experts);
        memcpy(dst + expert * size, gates + k * size, size);
    }
}

void
mt_gaterow_decode(const mt_gaterow_format *f, const void *record, size_t rows, void *dst)
{
    size_t row = f->experts * mt_dtype_size(f->dtype), coded = mt_gaterow_bytes(f);

    assert(f->keep == MT_KEEP_TOPK);
    for (size_t r = 0; r < rows; r++)
        decode_row(f, (const unsigned char *)record + r * coded, (unsigned char *)dst + r * row);
}

const void *
mt_gaterow_kept(const mt_gaterow_format *f, const void *record, size_t row, uint32_t *experts)
{
    size_t width = index_bytes(f);
    const unsigned char *at = (const unsigned char *)record + row * mt_gaterow_bytes(f);

    assert(f->keep == MT_KEEP_TOPK);
    for (unsigned k = 0; k < f->top_k; k++)
        experts[k] = get_index(at + k * width, width);
    return at + f->top_k * width;
}

bool
mt_gaterow_valid(const mt_gaterow_format *f, const void *record, size_t rows)
{
    size_t width = index_bytes(f), coded = mt_gaterow_bytes(f);

    if (f->keep == MT_KEEP_ALL) return true;
    for (size_t r = 0; r < rows; r++)
        for (unsigned k = 0; k < f->top_k; k++)
            if (get_index((const unsigned char *)record + r * coded + k * width, width) >=
                f->experts)
                return false;
    return true;
}
