/* mapping.h -- what addresses map. All functions expect the pool's lock.
 *
 * A row's table changes first, and the addresses follow it unit by unit, when a unit is used. Linux
 * limits how many map areas (lines of /proc/self/maps) a process has; a change that would take more
 * fails with MT_EAGAIN, after the areas of free slots have been given up for it. */
#ifndef MT_KV_MAPPING_H
#define MT_KV_MAPPING_H

#include "kv/state.h"

/* --- following the table --- */

/* Makes the places `see` of the slot's unit map what the row's table names, and zeros past its end.
 * Those of `write` can be written to; the others keep from the block what code writes there, where
 * another row names it as well. MT_EAGAIN. */
mt_status mt_kvmap_follow(mt_kvpool *pool, size_t slot, size_t unit, const mt_kvspan *see,
                          const mt_kvspan *write, mt_error *err);
/* Maps one extent, that of the slot `extent`, at all addresses of the slot, for writing: one
 * map area. Views show places [0, end). pre: a lazy store. */
mt_status mt_kvmap_extent(mt_kvpool *pool, size_t slot, size_t extent, size_t end, mt_error *err);
/* Maps the slot's own extent at the places of the unit past the table's end, for writing. pre: a
 * lazy store. MT_EAGAIN, without giving up the map areas of free slots. */
mt_status mt_kvmap_own_extent(mt_kvpool *pool, size_t slot, size_t unit, mt_error *err);
/* Maps at once the extent that holds most of what the row's table names, if there is one and it is
 * not mapped yet: one map area instead of many. */
mt_status mt_kvmap_main_extent(mt_kvpool *pool, size_t slot, mt_error *err);
/* The row's addresses map again what its table names, wherever a view has been. For a change that
 * came to nothing. Where that fails they are zeros. */
mt_status mt_kvmap_restore(mt_kvpool *pool, size_t slot);

/* --- leaving blocks --- */

/* Wherever addresses map a block that their row has let go of, they map the table again, or zeros.
 * After it no block is in a view of a row that does not name it. MT_EAGAIN: some rows are stale
 * still. */
mt_status mt_kvmap_clear_stale(mt_kvpool *pool, mt_error *err);
/* Whether the slot's addresses have to leave the block before its row lets go of it. */
bool mt_kvmap_must_leave(const mt_kvpool *pool, size_t slot, uint32_t block);
/* Before a row lets go of the blocks in the span: its addresses leave those of them that another
 * row has (mt_kvmap_must_leave) and map zeros instead. `anyway`: however many map areas that
 * takes. Where it fails all of the row's addresses are zeros until they are used again, but for one
 * case: a row with private writes before the span keeps its mappings, if writes in the span can be
 * kept from others, and goes on naming the blocks. MT_EAGAIN, or as the store says. */
mt_status mt_kvmap_leave(mt_kvpool *pool, size_t slot, const mt_kvspan *span, bool anyway,
                         mt_error *err);
/* Before the row's table becomes `table`: its addresses leave the blocks that only others will
 * name. `own` is the block of that table that will be the row's alone, or MT_KV_ZERO. pre: refs
 * count the names as they will be. MT_EAGAIN: some addresses have changed. */
mt_status mt_kvmap_leave_for_table(mt_kvpool *pool, size_t slot, const uint32_t *table,
                                   size_t taken, uint32_t own, mt_error *err);
/* All of the slot's addresses are zeros, in one map area, until they are used again. What was
 * written privately is lost. MT_EAGAIN: the store is not lazy. */
mt_status mt_kvmap_zeros(mt_kvpool *pool, size_t slot, mt_error *err);
/* After it no address maps blocks [first, end). pre: the store is not lazy. */
void mt_kvmap_unmap(mt_kvpool *pool, uint32_t first, uint32_t end);
/* Gives up the mappings of all free slots, which map their own extents again, in one map area each;
 * false where there were none to give up. */
bool mt_kvmap_unmap_idle(mt_kvpool *pool);
/* The row is over. What code wrote privately is forgotten, and what others map as well is no longer
 * in sight. What is mapped stays mapped for the next row, unless the pool has very many map areas.
 */
void mt_kvmap_end_row(mt_kvpool *pool, size_t slot);

/* --- what code wrote privately, over a block that others name as well --- */

/* Whether the row's addresses map any of its blocks [0, end) privately. */
bool mt_kvmap_has_private(const mt_kvpool *pool, size_t slot, size_t end);
/* Looks from *at bytes into the slot on for the next part of one of the row's blocks that code
 * wrote to privately. Writes its place to *place, and the end of the part to *at. False: there is
 * none. */
bool mt_kvmap_next_private(const mt_kvpool *pool, size_t slot, size_t *at, size_t *place);
/* Copies what the row wrote privately over its block at `place` into the block. pre: the block is
 * the row's alone. */
mt_status mt_kvmap_save_private(mt_kvpool *pool, size_t slot, size_t place, mt_error *err);
/* Forgets all that the row wrote privately: it shows its blocks. */
mt_status mt_kvmap_drop_private(mt_kvpool *pool, size_t slot);
/* For a row that takes the block for `place`: what it wrote privately there when it had the block
 * before is not to go into it. */
void mt_kvmap_forget_private(mt_kvpool *pool, size_t slot, size_t place, uint32_t block);

/* --- what is in sight --- */

/* Whether the block is in sight anywhere but at `place` of the slot. */
bool mt_kvmap_is_seen_elsewhere(const mt_kvpool *pool, size_t slot, size_t place, uint32_t block);
/* For a row in `slot` that takes the block for `place`: free slots have it in sight no more. */
void mt_kvmap_hide_in_free_slots(mt_kvpool *pool, size_t slot, size_t place, uint32_t block);
/* The address in the store's window of the block's part whose range begins at `at` in the slot. A
 * window is in sight. */
mt_status mt_kvmap_window(mt_kvpool *pool, uint32_t block, size_t at, void **out, mt_error *err);
/* The block's window in the store is used for the first time, or is gone. A window is in sight. */
void mt_kvmap_count_window(mt_kvpool *pool, uint32_t block, bool used);
/* Counts the map areas of a slot again. */
size_t mt_kvmap_count_areas(mt_kvpool *pool, const mt_kvslot *s);
/* Whether the slot's addresses map the block at `place` in some unit. */
bool mt_kvmap_shows(const mt_kvpool *pool, const mt_kvslot *s, size_t place, uint32_t block);

#endif
