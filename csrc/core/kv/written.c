#include "kv/written.h"

#include "kv/journal.h"
#include "kv/mapping.h"

static mt_status
save_row(mt_kvjournal *j, size_t row, mt_kvwritten *written, mt_error *err)
{
    const mt_kvpool *pool = j->lease->pool;
    size_t slot = j->lease->first + row, at = 0, place;
    mt_status st = MT_OK;

    *written = MT_KV_PLAIN;
    if (!mt_kvmap_has_private(pool, slot, pool->slots[slot].taken)) return MT_OK;
    while (st == MT_OK && mt_kvmap_next_private(pool, slot, &at, &place)) {
        *written = MT_KV_WRITTEN;
        st = mt_kvjournal_own_written(j, row, place, err);
    }
    return st;
}

/* The rows that are copied, each once. */
typedef struct saving {
    mt_kvlease *lease;
    const size_t *index;
    size_t n;
    mt_kvwritten *written;
} saving;

static mt_status
save_rows(void *arg, mt_error *err)
{
    const saving *k = arg;
    mt_kvlease *lease = k->lease;
    mt_kvwritten *written = k->written;
    mt_kvjournal j;
    mt_status st = MT_OK;

    for (size_t row = 0; written != NULL && row < lease->rows; row++)
        written[row] = MT_KV_UNSEEN;
    mt_kvjournal_begin(&j, lease);
    for (size_t i = 0; st == MT_OK && i < k->n; i++) {
        size_t row = k->index == NULL ? i : k->index[i];
        mt_kvwritten found;

        if (k->index != NULL && row == i) continue;
        if (written != NULL && written[row] != MT_KV_UNSEEN) continue;
        st = save_row(&j, row, &found, err);
        if (written != NULL) written[row] = found;
    }
    if (st == MT_OK) st = mt_kvjournal_follow_copies(&j, SIZE_MAX, 0, err);
    return mt_kvjournal_end(&j, st, err);
}

mt_status
mt_kvwritten_save(mt_kvlease *lease, const size_t *index, size_t n, mt_kvwritten *written,
                  mt_error *err)
{
    saving k = {lease, index, n, written};

    if (!lease->pool->store.private_writes) return MT_OK;
    return mt_kvpool_retry(lease->pool, save_rows, &k, err);
}
