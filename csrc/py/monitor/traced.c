/* traced.c -- the block of an object with a __dict__ begins two pointers further in front. */
#define Py_BUILD_CORE_MODULE /* what lies in front of an object */
#include "py/monitor/traced.h"

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
