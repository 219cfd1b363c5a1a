/* mapping.h -- what addresses map. All functions expect the pool's lock. */
#ifndef MT_KV_MAPPING_H
#define MT_KV_MAPPING_H

#include "kv/private.h"

/* Makes the blocks `see` of the slot's unit follow its table (past `taken`: zeros), those of
 * `write` writable. MT_EAGAIN when that would take more stretches than there may be. */
mt_status mt_kvmap_follow(mt_kvpool *pool, size_t slot, size_t unit, const mt_kvspan *see,
                          const mt_kvspan *write, mt_error *err);
/* Maps one home at all addresses of the slot, for writing: one stretch. Views show places [0, end).
 * Lazy stores. */
mt_status mt_kvmap_move(mt_kvpool *pool, size_t slot, size_t home, size_t end, mt_error *err);
/* Maps the slot's own home at blocks [taken, end) of the unit, for writing. Lazy stores. */
mt_status mt_kvmap_home(mt_kvpool *pool, size_t slot, size_t unit, mt_error *err);
/* One mapping of a whole home, where that is what most of the table names and not mapped yet. */
mt_status mt_kvmap_alias(mt_kvpool *pool, size_t slot, mt_error *err);
/* Addresses of all rows that map blocks which their rows let go of map the table again, or zeros.
 * After it no block is in a view of a row that does not name it. MT_EAGAIN where that takes more
 * stretches than there may be: some rows have not changed, and are stale still. */
mt_status mt_kvmap_clear(mt_kvpool *pool, mt_error *err);
/* The row's addresses leave those of its blocks in the span that it must leave before it lets go of
 * them: zeros there, `anyway` however many stretches that takes; where it fails all are zeros until
 * they are used again. But not those of a row that has private writes before the span, as long as
 * writes in the span can be kept from others: it goes on naming the blocks. MT_EAGAIN, or as the
 * store says. */
mt_status mt_kvmap_leave(mt_kvpool *pool, size_t slot, const mt_kvspan *span, bool anyway,
                         mt_error *err);
/* The same for all blocks that somebody is to name and another table, which is to be the row's,
 * does not: its blocks. pre: refs count names as they are to be. `own` is one of that table that is
 * to be the row's alone; or MT_KV_ZERO. MT_EAGAIN as above: some have changed. */
mt_status mt_kvmap_become(mt_kvpool *pool, size_t slot, const uint32_t *table, size_t taken,
                          uint32_t own, mt_error *err);
/* All of the slot's addresses are zeros, in one stretch, until they are used again. With it goes
 * what was written privately. MT_EAGAIN: the store is not lazy. */
mt_status mt_kvmap_blank(mt_kvpool *pool, size_t slot, mt_error *err);
/* The row's addresses show again what its table names, wherever a view has been, after a change
 * that came to nothing; where that fails they are zeros. */
mt_status mt_kvmap_restore(mt_kvpool *pool, size_t slot);
/* Whether the row's addresses map any of its blocks [0, end) privately. */
bool mt_kvmap_has_private(const mt_kvpool *pool, size_t slot, size_t end);
/* The next part of one of the row's blocks that code wrote to privately: at *at bytes into the slot
 * or behind. Writes its place to *tb and the end of the part to *at; false: there is none. */
bool mt_kvmap_next_private(const mt_kvpool *pool, size_t slot, size_t *at, size_t *tb);
/* What the row wrote privately is gone: it shows its blocks. */
mt_status mt_kvmap_drop_private(mt_kvpool *pool, size_t slot);
/* What the row wrote privately over its block tb goes into the block. pre: it is its own. */
mt_status mt_kvmap_keep(mt_kvpool *pool, size_t slot, size_t tb, mt_error *err);
/* Whether the block is in sight anywhere but at place tb of the slot. */
bool mt_kvmap_is_elsewhere(const mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The row takes the block for place tb: what it wrote privately there before, when it had the block
 * as well, is nothing that the block is to hold. */
void mt_kvmap_forget_private(mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The row in `slot` takes the block for place tb: free slots have it in sight no more. */
void mt_kvmap_yield(mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* All free slots map their own homes; false: none had anything to give. */
bool mt_kvmap_relax(mt_kvpool *pool);
/* The row is over: forgets private writes, and what others map as well is in sight no more. What is
 * mapped stays mapped for the next row, unless the pool has very many stretches. */
void mt_kvmap_settle(mt_kvpool *pool, size_t slot);
/* Nobody maps blocks [first, end) after it; for stores that are not lazy. */
void mt_kvmap_forget(mt_kvpool *pool, uint32_t first, uint32_t end);
/* A block's window was used for the first time, or is gone: what it adds to the sights. */
void mt_kvmap_window(mt_kvpool *pool, uint32_t block, bool used);
/* Stretches of a slot, counted anew. */
size_t mt_kvmap_count(mt_kvpool *pool, const mt_kvslot *s);
/* Whether the slot's addresses map the block at place tb in some unit. */
bool mt_kvmap_shows(const mt_kvpool *pool, const mt_kvslot *s, size_t tb, uint32_t block);

#endif
