/* arcs.h -- the objects of some types, found without writing to any other object.
 *
 * The collector's lists are linked. Who goes along one waits for memory at each object, and
 * gc.get_objects(), on which heap.h is built, counts a reference to each besides. So here a list is
 * cut at objects that lie all over it, the modules of sys.modules, and several of the arcs between
 * them are gone along in turn, each with its next object on the way from memory meanwhile:
 *
 *   a list      head ──► . ──► . ──► module ──► . ──► . ──► module ──► . ──► head
 *   arcs        0 ─────────────────► 1 ───────────────────► 2 ────────────────►
 *
 * 284,000 objects take 6 ms, and 29 ms by their list. Frozen objects have a list of their own.
 *
 * The layout is not public. It is the same in Python 3.11 to 3.13, and each look makes sure that the
 * newest object's successor is where the header says that the youngest list is. Where that is not so,
 * in other versions, without the GIL and inside of a collection, heap.h is the way. */
#ifndef MT_PY_CENSUS_ARCS_H
#define MT_PY_CENSUS_ARCS_H

#include "py/base/ptrset.h"

/* Appends the objects of just these types, in the order of gc.get_objects(), the frozen ones last. Runs
 * no Python code. 1 when that is done; 0 where it cannot be done this way; -1 with an error.
 * pre: `list` is the newest object that the collector tracks, and empty. */
int mt_py_arcs_instances(PyObject *list, const mt_ptrset *types);

#endif
