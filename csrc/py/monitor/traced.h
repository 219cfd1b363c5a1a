/* traced.h -- the lines that made what lives, as tracemalloc has noted them. */
#ifndef MT_PY_MONITOR_TRACED_H
#define MT_PY_MONITOR_TRACED_H

#include "py/base/state.h"

/* _traced_at(object) -> ((file, line), ...), the innermost frame first, of the block of memory that
 * the object lies in; None where tracemalloc does not know it. tracemalloc.get_object_traceback()
 * does the same from Python 3.12 on: in 3.11 it looks at the wrong address for each object with a
 * __dict__, which lies in front of it. */
PyObject *mt_py_traced_at(PyObject *module, PyObject *object);

/* _traced() -> [(((file, line), ...), bytes), ...]: what lives of all that was made since
 * tracemalloc was started, by stack, the innermost frame first; an empty list where it is not on.
 * Nothing else of the program runs meanwhile, some 0.5 us for each block, and nothing is collected,
 * although a tuple is made for each of them: so no finalizer runs on the thread that asks. */
PyObject *mt_py_traced(PyObject *module, PyObject *unused);

#endif
