/* recording.h -- records a step of the program block by block: what allocated each, in which phase.
 *
 *   torch's operators ──► begun, ended ──► where this thread is: operator, node, optimizer's step?
 *                    └──► made ──────────► shape and dtype of a block       │
 *   torch's allocator ──► born, died ──► phase, operator, site ◄────────────┘
 *                                            │
 *                                            ▼
 *                               core/blocks/journal.h ──► Contents, an object of Python's
 *
 * A birth is in the backward phase while autograd runs a backward pass on its thread, in the
 * optimizer's phase within what torch names "Optimizer.step#...", else in the forward phase. Its
 * operator is the innermost one that does not only allocate for another one (as aten::empty does); in a
 * backward pass, the node of autograd.
 *
 * Its module is the path of the classes of the modules whose calls run on its thread, if these are
 * watched (py/monitor/forwards.h): "Model.Block.Attention". Classes of torch are left out within one
 * that is not torch's.
 *
 * There is one recording in a process. Under the GIL, but for the reports. */
#ifndef MT_PY_BLOCKS_RECORDING_H
#define MT_PY_BLOCKS_RECORDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/blocks/live.h"
#include "py/base/state.h"

/* Once in a process, and again in a forked child. */
void mt_py_recording_init(const mt_birth *birth);

/* Adds memtools._core.Contents. -1 with an error. */
int mt_py_contents_register(PyObject *module, mt_state *st);

/* Reports, from any thread. */
bool mt_py_recording_is_on(void);
void mt_py_recording_born(const void *block, size_t bytes, uint32_t site);
void mt_py_recording_died(const void *block);

/* A module is called on this thread, and the call ends: with the GIL. What the first one returns is for
 * the second one, which comes whatever happened between. A few ns where nothing is recorded. */
uint64_t mt_py_recording_enter(PyObject *module);
void mt_py_recording_leave(uint64_t before);

/* Begins with the blocks that live; what was recorded is forgotten. -1 with an error; then nothing is
 * recorded. */
int mt_py_recording_begin(const mt_torch_ops *shim, mt_live *live);
void mt_py_recording_end(const mt_torch_ops *shim);
/* Forgets what was recorded. */
void mt_py_recording_forget(void);

/* How many of the blocks were not known. NULL with an error; then nothing is marked. */
PyObject *mt_py_recording_mark(PyObject *blocks, long category);

/* What lived at the peak; None where nothing was recorded. NULL with an error. */
PyObject *mt_py_recording_contents(const mt_state *st);

#endif
