/* heap.h -- everything the garbage collector tracks, at one moment.
 *
 *   open()  collector off ── gc.get_objects() ──► list, with a reference to each object
 *                         └─ anything frozen?  ──► what is reached from these, from sys.modules
 *                                                  and from running frames, and is not among them
 *   close() references back, collector as it was
 *
 * Between open and close the caller keeps the GIL and calls nothing that runs Python code: it looks
 * at Py_TYPE and calls tp_traverse. So no object changes, dies or is born in between, whatever its
 * class overrides, and all other threads wait.
 *
 * Why gc.get_objects() and not PyUnstable_GC_VisitObjects(): the latter exists from 3.12 on,
 * forbids the callback to take memory from the collector, and holds no reference to what it has
 * shown. The list costs a reference an object, which is a third of a census, and is the same in all
 * versions. Neither shows what gc.freeze() put aside, in 3.11 and 3.12: a long-lived list that was
 * frozen after warm-up is just where a leak hides, hence the second step.
 *
 * Who wants the objects of a few types alone has a faster way in some versions: arcs.h. */
#ifndef MT_PY_CENSUS_HEAP_H
#define MT_PY_CENSUS_HEAP_H

#include "py/base/state.h"

typedef struct mt_heap {
    PyObject *list;    /* what gc.get_objects() gave */
    PyObject **frozen; /* borrowed; PyMem memory */
    size_t tracked, frozen_n, frozen_cap;
    bool collecting; /* before open */
} mt_heap;

/* The allocator of what lives during a pass: Python's, so that its tools see it. */
extern const mt_alloc mt_py_alloc;

/* -1 with an error, and nothing is held. */
int mt_py_heap_open(mt_heap *heap);
void mt_py_heap_close(mt_heap *heap);

static inline size_t
mt_py_heap_len(const mt_heap *heap)
{
    return heap->tracked + heap->frozen_n;
}

/* Borrowed. pre: i < len */
static inline PyObject *
mt_py_heap_at(const mt_heap *heap, size_t i)
{
    if (i < heap->tracked) return PyList_GET_ITEM(heap->list, (Py_ssize_t)i);
    return heap->frozen[i - heap->tracked];
}

#endif
