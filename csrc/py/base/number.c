#include "py/base/number.h"

#include <stdbool.h>

enum { MT_DIGITS = 40 }; /* of a number that a sentence repeats */

static void
refuse(const mt_py_whole *whole, PyObject *index, bool is_small)
{
    PyObject *digits = PyObject_Str(index); /* fails where there are thousands of them */

    PyErr_Clear();
    if (digits == NULL || PyUnicode_GET_LENGTH(digits) > MT_DIGITS)
        Py_XSETREF(digits, PyUnicode_FromString(is_small ? "less than -10**39" : "10**40 or more"));
    if (digits == NULL) return;
    if (whole->maximum < PY_SSIZE_T_MAX)
        PyErr_Format(PyExc_ValueError, "%s is from %zd to %zd, got %U", whole->name, whole->minimum,
                     whole->maximum, digits);
    else
        PyErr_Format(PyExc_ValueError, "%s is at %s %zd, got %U", whole->name,
                     is_small ? "least" : "most", is_small ? whole->minimum : whole->maximum,
                     digits);
    Py_DECREF(digits);
}

int
mt_py_whole_take(PyObject *given, void *to)
{
    mt_py_whole *whole = to;
    PyObject *index = PyNumber_Index(given);
    long long value;
    int overflow = 0;
    bool fits;

    if (index == NULL) return 0;
    value = PyLong_AsLongLongAndOverflow(index, &overflow);
    fits = overflow == 0 && value >= whole->minimum && value <= whole->maximum;
    if (fits)
        whole->value = (Py_ssize_t)value;
    else
        refuse(whole, index, overflow < 0 || (overflow == 0 && value < whole->minimum));
    Py_DECREF(index);
    return fits;
}
