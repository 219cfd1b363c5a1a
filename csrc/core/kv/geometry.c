#include "kv/geometry.h"

#include <assert.h>

#include "base/size.h"

static size_t
gcd(size_t a, size_t b)
{
    while (b != 0) {
        size_t rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/* Bytes of one token in one range, and how many ranges a unit and how many units there are. */
static bool
geometry_lay_out(mt_kvgeom *g)
{
    const mt_kvconfig *c = &g->config;
    size_t all_heads, both;

    if (!mt_size_mul(c->head_dim, c->elem_bytes, &g->row_bytes)) return false;
    if (!mt_size_mul(g->row_bytes, c->heads, &all_heads) || !mt_size_mul(2, all_heads, &both))
        return false;
    g->units = c->layers / c->layer_group + (c->layers % c->layer_group != 0);
    if (c->layout == MT_KV_HEAD_MAJOR) {
        g->unit_ranges = 2 * c->heads;
        g->token_bytes = g->row_bytes;
        return true;
    }
    g->unit_ranges = c->layer_group == 1 ? 2 : 1;
    g->token_bytes = all_heads;
    return c->layer_group == 1 || mt_size_mul(both, c->layer_group, &g->token_bytes);
}

/* The shortest run of tokens that fills whole pages, and how many of them cover max_tokens. */
static bool
cut_blocks(mt_kvgeom *g, size_t page_bytes)
{
    size_t tokens = g->config.max_tokens;

    g->block_tokens = page_bytes / gcd(page_bytes, g->token_bytes);
    g->blocks = tokens / g->block_tokens + (tokens % g->block_tokens != 0);
    return mt_size_mul(g->block_tokens, g->token_bytes, &g->part_bytes) &&
           mt_size_mul(g->blocks, g->part_bytes, &g->range_bytes) &&
           mt_size_mul(g->range_bytes, g->unit_ranges, &g->unit_bytes) &&
           mt_size_mul(g->unit_bytes, g->units, &g->slot_bytes);
}

mt_status
mt_kvgeom_init(mt_kvgeom *g, const mt_kvconfig *config, size_t page_bytes, mt_error *err)
{
    assert(config->layers > 0 && config->heads > 0 && config->head_dim > 0);
    assert(config->elem_bytes > 0 && config->max_tokens > 0 && config->max_rows > 0);
    assert(config->layer_group > 0);
    assert(config->layout == MT_KV_TOKEN_MAJOR || config->layer_group == 1);
    *g = (mt_kvgeom){.config = *config};
    if (!geometry_lay_out(g) || !cut_blocks(g, page_bytes))
        return mt_fail(err, MT_EOVERFLOW, "kvgeom", 0);
    g->block_bytes = g->units * g->unit_ranges * g->part_bytes; /* <= slot_bytes */
    g->head_stride = config->layout == MT_KV_HEAD_MAJOR ? g->range_bytes : g->row_bytes;
    return MT_OK;
}
