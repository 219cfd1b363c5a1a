/* heap.c -- one look at the collector's objects: see heap.h. */
#include "py/census/heap.h"

#include "py/base/ptrset.h"
#include "py/census/frames.h"
#include "core/base/alloc.h"

static void *
heap_get(void *ctx, size_t bytes)
{
    (void)ctx;
    return PyMem_Malloc(bytes);
}

static void
heap_put(void *ctx, void *block, size_t bytes)
{
    (void)ctx;
    (void)bytes;
    PyMem_Free(block);
}

const mt_alloc mt_py_alloc = {.get = heap_get, .put = heap_put, .ctx = NULL};

/* --- what is frozen --------------------------------------------------------------------------- */

typedef struct reach {
    mt_heap *heap;
    mt_ptrset seen;
} reach;

/* 1 when it was not seen before, 0 when it was, -1 without memory. */
static int
heap_see(reach *r, const PyObject *op)
{
    if (mt_ptrset_reserve(&r->seen, r->seen.n + 1) < 0) return -1;
    return mt_ptrset_add(&r->seen, op, 0) == MT_PTRSET_NONE;
}

static bool
keep_frozen(mt_heap *heap, PyObject *op)
{
    PyObject **larger = (PyObject **)mt_alloc_grown(
        &mt_py_alloc, (void *)heap->frozen, &heap->frozen_cap, heap->frozen_n + 1, sizeof *larger);

    if (larger == NULL) return false;
    heap->frozen = larger;
    heap->frozen[heap->frozen_n++] = op;
    return true;
}

/* A visitproc: a container that is tracked and not in the list is a frozen one. */
static int
heap_reached(PyObject *op, void *arg)
{
    reach *r = arg;
    int added;

    if (!PyObject_IS_GC(op) || !PyObject_GC_IsTracked(op) || op == r->heap->list) return 0;
    if ((added = heap_see(r, op)) <= 0) return added;
    return keep_frozen(r->heap, op) ? 0 : -1;
}

static int
reached_in_frame(void *arg, PyObject *code, PyObject *name, PyObject *value)
{
    (void)code;
    (void)name;
    return heap_reached(value, arg);
}

static int
heap_follow(reach *r, PyObject *op)
{
    traverseproc traverse = Py_TYPE(op)->tp_traverse;

    return traverse == NULL ? 0 : traverse(op, heap_reached, r);
}

static int
find_frozen(reach *r)
{
    mt_heap *heap = r->heap;
    PyObject *modules = PyImport_GetModuleDict();

    for (size_t i = 0; i < heap->tracked; i++)
        if (heap_see(r, mt_py_heap_at(heap, i)) < 0) return -1;
    if (modules != NULL && heap_reached(modules, r) < 0) return -1;
    if (mt_py_frames_visit(reached_in_frame, r) < 0) return -1;
    for (size_t i = 0; i < mt_py_heap_len(heap); i++) /* which grows */
        if (heap_follow(r, mt_py_heap_at(heap, i)) < 0) return -1;
    return 0;
}

static int
add_frozen(mt_heap *heap)
{
    reach r = {.heap = heap};
    int failed = find_frozen(&r);

    mt_ptrset_fini(&r.seen);
    if (failed && !PyErr_Occurred()) PyErr_NoMemory();
    return failed;
}

/* --- open and close --------------------------------------------------------------------------- */

/* A list that nothing else refers to. A program may replace functions of gc. */
static PyObject *
own_list(PyObject *objects)
{
    PyObject *own;

    if (!PyList_Check(objects)) {
        PyErr_Format(PyExc_TypeError,
                     "gc.get_objects() returned %s, not a list; the program has replaced it",
                     Py_TYPE(objects)->tp_name);
        Py_DECREF(objects);
        return NULL;
    }
    if (Py_REFCNT(objects) == 1) return objects;
    own = PyList_GetSlice(objects, 0, PyList_GET_SIZE(objects));
    Py_DECREF(objects);
    return own;
}

/* *frozen: whether gc.freeze() has put anything aside. */
static PyObject *
get_objects(bool *frozen)
{
    PyObject *gc = PyImport_ImportModule("gc"), *count, *list = NULL;

    if (gc == NULL) return NULL;
    if ((count = PyObject_CallMethod(gc, "get_freeze_count", NULL)) != NULL) {
        *frozen = PyObject_IsTrue(count) == 1;
        Py_DECREF(count);
        if ((list = PyObject_CallMethod(gc, "get_objects", NULL)) != NULL) list = own_list(list);
    }
    Py_DECREF(gc);
    return list;
}

int
mt_py_heap_open(mt_heap *heap)
{
    bool frozen = false;

    *heap = (mt_heap){.collecting = PyGC_Disable() != 0};
    if ((heap->list = get_objects(&frozen)) != NULL) {
        heap->tracked = (size_t)PyList_GET_SIZE(heap->list);
        if (!frozen || add_frozen(heap) == 0) return 0;
    }
    mt_py_heap_close(heap);
    return -1;
}

void
mt_py_heap_close(mt_heap *heap)
{
    Py_CLEAR(heap->list);
    PyMem_Free((void *)heap->frozen);
    heap->frozen = NULL;
    heap->tracked = heap->frozen_n = heap->frozen_cap = 0;
    if (heap->collecting) PyGC_Enable();
}
