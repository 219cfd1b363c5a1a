/* journal.h -- the changes of a lease's tables that one call makes, so that they can be undone.
 *
 *   begin --> promise --> own, move, ...  --> end, MT_OK: blocks that were replaced are let go of
 *                          | an entry each
 *                          +---------------> end, else: the old names are put back, latest first
 *
 * Only tables and references change what a row *is*, and they change here. A mapping that was
 * changed on the way needs no undoing: it is found changed, and followed anew. One thing is lost
 * with such a mapping: what code wrote privately over a shared block. So a row whose new copy has
 * such writes keeps the copy when the rest is undone. All functions expect the pool's lock. */
#ifndef MT_KV_JOURNAL_H
#define MT_KV_JOURNAL_H

#include "kv/private.h"

typedef struct mt_kventry { /* one name given in a table */
    size_t row, place;
    uint32_t was;  /* MT_KV_NEW: the table ended here */
    size_t copied; /* tokens that the new block has of the old */
} mt_kventry;

#define MT_KV_NEW UINT32_MAX

typedef struct mt_kvjournal {
    mt_kvlease *lease;
    mt_kventry *entry;
    size_t count, room;
    size_t promised; /* blocks that this change added to the lease's promise */
} mt_kvjournal;

void mt_kvjournal_begin(mt_kvjournal *j, mt_kvlease *lease);
/* Makes `more` blocks and entries certain: after it only the store can fail. */
mt_status mt_kvjournal_promise(mt_kvjournal *j, size_t more, mt_error *err);
/* The end of a call that came to `st`, which it returns. MT_OK: lets go of the blocks that were
 * replaced. Otherwise undoes the changes: puts the names back, latest first, gives back the
 * promise, and takes nothing for mapped that was. In a refusal by the ledger, what the call had
 * reserved and releases here counts as asked. */
mt_status mt_kvjournal_end(mt_kvjournal *j, mt_status st, mt_error *err);

/* --- changes --- */

/* How many of the row's blocks [lo, hi) mt_kvjournal_own would take. */
size_t mt_kvjournal_missing(const mt_kvlease *lease, size_t row, size_t lo, size_t hi);
/* The row's blocks [lo, hi) become the row's alone: shared ones are copied, those past the table's
 * end are added. pre: lo is at most the table's end. */
mt_status mt_kvjournal_own(mt_kvjournal *j, size_t row, size_t lo, size_t hi, mt_error *err);
/* What code wrote privately at `place` of the row goes into the block there, if that is the row's
 * alone, or else into a copy, which then is. */
mt_status mt_kvjournal_own_written(mt_kvjournal *j, size_t row, size_t place, mt_error *err);
/* The row takes the blocks that cost nothing (mt_kvblock_nearest) for the places past its table's
 * end, up to place hi, as long as there are any, before another row takes them for itself. pre:
 * they are promised. */
mt_status mt_kvjournal_extend_nearest(mt_kvjournal *j, size_t row, size_t hi, mt_error *err);
/* Where stretches are short: the row's blocks move into one extent, its own or that of a free slot,
 * and all its addresses map that extent, in one stretch. Blocks of zeros are added for the first
 * `view` places and for all others that a view has ever reached, so that no view shows what lies
 * behind them in that extent. pre: a lazy store. */
mt_status mt_kvjournal_move(mt_kvjournal *j, size_t row, size_t view, mt_error *err);
/* The other units of rows whose blocks were copied show the old blocks, which are somebody else's.
 * They follow at once, all but this unit (SIZE_MAX: all). Where stretches are short the row moves,
 * with as many blocks as a view of this unit shows. */
mt_status mt_kvjournal_follow_copies(mt_kvjournal *j, size_t unit, size_t view, mt_error *err);

#endif
