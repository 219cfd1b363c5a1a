/* maps.h -- what an mmap.mmap has of memory. */
#ifndef MT_PY_CENSUS_MAPS_H
#define MT_PY_CENSUS_MAPS_H

#include "py/base/state.h"

#include <stdbool.h>
#include <stdint.h>

/* Whether a type is mmap.mmap itself. */
bool mt_py_is_map(const PyTypeObject *type);

/* Where it maps, and how many bytes: those of an anonymous mapping, or of a file that lies in memory
 * (/dev/shm, memfd). 0, and *data is NULL, for a file on a disk, whose pages the kernel takes back,
 * and for a map that is closed. Runs no Python code. pre: mt_py_is_map(Py_TYPE(op)). */
uint64_t mt_py_map_bytes(PyObject *op, const void **data);

#endif
