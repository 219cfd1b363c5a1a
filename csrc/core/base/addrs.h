/* addrs.h -- what is known of some addresses: an open table.
 *
 *   slots   [ 0 ......... ][ 0x7f10, what is known ][ 0x7f44, what is known ][ 0 ......... ] ...
 *             free           lies in the slot that a hash of its address names, or in the next
 *                            free one after it
 *
 * A slot is any struct whose first member is the address as uint64_t; all slots of a table are of
 * one size. One that is removed leaves no mark behind: those that follow move up, so that a search
 * ends at the first free slot, however many have come and gone. So a slot stays where it is only
 * until the next add or remove. The table doubles where it is two thirds full, and never gets
 * smaller.
 *
 * It has no lock. */
#ifndef MT_BASE_ADDRS_H
#define MT_BASE_ADDRS_H

#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"

typedef struct mt_addrs {
    const mt_alloc *mem;
    unsigned char *slots; /* `room` of them, a power of two, or NULL */
    size_t slot_bytes, room;
    size_t n; /* slots that are not free */
} mt_addrs;

/* pre: slot_bytes is a multiple of 8, and at least 8. Takes no memory before the first add. */
void mt_addrs_init(mt_addrs *addrs, const mt_alloc *mem, size_t slot_bytes);

/* Forgets all addresses, and gives the memory back. */
void mt_addrs_drop(mt_addrs *addrs);

/* The slot of this address, or NULL. pre: address is not 0. */
void *mt_addrs_find(const mt_addrs *addrs, uint64_t address);

/* The slot of this address; if it had none, a new one that holds the address and zeros. NULL without
 * memory: then nothing has changed. pre: address is not 0. */
void *mt_addrs_add(mt_addrs *addrs, uint64_t address);

/* Forgets the address of a slot. */
void mt_addrs_remove(mt_addrs *addrs, void *slot);

/* The first slot that is not free, or the next one after a slot; NULL where there is none. In no
 * order. */
void *mt_addrs_next(const mt_addrs *addrs, const void *slot);

#endif
