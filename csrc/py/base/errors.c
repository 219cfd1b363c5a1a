#include "py/base/errors.h"

#include <stdarg.h>

void
mt_py_refuse_word(const char *what, const char *word)
{
    PyObject *text = PyUnicode_FromString(word);

    if (text != NULL) PyErr_Format(PyExc_ValueError, "%s, got %R", what, text);
    Py_XDECREF(text);
}

PyObject *
mt_py_raise_own(mt_state *st, const char *name, const char *format, ...)
{
    va_list args;
    PyObject *message, *type;

    va_start(args, format);
    message = PyUnicode_FromFormatV(format, args);
    va_end(args);
    type = message == NULL ? NULL : PyObject_GetAttrString(st->errors, name);
    if (type != NULL) PyErr_SetObject(type, message);
    Py_XDECREF(type);
    Py_XDECREF(message);
    return NULL;
}

static PyObject *
raise_device(mt_state *st, const mt_error *err, const char *doing)
{
    if (err->native == 0) return mt_py_raise_own(st, "DeviceError", "%s: %s", doing, err->call);
    return mt_py_raise_own(
        st, "DeviceError", "%s: %s failed with code %d: %s", doing, err->call, err->native,
        st->natives->cudart ? mt_cudart_strerror(st->natives->cudart, err->native) : "unknown");
}

PyObject *
mt_py_raise(mt_state *st, const mt_error *err, const char *doing)
{
    switch (err->status) {
    case MT_ENOMEM:
        if (err->asked == 0)
            return PyErr_Format(PyExc_MemoryError, "%s: out of host memory in %s", doing,
                                err->call);
        return PyErr_Format(PyExc_MemoryError, "%s: the system refused %zu bytes (%s, errno %d)",
                            doing, err->asked, err->call, err->native);
    case MT_EDEVICE:
        return raise_device(st, err, doing);
    case MT_ELIMIT:
        return mt_py_raise_own(st, "BudgetError", "%s: asked %zu bytes, used %zu of %zu", doing,
                               err->asked, err->used, err->limit);
    case MT_EOVERFLOW:
        return PyErr_Format(PyExc_ValueError,
                            "%s: these numbers make a size of more than 2**64 - 1 bytes; give "
                            "smaller ones",
                            doing);
    case MT_EFORMAT:
        return PyErr_Format(PyExc_ValueError, "%s: %s", doing, err->detail);
    default:
        return PyErr_Format(PyExc_SystemError, "%s: unexpected status %s", doing,
                            mt_status_name(err->status));
    }
}
