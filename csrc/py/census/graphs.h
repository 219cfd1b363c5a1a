/* graphs.h -- which tensor keeps which nodes of autograd's graphs, and which of the graphs grows.
 *
 * All that a step computes hangs together: a `hidden` that is carried from step to step without
 * detach() leads to every step before, and so does whatever was computed from it, `q` or the loss.
 * Who holds the chain? The tensor that was there first. So the roots (tensors with a grad_fn that the
 * walk has reached) are taken oldest first, by their sequence numbers, and each gets the nodes that
 * no older root reached:
 *
 *   hidden (812) ──► 811 ──► 640 ──► ... ──► 3        809 nodes, the oldest of number 3
 *   q      (832) ──► 831 ─────┘                        its own 20, the oldest of number 813
 *   loss   (851) ──► 850 ──► 832                       its own 19, the oldest of number 833
 *
 * In the middle of a step `out` is still that of the step before, and older than the `hidden` that
 * replaces what both came from. The newest computation goes past such a root: it leads to what the
 * root leads to, and not to the root. The next step will do the same, so roots of this kind come
 * last:
 *
 *   hidden (812) ──► 811 ──► 797 ──► ... ──► 3        all but one
 *   out    (798) ─────────────┘                        its own node
 *
 * A graph is a leak only where it grows *and* keeps what it had at the look before: the graph of this
 * step, however long its sequence, is all younger than that look. So count() takes the number that
 * was the next one then, and counts for each root how many of its nodes are older.
 *
 *   walk:  mt_graphs_begin ─► add(root) ... ─► mt_graphs_count ─► roots[i].nodes ... ─► mt_graphs_end
 *
 * Nothing here makes a Python object, takes a reference or runs Python code. */
#ifndef MT_PY_CENSUS_GRAPHS_H
#define MT_PY_CENSUS_GRAPHS_H

#include "py/base/ptrset.h"
#include "py/base/state.h"

#include <stdbool.h>

typedef struct mt_graph {
    PyObject *root;   /* borrowed: the tensor, or the leaf whose .grad has the graph */
    const void *node; /* the grad_fn */
    uint64_t number;  /* of it */
    size_t order;     /* in which the roots were added */
    size_t nodes;     /* that no older root reached, without those of leaves */
    size_t old;       /* of them: how many are from before the look before */
    bool is_passed;   /* a newer root leads to some of what this one leads to, and not to it */
    bool of_grad;     /* the graph of root.grad: backward(create_graph=True) has made a cycle */
} mt_graph;

typedef struct mt_graphs {
    const mt_torch_ops *shim;
    /* after count(): those that are not passed, then the others, each oldest first; of those with
     * one grad_fn, the first added */
    mt_graph *roots;
    size_t n, cap;
    size_t nodes;   /* in all graphs together */
    uint64_t now;   /* the number that the next node of this thread will get */
    bool cut;       /* there were more than `most` nodes: the counts are of those that were seen */
    mt_ptrset seen; /* each node with the number of the root that has it */
} mt_graphs;

/* Takes no memory yet; reads `now`. */
void mt_graphs_begin(mt_graphs *graphs, const mt_torch_ops *shim);

/* Notes a tensor that was reached as a root where it has a graph, and a leaf where its .grad has
 * one; others are not roots and cost one call of the shim. Of two with the same grad_fn the one that
 * was added first gets the nodes. -1 without memory, and no error is set.
 * pre: tensor is a torch.Tensor */
int mt_graphs_add(mt_graphs *graphs, PyObject *tensor);

/* Sorts the roots and shares out the nodes among them, `most` nodes at most. `then` is `now` of the
 * look before, 0 at the first. -1 without memory, and no error is set. */
int mt_graphs_count(mt_graphs *graphs, size_t most, uint64_t then);

/* Frees what the others took; the graphs may be begun again. */
void mt_graphs_end(mt_graphs *graphs);

#endif
