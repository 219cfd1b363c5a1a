/* place.c -- where in a container an object lies, by identity and without calling code of a class.
 */
#include "py/census/census.h"

#include "py/census/frames.h"

static PyObject *
key_in_dict(PyObject *dict, const PyObject *value)
{
    PyObject *key, *held;
    Py_ssize_t at = 0;

    while (PyDict_Next(dict, &at, &key, &held))
        if (held == value || key == value) return Py_NewRef(key);
    Py_RETURN_NONE;
}

static PyObject *
index_in(PyObject *sequence, const PyObject *value)
{
    PyObject **items = PySequence_Fast_ITEMS(sequence);

    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); i++)
        if (items[i] == value) return PyLong_FromSsize_t(i);
    Py_RETURN_NONE;
}

/* _place(container, value) */
PyObject *
mt_py_place(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *container, *value;

    if (!PyArg_ParseTuple(args, "OO:_place", &container, &value)) return NULL;
    if (PyDict_Check(container)) return key_in_dict(container, value);
    if (PyList_Check(container) || PyTuple_Check(container)) return index_in(container, value);
    Py_RETURN_NONE;
}

/* An mt_py_frame_visitor. What lies only on the stack has no name. */
static int
add_variable(void *list, PyObject *code, PyObject *name, PyObject *value)
{
    PyObject *pair;
    int failed;

    (void)code;
    if (name == NULL) return 0;
    if ((pair = PyTuple_Pack(2, name, value)) == NULL) return -1;
    failed = PyList_Append(list, pair);
    Py_DECREF(pair);
    return failed;
}

/* _frame_variables(frame) */
PyObject *
mt_py_frame_variables(PyObject *Py_UNUSED(module), PyObject *frame)
{
    PyObject *found;

    if (!PyFrame_Check(frame))
        return PyErr_Format(PyExc_TypeError, "frame must be a frame, not %.100s",
                            Py_TYPE(frame)->tp_name);
    if ((found = PyList_New(0)) == NULL) return NULL;
    if (mt_py_frame_visit((PyFrameObject *)frame, add_variable, found) >= 0) return found;
    Py_DECREF(found);
    return NULL;
}

/* No reference to any module is taken: in a forked process each would copy a page. */
PyObject *
mt_py_module_of(PyObject *Py_UNUSED(module), PyObject *namespace)
{
    PyObject *modules = PyImport_GetModuleDict(), *name, *found;
    Py_ssize_t at = 0;

    if (!PyDict_CheckExact(namespace) || modules == NULL || !PyDict_Check(modules)) Py_RETURN_NONE;
    while (PyDict_Next(modules, &at, &name, &found))
        if (PyModule_Check(found) && PyModule_GetDict(found) == namespace && PyUnicode_Check(name))
            return Py_NewRef(name);
    Py_RETURN_NONE;
}

PyObject *
mt_py_instance_dict(PyObject *Py_UNUSED(module), PyObject *object)
{
    PyObject *dict = PyObject_GenericGetDict(object, NULL);

    if (dict != NULL) return dict;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return NULL;
    PyErr_Clear();
    Py_RETURN_NONE;
}
