/* prepare.h -- making one layer of a lease ready: for tokens that are to be written at the ends of
 * its rows, and for a view, which shows zeros past the ends.
 *
 *   1. own     each block to be written gets a name that nobody else has: a new block at the end of
 *              the table, a copy where it was shared          (journal.h: undone on failure)
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

#include "kv/lease.h"

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

#endif
