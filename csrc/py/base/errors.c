#include "py/base/errors.h"

#include <stdarg.h>
#include <string.h>

static PyObject *
raise_named(mt_state *st, const char *name, PyObject *message)
{
    PyObject *type = message == NULL ? NULL : PyObject_GetAttrString(st->errors, name);

    if (type != NULL) PyErr_SetObject(type, message);
    Py_XDECREF(type);
    Py_XDECREF(message);
    return NULL;
}

PyObject *
mt_py_raise_own(mt_state *st, const char *name, const char *format, ...)
{
    va_list args;
    PyObject *message;

    va_start(args, format);
    message = PyUnicode_FromFormatV(format, args);
    va_end(args);
    return raise_named(st, name, message);
}

static PyObject *
raise_no_memory(const mt_error *err, const char *doing)
{
    if (err->asked > 0)
        return PyErr_Format(
            PyExc_MemoryError,
            "%s: the system refused %zu bytes of address space (%s, errno %d); lower "
            "max_bytes or max_entries, or raise the process's limit (ulimit -v)",
            doing, err->asked, err->call, err->native);
    return PyErr_Format(PyExc_MemoryError, "%s: out of host memory in %s", doing, err->call);
}

static PyObject *
raise_shape(const mt_error *err, const char *doing)
{
    if (strcmp(err->detail, "experts") == 0)
        return PyErr_Format(
            PyExc_ValueError,
            "%s: got %zu experts, this history records %zu; use one history per gate", doing,
            err->asked, err->limit);
    if (strcmp(err->detail, "top_k") == 0)
        return PyErr_Format(PyExc_ValueError,
                            "%s: got %zu experts, fewer than top_k=%zu; pass a smaller top_k",
                            doing, err->asked, err->limit);
    return PyErr_Format(PyExc_ValueError, "%s: got %zu %s, at most %zu are possible; append parts",
                        doing, err->asked, err->detail, err->limit);
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
        return raise_no_memory(err, doing);
    case MT_ESHAPE:
        return raise_shape(err, doing);
    case MT_EDEVICE:
        return raise_device(st, err, doing);
    case MT_ELIMIT:
        return mt_py_raise_own(st, "BudgetError",
                               "%s: one record takes %zu bytes, max_bytes is %zu; raise max_bytes, "
                               "append fewer rows at a time, or record less (dtype=\"float16\", "
                               "keep=\"topk\")",
                               doing, err->asked, err->limit);
    case MT_EOVERFLOW:
        return PyErr_Format(PyExc_OverflowError, "%s: the size does not fit this machine's size_t",
                            doing);
    case MT_EFORMAT:
        return PyErr_Format(PyExc_ValueError, "%s: not a gate history: %s", doing, err->detail);
    default:
        return PyErr_Format(PyExc_SystemError, "%s: unexpected status %s", doing,
                            mt_status_name(err->status));
    }
}
