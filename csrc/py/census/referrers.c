/* referrers.c -- who refers to some objects: one heap pass for all of them.
 *
 *   each container ── tp_traverse ──► visit(op): one bit of a small filter says no to almost all,
 *                                     a table of the targets says which one it is
 *
 * A target's references are added up on the way. References beyond these in its reference count belong
 * to C or C++ code. The collector does not list a dict or a tuple of arrays and numbers alone: it is
 * entered from what holds it, and is a container as the others are. */
#include "py/census/census.h"

#include "py/base/objects.h"
#include "py/base/ptrset.h"
#include "py/census/frames.h"
#include "py/census/heap.h"
#include "py/census/kept.h"

enum { MAX_TARGETS = 4096, FILTER_BITS = 1 << 16, DEEPEST = 8 };

typedef struct edge {
    PyObject *container; /* borrowed: the heap keeps it */
    size_t target;
} edge;

typedef struct search {
    mt_heap heap;
    PyObject *list;    /* of targets */
    mt_ptrset targets; /* each with its number in the list */
    size_t *found;     /* references seen, for each target */
    PyObject *current; /* the container that is being traversed */
    mt_ptrset entered; /* containers with a target that the collector does not list */
    int depth;         /* so many of them in one another are being traversed */
    edge *edges;
    size_t edges_n, edges_cap;
    PyObject *frames;
    unsigned char filter[FILTER_BITS / 8];
} search;

/* The target's number, or MT_PTRSET_NONE. The filter says so of nearly everything else. */
static size_t
target_of(const search *s, PyObject *op)
{
    uint64_t bit = mt_ptr_hash(op) >> 48;

    if ((s->filter[bit / 8] >> bit % 8 & 1) == 0) return MT_PTRSET_NONE;
    return mt_ptrset_find(&s->targets, op);
}

static int referrers_visit(PyObject *op, void *arg);

/* Traverses a container that the collector does not list; once if it has a target. -1 without memory. */
static int
enter_unlisted(search *s, PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    PyObject *outer = s->current;
    size_t edges_n = s->edges_n;
    int failed;

    if ((type != &PyDict_Type && type != &PyTuple_Type) || PyObject_GC_IsTracked(op)) return 0;
    if (s->depth == DEEPEST || mt_ptrset_find(&s->entered, op) != MT_PTRSET_NONE) return 0;
    s->current = op;
    s->depth++;
    failed = type->tp_traverse(op, referrers_visit, s);
    s->depth--;
    s->current = outer;
    if (failed != 0 || s->edges_n == edges_n) return failed;
    if (mt_ptrset_reserve(&s->entered, s->entered.n + 1) < 0) return -1;
    (void)mt_ptrset_add(&s->entered, op, 0);
    return 0;
}

/* A visitproc; -1 without memory. A container that holds a target twice is one edge if it shows it
 * twice in a row, else two: the caller counts different targets. */
static int
referrers_visit(PyObject *op, void *arg)
{
    search *s = arg;
    size_t target = target_of(s, op);
    edge *edges;

    if (target == MT_PTRSET_NONE) return enter_unlisted(s, op);
    s->found[target]++;
    if (s->current == s->list) return 0;
    edges = mt_alloc_grown(&mt_py_alloc, s->edges, &s->edges_cap, s->edges_n + 1, sizeof *edges);
    if (edges == NULL) return -1;
    s->edges = edges;
    s->edges[s->edges_n++] = (edge){s->current, target};
    return 0;
}

/* An mt_py_kept_visitor: the keeper stands for a frame. What a context keeps is traversed, too, in the
 * tables that it has; here the reference of the pair is accounted for. */
static int
visit_kept(void *arg, PyObject *keeper, PyObject *value)
{
    search *s = arg;
    size_t target = target_of(s, value);

    if (target == MT_PTRSET_NONE) return 0;
    s->found[target]++;
    return mt_py_append(s->frames, Py_BuildValue("OOn", keeper, Py_None, (Py_ssize_t)target));
}

/* What the interpreter keeps: see kept.h. It is opened here, so that its list is not in the heap. */
static int
traverse_kept(search *s)
{
    mt_kept kept;
    int failed;

    if (mt_py_kept_open(&kept) < 0) return -1;
    failed = mt_py_kept_visit(&kept, visit_kept, s);
    mt_py_kept_close(&kept);
    return failed;
}

