#include "py/base/ptrset.h"

#include <assert.h>
#include <string.h>

#include "os/base/pages.h"

enum { FIRST_SLOTS = 16 };

/* Where the address is, or else where it is to go. */
static mt_ptrset_slot *
ptrset_slot_of(const mt_ptrset *set, const void *at)
{
    size_t mask = set->slots_n - 1, i = (size_t)(mt_ptr_hash(at) >> 20) & mask;

    while (set->slots[i].at != NULL && set->slots[i].at != at)
        i = (i + 1) & mask;
    return &set->slots[i];
}

void
mt_ptrset_fini(mt_ptrset *set)
{
    mt_alloc_pages.put(mt_alloc_pages.ctx, set->slots, set->slots_n * sizeof *set->slots);
    *set = (mt_ptrset){.slots = NULL};
}

int
mt_ptrset_reserve(mt_ptrset *set, size_t n)
{
    mt_ptrset larger = {.slots_n = set->slots_n == 0 ? FIRST_SLOTS : set->slots_n, .n = set->n};

    if (set->slots_n > 0 && 2 * n <= set->slots_n) return 0;
    while (larger.slots_n < 2 * n)
        larger.slots_n *= 2;
    larger.slots = mt_alloc_zeroed(&mt_alloc_pages, larger.slots_n, sizeof *larger.slots);
    if (larger.slots == NULL) return -1;
    for (size_t i = 0; i < set->slots_n; i++)
        if (set->slots[i].at != NULL) *ptrset_slot_of(&larger, set->slots[i].at) = set->slots[i];
    mt_ptrset_fini(set);
    *set = larger;
    return 0;
}

void
mt_ptrset_clear(mt_ptrset *set)
{
    if (set->n > 0) memset(set->slots, 0, set->slots_n * sizeof *set->slots);
    set->n = 0;
}

size_t
mt_ptrset_find(const mt_ptrset *set, const void *at)
{
    const mt_ptrset_slot *slot = ptrset_slot_of(set, at);

    return slot->at == NULL ? MT_PTRSET_NONE : slot->number;
}

size_t
mt_ptrset_add(mt_ptrset *set, const void *at, size_t number)
{
    mt_ptrset_slot *slot = ptrset_slot_of(set, at);

    if (slot->at != NULL) return slot->number;
    assert(at != NULL && 2 * (set->n + 1) <= set->slots_n);
    *slot = (mt_ptrset_slot){at, number};
    set->n++;
    return MT_PTRSET_NONE;
}
