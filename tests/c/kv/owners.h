/* owners.h -- who owns each byte: old views of a KV pool's rows, read and written.
 *
 *   row now        t t t . | . . . .         tokens in pages of its own, then nothing
 *   a view before  ? ? ? . | ? ? ? ?         same addresses: the row's tokens, or zeros, then
 * nothing ^ ^ ^ ^         that a live row holds; written over after every step
 *
 * Each token that was ever written has a number of its own (model.h), so what an address shows
 * says whose it is. */
#ifndef MT_TESTS_KV_OWNERS_H
#define MT_TESTS_KV_OWNERS_H

#include "kv/steps.h"

typedef struct owners {
    /* tokens [0, ever) of each row and layer were in a view of the lease at that place of the rig
     */
    size_t ever[RIG_LEASES][MODEL_ROWS][MODEL_LAYERS];
    /* when the row last held a token there, by the number that the next new token had */
    uint32_t since[RIG_LEASES][MODEL_ROWS][MODEL_LAYERS][MODEL_TOKENS];
    mt_kvlease *of[RIG_LEASES];   /* which lease that was */
    uint64_t *word[MODEL_LAYERS]; /* the first word of each live token */
    uint32_t *id[MODEL_LAYERS];
    size_t count[MODEL_LAYERS];
} owners;

enum { OWNERS_MOST = RIG_LEASES * MODEL_ROWS * MODEL_TOKENS };

static inline void
owners_init(owners *o)
{
    memset(o, 0, sizeof *o);
    for (size_t layer = 0; layer < MODEL_LAYERS; layer++) {
        o->word[layer] = calloc(OWNERS_MOST, sizeof **o->word);
        o->id[layer] = calloc(OWNERS_MOST, sizeof **o->id);
        CHECK(o->word[layer] != NULL && o->id[layer] != NULL);
    }
}

static inline void
owners_fini(owners *o)
{
    for (size_t layer = 0; layer < MODEL_LAYERS; layer++) {
        free(o->word[layer]);
        free(o->id[layer]);
    }
}

/* What was in a view before stays so for the life of the lease. */
static inline void
owners_note_views(owners *o, const rig *g)
{
    for (size_t i = 0; i < RIG_LEASES; i++) {
        const mlease *m = &g->lease[i];

        if (m->lease != o->of[i]) {
            memset(o->ever[i], 0, sizeof o->ever[i]);
            memset(o->since[i], 0, sizeof o->since[i]);
        }
        o->of[i] = m->lease;
        for (size_t row = 0; m->lease != NULL && row < m->rows; row++)
            for (size_t layer = 0; layer < rig_layers(g); layer++) {
                o->ever[i][row][layer] = mt_size_max(o->ever[i][row][layer], m->seen[layer]);
                for (size_t t = 0; t < m->row[row].len[layer]; t++)
                    o->since[i][row][layer][t] = g->next_id;
            }
    }
}

static inline void
owners_note_tokens(owners *o, const rig *g)
{
    for (size_t layer = 0; layer < rig_layers(g); layer++) {
        o->count[layer] = 0;
        for (size_t i = 0; i < RIG_LEASES; i++) {
            const mlease *m = &g->lease[i];

            for (size_t row = 0; m->lease != NULL && row < m->rows; row++)
                for (size_t t = 0; t < m->row[row].len[layer]; t++) {
                    uint32_t id = m->row[row].id[layer][t];

                    o->word[layer][o->count[layer]] = token_word(id, layer, 0, 0, 0);
                    o->id[layer][o->count[layer]++] = id;
                }
        }
    }
}

/* An address past the row's tokens shows no token that somebody holds, but for those that were
 * there while it was the row's own. */
static inline void
owners_check(const owners *o, size_t i, const mlease *m, size_t layer, size_t row, size_t t)
{
    uint64_t got;

    memcpy(&got, token_at(m->lease, row, layer, 0, 0, t), sizeof got);
    if (got == 0) return;
    for (size_t k = 0; k < o->count[layer]; k++)
        if (o->word[layer][k] == got) CHECK(o->id[layer][k] < o->since[i][row][layer][t]);
}

/* Reads every old view, and writes over all that is no token of its row. */
static inline void
owners_step(owners *o, rig *g)
{
    owners_note_views(o, g);
    owners_note_tokens(o, g);
    for (size_t i = 0; i < RIG_LEASES; i++) {
        mlease *m = &g->lease[i];

        for (size_t row = 0; m->lease != NULL && row < m->max_rows; row++)
            for (size_t layer = 0; layer < rig_layers(g); layer++) {
                size_t end = 0;

                if (row < m->rows) end = mrow_tokens(&m->row[row], rig_layers(g));
                end = mt_kvgeom_blocks(rig_geom(g), end) * rig_geom(g)->block_tokens;
                for (size_t t = 0; t < o->ever[i][row][layer]; t++) {
                    if (t < end) continue;
                    owners_check(o, i, m, layer, row, t);
                    token_write(m->lease, row, layer, t, g->next_id);
                }
                m->row[row].scribbled = mt_size_max(m->row[row].scribbled, o->ever[i][row][layer]);
            }
    }
    g->next_id += MODEL_ROWS * MODEL_TOKENS;
}

#endif
