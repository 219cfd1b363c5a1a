/* referrers.c -- who refers to some objects: one heap pass for all of them.
 *
 *   each container ── tp_traverse ──► visit(op): one bit of a small filter says no to almost all,
 *                                     a table of the targets says which one it is
 *
 * A target's references are added up on the way. What its reference count says beyond that is held
 * by nobody on the Python heap: by C or C++ code. */
#include "py/census/census.h"

#include "py/census/frames.h"
#include "py/census/heap.h"

enum { MAX_TARGETS = 4096, FILTER_BITS = 1 << 16 };

typedef struct edge {
    PyObject *container; /* borrowed: the heap keeps it */
    size_t target;
} edge;

typedef struct search {
    PyObject *list;    /* of targets */
    size_t *slots;     /* target + 1; 0 is empty */
    size_t slots_cap;  /* a power of two, at least twice the targets */
    size_t *found;     /* references seen, for each target */
    PyObject *current; /* the container that is being traversed */
    edge *edges;
    size_t edges_n, edges_cap;
    PyObject *frames;
    unsigned char filter[FILTER_BITS / 8];
} search;

static uint64_t
hash_of(const PyObject *op)
{
    return ((uint64_t)(uintptr_t)op >> 4) * UINT64_C(0x9E3779B97F4A7C15);
}

static size_t
slot_of(const search *s, PyObject *op)
{
    size_t at = (size_t)(hash_of(op) >> 20) & (s->slots_cap - 1);

    while (s->slots[at] != 0 && PyList_GET_ITEM(s->list, (Py_ssize_t)s->slots[at] - 1) != op)
        at = (at + 1) & (s->slots_cap - 1);
    return at;
}

/* The target's number, or SIZE_MAX. */
static size_t
target_of(const search *s, PyObject *op)
{
    uint64_t bit = hash_of(op) >> 48;

    if ((s->filter[bit / 8] >> bit % 8 & 1) == 0) return SIZE_MAX;
    return s->slots[slot_of(s, op)] - 1;
}

static bool
room_for_an_edge(search *s)
{
    size_t cap = s->edges_cap == 0 ? 256 : 2 * s->edges_cap;
    edge *larger;

    if (s->edges_n < s->edges_cap) return true;
    if ((larger = PyMem_Realloc(s->edges, cap * sizeof *larger)) == NULL) return false;
    s->edges = larger;
    s->edges_cap = cap;
    return true;
}

/* A visitproc; -1 without memory. A container that holds a target twice is one edge if it shows it
 * twice in a row, else two: whoever reads them counts different targets. */
static int
visit(PyObject *op, void *arg)
{
    search *s = arg;
    size_t target = target_of(s, op);

    if (target == SIZE_MAX) return 0;
    s->found[target]++;
    if (s->current == s->list) return 0;
    if (!room_for_an_edge(s)) return -1;
    s->edges[s->edges_n++] = (edge){s->current, target};
    return 0;
}

/* As long as nothing is appended to a list of our own that it would be traversed in: frames come
 * after the heap. */
static int
visit_frame(void *arg, PyObject *code, PyObject *name, PyObject *value)
{
    search *s = arg;
    size_t target = target_of(s, value);
    PyObject *row;
    int failed;

    if (target == SIZE_MAX) return 0;
    s->found[target]++;
    row = Py_BuildValue("OOn", code, name == NULL ? Py_None : name, (Py_ssize_t)target);
    failed = row == NULL ? -1 : PyList_Append(s->frames, row);
    Py_XDECREF(row);
    return failed;
}

static int
traverse_all(search *s, const mt_heap *heap)
{
    for (size_t i = 0; i < mt_py_heap_len(heap); i++) {
        traverseproc traverse;
        s->current = mt_py_heap_at(heap, i);
        traverse = Py_TYPE(s->current)->tp_traverse;
        if (traverse != NULL && traverse(s->current, visit, s) != 0) return -1;
    }
    return mt_py_frames_visit(visit_frame, s);
}

