#include "base/addrs.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

enum { FIRST_ROOM = 1024 };

void
mt_addrs_init(mt_addrs *a, const mt_alloc *mem, size_t slot_bytes)
{
    assert(slot_bytes >= sizeof(uint64_t) && slot_bytes % sizeof(uint64_t) == 0);
    *a = (mt_addrs){.mem = mem, .slot_bytes = slot_bytes};
}

void
mt_addrs_drop(mt_addrs *a)
{
    if (a->slots != NULL) a->mem->put(a->mem->ctx, a->slots, a->room * a->slot_bytes);
    a->slots = NULL;
    a->room = a->n = 0;
}

static void *
addrs_slot_at(const mt_addrs *a, size_t i)
{
    return a->slots + i * a->slot_bytes;
}

static uint64_t
addrs_address_at(const mt_addrs *a, size_t i)
{
    uint64_t address;

    memcpy(&address, addrs_slot_at(a, i), sizeof address);
    return address;
}

/* Blocks begin at multiples of 16 at least: the lowest bits say nothing. */
static size_t
addrs_home_of(const mt_addrs *a, uint64_t address)
{
    uint64_t h = (address >> 4) * UINT64_C(0x9E3779B97F4A7C15);

    return (size_t)(h >> 32) & (a->room - 1);
}

/* Where the address is, or else the free slot where it is to go. pre: a slot is free. */
static size_t
addrs_place_of(const mt_addrs *a, uint64_t address)
{
    size_t at = addrs_home_of(a, address);
    uint64_t there;

    while ((there = addrs_address_at(a, at)) != 0 && there != address)
        at = (at + 1) & (a->room - 1);
    return at;
}

void *
mt_addrs_find(const mt_addrs *a, uint64_t address)
{
    size_t at;

    assert(address != 0);
    if (a->n == 0) return NULL;
    at = addrs_place_of(a, address);
    return addrs_address_at(a, at) != 0 ? addrs_slot_at(a, at) : NULL;
}

static bool
addrs_make_room(mt_addrs *a)
{
    mt_addrs larger = *a;

    if (3 * (a->n + 1) <= 2 * a->room) return true;
    larger.room = a->room == 0 ? FIRST_ROOM : 2 * a->room;
    larger.slots = mt_alloc_zeroed(a->mem, larger.room, a->slot_bytes);
    if (larger.slots == NULL) return false;
    for (size_t i = 0; i < a->room; i++) {
        uint64_t address = addrs_address_at(a, i);
        if (address != 0)
            memcpy(addrs_slot_at(&larger, addrs_place_of(&larger, address)), addrs_slot_at(a, i),
                   a->slot_bytes);
    }
    if (a->slots != NULL) a->mem->put(a->mem->ctx, a->slots, a->room * a->slot_bytes);
    *a = larger;
    return true;
}

void *
mt_addrs_add(mt_addrs *a, uint64_t address)
{
    size_t room = a->room, at = room > 0 ? addrs_place_of(a, address) : 0;

    assert(address != 0);
    if (room > 0 && addrs_address_at(a, at) != 0) return addrs_slot_at(a, at);
    if (!addrs_make_room(a)) return NULL;
    if (a->room != room) at = addrs_place_of(a, address);
    memcpy(addrs_slot_at(a, at), &address, sizeof address);
    a->n++;
    return addrs_slot_at(a, at);
}

void
mt_addrs_remove(mt_addrs *a, void *slot)
{
    size_t mask = a->room - 1, gap = (size_t)((unsigned char *)slot - a->slots) / a->slot_bytes;

    assert(slot == addrs_slot_at(a, gap) && addrs_address_at(a, gap) != 0);
    for (size_t at = (gap + 1) & mask; addrs_address_at(a, at) != 0; at = (at + 1) & mask) {
        size_t pushed = (at - addrs_home_of(a, addrs_address_at(a, at))) & mask;
        if (pushed < ((at - gap) & mask)) continue; /* it would come before its own slot */
        memcpy(addrs_slot_at(a, gap), addrs_slot_at(a, at), a->slot_bytes);
        gap = at;
    }
    memset(addrs_slot_at(a, gap), 0, a->slot_bytes);
    a->n--;
}

void *
mt_addrs_next(const mt_addrs *a, const void *slot)
{
    size_t i =
        slot == NULL ? 0 : (size_t)((const unsigned char *)slot - a->slots) / a->slot_bytes + 1;

    for (; i < a->room; i++)
        if (addrs_address_at(a, i) != 0) return addrs_slot_at(a, i);
    return NULL;
}