/* The list of frames was made after the heap was listed, so that it is not traversed while it grows. */
static int
visit_frame(void *arg, PyObject *code, PyObject *name, PyObject *value)
{
    search *s = arg;
    size_t target = target_of(s, value);

    if (target == MT_PTRSET_NONE) return enter_unlisted(s, value);
    s->found[target]++;
    return mt_py_append(
        s->frames, Py_BuildValue("OOn", code, name == NULL ? Py_None : name, (Py_ssize_t)target));
}

static int
traverse_all(search *s)
{
    for (size_t i = 0; i < mt_py_heap_len(&s->heap); i++) {
        traverseproc traverse;
        s->current = mt_py_heap_at(&s->heap, i);
        traverse = Py_TYPE(s->current)->tp_traverse;
        if (traverse != NULL && traverse(s->current, referrers_visit, s) != 0) return -1;
    }
    return mt_py_frames_visit(visit_frame, s) < 0 ? -1 : traverse_kept(s);
}

/* --- the answer ------------------------------------------------------------------------------- */

static PyObject *
edge_row(const void *from, size_t i)
{
    const edge *e = &((const edge *)from)[i];

    return Py_BuildValue("On", e->container, (Py_ssize_t)e->target);
}

/* The number of references to target i that no Python object holds, without the reference of the
 * collector's list of all objects, which this pass holds. */
static PyObject *
unaccounted(const void *from, size_t i)
{
    const search *s = from;
    PyObject *op = PyList_GET_ITEM(s->list, (Py_ssize_t)i);
    bool in_heap = PyObject_IS_GC(op) && PyObject_GC_IsTracked(op) && s->heap.frozen_n == 0;
    Py_ssize_t more = Py_REFCNT(op) - (Py_ssize_t)s->found[i] - in_heap;

    return PyLong_FromSsize_t(more > 0 ? more : 0);
}

static PyObject *
referrers_answer(search *s)
{
    PyObject *missing, *rows, *result = NULL;

    if (traverse_all(s) < 0) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    missing = mt_py_list((size_t)PyList_GET_SIZE(s->list), unaccounted, s);
    if (missing == NULL) return NULL;
    if ((rows = mt_py_list(s->edges_n, edge_row, s->edges)) != NULL) {
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

    if (n > MAX_TARGETS) {
        PyErr_Format(PyExc_ValueError, "at most %d targets, got %zu", MAX_TARGETS, n);
        return -1;
    }
    if (mt_ptrset_reserve(&s->targets, n) < 0 || mt_ptrset_reserve(&s->entered, 1) < 0 ||
        (s->found = PyMem_Calloc(n + 1, sizeof *s->found)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < n; i++) {
        PyObject *op = PyList_GET_ITEM(s->list, (Py_ssize_t)i);
        uint64_t bit = mt_ptr_hash(op) >> 48;
        (void)mt_ptrset_add(&s->targets, op, i);
        s->filter[bit / 8] |= (unsigned char)(1U << bit % 8);
    }
    return 0;
}

/* The heap first: to list it calls functions that a program may replace, and until it is closed no
 * code of the program's runs, which could change the list of targets. */
static PyObject *
search_heap(search *s)
{
    PyObject *result = NULL;

    if (mt_py_heap_open(&s->heap) < 0) return NULL;
    if (enter_targets(s) == 0 && (s->frames = PyList_New(0)) != NULL) result = referrers_answer(s);
    mt_py_heap_close(&s->heap);
    Py_XDECREF(s->frames);
    return result;
}

/* _referrers(targets: list) -> (edges, frames, unaccounted)
 *   edges        [(container, number of the target)], without the list of targets itself
 *   frames       [(code, name of the variable or None, number of the target)], and with a
 *                ContextVar or module atexit in the place of the code what these keep
 *   unaccounted  for each target, the references that no Python object holds */
PyObject *
mt_py_referrers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *list, *result;
    search *s;

    if (!PyArg_ParseTuple(args, "O!:_referrers", &PyList_Type, &list)) return NULL;
    if ((s = PyMem_Calloc(1, sizeof *s)) == NULL) return PyErr_NoMemory();
    s->list = list;
    result = search_heap(s);
    mt_ptrset_fini(&s->targets);
    mt_ptrset_fini(&s->entered);
    PyMem_Free(s->found);
    PyMem_Free(s->edges);
    PyMem_Free(s);
    return result;
}
