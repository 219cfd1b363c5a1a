/* ending.h -- what tells how the interpreter is about to end. A program that looks at
 * sys.excepthook finds a built-in function that does what the one before did. */
#ifndef MT_PY_MONITOR_ENDING_H
#define MT_PY_MONITOR_ENDING_H

#include "py/base/state.h"

/* _watch_end(on_uncaught, excepthook): what the one below calls; returns the excepthook of the call
 * before. */
PyObject *mt_py_watch_end(PyObject *module, PyObject *args);

/* excepthook(type, value, traceback): calls on_uncaught(value) where the interpreter itself calls
 * it, for an exception that nobody caught, and then the excepthook before. */
PyObject *mt_py_excepthook(PyObject *module, PyObject *args);

/* _expect_signal(), _wait_for_signal(), _stop_waiting(): see os/record/endmark.h. */
PyObject *mt_py_expect_signal(PyObject *module, PyObject *none);
PyObject *mt_py_wait_for_signal(PyObject *module, PyObject *none);
PyObject *mt_py_stop_waiting(PyObject *module, PyObject *none);

/* _run_last(words, instead, at_exit): runs a command and waits for it; what it does not do,
 * `instead` is written for, to the standard error. At exit: as the last of all that exit() does. */
PyObject *mt_py_run_last(PyObject *module, PyObject *args);

#endif
