/* args.c -- counts, lengths, row numbers and layers as Python gives them. */
#include "py/kv/pool.h"

static int
refuse(PyObject *object, const char *what)
{
    PyErr_Format(PyExc_TypeError,
                 "%s are whole numbers in a sequence or a 1-D integer tensor, got %s", what,
                 Py_TYPE(object)->tp_name);
    return -1;
}

/* A bool is an int to Python, but a list of them is a mask: what it means is not what it says. */
static int
read_one(PyObject *item, const char *what, size_t *out)
{
    Py_ssize_t value;

    if (!PyIndex_Check(item) || PyBool_Check(item)) {
        PyErr_Format(PyExc_TypeError, "%s are whole numbers, got %s among them", what,
                     Py_TYPE(item)->tp_name);
        return -1;
    }
    if ((value = PyNumber_AsSsize_t(item, PyExc_IndexError)) == -1 && PyErr_Occurred()) return -1;
    if (value >= 0) {
        *out = (size_t)value;
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "%s are 0 or more, got %zd among them", what, value);
    return -1;
}

/* A tuple, so that nobody changes it while __index__ of its items runs. */
static int
read_tuple(PyObject *tuple, const char *what, mt_py_sizes *out)
{
    size_t n = (size_t)PyTuple_GET_SIZE(tuple);

    if ((out->at = PyMem_New(size_t, n + 1)) == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    out->n = n;
    for (size_t i = 0; i < n; i++)
        if (read_one(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), what, &out->at[i]) < 0) {
            mt_py_sizes_done(out);
            return -1;
        }
    return 0;
}

/* A tensor's numbers as a list, or one as an int; other objects as they are. */
static PyObject *
without_tensor(KVLease *self, PyObject *object, const char *what)
{
    int is_tensor = PyObject_IsInstance(object, (PyObject *)self->state->tensor);

    if (is_tensor < 0) return NULL;
    if (!is_tensor) return Py_NewRef(object);
    return PyObject_CallMethod(self->pool->helpers, "whole_numbers", "Os", object, what);
}

static int
read_plain(PyObject *object, const char *what, mt_py_sizes *out)
{
    PyObject *tuple;
    int failed;

    if (PyUnicode_Check(object) || PyBytes_Check(object)) return refuse(object, what);
    if ((tuple = PySequence_Tuple(object)) == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear();
        return refuse(object, what);
    }
    failed = read_tuple(tuple, what, out);
    Py_DECREF(tuple);
    return failed;
}

int
mt_py_sizes_read(KVLease *self, PyObject *object, const char *what, mt_py_sizes *out)
{
    PyObject *plain = without_tensor(self, object, what);
    int failed;

    *out = (mt_py_sizes){0};
    if (plain == NULL) return -1;
    failed = PyLong_Check(plain) ? refuse(plain, what) : read_plain(plain, what, out);
    Py_DECREF(plain);
    return failed;
}

int
mt_py_sizes_read_any(KVLease *self, PyObject *object, const char *what, mt_py_sizes *out)
{
    PyObject *plain = without_tensor(self, object, what);
    int failed = 0;

    *out = (mt_py_sizes){0};
    if (plain == NULL) return -1;
    if (!PyIndex_Check(plain) || PyBool_Check(plain)) {
        failed = read_plain(plain, what, out);
    } else {
        out->same = PyNumber_AsSsize_t(plain, PyExc_IndexError);
        failed = out->same == -1 && PyErr_Occurred() ? -1 : 0;
    }
    Py_DECREF(plain);
    return failed;
}

void
mt_py_sizes_done(mt_py_sizes *sizes)
{
    PyMem_Free(sizes->at);
    sizes->at = NULL;
}

int
mt_py_layer_read(KVLease *self, PyObject *object, size_t *out)
{
    Py_ssize_t layer = PyNumber_AsSsize_t(object, PyExc_IndexError);
    size_t layers = self->pool->config.layers;

    if (layer == -1 && PyErr_Occurred()) return -1;
    if (layer >= 0 && (size_t)layer < layers) {
        *out = (size_t)layer;
        return 0;
    }
    PyErr_Format(PyExc_IndexError, "layer %zd of a pool of %zu layers", layer, layers);
    return -1;
}
