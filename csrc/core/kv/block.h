/* block.h -- blocks of a pool: promising, taking, naming and dropping them, and their content. All
 * functions expect the pool's lock. */
#ifndef MT_KV_BLOCK_H
#define MT_KV_BLOCK_H

#include "kv/private.h"

/* Promises the lease `blocks` more: MT_ELIMIT with the bytes that the ledger lacks as `asked`. */
mt_status mt_kvblock_promise(mt_kvlease *lease, size_t blocks, mt_error *err);
/* Takes back what is left of a promise. */
void mt_kvblock_unpromise(mt_kvlease *lease, size_t blocks);
/* A block that is nobody's, for place tb of the row in `slot`: `exact`; or with MT_KV_ANY the idle
 * one that lies there, else any idle one, else a new one, for which idle ones are dropped where the
 * count would rise; where there are no stretches for others to leave it, one that nobody shows. Its
 * refs become 1, and no address that a view has shown maps it but at that place. pre: a promise is
 * left; refs of `exact` are 0. */
mt_status mt_kvblock_take(mt_kvlease *lease, size_t slot, size_t tb, uint32_t exact,
                          uint32_t *block, mt_error *err);
/* Whether a row that goes on may show the block, which nobody names, other than at place tb of the
 * slot. */
bool mt_kvblock_is_in_view(const mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The block for place tb that is idle and mapped there without a call, or is the row's own one of
 * that place; MT_KV_ANY where there is none, or the place is no longer to have what lies there. */
uint32_t mt_kvblock_nearest(const mt_kvpool *pool, size_t slot, size_t tb);
/* Undoes a take: the block is idle, the promise is back. Where an exposed row took it and it was
 * not filled since, what code wrote there in place before is there as it was; else it reads zeros
 * there. */
void mt_kvblock_untake(mt_kvlease *lease, size_t slot, uint32_t block, bool filled);
/* A try was undone that had `reserved` blocks: what it let go of counts as asked in a refusal. */
void mt_kvblock_note_undone(const mt_kvpool *pool, size_t reserved, mt_error *why);
void mt_kvblock_name(mt_kvpool *pool, uint32_t block); /* pre: refs > 0. MT_KV_ZERO is ignored */
/* For a row that is over: nobody sees its addresses any more. MT_KV_ZERO is ignored. */
void mt_kvblock_unname(mt_kvpool *pool, uint32_t block);
/* The same for a row that goes on and named it at place tb, where its addresses may map it still.
 * pre: they do not where mt_kvblock_must_leave says so. */
void mt_kvblock_let_go(mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The same for the row's blocks from place `keep` on, where its table ends then. */
void mt_kvblock_let_go_from(mt_kvpool *pool, size_t slot, size_t keep);
/* The slot's addresses may map the block where a view shows it, though its row does not name it. */
void mt_kvblock_note_shown(mt_kvpool *pool, size_t slot, uint32_t block);
/* Whether the slot's addresses have to leave the block before its row lets go of it. */
bool mt_kvblock_must_leave(const mt_kvpool *pool, size_t slot, uint32_t block);
/* Drops idle blocks until at most `keep` idle ones are left, or none but those of exposed homes and
 * those that rows may show which let go of them, where the system gives no mappings to change that.
 */
void mt_kvblock_drop(mt_kvpool *pool, size_t keep);
/* The slot's own home is open to others again; what code wrote there without a word is dropped. */
void mt_kvblock_unexpose(mt_kvpool *pool, size_t slot);
/* Copies the first `tokens` tokens of a block to another, in all ranges. What the row in `slot`
 * wrote privately over the block at place tb is copied in its stead; SIZE_MAX: there is no row. */
mt_status mt_kvblock_copy(mt_kvpool *pool, uint32_t to, uint32_t from, size_t tokens, size_t slot,
                          size_t tb, mt_error *err);
/* Zeros in all ranges of a block, from its token `from` on. */
mt_status mt_kvblock_zero(mt_kvpool *pool, uint32_t block, size_t from, mt_error *err);
/* An address of the block's part at `at` bytes into the slot, less its place. */
mt_status mt_kvblock_window(mt_kvpool *pool, uint32_t block, size_t at, void **out, mt_error *err);
/* Brings the ledger's reservation down to the need. */
void mt_kvblock_fit(mt_kvpool *pool);

#endif
