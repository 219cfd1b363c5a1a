/* blocks.h -- the bytes of Python's own small blocks. */
#ifndef MT_PY_MONITOR_BLOCKS_H
#define MT_PY_MONITOR_BLOCKS_H

#include "py/base/state.h"

/* _python_bytes() -> the bytes of all blocks that the interpreter's own allocator has given out, or
 * None where it does not report them. They are not part of malloc's heap. Takes 30 us, and goes
 * through all pools as sys.getallocatedblocks() does. */
PyObject *mt_py_python_bytes(PyObject *module, PyObject *unused);

/* _heap_bytes() -> the bytes that malloc has given out, or None where it does not report them: for
 * workers, in which a Probe would copy pages of their parent. */
PyObject *mt_py_heap_bytes(PyObject *module, PyObject *unused);

#endif
