#include "py/base/number.h"

enum { MT_DIGITS = 40 }; /* of a number that a sentence repeats */

/* An int for a sentence: its digits, or "10**40 or more". A new reference; NULL without memory. */
static PyObject *
digits_of(PyObject *number)
{
    PyObject *digits = PyObject_Str(number); /* fails where there are thousands of them */
    int overflow = 0;

    PyErr_Clear();
    if (digits != NULL && PyUnicode_GET_LENGTH(digits) <= MT_DIGITS) return digits;
    Py_XDECREF(digits);
    (void)PyLong_AsLongLongAndOverflow(number, &overflow);
    return PyUnicode_FromString(overflow < 0 ? "less than -10**39" : "10**40 or more");
}

static void
number_refuse(const mt_py_whole *whole, PyObject *index, bool is_small)
{
    PyObject *digits = digits_of(index);
    PyObject *error = whole->is_index ? PyExc_IndexError : PyExc_ValueError;

    if (digits == NULL) return;
    if (whole->maximum < PY_SSIZE_T_MAX)
        PyErr_Format(error, "%s must be from %zd to %zd, got %U", whole->name, whole->minimum,
                     whole->maximum, digits);
    else
        PyErr_Format(error, "%s must be at %s %zd, got %U", whole->name,
                     is_small ? "least" : "most", is_small ? whole->minimum : whole->maximum,
                     digits);
    Py_DECREF(digits);
}

int
mt_py_whole_take(PyObject *given, void *to)
{
    mt_py_whole *whole = to;
    PyObject *index;
    long long value;
    int overflow = 0;
    bool fits;

    if (!PyIndex_Check(given)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, got %s", whole->name,
                     Py_TYPE(given)->tp_name);
        return 0;
    }
    if ((index = PyNumber_Index(given)) == NULL) return 0;
    value = PyLong_AsLongLongAndOverflow(index, &overflow);
    fits = overflow == 0 && value >= whole->minimum && value <= whole->maximum;
    if (fits)
        whole->value = (Py_ssize_t)value;
    else
        number_refuse(whole, index, overflow < 0 || (overflow == 0 && value < whole->minimum));
    Py_DECREF(index);
    return fits;
}
