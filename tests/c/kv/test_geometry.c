/* kvgeom against arithmetic done the long way: every byte of a slot belongs to one token of one
 * head, or is padding of a last block, and blocks are what they say. */

#include "kit/check.h"
#include "core/kv/geometry.h"
#include "core/base/size.h"
#include "kit/rng.h"

static mt_kvgeom
geom_of(mt_kvconfig c, size_t page_bytes)
{
    mt_kvgeom g;

    CHECK(mt_kvgeom_init(&g, &c, page_bytes, NULL) == MT_OK);
    return g;
}

/* The nanochat-like model on the host: 16 tokens of 256 bytes a page. */
static void
head_major_is_a_page_of_tokens_per_head(void)
{
    mt_kvgeom g = geom_of((mt_kvconfig){.layers = 16,
                                        .heads = 8,
                                        .head_dim = 128,
                                        .elem_bytes = 2,
                                        .max_tokens = 4096,
                                        .max_rows = 16,
                                        .layout = MT_KV_HEAD_MAJOR,
                                        .layer_group = 1},
                          4096);

    CHECK(g.units == 16 && g.unit_ranges == 16);
    CHECK(g.token_bytes == 256 && g.row_bytes == 256 && g.block_tokens == 16);
    CHECK(g.part_bytes == 4096 && g.blocks == 256 && g.range_bytes == 1 << 20);
    CHECK(g.unit_bytes == 16 << 20 && g.slot_bytes == 256 << 20);
    CHECK(g.block_bytes == 1 << 20 && g.head_stride == 1 << 20);
    CHECK(mt_kvgeom_offset(&g, 0, 0) == 0 && mt_kvgeom_offset(&g, 0, 1) == 8 << 20);
    CHECK(mt_kvgeom_offset(&g, 3, 1) == 56 << 20);
    CHECK(mt_kvgeom_blocks(&g, 0) == 0 && mt_kvgeom_blocks(&g, 1) == 1);
    CHECK(mt_kvgeom_blocks(&g, 16) == 1 && mt_kvgeom_blocks(&g, 17) == 2);
    CHECK(mt_kvgeom_blocks(&g, 4096) == 256);
}

/* The same on a device: 1024 tokens of 2 KiB a page; 256 of 4 layers, K and V. */
static void
token_major_fills_large_pages(void)
{
    mt_kvconfig c = {.layers = 16,
                     .heads = 8,
                     .head_dim = 128,
                     .elem_bytes = 2,
                     .max_tokens = 4096,
                     .max_rows = 16,
                     .layout = MT_KV_TOKEN_MAJOR,
                     .layer_group = 1};
    mt_kvgeom g = geom_of(c, 2 << 20);

    CHECK(g.units == 16 && g.unit_ranges == 2 && g.token_bytes == 2048);
    CHECK(g.block_tokens == 1024 && g.blocks == 4 && g.head_stride == 256);
    CHECK(g.block_bytes == 64 << 20 && mt_kvgeom_offset(&g, 1, 1) == 24 << 20);
    c.layer_group = 4;
    g = geom_of(c, 2 << 20);
    CHECK(g.units == 4 && g.unit_ranges == 1 && g.token_bytes == 16384);
    CHECK(g.block_tokens == 128 && g.block_bytes == 8 << 20);
    CHECK(mt_kvgeom_offset(&g, 5, 1) == (64 << 20) + 3 * 2048); /* layer 1 of unit 1: V */
    CHECK(mt_kvgeom_unit(&g, 3) == 0 && mt_kvgeom_unit(&g, 4) == 1);
}

/* ---- at random ---- */

static mt_kvconfig
any_config(rng *r)
{
    mt_kvconfig c = {.layers = 1 + rng_below(r, 5),
                     .heads = 1 + rng_below(r, 3),
                     .head_dim = 1 + rng_below(r, 20),
                     .elem_bytes = (size_t)1 << rng_below(r, 3),
                     .max_tokens = 1 + rng_below(r, 40),
                     .max_rows = 1,
                     .layout = (mt_kvlayout)rng_below(r, 2),
                     .layer_group = 1};

    if (c.layout == MT_KV_TOKEN_MAJOR) c.layer_group = 1 + rng_below(r, c.layers);
    return c;
}

static void
sizes_hold(const mt_kvgeom *g, size_t page)
{
    CHECK(g->part_bytes % page == 0 && g->part_bytes == g->block_tokens * g->token_bytes);
    for (size_t less = page; less < g->part_bytes; less += page)
        CHECK(less % g->token_bytes != 0); /* it is the least */
    CHECK(g->range_bytes == g->blocks * g->part_bytes);
    CHECK(g->blocks * g->block_tokens >= g->config.max_tokens);
    CHECK((g->blocks - 1) * g->block_tokens < g->config.max_tokens);
    CHECK(g->unit_bytes == g->unit_ranges * g->range_bytes);
    CHECK(g->slot_bytes == g->units * g->unit_bytes);
    CHECK(g->block_bytes * g->blocks == g->slot_bytes);
    CHECK(g->row_bytes == g->config.head_dim * g->config.elem_bytes);
}

