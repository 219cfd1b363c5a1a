#include "py/base/objects.h"

PyObject *
mt_py_list(size_t n, mt_py_item *item, const void *from)
{
    PyObject *list = PyList_New((Py_ssize_t)n);

    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *made = item(from, i);
        if (made == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, made);
    }
    return list;
}

PyObject *
mt_py_uint64_at(const void *from, size_t i)
{
    return PyLong_FromUnsignedLongLong(((const uint64_t *)from)[i]);
}

int
mt_py_append(PyObject *list, PyObject *item)
{
    int failed = item == NULL ? -1 : PyList_Append(list, item);

    Py_XDECREF(item);
    return failed;
}

PyObject *
mt_py_tuple(PyObject *sequence, const char *what)
{
    PyObject *tuple, *iterator;

    if (PyTuple_CheckExact(sequence) || PyList_CheckExact(sequence))
        return PySequence_Tuple(sequence);
    if ((iterator = PyObject_GetIter(sequence)) == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_SetString(PyExc_TypeError, what);
        return NULL;
    }
    tuple = PySequence_Tuple(iterator);
    Py_DECREF(iterator);
    return tuple;
}

int
mt_py_truth(PyObject *answer)
{
    int value = answer == NULL ? -1 : PyObject_IsTrue(answer);

    Py_XDECREF(answer);
    return value;
}

int
mt_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **out)
{
    *out = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *out == NULL ? -1 : PyModule_AddType(module, *out);
}
