/* live.h -- the blocks of memory that an allocator has given out and not got back.
 *
 * The allocator reports each block that it gives out (born) and each that it gets back (died), from
 * any thread. One table knows those that live now, by their address:
 *
 *     born(0x7f10, 4096, site 3) ──┐     address   bytes  site  generation
 *     died(0x7f10) ────────────────┤
 *                                  ├──►  0x7f10    4,096    3       17
 *     turn() ──► generation 18     │     0x7f44      512    1       12
 *     in use, peak, blocks ◄──────┘
 *
 * A site is a number that the caller gives: the lines of the program that allocated the block, or 0.
 * A generation is the interval between two turns, such as a step: blocks that live and were born in
 * certain generations are what survived of them. In a process that was forked from the one that made
 * the table, whose lock some thread of the parent may have held, reports are ignored.
 *
 * 24 bytes a slot, in a table that doubles where it is two thirds full and never gets smaller: 36 to
 * 72 bytes for each of the most blocks that lived at once, and some 40 ns for each report. */
#ifndef MT_BLOCKS_LIVE_H
#define MT_BLOCKS_LIVE_H

#include <stddef.h>
#include <stdint.h>

#include "base/addrs.h"
#include "base/forks.h"
#include "base/lock.h"

typedef struct mt_block {
    uint64_t address;
    uint64_t bytes;
    uint32_t site;
    uint32_t generation; /* from 1 on */
} mt_block;

typedef struct mt_live_figures {
    uint64_t in_use; /* bytes of the blocks that live */
    uint64_t peak;   /* the most that in_use has been since the table began, or was cleared */
    uint64_t blocks; /* that live */
    uint64_t missed; /* births that found no memory for the table: then in_use is too low */
} mt_live_figures;

typedef struct mt_live {
    mt_birth birth;  /* all zeros: reports of forked children count as well */
    mt_lock lock;    /* around all below */
    mt_addrs blocks; /* each an mt_block */
    mt_live_figures figures;
    uint64_t highest; /* the most that in_use has been since mt_live_highest() was called */
    uint32_t generation;
} mt_live;

/* What lives of one site. */
typedef struct mt_live_sum {
    uint64_t bytes, blocks;
} mt_live_sum;

void mt_live_init(mt_live *live, const mt_alloc *mem, const mt_birth *birth);
/* pre: no thread reports any more. */
void mt_live_fini(mt_live *live);

/* A block was given out; one that is known at this address already has died unseen. address is not
 * NULL. May be called by any thread. */
void mt_live_born(mt_live *live, const void *address, size_t bytes, uint32_t site);

/* A block goes back: to be reported before it does, or the next one at its address may be reported
 * first. One that is not known is ignored. */
void mt_live_died(mt_live *live, const void *address);

/* Ends a generation, and returns the number of the one that begins: 1, 2, 3 and so on. */
uint32_t mt_live_turn(mt_live *live);

mt_live_figures mt_live_read(mt_live *live);

/* The same, with the most that in_use has been since the last call as the peak. */
mt_live_figures mt_live_highest(mt_live *live);

/* Adds up the blocks that live and were born in the generations from first to last, each included,
 * by their site: n sums, zeros before. Sites from n on are left out. Takes a pass over the table: 1
 * ms for 100,000 blocks, in which no report comes through. */
void mt_live_sum_sites(mt_live *live, uint32_t first, uint32_t last, mt_live_sum *sums, size_t n);

/* Copies the blocks that live to out, which has room for so many, in no order. Returns how many there
 * are: where that is more than there is room for, nothing is copied. 0 in a forked child. */
size_t mt_live_copy(mt_live *live, mt_block *out, size_t room);

/* The block at this very address, or zeros. */
mt_block mt_live_at(mt_live *live, const void *address);

/* Forgets all blocks and figures, but not the generation, and gives its memory back. */
void mt_live_clear(mt_live *live);

#endif
