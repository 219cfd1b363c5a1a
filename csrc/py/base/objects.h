/* objects.h -- how csrc/py makes lists, tuples, methods and types. */
#ifndef MT_PY_BASE_OBJECTS_H
#define MT_PY_BASE_OBJECTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Makes item i of what `from` points to: a new reference, or NULL with an error. */
typedef PyObject *mt_py_item(const void *from, size_t i);

/* n items as a new list; NULL with the error of the first item that could not be made. */
PyObject *mt_py_list(size_t n, mt_py_item *item, const void *from);

/* Items of an array of uint64_t as they are. */
mt_py_item mt_py_uint64_at;

/* Appends an item and drops the caller's reference to it. -1 with an error, and also for a NULL
 * item, whose maker has set one. */
int mt_py_append(PyObject *list, PyObject *item);

/* The items of a sequence as a tuple, which does not change while code of the program runs: a method
 * of an item may empty the list that it came from. NULL with a TypeError that says `what`
 * where it is not iterable. */
PyObject *mt_py_tuple(PyObject *sequence, const char *what);

/* Whether an object is true: 1, 0 or -1 with an error; drops the caller's reference. -1 also for
 * NULL, whose maker has set one. */
int mt_py_truth(PyObject *answer);

/* A function of METH_FASTCALL or METH_KEYWORDS as a method table takes it. */
#define MT_PY_FUNCTION(function) ((PyCFunction)(void (*)(void))(function))

/* A line of the method table of `type`: its method `name` is the C function type_name. */
#define MT_PY_METHOD(type, name, flags, doc) {#name, MT_PY_FUNCTION(type##_##name), flags, doc}

/* Makes a type of the module, and adds it to the module by its name. *out, which is NULL before,
 * holds the new reference, also where adding it fails. -1 with an error. */
int mt_py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **out);

#endif
