/* geometry.h -- where token t of head h of layer l lies in a sequence's slot of addresses.
 *
 *   slot:   | unit 0          | unit 1          | ...            one slot per sequence
 *           | range | range ..| range | range ..|                slot_bytes = stride of the batch
 *   range:  | block 0 | block 1 | ... | block n-1 |              tokens ascending, one stride
 *
 *   MT_KV_HEAD_MAJOR            a unit is a layer; a range is one head of K or V: [T, D]
 *   MT_KV_TOKEN_MAJOR, group 1  a unit is a layer; a range is K or V of it:       [T, H, D]
 *   MT_KV_TOKEN_MAJOR, group g  a unit is g layers; one range:                    [T, g, 2, H, D]
 *
 * A *block* of a sequence is the same run of tokens in all its ranges: block_tokens tokens,
 * ranges x part_bytes bytes, where part_bytes is the least multiple of the page that holds whole
 * tokens. It is what is counted, shared and copied. Head-major suits pages of 4 KiB and gives every
 * attention kernel the layout it likes best; token-major suits pages of 2 MiB. */
#ifndef MT_KV_GEOMETRY_H
#define MT_KV_GEOMETRY_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef enum mt_kvlayout { MT_KV_HEAD_MAJOR, MT_KV_TOKEN_MAJOR } mt_kvlayout;

typedef struct mt_kvconfig {
    size_t layers, heads, head_dim, elem_bytes; /* all > 0 */
    size_t max_tokens;                          /* of one sequence, > 0 */
    size_t max_rows;                            /* sequences of one lease, > 0 */
    mt_kvlayout layout;
    size_t layer_group; /* layers of one unit; 1 for head-major; > 0 */
} mt_kvconfig;

typedef struct mt_kvgeom {
    mt_kvconfig config;
    size_t units, unit_ranges; /* ranges = units x unit_ranges */
    size_t token_bytes;        /* of one token in one range */
    size_t block_tokens, part_bytes;
    size_t blocks; /* of one slot: covers max_tokens */
    size_t range_bytes, unit_bytes, slot_bytes;
    size_t block_bytes; /* a block's parts in all ranges */
    size_t head_stride; /* bytes from head to head */
    size_t row_bytes;   /* one token of one head: head_dim x elem_bytes */
} mt_kvgeom;

/* pre: page_bytes is a power of two. MT_EOVERFLOW when a slot does not fit a size_t. */
mt_status mt_kvgeom_init(mt_kvgeom *g, const mt_kvconfig *config, size_t page_bytes, mt_error *err);

/* The unit that holds the layer. */
static inline size_t
mt_kvgeom_unit(const mt_kvgeom *g, size_t layer)
{
    return layer / g->config.layer_group;
}

/* Offset in the slot of token 0, head 0 of K (which = 0) or V (1) of the layer. Heads follow at
 * head_stride, tokens at token_bytes. */
static inline size_t
mt_kvgeom_offset(const mt_kvgeom *g, size_t layer, size_t which)
{
    size_t group = g->config.layer_group, heads = g->config.heads;
    size_t unit = layer / group * g->unit_bytes;

    assert(layer < g->config.layers && which < 2);
    if (g->config.layout == MT_KV_HEAD_MAJOR) return unit + which * heads * g->range_bytes;
    if (group == 1) return unit + which * g->range_bytes;
    return unit + (2 * (layer % group) + which) * heads * g->row_bytes;
}

/* Blocks that hold the first `tokens` tokens. */
static inline size_t
mt_kvgeom_blocks(const mt_kvgeom *g, size_t tokens)
{
    return tokens / g->block_tokens + (tokens % g->block_tokens != 0);
}

#endif