/* --- the answer ------------------------------------------------------------------------------- */

static PyObject *
edge_rows(const search *s)
{
    PyObject *list = PyList_New((Py_ssize_t)s->edges_n);

    for (size_t i = 0; list != NULL && i < s->edges_n; i++) {
        PyObject *row = Py_BuildValue("On", s->edges[i].container, (Py_ssize_t)s->edges[i].target);
        if (row == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, row);
    }
    return list;
}

/* References beyond those seen, for each target; `held` are those of the pass itself. */
static PyObject *
unaccounted(const search *s, const mt_heap *heap)
{
    PyObject *list = PyList_New(PyList_GET_SIZE(s->list));

    for (Py_ssize_t i = 0; list != NULL && i < PyList_GET_SIZE(s->list); i++) {
        PyObject *op = PyList_GET_ITEM(s->list, i), *number;
        bool in_list = PyObject_IS_GC(op) && PyObject_GC_IsTracked(op) && heap->frozen_n == 0;
        Py_ssize_t more = Py_REFCNT(op) - (Py_ssize_t)s->found[i] - in_list;
        if ((number = PyLong_FromSsize_t(more > 0 ? more : 0)) == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, number);
    }
    return list;
}

static PyObject *
answer(search *s, const mt_heap *heap)
{
    PyObject *missing, *rows, *result = NULL;

    if (traverse_all(s, heap) < 0) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    if ((missing = unaccounted(s, heap)) == NULL) return NULL;
    if ((rows = edge_rows(s)) != NULL) {
        result = PyTuple_Pack(3, rows, s->frames, missing);
        Py_DECREF(rows);
    }
    Py_DECREF(missing);
    return result;
}

static int
enter_targets(search *s)
{
    size_t n = (size_t)PyList_GET_SIZE(s->list);

    for (s->slots_cap = 16; s->slots_cap < 4 * n;)
        s->slots_cap *= 2;
    s->slots = PyMem_Calloc(s->slots_cap, sizeof *s->slots);
    s->found = PyMem_Calloc(n + 1, sizeof *s->found);
    if (s->slots == NULL || s->found == NULL) return -1;
    for (size_t i = 0; i < n; i++) {
        PyObject *op = PyList_GET_ITEM(s->list, (Py_ssize_t)i);
        uint64_t bit = hash_of(op) >> 48;
        s->slots[slot_of(s, op)] = i + 1;
        s->filter[bit / 8] |= (unsigned char)(1U << bit % 8);
    }
    return 0;
}

static PyObject *
search_heap(search *s)
{
    PyObject *result = NULL;
    mt_heap heap;

    if (enter_targets(s) < 0) return PyErr_NoMemory();
    if ((s->frames = PyList_New(0)) == NULL) return NULL;
    if (mt_py_heap_open(&heap) == 0) {
        result = answer(s, &heap);
        mt_py_heap_close(&heap);
    }
    Py_DECREF(s->frames);
    return result;
}

/* _referrers(targets: list) -> (edges, frames, unaccounted)
 *   edges        [(container, number of the target)], without the list of targets itself
 *   frames       [(code, name of the variable or None, number of the target)]
 *   unaccounted  for each target, references that nobody on the Python heap holds */
PyObject *
mt_py_referrers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result;
    search *s;

    if (!PyArg_ParseTuple(args, "O!:_referrers", &PyList_Type, &list)) return NULL;
    if (PyList_GET_SIZE(list) > MAX_TARGETS)
        return PyErr_Format(PyExc_ValueError, "at most %d targets, got %zd", MAX_TARGETS,
                            PyList_GET_SIZE(list));
    if ((s = PyMem_Calloc(1, sizeof *s)) == NULL) return PyErr_NoMemory();
    s->list = list;
    result = search_heap(s);
    PyMem_Free(s->slots);
    PyMem_Free(s->found);
    PyMem_Free(s->edges);
    PyMem_Free(s);
    return result;
}
