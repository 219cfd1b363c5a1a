/* index.h -- finds entries of an array by a hash of their keys: an open table of their numbers.
 *
 *   slots   [ 0 ][ hash, 1 + 3 ][ 0 ][ hash, 1 + 0 ][ hash, 1 + 1 ] ...   three quarters full at most
 *                          └──► entry 3 of the caller's array
 *
 * The caller has the entries and compares keys; half of the hash lies in the slot, so that it rarely
 * compares two that differ. Entries are not removed one by one. All zeros are an empty index. It has
 * no lock. */
#ifndef MT_BASE_INDEX_H
#define MT_BASE_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"

#define MT_INDEX_NONE UINT32_MAX

typedef struct mt_index {
    uint64_t *slots; /* half of a hash << 32 | 1 + the entry's number; 0: free */
    size_t room;     /* a power of two of them, or 0 */
    size_t n;        /* that are not free */
} mt_index;

/* Room for one entry more. False without memory: then nothing has changed. */
bool mt_index_make_room(mt_index *index, const mt_alloc *mem);
/* pre: mt_index_make_room has made room for it; number < MT_INDEX_NONE. */
void mt_index_add(mt_index *index, uint64_t hash, uint32_t number);
/* Gives the memory back: all zeros. */
void mt_index_drop(mt_index *index, const mt_alloc *mem);

static inline uint32_t
mt_index_half(uint64_t hash)
{
    return (uint32_t)(hash ^ hash >> 32);
}

/* The next entry that may have this hash, or MT_INDEX_NONE. *at is mt_index_half(hash) at first. */
static inline uint32_t
mt_index_next(const mt_index *index, uint64_t hash, size_t *at)
{
    uint64_t slot;

    if (index->room == 0) return MT_INDEX_NONE;
    while ((slot = index->slots[(*at)++ & (index->room - 1)]) != 0)
        if (slot >> 32 == mt_index_half(hash)) return (uint32_t)slot - 1;
    return MT_INDEX_NONE;
}

#endif
