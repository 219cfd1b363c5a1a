/* prepare.h -- making one layer of a lease ready: for tokens that are to be written at the ends of
 * its rows, and for a view, which shows zeros past the ends.
 *
 *   1. own     each block to be written gets a name that no other row has: a new block at the end of
 *              the table, a copy where it was shared          (the journal: undone on failure)
 *   2. map     the addresses of the layer follow the table
 *   3. zero    what the view will show past a row's end becomes zeros
 *   4. commit  the names that were given up are taken back from their blocks
 *
 * What is known of a row is kept in marks, so that making room for the next token is a comparison
 * of numbers, without the pool's lock. All marks count tokens. Three are kept for each layer:
 *
 *   0               length      writable_to     zero_to        end of the table      max_tokens
 *   |----------------+---------------+-------------+------------------+-------------------+
 *     what was         may have been   known to be   not known          addresses map
 *     appended         written to      zeros                            zeros
 *
 * and three for each unit of layers that share pages; these lie at the borders of blocks:
 *
 *   |----------|----------|----------|----------|----------|
 *              owned_from            owned_to                   blocks that are the row's alone,
 *                                                               mapped and writable
 *   0                                           mapped_to       mapped as the table says
 *
 * The length is at most writable_to and at most zero_to. A row that was given room for tokens which
 * were not written has writable_to past its length, perhaps past zero_to: then nothing is known of
 * the tokens from the length on. */
#ifndef MT_KV_PREPARE_H
#define MT_KV_PREPARE_H

#include "kv/state.h"

typedef struct mt_kvwant {
    size_t layer;
    mt_kvstep step; /* tokens that the caller will write at the end of each row, */
    size_t to;      /* or more: up to this token. Together at most max_tokens */
    size_t view;    /* tokens [0, view) of each row are to be readable */
    bool held; /* the tokens that the rows hold already are to be written as well, in all layers */
    /* Only the blocks are wanted. Another call makes zeros of what they hold past the lengths. */
    bool own_only;
} mt_kvwant;

/* The step's tokens of each row can be written, and the view be read, with zeros past the step.
 * Takes the pool's lock where it has to, and asks other members of the ledger where ours does not
 * suffice. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvprepare(mt_kvlease *lease, const mt_kvwant *want, mt_error *err);

/* Nothing past the end of the row's table is known to be zeros any more. */
void mt_kvprepare_forget_zeros(mt_kvlease *lease, size_t row);
/* Nothing is known to be owned or mapped any more. */
void mt_kvprepare_forget_maps(mt_kvlease *lease, size_t row);

/* --- the journal: the changes of a lease's tables that one call makes ---
 *
 *   begin --> promise --> own, move, ...  --> end, MT_OK: blocks that were replaced are let go of
 *                          | an entry each
 *                          +---------------> end, else: the old names are put back, latest first
 *
 * Only tables and references change what a row *is*, and they change here. A mapping that was
 * changed on the way needs no undo record: the next call compares it with the table and changes it. One thing is lost
 * with such a mapping: what code wrote privately over a shared block. So a row whose new copy has
 * such writes keeps the copy when the rest is undone. All functions expect the pool's lock. */
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
 * promise, and no longer counts as mapped what it had mapped. In a refusal by the ledger, what the call had
 * reserved and releases here counts as asked. */
mt_status mt_kvjournal_end(mt_kvjournal *j, mt_status st, mt_error *err);

/* How many of the row's blocks [lo, hi) mt_kvjournal_own would take. */
size_t mt_kvjournal_missing(const mt_kvlease *lease, size_t row, size_t lo, size_t hi);
/* The row's blocks [lo, hi) become the row's alone: shared ones are copied, those past the table's
 * end are added. pre: lo is at most the table's end. */
mt_status mt_kvjournal_own(mt_kvjournal *j, size_t row, size_t lo, size_t hi, mt_error *err);

/* --- what code wrote privately into rows, over blocks which they share --- */

/* Whether code wrote privately over blocks of a row: not looked at, no, yes. */
typedef enum mt_kvwritten { MT_KV_UNSEEN, MT_KV_PLAIN, MT_KV_WRITTEN } mt_kvwritten;

/* Puts what code wrote privately into rows into blocks that are the rows' own, so that other rows
 * can name them. The rows are index[i] for i < n, but where that is i itself; or the first n where
 * index is NULL. Writes what it found to written[row] of each of the lease's rows, where `written`
 * is not NULL and the store has private writes at all. Takes the pool's lock, and asks other
 * members of the ledger as mt_kvprepare does. */
mt_status mt_kvwritten_save(mt_kvlease *lease, const size_t *index, size_t n, mt_kvwritten *written,
                            mt_error *err);

#endif
