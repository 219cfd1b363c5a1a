/* number.h -- whole numbers that a caller gives as arguments.
 *
 * "n" of PyArg_ParseTuple raises OverflowError for a number of 2**63 or more, in words about C. This
 * converter raises one sentence that names the argument and its range, whatever the number is. */
#ifndef MT_PY_BASE_NUMBER_H
#define MT_PY_BASE_NUMBER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

typedef struct mt_py_whole {
    const char *name; /* what the sentence calls the argument */
    Py_ssize_t minimum, maximum;
    bool is_index;    /* whether a number out of the range is an IndexError */
    Py_ssize_t value; /* the default, until a number is taken */
} mt_py_whole;

/* An mt_py_whole from `minimum_` on, with `value_` for its default. */
#define MT_PY_WHOLE(name_, minimum_, maximum_, value_)                                             \
    {.name = (name_), .minimum = (minimum_), .maximum = (maximum_), .value = (value_)}

/* One that numbers something: any Py_ssize_t is taken, and a larger number is an IndexError. */
#define MT_PY_INDEX(name_)                                                                         \
    {.name = (name_), .minimum = PY_SSIZE_T_MIN, .maximum = PY_SSIZE_T_MAX, .is_index = true}

/* The converter of "O&" for an mt_py_whole. Returns 1, or 0 with TypeError for an object without
 * __index__, or with ValueError (IndexError) for a number out of the range. */
int mt_py_whole_take(PyObject *given, void *whole);

#endif
