/* block.h -- blocks of a pool: promising, taking, naming and dropping them, and their content. All
 * functions expect the pool's lock.
 *
 *          promise          take            name               unname           drop
 *   ledger ------> promised ----> live, refs = 1 ----> refs > 1 ----> ... ----> idle ----> nothing
 *
 * The ledger has reserved live + max(idle, promised) blocks. */
#ifndef MT_KV_BLOCK_H
#define MT_KV_BLOCK_H

#include "kv/state.h"

/* --- promises --- */

/* Promises the lease `blocks` more. MT_ELIMIT, with the bytes that the ledger lacks as `asked`. */
mt_status mt_kvblock_promise(mt_kvlease *lease, size_t blocks, mt_error *err);
/* Takes back what is left of a promise. */
void mt_kvblock_unpromise(mt_kvlease *lease, size_t blocks);
/* Releases what the ledger has reserved beyond the need. */
void mt_kvblock_shrink_reservation(mt_kvpool *pool);
/* A try was undone that began with `reserved` blocks in the ledger: what it has released since
 * counts as asked in its refusal. */
void mt_kvblock_note_undone(const mt_kvpool *pool, size_t reserved, mt_error *why);

/* --- taking and naming --- */

/* Takes a block that no row names for a place of the row in `slot`: the block `exact`; or, with
 * MT_KV_ANY, the idle one that lies there, else any idle one, else a new one, for which idle ones
 * are dropped so that the physical count does not rise. Where the system has no map areas for other
 * rows to leave the block, one that no view shows is taken instead. Its refs become 1, and no
 * address that a view has shown maps it but at that place. pre: a promise is left; refs of `exact`
 * are 0. */
mt_status mt_kvblock_take(mt_kvlease *lease, size_t slot, size_t place, uint32_t exact,
                          uint32_t *block, mt_error *err);
/* Undoes a take: the block is idle and the promise is back. `filled`: something was copied into it
 * since. Then, if it lies in the extent of an exposed row, it reads zeros there; otherwise it holds
 * what code wrote there in place before. */
void mt_kvblock_untake(mt_kvlease *lease, size_t slot, uint32_t block, bool filled);
/* The block that costs nothing at the place: idle and mapped there, or the row's own one of that
 * place. MT_KV_ANY: there is none, or the place must no longer have what lies there. */
uint32_t mt_kvblock_nearest(const mt_kvpool *pool, size_t slot, size_t place);
/* One more row names the block. pre: refs > 0. MT_KV_ZERO is ignored. */
void mt_kvblock_name(mt_kvpool *pool, uint32_t block);
/* One row less names the block: a row that has ended, so that no view shows its addresses any more.
 * MT_KV_ZERO is ignored. */
void mt_kvblock_unname(mt_kvpool *pool, uint32_t block);
/* The same for a row that goes on and named the block at `place`, where its addresses may map it
 * still. pre: they do not where mt_kvmap_must_leave says so. */
void mt_kvblock_let_go(mt_kvpool *pool, size_t slot, size_t place, uint32_t block);
/* The same for the row's blocks from place `keep` on, where its table then ends. */
void mt_kvblock_let_go_from(mt_kvpool *pool, size_t slot, size_t keep);
/* Remembers that the slot's addresses may map the block, though its row does not name it. */
void mt_kvblock_note_shown(mt_kvpool *pool, size_t slot, uint32_t block);
/* Whether a row that goes on may show the block, which no row names, other than at `place` of the
 * slot. */
bool mt_kvblock_is_in_view(const mt_kvpool *pool, size_t slot, size_t place, uint32_t block);

/* --- dropping --- */

/* Drops idle blocks until at most `keep` are left. Two kinds stay: those of exposed extents, and,
 * where the system has no map areas to change that, those that rows may show which let go of them.
 */
void mt_kvblock_drop(mt_kvpool *pool, size_t keep);
/* The slot's extent is open to other rows again. What code wrote there past the
 * advanced length is dropped. */
void mt_kvblock_unexpose(mt_kvpool *pool, size_t slot);

/* --- content --- */

/* Copies the first `tokens` tokens of a block to another, in all ranges. Where the row in `slot`
 * wrote privately over the block at `place`, that is copied instead; SIZE_MAX: there is no row. */
mt_status mt_kvblock_copy(mt_kvpool *pool, uint32_t to, uint32_t from, size_t tokens, size_t slot,
                          size_t place, mt_error *err);
/* Writes zeros in all ranges of a block, from its token `from` on. */
mt_status mt_kvblock_zero(mt_kvpool *pool, uint32_t block, size_t from, mt_error *err);

#endif
