/* live.c -- how this file works.
 *
 * The table is open: a block lies in the slot that a hash of its address names, or in the next free
 * one after it. One that dies leaves no mark behind: those that follow move up, so that a search ends
 * at the first free slot, however many have come and gone. */
#include "blocks/live.h"

#include <assert.h>
#include <stdbool.h>

enum { FIRST_ROOM = 1024 };

void
mt_live_init(mt_live *live, const mt_alloc *mem, const mt_home *home)
{
    *live = (mt_live){.mem = mem, .home = home, .generation = 1};
    mt_lock_init(&live->lock);
}

static void
drop_slots(mt_live *live)
{
    if (live->slots != NULL)
        live->mem->put(live->mem->ctx, live->slots, live->room * sizeof *live->slots);
    live->slots = NULL;
    live->room = 0;
}

void
mt_live_fini(mt_live *live)
{
    drop_slots(live);
    mt_lock_fini(&live->lock);
}

/* False in a forked child, where the lock is not to be touched. */
static bool
is_home(const mt_live *live)
{
    return live->home == NULL || atomic_load_explicit(live->home, memory_order_relaxed) != 0;
}

/* --- slots ------------------------------------------------------------------------------------- */

/* Blocks begin at multiples of 64: the lowest bits tell nothing. */
static size_t
home_slot(const mt_live *live, uint64_t address)
{
    uint64_t h = (address >> 4) * UINT64_C(0x9E3779B97F4A7C15);

    return (size_t)(h >> 32) & (live->room - 1);
}

/* Where the address is, or else the free slot where it is to go. pre: a slot is free. */
static size_t
slot_of(const mt_live *live, uint64_t address)
{
    size_t at = home_slot(live, address);

    while (live->slots[at].address != 0 && live->slots[at].address != address)
        at = (at + 1) & (live->room - 1);
    return at;
}

/* Moves up what follows a slot that has become free, as far as it was pushed on. */
static void
close_gap(mt_live *live, size_t gap)
{
    size_t mask = live->room - 1;

    for (size_t at = (gap + 1) & mask; live->slots[at].address != 0; at = (at + 1) & mask) {
        size_t pushed = (at - home_slot(live, live->slots[at].address)) & mask;
        if (pushed < ((at - gap) & mask)) continue; /* it would come before its own slot */
        live->slots[gap] = live->slots[at];
        gap = at;
    }
    live->slots[gap] = (mt_block){0};
}

/* Room for one more block, at most two thirds full. */
static bool
make_room(mt_live *live)
{
    size_t room = live->room == 0 ? FIRST_ROOM : 2 * live->room, before = live->room;
    mt_block *slots, *old = live->slots;

    if (3 * (live->figures.blocks + 1) <= 2 * (uint64_t)live->room) return true;
    if ((slots = mt_alloc_zeroed(live->mem, room, sizeof *slots)) == NULL) return false;
    live->slots = slots;
    live->room = room;
    for (size_t i = 0; i < before; i++)
        if (old[i].address != 0) slots[slot_of(live, old[i].address)] = old[i];
    if (old != NULL) live->mem->put(live->mem->ctx, old, before * sizeof *old);
    return true;
}

/* --- reports ----------------------------------------------------------------------------------- */

static void
remove_at(mt_live *live, size_t at)
{
    assert(live->figures.in_use >= live->slots[at].bytes && live->figures.blocks > 0);
    live->figures.in_use -= live->slots[at].bytes;
    live->figures.blocks--;
    live->figures.deaths++;
    close_gap(live, at);
}

static void
add(mt_live *live, mt_block block)
{
    mt_live_figures *f = &live->figures;
    size_t at;

    if (live->room > 0 && live->slots[at = slot_of(live, block.address)].address != 0)
        remove_at(live, at);
    f->births++;
    if (!make_room(live)) {
        f->missed++;
        return;
    }
    live->slots[slot_of(live, block.address)] = block;
    f->blocks++;
    f->in_use += block.bytes;
    if (f->in_use > f->peak) f->peak = f->in_use;
}

void
mt_live_born(mt_live *live, const void *address, size_t bytes, uint32_t site)
{
    assert(address != NULL);
    if (!is_home(live)) return;
    mt_lock_take(&live->lock);
    add(live, (mt_block){.address = (uint64_t)(uintptr_t)address,
                         .bytes = bytes,
                         .site = site,
                         .generation = live->generation});
    mt_lock_give(&live->lock);
}

void
mt_live_died(mt_live *live, const void *address)
{
    uint64_t key = (uint64_t)(uintptr_t)address;
    size_t at;

    if (key == 0 || !is_home(live)) return;
    mt_lock_take(&live->lock);
    if (live->room > 0 && live->slots[at = slot_of(live, key)].address != 0) remove_at(live, at);
    mt_lock_give(&live->lock);
}

/* --- what is asked ----------------------------------------------------------------------------- */

uint32_t
mt_live_turn(mt_live *live)
{
    uint32_t generation = 0;

    if (!is_home(live)) return 0;
    mt_lock_take(&live->lock);
    generation = ++live->generation;
    mt_lock_give(&live->lock);
    return generation;
}

mt_live_figures
mt_live_read(mt_live *live)
{
    mt_live_figures figures = {0};

    if (!is_home(live)) return figures;
    mt_lock_take(&live->lock);
    figures = live->figures;
    mt_lock_give(&live->lock);
    return figures;
}

void
mt_live_reset_peak(mt_live *live)
{
    if (!is_home(live)) return;
    mt_lock_take(&live->lock);
    live->figures.peak = live->figures.in_use;
    mt_lock_give(&live->lock);
}

void
mt_live_sum_sites(mt_live *live, uint32_t first, uint32_t last, mt_live_sum *sums, size_t n)
{
    if (!is_home(live)) return;
    mt_lock_take(&live->lock);
    for (size_t i = 0; i < live->room; i++) {
        const mt_block *block = &live->slots[i];
        if (block->address == 0 || block->site >= n) continue;
        if (block->generation < first || block->generation > last) continue;
        sums[block->site].bytes += block->bytes;
        sums[block->site].blocks++;
    }
    mt_lock_give(&live->lock);
}

size_t
mt_live_copy(mt_live *live, mt_block *out, size_t room)
{
    size_t n, copied = 0;

    if (!is_home(live)) return 0;
    mt_lock_take(&live->lock);
    n = (size_t)live->figures.blocks;
    for (size_t i = 0; n <= room && i < live->room; i++)
        if (live->slots[i].address != 0) out[copied++] = live->slots[i];
    mt_lock_give(&live->lock);
    return n;
}

mt_block
mt_live_at(mt_live *live, const void *address)
{
    uint64_t key = (uint64_t)(uintptr_t)address;
    mt_block found = {0};

    if (key == 0 || !is_home(live)) return found;
    mt_lock_take(&live->lock);
    if (live->room > 0) found = live->slots[slot_of(live, key)];
    mt_lock_give(&live->lock);
    return found;
}

void
mt_live_clear(mt_live *live)
{
    if (!is_home(live)) return;
    mt_lock_take(&live->lock);
    drop_slots(live);
    live->figures = (mt_live_figures){0};
    mt_lock_give(&live->lock);
}
