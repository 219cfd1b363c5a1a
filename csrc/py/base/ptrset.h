/* ptrset.h -- a set of addresses, each with a number: an open-addressing hash table.
 *
 *   slots   [ -, - ][ 0x7f10, 2 ][ -, - ][ 0x7f80, 0 ][ 0x7fc0, 1 ][ -, - ] ...  at most half full
 *
 * A large table is pages of its own, which the system has back at once (os/base/pages.h): sets of a
 * pass over the heap are large and short-lived. Not thread-safe. */
#ifndef MT_PY_BASE_PTRSET_H
#define MT_PY_BASE_PTRSET_H

#define PY_SSIZE_T_CLEAN
#include <Python.h> /* before all others: it says which POSIX they are read for */

#include <stddef.h>
#include <stdint.h>

#define MT_PTRSET_NONE SIZE_MAX

typedef struct mt_ptrset_slot {
    const void *at; /* NULL: empty */
    size_t number;
} mt_ptrset_slot;

/* Zeros are an empty set. */
typedef struct mt_ptrset {
    mt_ptrset_slot *slots; /* a power of two of them */
    size_t slots_n, n;
} mt_ptrset;

/* Of an object's address, whose low bits are always 0. The upper bits are the best ones. */
static inline uint64_t
mt_ptr_hash(const void *at)
{
    return ((uint64_t)(uintptr_t)at >> 4) * UINT64_C(0x9E3779B97F4A7C15);
}

/* Makes room for n addresses. -1 without memory: the set is as it was, and no error is set. */
int mt_ptrset_reserve(mt_ptrset *set, size_t n);
void mt_ptrset_fini(mt_ptrset *set);

/* Takes everything out, and keeps the room. */
void mt_ptrset_clear(mt_ptrset *set);

/* The number of an address, or MT_PTRSET_NONE. pre: mt_ptrset_reserve was called once. */
size_t mt_ptrset_find(const mt_ptrset *set, const void *at);

/* Puts an address in with its number and returns MT_PTRSET_NONE; or returns the number of one that
 * is in already, which stays. pre: at is not NULL, and there is room for it. */
size_t mt_ptrset_add(mt_ptrset *set, const void *at, size_t number);

#endif
