#include "py/census/buffers.h"

#include <string.h>

/* The type of this name, which begins with '_', that a type is or is derived from; NULL for other
 * types. */
static PyTypeObject *
base_of(PyTypeObject *type, const char *name)
{
    while (type != NULL && (type->tp_name[0] != '_' || strcmp(type->tp_name, name) != 0))
        type = type->tp_base;
    return type;
}

static PyTypeObject *
stream_of(PyTypeObject *type)
{
    PyTypeObject *bytes = base_of(type, "_io.BytesIO");

    return bytes != NULL ? bytes : base_of(type, "_io.StringIO");
}

bool
mt_py_is_stream(PyTypeObject *type)
{
    return stream_of(type) != NULL;
}

/* What a method of the stream's own type, written in C, returns of it, whatever a derived class has
 * for it; -1 where there is none. */
static Py_ssize_t
call_method(PyTypeObject *type, const char *name, PyObject *op)
{
    PyObject *method = type->tp_dict == NULL ? NULL : PyDict_GetItemString(type->tp_dict, name);
    PyObject *result;
    Py_ssize_t number;

    if (method == NULL || Py_TYPE(method) != &PyMethodDescr_Type) return -1;
    result = PyObject_CallOneArg(method, op);
    number = result == NULL ? -1 : PyLong_AsSsize_t(result);
    Py_XDECREF(result);
    if (number < 0) PyErr_Clear(); /* it is closed */
    return number;
}

/* The fields of io.StringIO as all Pythons from 3.11 on lay them out. While text is only added to its
 * end, its parts are in a string of one to four bytes a character; after that it is one array of
 * four. */
typedef struct text_fields {
    PyObject_HEAD
    Py_UCS4 *buf;
    Py_ssize_t pos, string_size;
    size_t buf_size; /* characters */
    int state;       /* 1: it is an array */
} text_fields;

static uint64_t
text_stream_bytes(PyTypeObject *type, PyObject *op)
{
    const text_fields *text = (const text_fields *)op;

    /* Whether the fields are those that its method shows. */
    if (call_method(type, "tell", op) != text->pos || text->string_size < 0) return 0;
    return text->state == 1 ? 4 * (uint64_t)text->buf_size : (uint64_t)text->string_size;
}

uint64_t
mt_py_stream_bytes(PyObject *op)
{
    PyTypeObject *type = stream_of(Py_TYPE(op));
    Py_ssize_t bytes;

    if (strcmp(type->tp_name, "_io.StringIO") == 0) return text_stream_bytes(type, op);
    bytes = call_method(type, "__sizeof__", op);
    return bytes < 0 ? 0 : (uint64_t)bytes;
}

bool
mt_py_is_ctypes(PyTypeObject *type)
{
    return base_of(type, "_ctypes._CData") != NULL;
}

/* Whether it frees its memory: a member that ctypes shows as `_b_needsfree_`. */
static bool
has_memory(PyObject *op)
{
    PyTypeObject *type = base_of(Py_TYPE(op), "_ctypes._CData");
    PyObject *member =
        type->tp_dict == NULL ? NULL : PyDict_GetItemString(type->tp_dict, "_b_needsfree_");
    PyObject *value;
    bool owns;

    if (member == NULL || Py_TYPE(member) != &PyMemberDescr_Type) return false;
    value = Py_TYPE(member)->tp_descr_get(member, op, (PyObject *)Py_TYPE(op));
    owns = value != NULL && PyObject_IsTrue(value) == 1;
    Py_XDECREF(value);
    if (value == NULL) PyErr_Clear();
    return owns;
}

uint64_t
mt_py_ctypes_bytes(PyObject *op)
{
    const char *begin = (const char *)op, *end = begin + Py_TYPE(op)->tp_basicsize;
    Py_buffer view;
    uint64_t bytes = 0;

    if (!has_memory(op)) return 0;
    if (PyObject_GetBuffer(op, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    if ((const char *)view.buf < begin || (const char *)view.buf >= end) bytes = (uint64_t)view.len;
    PyBuffer_Release(&view);
    return bytes;
}
