/* journal.h -- the changes of a lease's tables that one call makes, so that they can be undone.
 *
 * Only tables and references change what a row *is*. Blocks are taken and named here, each with an
 * entry; undo puts the names back, commit unnames what was given up. A mapping that was changed on
 * the way is found changed and followed anew. With it goes what code wrote privately over a shared
 * block: a row whose copy has that keeps the copy, also when the rest is undone. */
#ifndef MT_KV_JOURNAL_H
#define MT_KV_JOURNAL_H

#include "kv/private.h"

typedef struct mt_kventry { /* one name given in a table */
    size_t row, tb;
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
/* What it had reserved and lets go of counts as asked in a refusal by the ledger. */
void mt_kvjournal_undo(mt_kvjournal *j, mt_error *why);
void mt_kvjournal_commit(mt_kvjournal *j);

/* How many of the row's blocks [lo, hi) own would take. */
size_t mt_kvgrow_missing(const mt_kvlease *lease, size_t row, size_t lo, size_t hi);

/* Rows' blocks [lo, hi) become theirs alone; those past the table's end are added. */
mt_status mt_kvgrow_own(mt_kvjournal *j, size_t row, size_t lo, size_t hi, mt_error *err);

/* What code wrote privately at place tb of the row goes into the block there, if that is the row's
 * own, or else into a copy, which is then. */
mt_status mt_kvjournal_own_written(mt_kvjournal *j, size_t row, size_t tb, mt_error *err);

/* Of the blocks past the table's end, up to place hi, the row takes those that lie nearest, as long
 * as there are any, so that no other row takes them first. pre: they are promised. */
mt_status mt_kvgrow_extend_nearest(mt_kvjournal *j, size_t row, size_t hi, mt_error *err);

/* The row's blocks become copies of its own in one home, its own where nobody else names a block
 * there, and all its addresses map that home: one stretch. Blocks are added, of zeros, for the
 * first `view` places and for all others that a view has ever reached, so that no view shows what
 * lies behind them in that home. Lazy stores. */
mt_status mt_kvgrow_move(mt_kvjournal *j, size_t row, size_t view, mt_error *err);

/* The other layers of rows whose blocks were copied show the old ones, which are somebody else's:
 * they follow at once, all but this unit (SIZE_MAX: all). Where there are no stretches left for
 * that, the row moves, with as many blocks as a view of this unit shows. */
mt_status mt_kvgrow_follow_copies(mt_kvjournal *j, size_t unit, size_t view, mt_error *err);

#endif
