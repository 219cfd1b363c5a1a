/* chains.h -- linked chains: what grows by one link a step, and no container is longer for it.
 *
 *   last = {"prev": last, "loss": loss}
 *
 *   __main__                          links   a link is an object that has another one of its own
 *     └─ last ─► dict                   319   type below it, at most MT_CHAIN_APART steps down in
 *                 └─ prev ─► dict       318   the walk's tree; the steps in between may be an
 *                      └─ ... ─► dict     0   instance's dict, a tuple, a cell, a frame
 *
 * The head is the first link, as it is seen from the program's names: the variable that holds it
 * keeps all of them alive. A list of links is not a chain: the walk finds each of them in the list,
 * which is above none of the others. So are exceptions by __context__ and __traceback__, functions
 * by their closures, and iterators that go through iterators.
 *
 * Everything here is a loop over the nodes of a walk: a chain of a million links takes no stack. */
#ifndef MT_PY_CENSUS_CHAINS_H
#define MT_PY_CENSUS_CHAINS_H

#include "py/census/walk.h"

enum {
    MT_CHAIN_LEAST = 4, /* links: what is shorter is a program's data and no chain */
    MT_CHAIN_APART = 4, /* steps in the walk's tree from one link to the next */
    MT_CHAIN_BELOW =
        8, /* so far the tree has to go on below a link: nearly all objects are left out */
};

typedef struct mt_chain {
    size_t node;    /* of the head */
    size_t last;    /* the node of its last link, but for the few below it */
    uint32_t links; /* that lead from the head to the last one */
} mt_chain;

typedef struct mt_chains {
    mt_chain *at;
    size_t n, cap;
} mt_chains;

/* The chains of a walk. All zeros: there are none. -1 without memory, and no error is set. */
int mt_chains_find(const mt_walk *walk, mt_chains *chains);
void mt_chains_free(mt_chains *chains);

#endif
