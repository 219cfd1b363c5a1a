#include "base/index.h"

#include <assert.h>

enum { FIRST_ROOM = 128 };

/* One entry more, in three quarters of the slots at most. */
static bool
index_fits(const mt_index *index)
{
    return 4 * (index->n + 1) <= 3 * index->room;
}

static void
index_put(mt_index *index, uint64_t slot)
{
    size_t at = (size_t)(slot >> 32);

    while (index->slots[at & (index->room - 1)] != 0)
        at++;
    index->slots[at & (index->room - 1)] = slot;
}

bool
mt_index_make_room(mt_index *index, const mt_alloc *mem)
{
    mt_index larger = {.room = index->room == 0 ? FIRST_ROOM : 2 * index->room, .n = index->n};

    if (index_fits(index)) return true;
    if (index->n >= MT_INDEX_NONE / 2) return false;
    larger.slots = mt_alloc_zeroed(mem, larger.room, sizeof *larger.slots);
    if (larger.slots == NULL) return false;
    for (size_t i = 0; i < index->room; i++)
        if (index->slots[i] != 0) index_put(&larger, index->slots[i]);
    mt_index_drop(index, mem);
    *index = larger;
    return true;
}

void
mt_index_add(mt_index *index, uint64_t hash, uint32_t number)
{
    assert(index_fits(index) && number < MT_INDEX_NONE);
    index_put(index, (uint64_t)mt_index_half(hash) << 32 | (number + 1));
    index->n++;
}

void
mt_index_drop(mt_index *index, const mt_alloc *mem)
{
    mem->put(mem->ctx, index->slots, index->room * sizeof *index->slots);
    *index = (mt_index){.n = 0};
}
