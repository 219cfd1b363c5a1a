/* held.c -- the objects of some types that others hold: one heap pass.
 *
 * The collector does not list an array of NumPy, as it refers to nothing. So each container is asked
 * for what it refers to, and the running functions for their variables. A dict or a tuple of arrays
 * alone is not listed either: it is entered from what holds it. */
#include "py/census/census.h"

#include "py/base/ptrset.h"
#include "py/census/frames.h"
#include "py/census/heap.h"

enum { DEEPEST = 8, FEWEST = 64 };

typedef struct gathering {
    PyObject *types, *list;
    mt_ptrset seen;
    size_t room;
    int depth;
} gathering;

static bool
is_wanted(const gathering *g, PyTypeObject *type)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(g->types); i++)
        if (PyType_IsSubtype(type, (PyTypeObject *)PyTuple_GET_ITEM(g->types, i))) return true;
    return false;
}

/* -1 with an error. */
static int
take(gathering *g, PyObject *op)
{
    if (g->seen.n + 1 > g->room) {
        if (mt_ptrset_reserve(&g->seen, 2 * g->room) < 0) {
            PyErr_NoMemory();
            return -1;
        }
        g->room *= 2;
    }
    if (mt_ptrset_add(&g->seen, op, 0) != MT_PTRSET_NONE) return 0;
    return PyList_Append(g->list, op);
}

/* A visitproc; -1 with an error. */
static int
visit(PyObject *op, void *arg)
{
    gathering *g = arg;
    PyTypeObject *type = Py_TYPE(op);
    int failed = 0;

    if (is_wanted(g, type)) return take(g, op);
    if ((type != &PyDict_Type && type != &PyTuple_Type) || PyObject_GC_IsTracked(op)) return 0;
    if (g->depth == DEEPEST) return 0;
    g->depth++;
    failed = type->tp_traverse(op, visit, g);
    g->depth--;
    return failed;
}

static int
visit_variable(void *arg, PyObject *Py_UNUSED(code), PyObject *Py_UNUSED(name), PyObject *value)
{
    return visit(value, arg);
}

/* -1 with an error. */
static int
gather(gathering *g, const mt_heap *heap)
{
    for (size_t i = 0; i < mt_py_heap_len(heap); i++) {
        PyObject *op = mt_py_heap_at(heap, i);
        traverseproc traverse = Py_TYPE(op)->tp_traverse;
        if (op != g->list && traverse != NULL && traverse(op, visit, g) != 0) return -1;
    }
    return mt_py_frames_visit(visit_variable, g) < 0 ? -1 : 0;
}

/* A list of its own, which is not in the heap while it grows. -1 with an error. */
static int
search(gathering *g)
{
    mt_heap heap;
    int failed;

    if (mt_ptrset_reserve(&g->seen, g->room) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    if (mt_py_heap_open(&heap) < 0) return -1;
    failed = (g->list = PyList_New(0)) == NULL ? -1 : gather(g, &heap);
    mt_py_heap_close(&heap);
    return failed;
}

PyObject *
mt_py_held(PyObject *Py_UNUSED(module), PyObject *types)
{
    gathering g = {.types = types, .room = FEWEST};

    if (!PyTuple_Check(types))
        return PyErr_Format(PyExc_TypeError, "types must be a tuple, not %.100s",
                            Py_TYPE(types)->tp_name);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++)
        if (!PyType_Check(PyTuple_GET_ITEM(types, i)))
            return PyErr_Format(PyExc_TypeError, "types holds types; item %zd is %.100s", i,
                                Py_TYPE(PyTuple_GET_ITEM(types, i))->tp_name);
    if (search(&g) < 0) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        Py_CLEAR(g.list);
    }
    mt_ptrset_fini(&g.seen);
    return g.list;
}