static void
claim(const mt_kvgeom *g, unsigned char *owned, size_t layer, size_t which, size_t head, size_t t)
{
    size_t at = mt_kvgeom_offset(g, layer, which) + head * g->head_stride + t * g->token_bytes;
    size_t unit = mt_kvgeom_unit(g, layer);

    CHECK(at + g->row_bytes <= g->slot_bytes && at / g->unit_bytes == unit);
    /* in a part of the token's own block, wherever that range is */
    CHECK(at % g->range_bytes / g->part_bytes == t / g->block_tokens);
    for (size_t i = 0; i < g->row_bytes; i++)
        CHECK(owned[at + i]++ == 0);
}

static void
no_two_tokens_share_a_byte(void)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        rng r = rng_seeded(seed);
        mt_kvconfig c = any_config(&r);
        size_t page = (size_t)64 << rng_below(&r, 3);
        mt_kvgeom g = geom_of(c, page);
        unsigned char *owned = calloc(1, g.slot_bytes);

        CHECK(owned != NULL);
        sizes_hold(&g, page);
        for (size_t i = 0; i < c.layers * 2 * c.heads * c.max_tokens; i++)
            claim(&g, owned, i % c.layers, i / c.layers % 2, i / c.layers / 2 % c.heads,
                  i / c.layers / 2 / c.heads);
        free(owned);
    }
}

/* Products that wrap must be refused, not found out later by a small slot. */
static void
sizes_that_wrap_are_refused(void)
{
    static const size_t large[] = {(size_t)1 << 20, (size_t)1 << 32, ((size_t)1 << 62) + 1,
                                   SIZE_MAX / 2 + 1, SIZE_MAX};
    mt_kvconfig plain = {.layers = 2,
                         .heads = 2,
                         .head_dim = 64,
                         .elem_bytes = 2,
                         .max_tokens = 64,
                         .max_rows = 2,
                         .layout = MT_KV_HEAD_MAJOR,
                         .layer_group = 1};

    for (size_t i = 0; i < 5 * 5 * 4 * 4 * 2; i++) {
        mt_kvconfig c = plain;
        size_t *const fields[] = {&c.layers, &c.heads, &c.head_dim, &c.max_tokens};
        unsigned __int128 truth;
        mt_error err = {0};
        mt_kvgeom g;
        mt_status st;

        *fields[i / 25 % 4] = large[i % 5];
        *fields[i / 100 % 4] = large[i / 5 % 5];
        c.layout = i / 400 ? MT_KV_TOKEN_MAJOR : MT_KV_HEAD_MAJOR;
        st = mt_kvgeom_init(&g, &c, 4096, &err);
        /* the true size of the tokens alone, saturating */
        truth = (unsigned __int128)c.layers * c.heads;
        if (truth <= SIZE_MAX) truth = (unsigned __int128)(size_t)truth * c.head_dim;
        if (truth <= SIZE_MAX) truth = (unsigned __int128)(size_t)truth * c.max_tokens;
        if (truth <= SIZE_MAX) truth = (unsigned __int128)(size_t)truth * 4;
        CHECK(st == MT_OK || (st == MT_EOVERFLOW && err.status == MT_EOVERFLOW));
        if (truth > SIZE_MAX) CHECK(st == MT_EOVERFLOW);
        if (st == MT_OK) CHECK(g.slot_bytes >= (size_t)truth);
    }
}

static void
any_layout_says_when_it_does_not_fit(void)
{
    mt_kvconfig c = {.layers = 4,
                     .heads = 1,
                     .head_dim = 1,
                     .elem_bytes = 1,
                     .max_tokens = SIZE_MAX / 4,
                     .max_rows = 1,
                     .layout = MT_KV_TOKEN_MAJOR,
                     .layer_group = 4};
    mt_kvgeom g;

    CHECK(mt_kvgeom_init(&g, &c, 4096, NULL) == MT_EOVERFLOW);
    c.max_tokens = 1;
    c.layer_group = SIZE_MAX / 2; /* more layers in a unit than there are */
    CHECK(mt_kvgeom_init(&g, &c, 4096, NULL) == MT_EOVERFLOW);
}

int
main(void)
{
    RUN(head_major_is_a_page_of_tokens_per_head);
    RUN(token_major_fills_large_pages);
    RUN(no_two_tokens_share_a_byte);
    RUN(sizes_that_wrap_are_refused);
    RUN(any_layout_says_when_it_does_not_fit);
    CHECK_DONE();
}
