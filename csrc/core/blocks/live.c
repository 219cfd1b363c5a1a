#include "blocks/live.h"

#include <assert.h>
#include <stdbool.h>

void
mt_live_init(mt_live *live, const mt_alloc *mem, const mt_birth *birth)
{
    *live = (mt_live){.birth = birth == NULL ? (mt_birth){NULL, 0} : *birth, .generation = 1};
    mt_addrs_init(&live->blocks, mem, sizeof(mt_block));
    mt_lock_init(&live->lock);
}

void
mt_live_fini(mt_live *live)
{
    mt_addrs_drop(&live->blocks);
    mt_lock_fini(&live->lock);
}

/* --- reports ----------------------------------------------------------------------------------- */

/* A block does not live any more; its slot is left to the caller. */
static void
count_death(mt_live *live, const mt_block *block)
{
    assert(live->figures.in_use >= block->bytes && live->figures.blocks > 0);
    live->figures.in_use -= block->bytes;
    live->figures.blocks--;
}

static void
live_add(mt_live *live, mt_block block)
{
    mt_live_figures *f = &live->figures;
    mt_block *slot = mt_addrs_add(&live->blocks, block.address);

    if (slot == NULL) {
        f->missed++;
        return;
    }
    if (slot->generation != 0) count_death(live, slot); /* the one before it has died unseen */
    *slot = block;
    f->blocks++;
    f->in_use += block.bytes;
    if (f->in_use > f->peak) f->peak = f->in_use;
    if (f->in_use > live->highest) live->highest = f->in_use;
}

void
mt_live_born(mt_live *live, const void *address, size_t bytes, uint32_t site)
{
    assert(address != NULL);
    if (!mt_birth_is_here(&live->birth)) return;
    mt_lock_take(&live->lock);
    live_add(live, (mt_block){.address = (uint64_t)(uintptr_t)address,
                              .bytes = bytes,
                              .site = site,
                              .generation = live->generation});
    mt_lock_give(&live->lock);
}

void
mt_live_died(mt_live *live, const void *address)
{
    uint64_t key = (uint64_t)(uintptr_t)address;
    mt_block *block;

    if (key == 0 || !mt_birth_is_here(&live->birth)) return;
    mt_lock_take(&live->lock);
    if ((block = mt_addrs_find(&live->blocks, key)) != NULL) {
        count_death(live, block);
        mt_addrs_remove(&live->blocks, block);
    }
    mt_lock_give(&live->lock);
}

/* --- queries ---------------------------------------------------------------------------------- */

uint32_t
mt_live_turn(mt_live *live)
{
    uint32_t generation = 0;

    if (!mt_birth_is_here(&live->birth)) return 0;
    mt_lock_take(&live->lock);
    generation = ++live->generation;
    mt_lock_give(&live->lock);
    return generation;
}

mt_live_figures
mt_live_read(mt_live *live)
{
    mt_live_figures figures = {0};

    if (!mt_birth_is_here(&live->birth)) return figures;
    mt_lock_take(&live->lock);
    figures = live->figures;
    mt_lock_give(&live->lock);
    return figures;
}

mt_live_figures
mt_live_highest(mt_live *live)
{
    mt_live_figures figures = {0};

    if (!mt_birth_is_here(&live->birth)) return figures;
    mt_lock_take(&live->lock);
    figures = live->figures;
    figures.peak = live->highest;
    live->highest = figures.in_use;
    mt_lock_give(&live->lock);
    return figures;
}

void
mt_live_sum_sites(mt_live *live, uint32_t first, uint32_t last, mt_live_sum *sums, size_t n)
{
    const mt_block *block = NULL;

    if (!mt_birth_is_here(&live->birth)) return;
    mt_lock_take(&live->lock);
    while ((block = mt_addrs_next(&live->blocks, block)) != NULL) {
        if (block->site >= n) continue;
        if (block->generation < first || block->generation > last) continue;
        sums[block->site].bytes += block->bytes;
        sums[block->site].blocks++;
    }
    mt_lock_give(&live->lock);
}

size_t
mt_live_copy(mt_live *live, mt_block *out, size_t room)
{
    const mt_block *block = NULL;
    size_t n, copied = 0;

    if (!mt_birth_is_here(&live->birth)) return 0;
    mt_lock_take(&live->lock);
    n = live->blocks.n;
    while (n <= room && (block = mt_addrs_next(&live->blocks, block)) != NULL)
        out[copied++] = *block;
    mt_lock_give(&live->lock);
    return n;
}

mt_block
mt_live_at(mt_live *live, const void *address)
{
    uint64_t key = (uint64_t)(uintptr_t)address;
    const mt_block *block;
    mt_block found = {0};

    if (key == 0 || !mt_birth_is_here(&live->birth)) return found;
    mt_lock_take(&live->lock);
    if ((block = mt_addrs_find(&live->blocks, key)) != NULL) found = *block;
    mt_lock_give(&live->lock);
    return found;
}

void
mt_live_clear(mt_live *live)
{
    if (!mt_birth_is_here(&live->birth)) return;
    mt_lock_take(&live->lock);
    mt_addrs_drop(&live->blocks);
    live->figures = (mt_live_figures){0};
    live->highest = 0;
    mt_lock_give(&live->lock);
}
