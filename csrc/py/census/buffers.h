/* buffers.h -- what objects of io and of ctypes have of memory, which their size does not show. */
#ifndef MT_PY_CENSUS_BUFFERS_H
#define MT_PY_CENSUS_BUFFERS_H

#include "py/base/state.h"

#include <stdbool.h>
#include <stdint.h>

/* Whether a type is io.BytesIO, io.StringIO, or derived from one. */
bool mt_py_is_stream(PyTypeObject *type);

/* The bytes of a stream; 0 where they are not known. Runs no Python code.
 * pre: mt_py_is_stream(Py_TYPE(op)). */
uint64_t mt_py_stream_bytes(PyObject *op);

/* Whether a type is an array, a structure or another object of ctypes. */
bool mt_py_is_ctypes(PyTypeObject *type);

/* The bytes that an object of ctypes has of malloc: 0 where it shows memory of others, and for a small
 * one, which lies in the object. Runs no Python code. pre: mt_py_is_ctypes(Py_TYPE(op)). */
uint64_t mt_py_ctypes_bytes(PyObject *op);

#endif
