/* traced.c -- what tracemalloc knows: see traced.h.
 *
 * The block of an object with a __dict__ begins two pointers further in front. */
#define Py_BUILD_CORE_MODULE /* what lies in front of an object */
#include "py/monitor/traced.h"

#include <stdint.h>

#if PY_VERSION_HEX < 0x030C0000
#include <internal/pycore_object.h>

PyObject *
mt_py_traced_at(PyObject *Py_UNUSED(module), PyObject *object)
{
    const char *block = (const char *)object - _PyType_PreHeaderSize(Py_TYPE(object));

    return _PyTraceMalloc_GetTraceback(0, (uintptr_t)block);
}

#else

PyObject *
mt_py_traced_at(PyObject *Py_UNUSED(module), PyObject *object)
{
    PyObject *tracemalloc = PyImport_ImportModule("_tracemalloc"), *found = NULL;

    if (tracemalloc != NULL)
        found = PyObject_CallMethod(tracemalloc, "_get_object_traceback", "O", object);
    Py_XDECREF(tracemalloc);
    return found;
}

#endif

/* Bytes by stack: `numbers` says where in `bytes` those of a stack are. So a block that is added
 * makes no object, which tracemalloc would have to note. */
typedef struct {
    PyObject *numbers; /* dict, from a stack to a number below `count` */
    size_t *bytes;
    Py_ssize_t count;
    Py_ssize_t room;
} sums;

/* The place of a stack's bytes, made with 0 where it is new; NULL with an error. */
static size_t *
traced_place_of(sums *by, PyObject *stack)
{
    PyObject *number = PyDict_GetItemWithError(by->numbers, stack);
    int failed;

    if (number != NULL) return &by->bytes[PyLong_AsSsize_t(number)];
    if (PyErr_Occurred()) return NULL;
    if (by->count == by->room) {
        Py_ssize_t room = by->room == 0 ? 256 : 2 * by->room;
        size_t *more = PyMem_RawRealloc(by->bytes, (size_t)room * sizeof *more);

        if (more == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        by->bytes = more;
        by->room = room;
    }
    if ((number = PyLong_FromSsize_t(by->count)) == NULL) return NULL;
    failed = PyDict_SetItem(by->numbers, stack, number);
    Py_DECREF(number);
    if (failed) return NULL;
    by->bytes[by->count] = 0;
    return &by->bytes[by->count++];
}

/* A list of (domain, bytes, stack, ...), one for each block; -1 with an error. */
static int
traced_add_all(sums *by, PyObject *blocks)
{
    if (!PyList_Check(blocks)) goto unknown;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(blocks); i++) {
        PyObject *block = PyList_GET_ITEM(blocks, i);
        size_t *at, bytes;

        if (!PyTuple_Check(block) || PyTuple_GET_SIZE(block) < 3) goto unknown;
        bytes = PyLong_AsSize_t(PyTuple_GET_ITEM(block, 1));
        if (bytes == (size_t)-1 && PyErr_Occurred()) return -1;
        /* Held: a stack of a function that the program put in place may run code when it is hashed.
         * */
        Py_INCREF(block);
        at = traced_place_of(by, PyTuple_GET_ITEM(block, 2));
        Py_DECREF(block);
        if (at == NULL) return -1;
        *at += bytes;
    }
    return 0;
unknown:
    PyErr_SetString(PyExc_TypeError, "tracemalloc lists blocks in a form that is not known");
    return -1;
}

static PyObject *
as_list(const sums *by)
{
    PyObject *found = PyList_New(0), *stack, *number;
    Py_ssize_t at = 0;

    while (found != NULL && PyDict_Next(by->numbers, &at, &stack, &number)) {
        size_t bytes = by->bytes[PyLong_AsSsize_t(number)];
        PyObject *one = Py_BuildValue("(On)", stack, (Py_ssize_t)bytes);

        if (one == NULL || PyList_Append(found, one) < 0) Py_CLEAR(found);
        Py_XDECREF(one);
    }
    return found;
}

PyObject *
mt_py_traced(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *tracemalloc = PyImport_ImportModule("_tracemalloc"), *blocks, *found = NULL;
    sums by = {.numbers = PyDict_New()};
    int collects = PyGC_Disable(); /* the GIL is not let go of until it is enabled again */

    if (tracemalloc != NULL && by.numbers != NULL &&
        (blocks = PyObject_CallMethod(tracemalloc, "_get_traces", NULL)) != NULL) {
        int failed = traced_add_all(&by, blocks);

        Py_DECREF(blocks);
        if (!failed) found = as_list(&by);
    }
    if (collects) (void)PyGC_Enable();
    PyMem_RawFree(by.bytes);
    Py_XDECREF(by.numbers);
    Py_XDECREF(tracemalloc);
    return found;
}
