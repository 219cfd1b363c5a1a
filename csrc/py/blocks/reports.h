/* reports.h -- memtools._core.Blocks: what torch's host allocator has given out. See reports.c. */
#ifndef MT_PY_BLOCKS_REPORTS_H
#define MT_PY_BLOCKS_REPORTS_H

#include "py/base/state.h"

int mt_py_blocks_register(PyObject *module, mt_state *st);

#endif
